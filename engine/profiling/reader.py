"""Reads a Chrome trace as a stream: batches of events out of bytes, in constant memory.

Path: a rank's trace file -> here -> part.py (merge), summary.py, rules.py.

A trace is ``{... "traceEvents": [event, event, ...] ...}``. The reader never holds more than one
chunk and one event. It cuts the decompressed bytes where an event ends and lets msgspec parse the
piece between two cuts, so strings with braces, escapes and nested objects need no care here: a
piece that was cut in the wrong place is not valid JSON. (A JSON parser reads from left to right;
``[`` + prefix + ``]`` parses only if the prefix ends at depth 1, that is, behind an event.)
"""

from __future__ import annotations

import hashlib
import re
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from math import inf
from pathlib import Path
from typing import Any, BinaryIO, Generic, TypeVar, cast

import msgspec
from isal import igzip, isal_zlib

CHUNK_BYTES = 32 * 1024  # with its events in the caches: 256 KiB took 15 % more time, 8 KiB 5 %
MAX_EVENT_BYTES = 8 * 1024 * 1024  # one event; torch writes about 400 bytes
MAX_ENVELOPE_BYTES = 4 * 1024 * 1024  # what stands before or behind the events
MAX_CUT_TRIES = 6  # then the piece is tokenized, which is slow and exact

GZIP_MAGIC = b"\x1f\x8b"
EVENT = TypeVar("EVENT")

_EVENTS_KEY = re.compile(rb'"traceEvents"\s*:\s*\[')
# A whole string, a bracket, or a quote whose string is not all there yet.
_TOKEN = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"|[{}\[\]]|"', re.DOTALL)
_EVENT_INDEX = re.compile(r"`\$\[(\d+)\]\.?(.*?)`")
_COMMA = re.compile(rb"\s*,")


class TraceError(Exception):
    """A trace file that is not what it should be; the sentence says where."""


class UnknownFieldError(TraceError):
    """An event has a field that the decoder's struct forbids."""


@contextmanager
def open_trace(path: Path, sha256: str = "") -> Iterator[BinaryIO]:
    """The file's JSON bytes, decompressed if it is gzip, whatever its name.

    TraceError if the file cannot be read or its digest is not ``sha256`` ("": not known).
    """
    try:
        raw = path.open("rb")
    except OSError as error:
        raise TraceError(f"cannot be read: {error.strerror}") from error
    with raw:
        if sha256 and hashlib.file_digest(raw, "sha256").hexdigest() != sha256:
            raise TraceError("its sha256 is not the one in the manifest")
        raw.seek(0)
        compressed = raw.read(2) == GZIP_MAGIC
        raw.seek(0)
        if not compressed:
            yield raw
            return
        with igzip.IGzipFile(fileobj=raw, mode="rb") as plain:  # type: ignore[no-untyped-call]
            yield cast(BinaryIO, plain)


def chunks(stream: BinaryIO) -> Iterator[bytes]:
    """Pieces of at most ``CHUNK_BYTES``; TraceError when the compressed file is damaged."""
    while True:
        try:
            piece = stream.read(CHUNK_BYTES)
        except EOFError as error:
            raise TraceError("the gzip file is cut off") from error
        except (isal_zlib.error, zlib.error, igzip.BadGzipFile) as error:  # type: ignore[misc]
            raise TraceError(f"the gzip file is damaged: {error}") from error
        except OSError as error:
            raise TraceError(f"cannot be read: {error.strerror}") from error
        if not piece:
            return
        yield piece


class TraceReader(Generic[EVENT]):
    """One pass over a trace. ``envelope`` is the document without its events.

    ``decoder`` turns ``[event, ...]`` into a list; what it refuses is a TraceError that names the
    event. Until the pass ends, ``envelope`` holds only what stands in front of the events.
    """

    def __init__(self, stream: BinaryIO, decoder: msgspec.json.Decoder[list[EVENT]]) -> None:
        self._chunks = chunks(stream)
        self._decoder = decoder
        self._closed = False
        self.events = 0
        self.envelope: dict[str, Any] = {}
        self._head, self._buffer = self._read_head()

    def __iter__(self) -> Iterator[list[EVENT]]:
        """Batches in file order, each of at least one event."""
        enough = 0  # a piece without a whole event is looked at again when it has doubled
        for piece in self._chunks:
            self._buffer += piece
            if len(self._buffer) < enough:
                continue
            if batch := self._guess() or self._scan():
                yield batch
            if self._closed:
                break
            if len(self._buffer) > MAX_EVENT_BYTES:
                raise TraceError(f"event {self.events} is longer than {MAX_EVENT_BYTES} bytes")
            enough = 0 if batch else 2 * len(self._buffer)
        while not self._closed:
            batch = self._scan()
            if batch:
                yield batch
            elif not self._closed:
                raise TraceError(f"the list of events breaks off behind event {self.events}")
        self._read_tail()

    def _read_head(self) -> tuple[bytes, bytes]:
        """The document up to and with the ``[`` of the events, and what was read beyond it."""
        seen = b""
        for piece in self._chunks:
            seen += piece
            for found in _EVENTS_KEY.finditer(seen):
                head = seen[: found.end()]
                if (envelope := _parse_object(head + b"]}")) is not None:
                    self.envelope = envelope
                    return head, seen[found.end() :]
            if len(seen) > MAX_ENVELOPE_BYTES:
                break
        raise TraceError("not a Chrome trace: it has no list named traceEvents")

    def _read_tail(self) -> None:
        tail = self._buffer
        for piece in self._chunks:
            tail += piece
            if len(tail) > MAX_ENVELOPE_BYTES:
                raise TraceError("too many bytes behind the list of events")
        envelope = _parse_object(self._head + tail)
        if envelope is None:
            raise TraceError("what stands behind the list of events is not JSON")
        self.envelope = envelope

    def _guess(self) -> list[EVENT] | None:
        """Events up to the last ``},`` that proves to be the end of one; None: no such place."""
        end = len(self._buffer)
        for _ in range(MAX_CUT_TRIES):
            end = self._buffer.rfind(b"},", 0, end)
            if end < 0:
                return None
            try:
                return self._take(end + 1)
            except msgspec.DecodeError:
                continue
        return None

    def _scan(self) -> list[EVENT]:
        """Events up to the last whole one, found exactly; notes the end of the list."""
        end, close = self._whole_events()
        try:
            batch = self._take(end) if end else []
        except msgspec.DecodeError as error:
            raise TraceError(f"not JSON behind event {self.events}: {error}") from error
        if close >= 0:
            self._closed = True
            self._buffer = self._buffer[close - end :]
        return batch

    def _whole_events(self) -> tuple[int, int]:
        """Where the last whole event ends (0: none), and where the list's ``]`` is (-1: beyond)."""
        end = depth = 0
        for token in _TOKEN.finditer(self._buffer):
            first = self._buffer[token.start()]
            if first in b"{[":
                depth += 1
            elif first in b"}]":
                depth -= 1
                if depth < 0:
                    return end, token.start()
                if depth == 0:
                    end = token.end()
            elif token.end() - token.start() == 1:
                break  # a string that goes on in the next chunk
        return end, -1

    def _take(self, end: int) -> list[EVENT]:
        """Decodes and drops the first ``end`` bytes of the buffer; DecodeError if it cannot."""
        comma = _COMMA.match(self._buffer) if self.events else None
        piece = self._buffer[comma.end() if comma else 0 : end]
        try:
            batch = self._decoder.decode(b"[" + piece + b"]")
        except msgspec.ValidationError as error:
            kind = UnknownFieldError if "unknown field" in str(error) else TraceError
            raise kind(_name_event(str(error), self.events)) from error
        if not (piece.isascii() or _is_utf8(piece)):
            raise TraceError(f"not UTF-8 behind event {self.events}")
        self._buffer = self._buffer[end:]
        self.events += len(batch)
        return batch


class _Time(msgspec.Struct):
    ph: str
    ts: float = inf


def base_ns(envelope: dict[str, Any]) -> int:
    """What torch took away from all times of the file, nanoseconds."""
    found = envelope.get("baseTimeNanoseconds", 0)
    return found if isinstance(found, int) else 0


def first_time_ns(path: Path) -> int:
    """Earliest time in the first batch, nanoseconds of the trace clock; TraceError if none."""
    with open_trace(path) as stream:
        reader = TraceReader(stream, msgspec.json.Decoder(list[_Time]))
        for batch in reader:
            earliest = min((event.ts for event in batch if event.ph != "M"), default=inf)
            if earliest != inf:
                return base_ns(reader.envelope) + round(earliest * 1000.0)
    raise TraceError("no event has a time")


def _is_utf8(text: bytes) -> bool:
    try:
        text.decode()
    except UnicodeDecodeError:
        return False
    return True


def _parse_object(text: bytes) -> dict[str, Any] | None:
    """The envelope, without its (empty) list of events; None if the text is not a JSON object."""
    try:
        found: dict[str, Any] = msgspec.json.decode(text, type=dict[str, Any])
    except msgspec.DecodeError:
        return None
    return {key: value for key, value in found.items() if key != "traceEvents"}


def _name_event(reason: str, before: int) -> str:
    """msgspec's sentence with the event's index in the file in place of that in the batch."""

    def place(found: re.Match[str]) -> str:
        field = f", field {found[2]}" if found[2] else ""
        return f"event {before + int(found[1])}{field}"

    return _EVENT_INDEX.sub(place, reason)
