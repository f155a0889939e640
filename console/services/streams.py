"""Streams of one worker: rows of the engine in, indexed frames out, with replay and grace.

Path: engine/client.py -> here -> consumers/chat.py.

A producer task takes rows as fast as the engine sends them; the attached socket pulls frames at its
own pace. Rows that come while the socket is busy are joined into one frame, so a slow reader gets
fewer and larger frames and loses nothing. Frames keep their index, so a socket that comes back says
which one it wants next.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

import msgspec

from console.api.errors import internal_error
from console.services.rows import merge_all
from engine.errors import Conflict, NotFound, QuarterdeckError
from engine.messages import Finish, OutputLogprobs, Provenance, StrRow, join_runs

log = logging.getLogger(__name__)

FLUSH_S = 0.02  # between two delta frames of a stream; one screen refresh
STARTED_S = 0.25  # a stream that was not refused within this time is shown as started
REPLAY_BYTES = 4 * 2**20  # frames kept for a socket that comes back
STOP_TIMEOUT_S = 5.0  # the engine's answer to an abort


@dataclass(slots=True)
class Answer:
    """All that one stream produced, for the record and the end frame."""

    text: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    epochs: list[tuple[int, int]] = field(default_factory=list)
    kv_epochs: list[tuple[int, int]] | None = None
    logprobs: list[float] = field(default_factory=list)
    entropy: list[float] = field(default_factory=list)
    top: list[list[tuple[int, float]]] = field(default_factory=list)  # candidates per token
    provenance: Provenance | None = None
    finish: Finish | None = None
    confirmed: bool = False  # the engine sent the terminal row: its slot is free
    asked_at: float = field(default_factory=time.monotonic)
    first_at: float = 0.0
    last_at: float = 0.0

    def add(self, row: StrRow) -> None:
        if row.output_ids:
            self.last_at = time.monotonic()
            self.first_at = self.first_at or self.last_at
        self.text.append(row.text)
        self.token_ids += row.output_ids
        self.epochs += row.epochs
        self.kv_epochs = row.kv_epochs or self.kv_epochs
        self.entropy += row.entropy or []
        if row.output_logprobs is not None:
            self.logprobs += row.output_logprobs.values
            self.top += candidates(row.output_logprobs) or []
        self.provenance = row.provenance or self.provenance
        if row.finish is not None:
            self.finish, self.confirmed = row.finish, True

    @property
    def ttft_ms(self) -> float | None:
        return round(1000 * (self.first_at - self.asked_at), 1) if self.first_at else None

    @property
    def tokens_per_s(self) -> float | None:
        """Decode speed: the first token is not counted, its time is the TTFT."""
        seconds = self.last_at - self.first_at
        return round((len(self.token_ids) - 1) / seconds, 1) if seconds > 0 else None

    @property
    def finish_fields(self) -> dict[str, Any]:
        """Every field of the finish; one that says so when the stream just broke off."""
        finish = self.finish or Finish(type="abort", message="the stream broke off")
        return {name: getattr(finish, name) for name in finish.__struct_fields__}

    @property
    def epoch_runs(self) -> list[tuple[int, int]]:
        return join_runs(self.epochs)

    @property
    def rank(self) -> int | None:
        return self.provenance.dp_rank if self.provenance else None

    @property
    def usage(self) -> dict[str, int]:
        prompt = self.provenance
        return {
            "prompt_tokens": prompt.prompt_tokens if prompt else 0,
            "completion_tokens": len(self.token_ids),
            "cached_tokens": prompt.cached_tokens if prompt else 0,
        }


@dataclass(frozen=True, kw_only=True)
class StreamSource:
    """What a stream needs of the outside.

    ``begin`` stores the question while the engine already works and returns what the ``started``
    frame says; ``record`` stores the answer. ``abort`` returns when the engine has taken the abort.
    """

    rows: AsyncGenerator[StrRow, None]
    abort: Callable[[], Awaitable[object]]
    begin: Callable[[], Coroutine[Any, Any, dict[str, Any]]]
    record: Callable[[Answer], Awaitable[None]]


class Stream:
    """One answer under way; ``frames`` is pulled by at most one socket at a time."""

    def __init__(self, stream_id: str, owner: str, source: StreamSource, *, worker: str) -> None:
        self.id = stream_id
        self.owner = owner
        self.worker = worker
        self.answer = Answer()
        self.refusal: QuarterdeckError | None = None
        self.ended = False
        self.reader = 0  # grows with each attach; an older reader sees it and leaves
        self._source = source
        self._frames: deque[bytes] = deque()
        self._first = 0  # index of _frames[0]
        self._bytes = 0
        self._pending: list[StrRow] = []
        self._taking = True  # rows may still come
        self._wake = asyncio.Event()
        self._begin = asyncio.create_task(source.begin(), name=f"begin-{stream_id}")
        self._announcing: asyncio.Task[None] | None = None
        self._aborting: asyncio.Task[None] | None = None
        self.task = asyncio.create_task(self._produce(), name=f"stream-{stream_id}")

    # ------------------------------------------------------------------ producing

    async def _produce(self) -> None:
        """The boundary of one request: whatever goes wrong ends this stream alone."""
        timer = asyncio.get_running_loop().call_later(STARTED_S, self._announce)
        error: QuarterdeckError | None = None
        try:
            await self._take_rows()
        except QuarterdeckError as refusal:
            error = refusal
        except asyncio.CancelledError:  # only ``_abort`` cancels this task
            error = QuarterdeckError("stopped; the engine has not confirmed it", err_type="aborted")
        except Exception:  # noqa: BLE001 - one bad request must not end the worker
            error = internal_error(f"stream {self.id}")
        self._taking = False
        timer.cancel()
        try:
            await self._finish(error)
        except Exception:  # noqa: BLE001 - the record failed; the reader still gets an end
            self.refusal = internal_error(f"the record of stream {self.id}")
        finally:
            self.ended = True
            self._wake.set()

    async def _take_rows(self) -> None:
        async with aclosing(self._source.rows) as rows:
            async for row in rows:
                await self._announce()
                self.answer.add(row)
                if row.output_ids or row.text:
                    self._pending.append(row)
                    self._wake.set()

    def _announce(self) -> asyncio.Task[None]:
        """The ``started`` frame, once: at the first row, or when no refusal came for a while."""
        if self._announcing is None:
            self._announcing = asyncio.create_task(self._append_started())
        return self._announcing

    async def _append_started(self) -> None:
        self._append({"type": "started", **await self._begin})

    async def _finish(self, error: QuarterdeckError | None) -> None:
        """Stores the answer, then one end frame; a refusal has no frame, its reader raises it."""
        if error is not None and not self.answer.confirmed:
            self.answer.finish = Finish(
                type="abort",
                message=error.message,
                status_code=error.status_code,
                err_type=error.err_type,
            )
        if error is not None and self._announcing is None:
            self.refusal = error
            await self._begin
        else:
            await self._announce()
        await self._source.record(self.answer)
        if self.refusal is None:
            self._flush()
            self._append(self._end_fields())

    def _end_fields(self) -> dict[str, Any]:
        answer = self.answer
        return {
            "type": "end",
            "finish": answer.finish_fields,
            "usage": answer.usage,
            "worker": self.worker,
            "rank": answer.rank,
            "ttft_ms": answer.ttft_ms,
            "tokens_per_s": answer.tokens_per_s,
            "text_length": len("".join(answer.text)),
            "slot_freed": answer.confirmed,
        }

    # ------------------------------------------------------------------ frames

    def _append(self, fields: dict[str, Any]) -> None:
        index = self._first + len(self._frames)
        frame = msgspec.json.encode({"stream": self.id, "index": index, **fields})
        self._frames.append(frame)
        self._bytes += len(frame)
        while self._bytes > REPLAY_BYTES and len(self._frames) > 1:
            self._bytes -= len(self._frames.popleft())
            self._first += 1
        self._wake.set()

    def _flush(self) -> None:
        """Pending rows become one frame."""
        if self._pending:
            rows, self._pending = self._pending, []
            self._append(delta_fields(merge_all(rows)))

    async def frames(self, reader: int, next_index: int) -> AsyncGenerator[bytes, None]:
        """Frames from ``next_index`` to the end, for the attached ``reader``.

        Raises the refusal, ``replay_gone`` for frames that are dropped already, and ``taken_over``
        once a newer reader is attached.
        """
        flushed_at = 0.0
        while reader == self.reader:
            if next_index < self._first:
                raise NotFound(
                    f"frames before {self._first} are gone; load the conversation instead",
                    err_type="replay_gone",
                )
            if next_index < self._first + len(self._frames):
                yield self._frames[next_index - self._first]
                next_index += 1
            elif self._pending:
                early_s = flushed_at + FLUSH_S - time.monotonic()
                if early_s > 0:
                    await asyncio.sleep(early_s)
                if reader == self.reader:
                    self._flush()
                    flushed_at = time.monotonic()
            elif self.ended:
                if self.refusal is not None:
                    raise self.refusal
                return
            else:
                self._wake.clear()
                await self._wake.wait()
        raise Conflict("another socket resumed this stream", err_type="taken_over")

    def new_reader(self) -> int:
        self.reader += 1
        self._wake.set()
        return self.reader

    # ------------------------------------------------------------------ stopping

    def stop(self) -> None:
        """Asks the engine to end the request; its terminal row then ends the stream."""
        if self._aborting is None and not self.ended:
            self._aborting = asyncio.create_task(self._abort(), name=f"abort-{self.id}")

    async def _abort(self) -> None:
        try:
            async with asyncio.timeout(STOP_TIMEOUT_S):
                await self._source.abort()
                await asyncio.wait({self.task})
        except (QuarterdeckError, TimeoutError) as error:
            log.warning("the abort of stream %s had no answer: %s", self.id, error)
            if self._taking:
                self.task.cancel()


@dataclass(slots=True)
class LocalAttachment:
    """A socket's hold on a stream of this worker."""

    hub: StreamHub
    stream: Stream
    reader: int
    next_index: int

    def frames(self) -> AsyncGenerator[bytes, None]:
        return self.stream.frames(self.reader, self.next_index)

    async def stop(self) -> None:
        self.stream.stop()

    async def detach(self) -> None:
        """The socket is gone: the grace begins, unless another socket has taken over."""
        if self.reader == self.stream.reader:
            self.hub.start_grace(self.stream)


class StreamHub:
    """This worker's streams by id. One that lost its socket may be resumed for ``grace_s``."""

    def __init__(self, *, worker: str, grace_s: float) -> None:
        self._worker = worker
        self._grace_s = grace_s
        self._streams: dict[str, Stream] = {}
        self._timers: dict[str, asyncio.TimerHandle] = {}

    def __len__(self) -> int:
        return sum(not stream.ended for stream in self._streams.values())

    def start(self, stream_id: str, owner: str, source: StreamSource) -> LocalAttachment:
        self.check_free(stream_id)
        stream = Stream(stream_id, owner, source, worker=self._worker)
        self._streams[stream_id] = stream
        return self._attach(stream, 0)

    def check_free(self, stream_id: str) -> None:
        if stream_id in self._streams:
            raise Conflict(f"stream {stream_id!r} exists", err_type="duplicate_stream")

    def resume(self, stream_id: str, owner: str, next_index: int) -> LocalAttachment | None:
        """None when the stream is not here, or somebody else started it."""
        stream = self._streams.get(stream_id)
        if stream is None or stream.owner != owner:
            return None
        return self._attach(stream, next_index)

    def _attach(self, stream: Stream, next_index: int) -> LocalAttachment:
        timer = self._timers.pop(stream.id, None)
        if timer is not None:
            timer.cancel()
        return LocalAttachment(self, stream, stream.new_reader(), next_index)

    def start_grace(self, stream: Stream) -> None:
        """The answer goes on into the replay buffer until the grace ends."""
        if self._streams.get(stream.id) is stream and stream.id not in self._timers:
            loop = asyncio.get_running_loop()
            self._timers[stream.id] = loop.call_later(self._grace_s, self._expire, stream)

    def _expire(self, stream: Stream) -> None:
        self._timers.pop(stream.id, None)
        self._streams.pop(stream.id, None)
        stream.stop()

    def end_of(self, owner: str) -> None:
        """Stops every stream of an account at once: it signed out or lost its rights."""
        for stream in list(self._streams.values()):
            if stream.owner == owner:
                stream.stop()

    async def close(self) -> None:
        """Stops everything at once: the worker leaves."""
        for timer in self._timers.values():
            timer.cancel()
        self._timers.clear()
        streams = list(self._streams.values())
        self._streams.clear()
        for stream in streams:
            stream.stop()
        if streams:
            await asyncio.wait({stream.task for stream in streams}, timeout=STOP_TIMEOUT_S)


def delta_fields(row: StrRow) -> dict[str, Any]:
    """A ``delta`` frame; candidates are ``[[id, logprob], ...]`` per token, best first.

    ``made_at`` is when its newest token was sampled.
    """
    fields: dict[str, Any] = {
        "type": "delta",
        "text": row.text,
        "token_ids": row.output_ids,
        "epochs": join_runs(row.epochs),
        "made_at": row.made_at,
    }
    if row.output_logprobs is not None:
        fields["logprobs"] = row.output_logprobs.values
        top = candidates(row.output_logprobs)
        if top is not None:
            fields["top"] = top
    if row.entropy is not None:
        fields["entropy"] = row.entropy
    return fields


def candidates(logprobs: OutputLogprobs) -> list[list[tuple[int, float]]] | None:
    """``[(id, logprob), ...]`` per token, best first."""
    top = logprobs.top
    if top is None:
        return None
    return [
        list(zip(ids, values, strict=True)) for ids, values in zip(top.ids, top.values, strict=True)
    ]
