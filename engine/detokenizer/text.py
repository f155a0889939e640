"""Streams that turn the token ids of one answer into text, a few ids at a time. Pure.

Path: the scheduler asks one for stop strings (stops.py), the detokenizer for the answer
(incremental.py); both see the same characters.

**The text of an answer** with prompt ids P and output ids O is ``decode(P + O)`` without what P
alone says. A character whose bytes lie on both sides of the border belongs to the answer. In a
stream, text is *settled* once no later token can change it: only settled text is given out, so what
was given out concatenates to exactly that text, with U+FFFD only where it stays.

Three kinds of decoder, each exact and with bounded work per token:

* ``lossy`` (ByteLevel): the bytes of all tokens form one text; bytes that are not UTF-8 become
  U+FFFD. Settled: all but an unfinished last character.
* ``byte_runs`` (SentencePiece-like, with or without byte fallback): each token is a piece of text
  or one byte; a run of bytes is text if the whole run is UTF-8, else one U+FFFD per byte. Settled:
  all but an open run.
* ``opaque``: nothing is known but ``decode``, which is asked for a short window of ids. Exact where
  a token changes no text before it but U+FFFD at the end.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable, Container, Iterable, Sequence
from typing import Literal, Protocol

REPLACEMENT = "\ufffd"
UNFINISHED_BYTES = 3  # of a UTF-8 character that may still become one
CONTEXT_IDS = 6  # kept in front of the ids that an opaque decoder is asked for
PENDING_IDS = 16  # more ids than this are settled even if their text ends in U+FFFD
PEEK_BYTES = 1_024

DecoderStyle = Literal["lossy", "byte_runs", "opaque"]


class Vocabulary(Protocol):
    """What streams ask of a tokenizer (``engine.tokenizer.Tokenizer`` is one)."""

    @property
    def style(self) -> DecoderStyle: ...

    @property
    def special_ids(self) -> frozenset[int]: ...

    @property
    def drops_first_space(self) -> bool:
        """A text that starts with this vocabulary's word-border space is shown without it."""

    def piece(self, token_id: int) -> bytes:
        """The bytes a token adds in the middle of a text; none for an unknown id."""

    def is_byte(self, token_id: int) -> bool:
        """Whether the token is one raw byte (byte fallback)."""

    def decode_known(self, ids: Sequence[int], skip_special_tokens: bool) -> str:
        """One-shot decoding; unknown ids say nothing."""


class TextStream(Protocol):
    """The text of one answer."""

    def push(self, ids: Iterable[int]) -> str:
        """Text that these ids settle."""

    def peek(self) -> str:
        """Whole characters that are there and not settled: the text if the answer ended here."""

    def flush(self) -> str:
        """The rest, at the end of the answer; U+FFFD where bytes are missing."""


def open_stream(
    vocabulary: Vocabulary, *, skip_special_tokens: bool, prompt_tail: Sequence[int] = ()
) -> TextStream:
    """A stream for an answer behind ``prompt_tail``; it keeps a first space (``is_at_start``)."""
    hidden = vocabulary.special_ids if skip_special_tokens else frozenset[int]()
    if vocabulary.style == "lossy":
        return LossyStream(vocabulary.piece, hidden, prompt_tail)
    if vocabulary.style == "byte_runs":
        return ByteRunStream(vocabulary, hidden, prompt_tail)
    return WindowStream(
        lambda ids: vocabulary.decode_known(ids, skip_special_tokens), prompt_tail[-CONTEXT_IDS:]
    )


def is_at_start(
    vocabulary: Vocabulary, prompt_tail: Sequence[int], skip_special_tokens: bool
) -> bool:
    """Whether the answer is the start of a text, whose first space is then not shown."""
    if not vocabulary.drops_first_space or vocabulary.style == "opaque":
        return False
    hidden = vocabulary.special_ids if skip_special_tokens else frozenset[int]()
    return all(token_id in hidden or not vocabulary.piece(token_id) for token_id in prompt_tail)


class LossyStream:
    def __init__(
        self, piece: Callable[[int], bytes], hidden: Container[int], prompt_tail: Sequence[int]
    ) -> None:
        self._piece = piece
        self._hidden = hidden
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self.push(prompt_tail)

    def push(self, ids: Iterable[int]) -> str:
        piece, hidden = self._piece, self._hidden
        return self._decoder.decode(b"".join([piece(i) for i in ids if i not in hidden]))

    def peek(self) -> str:
        return ""

    def flush(self) -> str:
        return self._decoder.decode(b"", True)


class ByteRunStream:
    def __init__(
        self, vocabulary: Vocabulary, hidden: Container[int], prompt_tail: Sequence[int]
    ) -> None:
        self._vocabulary = vocabulary
        self._hidden = hidden
        self._run = bytearray()
        self._prompt_bytes = 0  # of the open run, so many are the prompt's
        self.push(prompt_tail)
        self._prompt_bytes = len(self._run)

    def push(self, ids: Iterable[int]) -> str:
        settled: list[str] = []
        for token_id in ids:
            piece = b"" if token_id in self._hidden else self._vocabulary.piece(token_id)
            if not piece:
                continue
            if self._vocabulary.is_byte(token_id):
                self._run += piece
            else:
                settled.append(self.flush())
                settled.append(piece.decode())
        return "".join(settled)

    def peek(self) -> str:
        """Empty for a run that is no UTF-8 now, and for a very long one (bounded work)."""
        if not self._run or len(self._run) > PEEK_BYTES:
            return ""
        text = self._run_text()
        return "" if REPLACEMENT in text else text

    def flush(self) -> str:
        if not self._run:
            return ""
        text = self._run_text()
        self._run.clear()
        self._prompt_bytes = 0
        return text

    def _run_text(self) -> str:
        try:
            text = self._run.decode()
        except UnicodeDecodeError:
            return REPLACEMENT * (len(self._run) - self._prompt_bytes)
        said_by_prompt = self._run[: self._prompt_bytes].decode(errors="ignore")
        return text[len(said_by_prompt) :]


class WindowStream:
    """Decodes ``context + pending`` ids and gives out what is new behind the context.

    The window is cut as soon as its text is settled, and at ``PENDING_IDS`` in any case: an
    unfinished character has at most three bytes, so all but the last three U+FFFD stay.
    """

    def __init__(self, decode: Callable[[list[int]], str], context: Sequence[int]) -> None:
        self._decode = decode
        self._window = list(context)
        self._pending = 0
        self._shown = len(_settled(decode(self._window)))

    def push(self, ids: Iterable[int]) -> str:
        fresh = list(ids)
        if not fresh:
            return ""
        self._window += fresh
        self._pending += len(fresh)
        text = self._decode(self._window)
        settled = _settled(text)
        new = settled[self._shown :]
        self._shown = max(self._shown, len(settled))
        held = len(text) - self._shown
        if held <= 0 or self._pending > PENDING_IDS:
            self._cut(CONTEXT_IDS if held <= 0 else PENDING_IDS, max(0, held))
        return new

    def peek(self) -> str:
        return ""

    def flush(self) -> str:
        return self._decode(self._window)[self._shown :]

    def _cut(self, keep: int, held: int) -> None:
        del self._window[:-keep]
        self._pending = 0
        self._shown = max(0, len(self._decode(self._window)) - held)


def _settled(text: str) -> str:
    """``text`` without U+FFFD at its end that may be an unfinished character."""
    end = len(text)
    while end > max(0, len(text) - UNFINISHED_BYTES) and text[end - 1] == REPLACEMENT:
        end -= 1
    return text[:end]
