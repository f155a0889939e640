"""Text and chats to token ids and back, from a model directory's files.

Path: client.py (prompts), scheduler/process.py (stop strings), detokenizer/process.py (answers).

It stands on ``tokenizers`` and jinja2 and gives what ``transformers`` gives for the same directory
(the tests compare), without importing it: that costs 3 s and 360 MB per process. Two differences:
ids out of range are an error here, and ``clean_up_tokenization_spaces`` (which rewrites text that a
stream has already sent) is never applied; transformers itself ignores it for BPE.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers

from engine.chat_template import ChatTemplates
from engine.detokenizer.text import DecoderStyle, is_at_start, open_stream
from engine.errors import BadRequest, ConfigError

NAMED_TOKENS = ("bos", "eos", "unk", "sep", "pad", "cls", "mask")
BYTE_TOKEN = re.compile(r"<0x[0-9A-Fa-f]{2}>")
SEARCHED_IDS = 4_096  # for an ordinary token to stand in front of others, and for a space
CHECKED_TEXTS = 64  # of random ids, before a decoder style is trusted


class Tokenizer:
    """One model's tokenizer; ``load`` builds it. Safe to share between threads."""

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        named_tokens: Mapping[str, str],
        templates: ChatTemplates,
        eos_token_ids: Iterable[int] = (),
    ) -> None:
        self._backend = backend
        self._templates = templates
        self.named_tokens = dict(named_tokens)  # "bos_token" -> "<s>", ...
        added = backend.get_added_tokens_decoder()
        self.vocab_size = max([backend.get_vocab_size(with_added_tokens=False) - 1, *added]) + 1
        self.special_ids = frozenset(i for i in added if not backend.decode([i]))
        self.bos_token_id = self._named_id("bos_token")
        self.eos_token_id = self._named_id("eos_token")
        own = () if self.eos_token_id is None else (self.eos_token_id,)
        self.eos_token_ids = tuple(dict.fromkeys((*eos_token_ids, *own)))
        self._pieces: dict[int, bytes] = {}
        decoder_types = _decoder_types(backend)
        self._has_byte_tokens = "ByteFallback" in decoder_types
        self.style: DecoderStyle = "lossy" if "ByteLevel" in decoder_types else "byte_runs"
        self._anchor, self._anchor_text = self._find_anchor()
        self.drops_first_space = self._find_first_space_rule()
        if not self._style_is_exact():
            self.style = "opaque"

    @staticmethod
    def load(model_dir: Path) -> Tokenizer:
        """Reads ``tokenizer.json`` and, where they exist, the files beside it.

        Raises ``ConfigError`` for a directory that has no usable tokenizer.
        """
        path = model_dir / "tokenizer.json"
        if not path.is_file():
            raise ConfigError(f"{model_dir} has no tokenizer.json")
        try:
            backend = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # noqa: BLE001 - the library raises bare Exception
            raise ConfigError(f"{path} cannot be read: {error}") from error
        backend.no_truncation()
        backend.no_padding()
        config = _read_json(model_dir / "tokenizer_config.json")
        if "added_tokens_decoder" not in config:
            config |= _read_json(model_dir / "special_tokens_map.json")
        named = _named_tokens(config)
        _add_configured_tokens(backend, config, named)
        backend.encode_special_tokens = bool(config.get("split_special_tokens", False))
        eos = _read_json(model_dir / "generation_config.json").get("eos_token_id")
        return Tokenizer(
            backend,
            named_tokens=named,
            templates=ChatTemplates.load(model_dir, config.get("chat_template")),
            eos_token_ids=[eos] if isinstance(eos, int) else eos or [],
        )

    # ------------------------------------------------------------------ text

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Raises ``BadRequest`` for a text that is not Unicode (a lone surrogate).

        Other threads run meanwhile: ``encode`` of the library would hold them up.
        """
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise BadRequest(f"the text is not valid Unicode: {error}") from error
        [encoding] = self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        return encoding.ids

    def decode(
        self,
        ids: Sequence[int],
        *,
        skip_special_tokens: bool = True,
        spaces_between_special_tokens: bool = True,
    ) -> str:
        """One-shot decoding. Raises ``BadRequest`` for ids out of range.

        ``spaces_between_special_tokens`` has no effect: it is a flag of transformers' slow
        tokenizers, and ``tokenizers`` (like transformers on top of it) never adds such spaces. It
        is accepted and carried because clients of SGLang's API send it.
        """
        self.check_ids(ids)
        return self.decode_known(ids, skip_special_tokens)

    def decode_known(self, ids: Sequence[int], skip_special_tokens: bool) -> str:
        return self._backend.decode(list(ids), skip_special_tokens=skip_special_tokens)

    def check_ids(self, ids: Sequence[int]) -> None:
        for token_id in ids:
            if not 0 <= token_id < self.vocab_size:
                raise BadRequest(f"token id {token_id} is not in 0..{self.vocab_size - 1}")

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that the token adds in the middle of a text."""
        self.check_ids((token_id,))
        return self.piece(token_id)

    # ------------------------------------------------------------------ chats

    @property
    def chat_template(self) -> str | None:
        return self._templates.default

    def apply_chat_template(
        self,
        messages: list[dict[str, Any]],
        *,
        add_generation_prompt: bool = True,
        tools: list[dict[str, Any]] | None = None,
        continue_final_message: bool = False,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """Token ids of a chat. Raises ``BadRequest``: no template, messages it does not take."""
        text = self.render_chat(
            messages,
            add_generation_prompt=add_generation_prompt,
            tools=tools,
            continue_final_message=continue_final_message,
            template_kwargs=template_kwargs,
        )
        return self.encode(text, add_special_tokens=False)

    def render_chat(
        self,
        messages: list[dict[str, Any]],
        *,
        add_generation_prompt: bool = True,
        tools: list[dict[str, Any]] | None = None,
        continue_final_message: bool = False,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> str:
        """The chat as the text that ``apply_chat_template`` encodes."""
        return self._templates.render(
            messages,
            tools=tools,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            variables={**self.named_tokens, **(template_kwargs or {})},
        )

    # ------------------------------------------------------------------ pieces, for streams

    def piece(self, token_id: int) -> bytes:
        found = self._pieces.get(token_id)
        if found is None:
            found = self._pieces[token_id] = self._make_piece(token_id)
        return found

    def is_byte(self, token_id: int) -> bool:
        token = self._backend.id_to_token(token_id) if self._has_byte_tokens else None
        return token is not None and BYTE_TOKEN.fullmatch(token) is not None

    def _make_piece(self, token_id: int) -> bytes:
        token = self._backend.id_to_token(token_id)
        if token is None:
            return b""
        if self.style == "lossy":
            return _byte_level_bytes(token)
        if self.is_byte(token_id):
            return bytes((int(token[3:5], 16),))
        ids = [token_id] if self._anchor is None else [self._anchor, token_id]
        text = self.decode_known(ids, skip_special_tokens=False)
        return text.removeprefix(self._anchor_text).encode()

    def _find_anchor(self) -> tuple[int | None, str]:
        """An ordinary word: what a token says behind it, it says in the middle of a text."""
        for token_id in range(min(self.vocab_size, SEARCHED_IDS)):
            if token_id not in self.special_ids and not self.is_byte(token_id):
                text = self.decode_known([token_id], skip_special_tokens=False)
                if text.isascii() and text.isalnum():
                    return token_id, text
        return None, ""

    def _find_first_space_rule(self) -> bool:
        for token_id in range(min(self.vocab_size, SEARCHED_IDS)):
            piece = self.piece(token_id)
            if piece.startswith(b" ") and not self.is_byte(token_id):
                return self.decode_known([token_id], False).encode() == piece[1:]
        return False

    def _style_is_exact(self) -> bool:
        """Whether streams of random ids give what one-shot decoding gives."""
        chance = random.Random(0)
        added = sorted(self._backend.get_added_tokens_decoder())
        below = (self.vocab_size, min(self.vocab_size, 512))  # byte tokens have small ids
        texts = [
            [chance.randrange(chance.choice(below)) for _ in range(chance.randrange(1, 12))]
            for _ in range(CHECKED_TEXTS)
        ]
        texts += [
            [first, middle, first] for first, middle in zip(texts[0] * 64, added, strict=False)
        ]
        return all(
            self._streamed(ids, skip) == self.decode_known(ids, skip)
            for ids in texts
            for skip in (False, True)
        )

    def _streamed(self, ids: list[int], skip_special_tokens: bool) -> str:
        stream = open_stream(self, skip_special_tokens=skip_special_tokens)
        text = stream.push(ids) + stream.flush()
        return text.removeprefix(" ") if is_at_start(self, (), skip_special_tokens) else text

    def _named_id(self, name: str) -> int | None:
        token = self.named_tokens.get(name)
        return None if token is None else self._backend.token_to_id(token)


# --------------------------------------------------------------------------- byte-level tokens


def _byte_level_alphabet() -> dict[str, int]:
    """GPT-2's alphabet: printable Latin-1 stands for itself, other bytes for 256, 257, ..."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(plain)]
    letters = {chr(byte): byte for byte in plain}
    return letters | {chr(256 + index): byte for index, byte in enumerate(others)}


_BYTE_OF_LETTER = _byte_level_alphabet()


def _byte_level_bytes(token: str) -> bytes:
    """A token with a letter outside the alphabet (an added one) stands for itself."""
    try:
        return bytes([_BYTE_OF_LETTER[letter] for letter in token])
    except KeyError:
        return token.encode()


def _decoder_types(backend: tokenizers.Tokenizer) -> set[str]:
    if backend.decoder is None:
        return set()
    state = json.loads(backend.decoder.__getstate__())
    return {part["type"] for part in (state, *state.get("decoders", ()))}


# --------------------------------------------------------------------------- configuration


def _read_json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except ValueError as error:
        raise ConfigError(f"{path} is not JSON: {error}") from error
    if not isinstance(found, dict):
        raise ConfigError(f"{path} must hold a JSON object")
    return found


def _content(token: object) -> str | None:
    """A token is written as a string or as an object with ``content``."""
    if isinstance(token, dict):
        token = token.get("content")
    return token if isinstance(token, str) else None


def _named_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """``bos_token`` and its like, and a model's own ``*_token`` entries, as templates see them."""
    extra = config.get("extra_special_tokens")
    entries = {**config, **(extra if isinstance(extra, dict) else {})}
    standard = [f"{name}_token" for name in NAMED_TOKENS]
    own = [name for name in entries if name.endswith("_token") and name not in standard]
    found = {name: _content(entries.get(name)) for name in (*standard, *own)}
    return {name: token for name, token in found.items() if token is not None}


def _add_configured_tokens(
    backend: tokenizers.Tokenizer, config: Mapping[str, Any], named: Mapping[str, str]
) -> None:
    """What the configuration adds to ``tokenizer.json``: tokens, and that some are special."""
    listed = sorted(config.get("added_tokens_decoder", {}).items(), key=lambda item: int(item[0]))
    backend.add_tokens([tokenizers.AddedToken(**token) for _, token in listed])
    extra = config.get("extra_special_tokens") or config.get("additional_special_tokens") or []
    special = [
        *named.values(),
        *filter(None, map(_content, extra if isinstance(extra, list) else ())),
    ]
    backend.add_special_tokens(
        [tokenizers.AddedToken(token, special=True, normalized=False) for token in special]
    )
