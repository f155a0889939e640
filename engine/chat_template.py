"""A chat as one text: the model's jinja template, run in a sandbox.

Path: tokenizer.py -> here. Templates get what ``transformers`` gives them (the tests compare):
``messages``, ``tools``, ``documents``, ``add_generation_prompt``, the named special tokens,
``raise_exception``, ``strftime_now``, a ``tojson`` that escapes nothing, loop controls and the
``generation`` tag.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

from engine.errors import BadRequest

Messages = list[dict[str, Any]]
REASONING_NAMES = ("reasoning_content", "thinking", "reasoning")
END_MARK = "END_OF_UNFINISHED_MESSAGE "  # its space shows whether the template trims the message
PROBE = "a part of a message"


class GenerationTag(jinja2.ext.Extension):
    """``{% generation %}`` marks what trainers learn from; for a prompt it is only a scope."""

    tags = {"generation"}

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.Scope(body, lineno=line)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


def _to_json(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, **options)


def _environment() -> jinja2.Environment:
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[GenerationTag, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


class ChatTemplates:
    """A model's templates by name: ``default``, and perhaps ``tool_use`` and others."""

    def __init__(self, sources: Mapping[str, str]) -> None:
        self._sources = dict(sources)
        self._environment = _environment()
        self._compiled: dict[str, jinja2.Template] = {}
        self._takes_parts: dict[str, bool] = {}

    @staticmethod
    def load(model_dir: Path, configured: object) -> ChatTemplates:
        """Template files win over ``configured``, the entry of ``tokenizer_config.json``."""
        files = {
            path.stem: path for path in sorted(model_dir.glob("additional_chat_templates/*.jinja"))
        }
        if (default := model_dir / "chat_template.jinja").is_file():
            files["default"] = default
        if files:
            return ChatTemplates({n: p.read_text(encoding="utf-8") for n, p in files.items()})
        if isinstance(configured, str):
            return ChatTemplates({"default": configured})
        if isinstance(configured, dict):
            return ChatTemplates(configured)
        if isinstance(configured, list):
            return ChatTemplates({entry["name"]: entry["template"] for entry in configured})
        return ChatTemplates({})

    @property
    def default(self) -> str | None:
        return self._sources.get("default")

    def render(
        self,
        messages: Messages,
        *,
        tools: list[dict[str, Any]] | None,
        add_generation_prompt: bool,
        continue_final_message: bool,
        variables: Mapping[str, Any],
    ) -> str:
        """The chat as text; ``BadRequest`` says why it cannot be one."""
        if continue_final_message and add_generation_prompt:
            raise BadRequest("continue_final_message and add_generation_prompt exclude each other")
        _check_messages(messages)
        name = self._choose(tools)
        chat = [self._prepare(name, message) for message in messages]
        last_text = _mark_end(chat) if continue_final_message else ""
        text = self._run(
            name,
            {
                "messages": chat,
                "tools": tools,
                "documents": None,
                "add_generation_prompt": add_generation_prompt,
                **variables,
            },
        )
        return _cut_at_mark(text, last_text) if continue_final_message else text

    # ------------------------------------------------------------------ templates

    def _choose(self, tools: object) -> str:
        if tools is not None and "tool_use" in self._sources:
            return "tool_use"
        if "default" in self._sources:
            return "default"
        if self._sources:
            raise BadRequest(f"the model's chat templates have no default: {sorted(self._sources)}")
        raise BadRequest("the model has no chat template; send text or input_ids instead")

    def _run(self, name: str, variables: Mapping[str, Any]) -> str:
        try:
            if name not in self._compiled:
                self._compiled[name] = self._environment.from_string(self._sources[name])
            return self._compiled[name].render(**variables)
        except (
            jinja2.TemplateError,
            TypeError,
            ValueError,
            LookupError,
            ArithmeticError,
            AttributeError,
            RecursionError,
        ) as error:
            raise BadRequest(f"the chat template does not take these messages: {error}") from error

    def _reads_parts(self, name: str) -> bool:
        """Whether the template walks lists of parts itself: tried once, with one text part."""
        if name not in self._takes_parts:
            content = [{"type": "text", "text": PROBE}]
            chat = [{"role": "user", "content": content}]
            variables = {"messages": chat, "tools": None, "documents": None}
            try:
                text = self._run(name, variables)
            except BadRequest:
                text = ""
            self._takes_parts[name] = PROBE in text and str(content) not in text
        return self._takes_parts[name]

    # ------------------------------------------------------------------ messages

    def _prepare(self, name: str, message: dict[str, Any]) -> dict[str, Any]:
        """A copy without nulls, with content as the template reads it."""
        copy = {key: value for key, value in message.items() if value is not None}
        thoughts = [copy[key] for key in REASONING_NAMES if key in copy]
        if thoughts:
            copy = {"thinking": thoughts[0], **copy, "reasoning_content": thoughts[0]}
        content = copy.get("content")
        if isinstance(content, list):
            if self._reads_parts(name):
                copy["content"] = [dict(p) if isinstance(p, dict) else p for p in content]
            else:
                copy["content"] = _flatten(content)
        return copy


def _check_messages(messages: object) -> None:
    if not isinstance(messages, list) or not messages:
        raise BadRequest("messages must be a list of at least one message")
    for index, message in enumerate(messages):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise BadRequest(f"messages[{index}] must be an object with a role")


def _flatten(parts: list[Any]) -> str:
    """Text parts as one text, a line each."""
    texts = []
    for part in parts:
        if not isinstance(part, dict) or part.get("type") != "text":
            kind = part.get("type") if isinstance(part, dict) else type(part).__name__
            raise BadRequest(f"this model takes text only, not a content part of type {kind!r}")
        if not isinstance(part.get("text"), str):
            raise BadRequest("a content part of type 'text' must have a text")
        texts.append(part["text"])
    return "\n".join(texts)


def _mark_end(chat: Messages) -> str:
    """Puts ``END_MARK`` behind the last message's text; returns that text."""
    content = chat[-1].get("content")
    if isinstance(content, str):
        chat[-1]["content"] = content + END_MARK
        return content
    for part in reversed(content if isinstance(content, list) else []):
        if isinstance(part, dict) and isinstance(part.get("text"), str):
            text: str = part["text"]
            part["text"] = text + END_MARK
            return text
    raise BadRequest("continue_final_message needs a text in the last message")


def _cut_at_mark(text: str, last_text: str) -> str:
    """Everything before the mark; without trailing space where the template trims messages."""
    place = text.rfind(END_MARK.strip())
    if place < 0 or last_text.strip() not in text:
        raise BadRequest("the chat template does not keep the last message: it cannot be continued")
    kept = text[:place]
    return kept if text.startswith(END_MARK, place) else kept.rstrip()
