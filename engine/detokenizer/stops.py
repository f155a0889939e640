"""Stop strings and stop regexes: where a text ends, and what must wait until that is known. Pure.

Path: scheduler/core.py asks ``StopChecker`` after each token whether the request ends there; the
detokenizer (incremental.py) runs the same ``StopScanner`` over the same characters to hold back and
to cut. So the two cannot disagree.

The rules:

* A stop string matches anywhere in the answer, also across tokens; the prompt does not count. Of
  several matches the one that is complete first wins, of those the longest: the cut does not depend
  on where tokens end.
* A regex is tried after each token on the last ``REGEX_CHARACTERS`` characters; the leftmost match
  that ends in the new characters counts. ``$`` and ``\\b`` see the end of the text so far. A match
  of no characters never stops. A request whose regexes together search for longer than
  ``REGEX_TIMEOUT_S`` ends (``stop_regex_too_slow``), so that patterns cannot hold up the others;
  what would take gigabytes to compile is refused (``regex_size.py``).
* Text waits while it could become part of a match: the longest end of the text that begins a stop
  string, and for a regex everything from the first place where a partial match is possible.
* A stop string that spells a special token matches that token even where special tokens are not
  shown; then there is nothing to cut.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import regex  # type: ignore[import-untyped]

from engine.detokenizer.regex_size import regex_size
from engine.detokenizer.text import Vocabulary, open_stream
from engine.errors import BadRequest
from engine.messages import SamplingParams

Pattern = Any  # regex ships no types
MAX_STOPS = 64  # strings and regexes together
STOP_CHARACTERS = 512  # of one stop string or regex source
REGEX_CHARACTERS = 256  # a match is no longer than this; look-behind sees as much again
REGEX_PIECES = 16_384  # that the regexes of one request unroll to; some 4 MB
REGEX_TIMEOUT_S = 0.05  # of all regexes of one request together, after one token
REGEX_LEAST_S = 0.003  # of one of many: a pause of the process is no slow pattern


def check_stops(stop: tuple[str, ...], stop_regex: tuple[str, ...]) -> None:
    """Raises ``BadRequest`` for stops that no request may have; call it where requests come in."""
    if len(stop) + len(stop_regex) > MAX_STOPS:
        raise BadRequest(f"at most {MAX_STOPS} stop strings and regexes, got {len(stop)}")
    for text in (*stop, *stop_regex):
        if not 0 < len(text) <= STOP_CHARACTERS:
            raise BadRequest(
                f"a stop string or regex has 1 to {STOP_CHARACTERS} characters, got {len(text)}"
            )
    if sum(map(regex_size, stop_regex)) > REGEX_PIECES:
        raise BadRequest(
            f"the counted repeats of stop_regex unroll to more than {REGEX_PIECES} pieces; a match "
            f"has at most {REGEX_CHARACTERS} characters"
        )
    for source in stop_regex:
        _compile(source)


@functools.lru_cache(maxsize=256)
def _compile(source: str) -> Pattern:
    try:
        return regex.compile(source)
    except (regex.error, RecursionError) as error:
        raise BadRequest(f"stop_regex {source!r} does not compile: {error}") from error


@dataclass(frozen=True, slots=True)
class Match:
    """``source`` is the stop string or regex source; offsets are characters of the answer."""

    source: str
    start: int
    end: int


class StopScanner:
    """Follows the text of one answer; keeps a bounded tail of it."""

    def __init__(self, stop: tuple[str, ...], stop_regex: tuple[str, ...]) -> None:
        self._stops = tuple(filter(None, stop))
        self._patterns = [_compile(source) for source in stop_regex]
        self._timeout_s = max(REGEX_LEAST_S, REGEX_TIMEOUT_S / max(1, len(stop_regex)))
        self._tail = ""
        self._tail_start = 0  # characters of the answer before the tail
        self._keep = max(
            2 * REGEX_CHARACTERS if stop_regex else 0, max(map(len, stop), default=1) - 1
        )

    def feed(self, text: str, ahead: str = "") -> Match | None:
        """The match that ends in ``text``, which is taken in, or in ``ahead``, which is not."""
        if not text and not ahead:
            return None
        seen = len(self._tail)
        window = self._tail + text + ahead
        base = self._tail_start
        drop = max(0, seen + len(text) - self._keep)
        self._tail = window[drop : seen + len(text)]
        self._tail_start += drop
        spans = self._spans(window, seen)
        end, start, source = min(spans, default=(0, 0, ""))
        return Match(source, base + start, base + end) if source else None

    def _spans(self, window: str, seen: int) -> Iterator[tuple[int, int, str]]:
        """(end, start, source) of the first match of each stop that ends behind ``seen``."""
        for stop in self._stops:
            start = window.find(stop, max(0, seen - len(stop) + 1))
            if start >= 0:
                yield start + len(stop), start, stop
        for pattern in self._patterns:
            with _bounded_time(pattern):
                for found in pattern.finditer(window, _span_start(window), timeout=self._timeout_s):
                    if found.end() > max(seen, found.start()):
                        yield found.end(), found.start(), pattern.pattern
                        break

    def hold_back(self) -> int:
        """How many characters at the end of the text may become part of a match."""
        held = [_begun_stop(self._tail, stop) for stop in self._stops]
        held += [_begun_regex(self._tail, each, self._timeout_s) for each in self._patterns]
        return max(held, default=0)


def _span_start(text: str) -> int:
    return max(0, len(text) - REGEX_CHARACTERS)


def _begun_stop(text: str, stop: str) -> int:
    """Length of the longest end of ``text`` that begins ``stop`` and is not all of it."""
    start = text.find(stop[0], max(0, len(text) - len(stop) + 1))
    while start >= 0:
        if stop.startswith(text[start:]):
            return len(text) - start
        start = text.find(stop[0], start + 1)
    return 0


def _begun_regex(text: str, pattern: Pattern, timeout_s: float) -> int:
    """Length of the longest end of ``text`` that may become a match."""
    first = _span_start(text)
    with _bounded_time(pattern):
        found = pattern.search(text, first, partial=True, timeout=timeout_s)
    if found is None:
        return 0
    if found.partial:
        return len(text) - int(found.start())
    # A whole match that did not end the request (min_new_tokens): the search names it before a
    # partial match further left, so nothing in reach is sure.
    return len(text) - first


@contextlib.contextmanager
def _bounded_time(pattern: Pattern) -> Iterator[None]:
    try:
        yield
    except TimeoutError:
        raise BadRequest(
            f"stop_regex {pattern.pattern!r} took too long; the regexes of a request have "
            f"{REGEX_TIMEOUT_S * 1000:.0f} ms together",
            err_type="stop_regex_too_slow",
        ) from None


class StopChecker:
    """Decides for one request, token by token, whether its text ends there.

    Push every output token, in order; a caller that must not stop yet (``min_new_tokens``) ignores
    the answer. Raises ``BadRequest`` for a pattern that does not compile or takes too long.
    """

    def __init__(self, sampling: SamplingParams, vocabulary: Vocabulary) -> None:
        self._stream = open_stream(vocabulary, skip_special_tokens=sampling.skip_special_tokens)
        self._scanner = StopScanner(sampling.stop, sampling.stop_regex)
        self._hidden = hidden_stops(vocabulary, sampling.stop, sampling.skip_special_tokens)

    def push(self, token_id: int) -> str | None:
        """The stop string or regex source that is complete with this token."""
        text = self._stream.push((token_id,))
        match = self._scanner.feed(text, self._stream.peek())
        return match.source if match else self._hidden.get(token_id)


def hidden_stops(
    vocabulary: Vocabulary, stop: tuple[str, ...], skip_special_tokens: bool
) -> dict[int, str]:
    """Special tokens that are not shown and are spelled like a stop string."""
    if not stop or not skip_special_tokens:
        return {}
    spelled = {token_id: vocabulary.piece(token_id) for token_id in vocabulary.special_ids}
    wanted = {text.encode(): text for text in stop}
    return {i: wanted[piece] for i, piece in spelled.items() if piece in wanted}
