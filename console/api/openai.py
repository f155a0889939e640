"""OpenAI's routes: ``/v1/models``, ``/v1/chat/completions`` and ``/v1/completions``.

The ``openai`` package works unchanged. Fields beyond OpenAI's carry SGLang's names.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from django.conf import settings
from django.http import HttpResponse
from django.views.decorators.http import require_GET, require_POST

from console.access import requires
from console.api import meta
from console.api.answers import json_answer
from console.api.errors import ModelNotFound, NotSupported
from console.api.expand import for_sample
from console.api.schemas import (
    ChatCompletionBody,
    CompletionBody,
    OpenAIBody,
    StreamOptions,
    decode,
    refuse_fields,
)
from console.api.sse import DONE, event, event_stream
from console.fields import BadField
from console.http import ApiRequest
from console.services import inference
from console.services.rows import collect
from console.services.tokens import token_bytes, token_text
from console.worker import this_worker
from engine.client import GenerateReqInput
from engine.errors import EngineUnreachable
from engine.messages import Finish, LogprobParams, OutputLogprobs, Provenance, StrRow
from engine.runfile import read_run_file
from engine.tokenizer import Tokenizer

DEFAULT_ALIAS = "default"


# ---------------------------------------------------------------- models


def served_model() -> tuple[str, str]:
    """(name, path) of the model that the engine serves: the name is its directory's."""
    run = read_run_file(settings.QUARTERDECK_RUN_FILE)
    if run is None or run.config is None:
        raise EngineUnreachable("the engine is not up", retry_after_s=2)
    return Path(run.config.model_path).name, run.config.model_path


def check_model(name: str) -> str:
    """The served model's name, if ``name`` means it."""
    served, path = served_model()
    if name not in (DEFAULT_ALIAS, served, path):
        raise ModelNotFound(
            f"the model {name!r} is not served here; {served!r} is ('{DEFAULT_ALIAS}' for short)"
        )
    return served


def _model(name: str, root: str) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": 0,
        "owned_by": "quarterdeck",
        "root": root,
        "parent": None,
        "max_model_len": this_worker().engine.max_context,
    }


@require_GET
@requires("use_inference")
async def models(request: ApiRequest) -> HttpResponse:
    name, path = served_model()
    return json_answer({"object": "list", "data": [_model(name, path)]})


@require_GET
@requires("use_inference")
async def model(request: ApiRequest, name: str) -> HttpResponse:
    served = check_model(name)
    return json_answer(_model(served, served_model()[1]))


# ---------------------------------------------------------------- chat completions


@require_POST
@requires("use_inference")
async def chat_completions(request: ApiRequest) -> HttpResponse:
    body = decode(request, ChatCompletionBody)
    body.check()
    refuse_fields(body, ("tools",))
    if body.top_logprobs is not None and not body.logprobs:
        raise BadField("top_logprobs needs logprobs: true", param="top_logprobs")
    prompt = {"messages": [m.plain(i) for i, m in enumerate(body.messages)]}
    longest = body.max_completion_tokens or body.max_tokens
    logprob = None
    if body.logprobs:
        logprob = LogprobParams(top_num=body.top_logprobs or 0, raw=body.logprobs_raw)
    job = _job("chatcmpl", body, [prompt], longest, logprob)
    return await _answer(request, body, job, _Chat(job))


@require_POST
@requires("use_inference")
async def completions(request: ApiRequest) -> HttpResponse:
    body = decode(request, CompletionBody)
    body.check()
    if body.echo or body.suffix:
        raise NotSupported("echo and suffix are not supported by this server")
    logprob = None
    if body.logprobs is not None:
        logprob = LogprobParams(top_num=body.logprobs, raw=body.logprobs_raw)
    job = _job("cmpl", body, _prompts(body.prompt), body.max_tokens, logprob)
    return await _answer(request, body, job, _Text(job))


def _prompts(prompt: str | list[Any]) -> list[dict[str, Any]]:
    if isinstance(prompt, str):
        return [{"text": prompt}]
    if prompt and all(isinstance(part, int) for part in prompt):
        return [{"input_ids": prompt}]
    kinds = {type(part) for part in prompt}
    if kinds == {str}:
        return [{"text": part} for part in prompt]
    if kinds == {list}:
        return [{"input_ids": part} for part in prompt]
    raise BadField("prompt is empty, or mixes kinds of prompts", param="prompt")


# ---------------------------------------------------------------- both


@dataclass(slots=True)
class _Job:
    """One call: its requests are its choices, in order."""

    id: str
    model: str
    created: int
    requests: list[GenerateReqInput]
    samples: int
    tokenizer: Tokenizer
    provenances: dict[int, Provenance] = field(default_factory=dict)
    completion_tokens: int = 0

    def see(self, index: int, row: StrRow) -> None:
        if row.provenance is not None:
            self.provenances[index] = row.provenance
        self.completion_tokens += len(row.output_ids)

    def usage(self) -> dict[str, Any]:
        """A prompt that has several samples is counted once."""
        first = [self.provenances.get(i) for i in range(0, len(self.requests), self.samples)]
        prompt = sum(p.prompt_tokens for p in first if p is not None)
        cached = sum(p.cached_tokens for p in first if p is not None)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": self.completion_tokens,
            "total_tokens": prompt + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": cached},
        }


def _job(
    prefix: str,
    body: OpenAIBody,
    prompts: list[dict[str, Any]],
    max_tokens: int | None,
    logprob: LogprobParams | None,
) -> _Job:
    name = check_model(body.model)
    engine = this_worker().engine
    identity = body.rid or f"{prefix}-{uuid.uuid4().hex}"
    samples = body.n or 1
    sampling = body.sampling(max_tokens or engine.max_context, engine.sampling_defaults)
    count = len(prompts) * samples
    requests = [
        GenerateReqInput(
            **prompts[at // samples],
            sampling=for_sample(sampling, at % samples),
            rid=identity if count == 1 else f"{identity}-{at}",
            stream=bool(body.stream),
            logprob=logprob,
            priority=body.priority,
            extra_key=((body.cache_salt or "") + (body.extra_key or "")) or None,
            dp_rank=body.data_parallel_rank,
        )
        for at in range(count)
    ]
    return _Job(identity, name, int(time.time()), requests, samples, engine.tokenizer)


async def _answer(
    request: ApiRequest, body: OpenAIBody, job: _Job, shape: _Chat | _Text
) -> HttpResponse:
    job.requests = await inference.admit(request.principal, job.requests)
    if body.stream:
        options = body.stream_options or StreamOptions()
        events = _events(job, shape, include_usage=options.include_usage)
        return await event_stream(events)  # type: ignore[return-value]
    rows = await collect(inference.generate(job.requests, job.id), len(job.requests))
    choices = []
    for index, row in enumerate(rows):
        meta.raise_failure(row.finish)
        job.see(index, row)
        choices.append(shape.choice(index, row))
    provenance = await meta.provenance(rows[0], 0)
    return json_answer(
        {
            **_head(job, shape.whole),
            "choices": choices,
            "usage": job.usage(),
            "metadata": {"weight_version": provenance["weight_version"]},
        }
    )


async def _events(
    job: _Job, shape: _Chat | _Text, *, include_usage: bool
) -> AsyncGenerator[bytes, None]:
    head = _head(job, shape.part)
    usage = {"usage": None} if include_usage else {}
    async with aclosing(inference.generate(job.requests, job.id)) as rows:
        async for index, row in rows:
            meta.raise_failure(row.finish)
            job.see(index, row)
            for choice in shape.deltas(index, row):
                yield event({**head, "choices": [choice], **usage})
    if include_usage:
        yield event({**head, "choices": [], "usage": job.usage()})
    yield DONE


def _head(job: _Job, kind: str) -> dict[str, Any]:
    return {"id": job.id, "object": kind, "created": job.created, "model": job.model}


def _finish_reason(finish: Finish | None) -> str | None:
    return finish.type if finish is not None else None


def _matched(finish: Finish | None) -> int | str | None:
    return finish.matched if finish is not None else None


class _Chat:
    """Choices of ``/v1/chat/completions``."""

    whole: Literal["chat.completion"] = "chat.completion"
    part: Literal["chat.completion.chunk"] = "chat.completion.chunk"

    def __init__(self, job: _Job) -> None:
        self._job = job
        self._begun: set[int] = set()

    def choice(self, index: int, row: StrRow) -> dict[str, Any]:
        return {
            "index": index,
            "message": {"role": "assistant", "content": row.text},
            "logprobs": self._logprobs(row),
            "finish_reason": _finish_reason(row.finish),
            "matched_stop": _matched(row.finish),
        }

    def deltas(self, index: int, row: StrRow) -> list[dict[str, Any]]:
        """The role first, then text, then the reason of the end: each a chunk of its own."""
        chunks: list[tuple[dict[str, Any], Any]] = []
        if index not in self._begun:
            self._begun.add(index)
            chunks.append(({"role": "assistant", "content": ""}, None))
        if row.text or row.output_logprobs:
            chunks.append(({"content": row.text}, self._logprobs(row)))
        choices: list[dict[str, Any]] = [
            {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": None}
            for delta, logprobs in chunks
        ]
        if row.finish is not None:
            choices.append(
                {
                    "index": index,
                    "delta": {},
                    "logprobs": None,
                    "finish_reason": _finish_reason(row.finish),
                    "matched_stop": _matched(row.finish),
                }
            )
        return choices

    def _logprobs(self, row: StrRow) -> dict[str, Any] | None:
        part = row.output_logprobs
        if part is None:
            return None
        content = [
            {**self._token(token, value), "top_logprobs": self._top(part, at)}
            for at, (token, value) in enumerate(zip(row.output_ids, part.values, strict=True))
        ]
        return {"content": content, "refusal": None}

    def _top(self, part: OutputLogprobs, at: int) -> list[dict[str, Any]]:
        if part.top is None:
            return []
        pairs = zip(part.top.ids[at], part.top.values[at], strict=True)
        return [self._token(token, value) for token, value in pairs]

    def _token(self, token: int, value: float) -> dict[str, Any]:
        raw = token_bytes(self._job.tokenizer, token)
        return {
            "token": raw.decode("utf-8", errors="replace"),
            "logprob": value,
            "bytes": list(raw),
        }


class _Text:
    """Choices of ``/v1/completions``."""

    whole: Literal["text_completion"] = "text_completion"
    part: Literal["text_completion"] = "text_completion"

    def __init__(self, job: _Job) -> None:
        self._job = job
        self._length: dict[int, int] = {}  # characters so far, for ``text_offset``

    def choice(self, index: int, row: StrRow) -> dict[str, Any]:
        return {
            "index": index,
            "text": row.text,
            "logprobs": self._logprobs(index, row),
            "finish_reason": _finish_reason(row.finish),
            "matched_stop": _matched(row.finish),
        }

    def deltas(self, index: int, row: StrRow) -> list[dict[str, Any]]:
        return [self.choice(index, row)]

    def _logprobs(self, index: int, row: StrRow) -> dict[str, Any] | None:
        part = row.output_logprobs
        if part is None:
            return None
        tokens = [token_text(self._job.tokenizer, token) for token in row.output_ids]
        offsets = []
        for token in tokens:
            offsets.append(self._length.get(index, 0))
            self._length[index] = offsets[-1] + len(token)
        top = None
        if part.top is not None:
            top = [
                {
                    token_text(self._job.tokenizer, token): value
                    for token, value in zip(*pair, strict=True)
                }
                for pair in zip(part.top.ids, part.top.values, strict=True)
            ]
        return {
            "tokens": tokens,
            "token_logprobs": part.values,
            "top_logprobs": top,
            "text_offset": offsets,
        }
