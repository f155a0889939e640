"""EngineClient: how a web worker, a Celery process or a command talks to the engine.

Path: console/services -> here -> router/process.py -> ... -> detokenizer/process.py -> here.

One client joins with one inbox and one lease. When the engine restarts or the lease is fenced,
every open stream and call ends with an answer, and the client joins again with a new inbox.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import time
import uuid
from collections.abc import AsyncGenerator, Callable, Collection
from contextlib import aclosing
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeVar

import msgspec

from engine import messages as m
from engine.config import EngineConfig
from engine.detokenizer.stops import check_stops
from engine.errors import BadRequest, DeadlineExceeded, EngineUnreachable, QuarterdeckError
from engine.lease import LeaseHolder, LeaseThread
from engine.runfile import RunFile, read_run_file
from engine.tokenizer import Tokenizer
from engine.wire import AsyncInbox, PushSocket

log = logging.getLogger(__name__)

RESERVE_TIMEOUT_S = 5.0
SILENCE_S = 5.0  # no heartbeat for so long: local requests end with engine_unreachable
JOIN_RETRY_S = 0.25
ANSWER_GRACE_S = 2.0  # the router answers at the deadline; a reply needs a moment to get here
STREAM_BYTES = 2**20  # undelivered rows of one request; beyond it the request fails
LONG_TEXT = 2_000  # characters, some 2 ms; longer texts are tokenized on a thread
TOKEN_CHARACTERS = 256  # no vocabulary has a longer token


@dataclass(frozen=True, kw_only=True)
class GenerateReqInput:
    """One prompt, one answer. Exactly one of ``text``, ``input_ids`` and ``messages`` is set."""

    sampling: m.SamplingParams
    text: str | None = None
    input_ids: list[int] | None = None
    messages: list[dict[str, Any]] | None = None
    rid: str | None = None
    stream: bool = True
    logprob: m.LogprobParams | None = None
    return_text_in_logprobs: bool = False
    return_entropy: bool = False
    return_hidden_states: bool = False
    return_bytes: bool = False
    priority: int = 0
    extra_key: str | None = None
    kv_reuse: Literal["isolate", "group", "share"] = "isolate"
    dp_rank: int | None = None
    no_logs: bool = False
    actor: str = ""  # who asks, for people who look at the table of requests


@dataclass(frozen=True, kw_only=True)
class SamplingDefaults:
    """What the model's generation_config.json recommends, for requests that do not say."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    repetition_penalty: float = 1.0

    @staticmethod
    def of(model_path: Path) -> SamplingDefaults:
        path = model_path / "generation_config.json"
        given = msgspec.json.decode(path.read_bytes()) if path.exists() else {}
        if given.get("do_sample") is False:
            return SamplingDefaults(temperature=0.0)
        names = ("temperature", "top_p", "top_k", "repetition_penalty")
        return SamplingDefaults(**{name: given[name] for name in names if given.get(name)})


Given = TypeVar("Given")


class TokenizerWorker:
    """Prompts to token ids, checked against the model's limits."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        max_context: int,
        vocab_size: int,
        defaults: SamplingDefaults | None = None,
    ) -> None:
        self.tokenizer = tokenizer
        self.defaults = defaults or SamplingDefaults()
        self.max_context = max_context
        self.vocab_size = vocab_size

    async def tokenize(self, request: GenerateReqInput) -> list[int]:
        given = [request.text, request.input_ids, request.messages]
        if sum(value is not None for value in given) != 1:
            raise BadRequest("give exactly one of text, input_ids and messages")
        check_stops(request.sampling.stop, request.sampling.stop_regex)
        if request.input_ids is not None:
            ids = request.input_ids
        elif request.text is not None:
            ids = await self.encode(request.text)
        else:
            messages = request.messages or []
            characters = sum(len(str(part)) for each in messages for part in each.values())
            ids = await self._beside(characters, self.tokenizer.apply_chat_template, messages)
        self._check(ids)
        return ids

    async def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Raises ``BadRequest`` for a text that no context can hold."""
        encode = partial(self.tokenizer.encode, add_special_tokens=add_special_tokens)
        return await self._beside(len(text), encode, text)

    async def _beside(
        self, characters: int, encode: Callable[[Given], list[int]], given: Given
    ) -> list[int]:
        """A long text takes seconds: it holds up nobody, and one that cannot fit is not begun."""
        if characters > self.max_context * TOKEN_CHARACTERS:
            raise BadRequest(
                f"the prompt has {characters} characters; the model's context is "
                f"{self.max_context} tokens",
                err_type="context_length_exceeded",
            )
        if characters > LONG_TEXT:
            return await asyncio.to_thread(encode, given)
        return encode(given)

    def _check(self, ids: list[int]) -> None:
        if not ids:
            raise BadRequest("the prompt has no tokens")
        if len(ids) >= self.max_context:
            raise BadRequest(
                f"the prompt has {len(ids)} tokens; the model's context is {self.max_context} "
                "and at least one token must be left for the answer",
                err_type="context_length_exceeded",
            )
        if min(ids) < 0 or max(ids) >= self.vocab_size:
            raise BadRequest(f"input_ids must be in 0..{self.vocab_size - 1}")


RequestT = TypeVar("RequestT", bound=m.Request)


class SenderWrapper:
    """Puts this client's inbox on everything it sends; nothing else builds a ``Request``."""

    def __init__(self, config: EngineConfig, inbox: str) -> None:
        self.inbox = inbox
        self._requests = PushSocket(config.router_address)
        self._control = PushSocket(config.router_reply_address)

    def submit(self, kind: type[RequestT], **fields: Any) -> None:
        """Bulk lane: reservations and prompts. Raises when the router takes nothing."""
        self._send(self._requests, m.stamped(self.inbox, kind, **fields))

    def control(self, kind: type[RequestT], **fields: Any) -> None:
        """Control lane: aborts and control calls, never behind a burst of prompts."""
        self._send(self._control, m.stamped(self.inbox, kind, **fields))

    def _send(self, socket: PushSocket, message: m.Request) -> None:
        if not socket.send(message):
            raise EngineUnreachable("the router takes no more messages; try again", retry_after_s=1)

    def close(self) -> None:
        self._requests.close()
        self._control.close()


@dataclass(slots=True)
class _Streams:
    """Undelivered rows of one request, or of all children of one parent."""

    index_of: dict[str, int]
    sizes: dict[str, int] = field(default_factory=dict)
    rows: list[tuple[int, m.StrRow]] = field(default_factory=list)
    wake: asyncio.Event = field(default_factory=asyncio.Event)
    open: set[str] = field(default_factory=set)

    def put(self, row: m.StrRow) -> None:
        self.rows.append((self.index_of[row.rid], row))
        if row.finish is not None:
            self.open.discard(row.rid)
        self.wake.set()

    def take(self) -> list[tuple[int, m.StrRow]]:
        """What came since the last call, one row per request: a slow reader gets fewer rows."""
        waiting: dict[int, list[m.StrRow]] = {}
        for index, row in self.rows:
            waiting.setdefault(index, []).append(row)
        self.rows = []
        self.sizes.clear()
        self.wake.clear()
        return [
            (index, rows[0] if len(rows) == 1 else m.merge_all(rows))
            for index, rows in waiting.items()
        ]


class _Connection:
    """One join: a config, an inbox, a lease and the sockets that go with them."""

    def __init__(self, client: EngineClient, config: EngineConfig, generation: int) -> None:
        self.config = config
        self.generation = generation
        name = f"{client.holder.kind}-{client.worker_id}-{os.getpid()}-{generation}"
        self.inbox = f"ipc://{config.run_dir}/in-{name}"
        self._receiver = AsyncInbox(self.inbox, client._on_message)
        self.sender = SenderWrapper(config, self.inbox)
        self._lease = LeaseThread(
            address=config.router_reply_address,
            inbox=self.inbox,
            generation=generation,
            holder=client.holder,
            run_file=client.run_file,
            on_run_file=client._on_run_file,
        )

    @property
    def malformed(self) -> int:
        return self._receiver.socket.malformed

    def close(self, *, goodbye: bool) -> None:
        self._lease.stop(goodbye=goodbye)
        self._receiver.close()
        self.sender.close()


class EngineClient:
    """Build it with ``connect``, in the process and loop that use it."""

    def __init__(self, run_file: Path, holder: LeaseHolder) -> None:
        self.run_file = run_file
        self.holder = holder
        self.snapshot: m.FleetSnapshot | None = None
        self.counters: dict[str, int] = {
            "rows": 0,
            "late_rows": 0,
            "late_replies": 0,
            "slow_consumers": 0,
            "rejoins": 0,
        }
        self._connection: _Connection | None = None
        self._worker: TokenizerWorker | None = None
        self._streams: dict[str, _Streams] = {}
        self._abandoned: set[str] = set()  # their terminal rows are still to come
        self._calls: dict[str, asyncio.Future[m.ControlReply]] = {}
        self._reservations: dict[str, asyncio.Future[m.ReserveReply]] = {}
        self._subscribers: set[Callable[[m.FleetSnapshot], None]] = set()
        self._joined = asyncio.Event()
        self._heard_at = 0.0
        self._keeper: asyncio.Task[None] | None = None
        self._rejoin = asyncio.Event()

    # ------------------------------------------------------------------ life

    @classmethod
    async def connect(
        cls,
        run_file: Path,
        *,
        kind: Literal["web", "job", "command"],
        worker_id: str,
        via: str = "",
        timeout_s: float | None = None,
    ) -> EngineClient:
        """A client that keeps itself joined. With ``timeout_s`` it waits for the first join and
        raises ``EngineUnreachable`` when that takes longer."""
        holder = LeaseHolder(
            kind=kind, worker_id=worker_id, via=via, pid=os.getpid(), since=time.time()
        )
        client = cls(run_file, holder)
        client._keeper = asyncio.create_task(client._keep_joined(), name="engine-client")
        client._keeper.add_done_callback(_end_with)
        if timeout_s is not None:
            try:
                async with asyncio.timeout(timeout_s):
                    await client._joined.wait()
            except TimeoutError:
                await client.close()
                raise EngineUnreachable(
                    f"no engine answered within {timeout_s:g} s ({run_file})"
                ) from None
        return client

    async def close(self) -> None:
        """Aborts what is open, gives the lease back, closes the sockets."""
        if self._keeper is not None:
            self._keeper.cancel()
            await asyncio.gather(self._keeper, return_exceptions=True)
        self._leave("this worker is shutting down", "worker_shutdown", goodbye=True)

    @property
    def worker_id(self) -> str:
        return self.holder.worker_id

    @property
    def inbox(self) -> str:
        return self._connection.inbox if self._connection else ""

    @property
    def joined(self) -> bool:
        return self._joined.is_set()

    @property
    def tokenizer(self) -> Tokenizer:
        return self._ready().tokenizer

    @property
    def max_context(self) -> int:
        return self._ready().max_context

    @property
    def sampling_defaults(self) -> SamplingDefaults:
        return self._ready().defaults

    async def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Raises ``BadRequest`` for a text that no context can hold."""
        return await self._ready().encode(text, add_special_tokens=add_special_tokens)

    def subscribe(self, callback: Callable[[m.FleetSnapshot], None]) -> Callable[[], None]:
        """``callback`` gets each snapshot, in the loop; the result unsubscribes it."""
        self._subscribers.add(callback)
        return lambda: self._subscribers.discard(callback)

    def _ready(self) -> TokenizerWorker:
        if self._worker is None or not self._joined.is_set():
            raise EngineUnreachable(
                "the engine is not reachable now (starting or restarting)", retry_after_s=2
            )
        return self._worker

    async def _keep_joined(self) -> None:
        """Joins, watches the heartbeat, joins again."""
        generation = 0
        while True:
            run = read_run_file(self.run_file)
            if run is None or run.state != "up" or run.config is None:
                await asyncio.sleep(JOIN_RETRY_S)
                continue
            generation += 1
            self._rejoin.clear()
            self._worker = await asyncio.to_thread(_tokenizer_worker, run)
            self._heard_at = time.monotonic()
            try:
                self._connection = _Connection(self, run.config, generation)
            except OSError as error:  # the file is of an engine that was killed, its sockets gone
                log.info("no engine behind %s: %s", self.run_file, error)
                await asyncio.sleep(JOIN_RETRY_S)
                continue
            await self._watch_heartbeat()
            self.counters["rejoins"] += 1

    async def _watch_heartbeat(self) -> None:
        """Returns when this connection has ended, after ending everything that used it."""
        while not self._rejoin.is_set():
            silent_s = time.monotonic() - self._heard_at
            if silent_s > SILENCE_S:
                self._leave(
                    f"the engine said nothing for {silent_s:.0f} s",
                    "engine_unreachable",
                    goodbye=False,
                )
                return
            try:
                async with asyncio.timeout(0.5):
                    await self._rejoin.wait()
            except TimeoutError:
                continue

    def _on_run_file(self, run: RunFile | None) -> None:
        connection = self._connection
        if connection is None:
            return
        same = (
            run is not None
            and run.config is not None
            and (
                run.config.generation == connection.config.generation
                and run.config.run_dir == connection.config.run_dir
            )
        )
        if run is None or run.state != "up" or not same:
            self._leave(
                "the engine is restarting; please try again", "engine_restarting", goodbye=False
            )
            self._rejoin.set()

    def _leave(self, message: str, err_type: str, *, goodbye: bool) -> None:
        """Ends every open stream, call and reservation, and drops the connection."""
        connection, self._connection = self._connection, None
        self._joined.clear()
        self.snapshot = None
        finish = m.Finish(type="abort", status_code=503, err_type=err_type, message=message)
        for rid, streams in list(self._streams.items()):
            streams.put(m.local_end(rid, finish))
        self._streams.clear()
        self._abandoned.clear()
        error = EngineUnreachable(message, err_type=err_type, retry_after_s=2)
        waiting: list[asyncio.Future[Any]] = [*self._calls.values(), *self._reservations.values()]
        for future in waiting:
            if not future.done():
                future.set_exception(error)
        self._calls.clear()
        self._reservations.clear()
        if connection is not None:
            connection.close(goodbye=goodbye)

    # ------------------------------------------------------------------ receiving

    def _on_message(self, message: Any) -> None:
        match message:
            case m.BatchStrOutput():
                for row in message.rows:
                    self._on_row(row)
            case m.ReserveReply():
                self._settle(self._reservations, message.parent, message)
            case m.ControlReply():
                self._settle(self._calls, message.call_id, message)
            case m.FleetSnapshot():
                self._on_snapshot(message)
            case m.Rejoin() if self._connection and message.inbox == self._connection.inbox:
                log.warning("fenced by the router: %s", message.reason)
                self._leave(
                    f"this worker was fenced: {message.reason}", "worker_fenced", goodbye=False
                )
                self._rejoin.set()
            case _:
                self.counters["unexpected"] = self.counters.get("unexpected", 0) + 1

    def _on_row(self, row: m.StrRow) -> None:
        streams = self._streams.get(row.rid)
        if streams is None:
            self._on_unclaimed_row(row)
            return
        self.counters["rows"] += 1
        size = streams.sizes.get(row.rid, 0) + 64 + len(row.text) + 8 * len(row.output_ids)
        if row.hidden is not None:
            size += len(row.hidden.data)
        streams.sizes[row.rid] = size
        if size > STREAM_BYTES and row.finish is None:
            self._abandon(row.rid, "slow_consumer")
            self.counters["slow_consumers"] += 1
            row.finish = m.Finish(
                type="abort",
                status_code=503,
                err_type="slow_consumer",
                message="the reader took too long; 1 MiB of undelivered output was reached",
            )
        streams.put(row)
        if row.finish is not None:
            self._streams.pop(row.rid, None)
            self.holder.streams = len(self._streams)

    def _on_unclaimed_row(self, row: m.StrRow) -> None:
        """Rows of an abandoned request come until its terminal one; others should not exist."""
        if row.rid not in self._abandoned:
            self.counters["late_rows"] += 1
        elif row.finish is not None:
            self._abandoned.discard(row.rid)

    def _on_snapshot(self, snapshot: m.FleetSnapshot) -> None:
        self._heard_at = time.monotonic()
        self.snapshot = snapshot
        self._joined.set()
        for callback in list(self._subscribers):
            callback(snapshot)

    def _settle(self, waiting: dict[str, asyncio.Future[Any]], key: str, reply: Any) -> None:
        future = waiting.pop(key, None)
        if future is None or future.done():
            self.counters["late_replies"] += 1
        else:
            future.set_result(reply)

    # ------------------------------------------------------------------ generating

    async def generate(self, request: GenerateReqInput) -> AsyncGenerator[m.StrRow]:
        """Rows of one answer, each with what is new; the last one has ``finish``.

        Raises ``QuarterdeckError`` when the request is refused before its first row. Closing the
        iterator early aborts the request at once.
        """
        async with aclosing(self.generate_many([request], parent=request.rid)) as rows:
            async for _, row in rows:
                yield row

    async def generate_many(
        self, requests: list[GenerateReqInput], parent: str | None = None
    ) -> AsyncGenerator[tuple[int, m.StrRow]]:
        """Rows of several answers as they come: (index in ``requests``, row).

        All are admitted or none. ``parent`` names them all for an abort.
        """
        worker = self._ready()
        parent = parent or uuid.uuid4().hex
        rids = [
            r.rid or (parent if len(requests) == 1 else f"{parent}-{i}")
            for i, r in enumerate(requests)
        ]
        received_at = time.time()
        streams = _Streams(index_of={rid: i for i, rid in enumerate(rids)}, open=set(rids))
        await self._reserve(parent, rids, requests[0])
        unsent = set(rids)
        try:
            for rid, request in zip(rids, requests, strict=True):
                ids = await worker.tokenize(request)
                self._streams[rid] = streams
                self._submit(rid, ids, request, received_at)
                unsent.discard(rid)
            self.holder.streams = len(self._streams)
            while streams.open or streams.rows:
                await streams.wake.wait()
                for index, row in streams.take():
                    yield index, row
        finally:
            self._release(unsent)
            for rid in streams.open - unsent:
                self._abandon(rid, "the client went away")
            self.holder.streams = len(self._streams)

    async def _reserve(self, parent: str, rids: list[str], first: GenerateReqInput) -> None:
        if parent in self._reservations or any(rid in self._streams for rid in rids):
            raise QuarterdeckError(
                f"request id {parent!r} is in use", status_code=409, err_type="duplicate_rid"
            )
        future: asyncio.Future[m.ReserveReply] = asyncio.get_running_loop().create_future()
        self._reservations[parent] = future
        try:
            self._sender().submit(
                m.Reserve, parent=parent, rids=rids, priority=first.priority,
                dp_rank=first.dp_rank, actor=first.actor,
            )  # fmt: skip
            async with asyncio.timeout(RESERVE_TIMEOUT_S):
                reply = await future
        except (TimeoutError, asyncio.CancelledError) as error:
            self._release(set(rids))
            if isinstance(error, asyncio.CancelledError):
                raise
            raise EngineUnreachable(
                f"the router did not answer within {RESERVE_TIMEOUT_S:g} s", retry_after_s=2
            ) from None
        finally:
            self._reservations.pop(parent, None)
        if reply.status_code:
            raise QuarterdeckError(
                reply.message,
                status_code=reply.status_code,
                err_type=reply.err_type,
                retry_after_s=reply.retry_after_s,
            )

    def _submit(
        self, rid: str, input_ids: list[int], request: GenerateReqInput, received_at: float
    ) -> None:
        self._sender().submit(
            m.TokenizedGenerateReqInput,
            rid=rid,
            input_ids=input_ids,
            sampling=request.sampling,
            stream=request.stream,
            logprob=request.logprob,
            return_text_in_logprobs=request.return_text_in_logprobs,
            return_entropy=request.return_entropy,
            return_hidden_states=request.return_hidden_states,
            return_bytes=request.return_bytes,
            priority=request.priority,
            extra_key=request.extra_key,
            kv_reuse=request.kv_reuse,
            dp_rank=request.dp_rank,
            received_at=received_at,
            no_logs=request.no_logs,
        )

    def _release(self, rids: set[str]) -> None:
        """Gives reservations back that were never submitted; same lane as the reservation."""
        for rid in rids:
            self._streams.pop(rid, None)
        if rids and self._connection is not None:
            self._connection.sender.submit(m.Release, rids=sorted(rids))

    def _abandon(self, rid: str, reason: str) -> None:
        """Nobody reads this request any more: abort it; its rows are dropped up to its end."""
        self._streams.pop(rid, None)
        if self._connection is None:
            return  # the engine is gone, and with it the request
        self._abandoned.add(rid)
        self._connection.sender.control(
            m.AbortReq, call=_call("", 10.0, None, self.worker_id), rid=rid, reason=reason
        )

    def _sender(self) -> SenderWrapper:
        if self._connection is None:
            raise EngineUnreachable("the engine is not reachable now", retry_after_s=2)
        return self._connection.sender

    # ------------------------------------------------------------------ control

    async def abort(
        self,
        rid: str = "",
        *,
        abort_all: bool = False,
        prefix: bool = False,
        actor: str = "",
        reason: str = "aborted by the client",
    ) -> m.ControlReply:
        """Ends by exact rid (or a parent's). ``result["found"]`` lists what was found."""
        return await self.call(
            m.AbortReq,
            deadline_s=10.0,
            actor=actor,
            rid=rid,
            abort_all=abort_all,
            prefix=prefix,
            reason=reason,
        )

    async def call(
        self,
        kind: type[m.Request],
        *,
        deadline_s: float,
        actor: str = "",
        key: str | None = None,
        **fields: Any,
    ) -> m.ControlReply:
        """Sends one control request and waits for its one answer.

        Raises ``DeadlineExceeded`` (the answer may still come and is then dropped) and
        ``EngineUnreachable``. A refusal is a reply with ``success`` false.
        """
        call = _call(uuid.uuid4().hex, deadline_s, key, actor)
        return await self._ask(kind, call, fields, deadline_s)

    async def outcome_of(self, key: str, *, deadline_s: float) -> m.ControlReply:
        """What became of the call with this idempotency key: ``GetOutcomeReqInput``."""
        call = _call(uuid.uuid4().hex, deadline_s, None, self.worker_id)
        return await self._ask(m.GetOutcomeReqInput, call, {"key": key}, deadline_s)

    async def _ask(
        self, kind: type[m.Request], call: m.Call, fields: dict[str, Any], deadline_s: float
    ) -> m.ControlReply:
        future: asyncio.Future[m.ControlReply] = asyncio.get_running_loop().create_future()
        self._calls[call.id] = future
        try:
            self._sender().control(kind, call=call, **fields)
            # not wait_for: before Python 3.12 it forgets a cancellation that meets the answer
            async with asyncio.timeout(deadline_s + ANSWER_GRACE_S):
                reply = await future
        except TimeoutError:
            raise DeadlineExceeded(
                f"{kind.__name__} had no answer within {deadline_s:g} s"
            ) from None
        finally:
            self._calls.pop(call.id, None)
        return reply

    async def labels(self, epochs: Collection[int]) -> dict[int, m.EpochLabel]:
        """What these epochs are called; one call to the router for those that are not in the
        newest snapshot. An epoch that nobody knows any more is left out."""
        recent = self.snapshot.epochs if self.snapshot else {}
        found = {epoch: recent[epoch] for epoch in epochs if epoch in recent}
        missing = sorted(set(epochs) - found.keys())
        if missing:
            reply = await self.call(m.GetEpochReqInput, deadline_s=5.0, epochs=missing)
            for record in reply.result.get("epochs", ()):
                found[record["epoch"]] = msgspec.convert(record, m.EpochLabel)
        return found

    async def fleet(self) -> m.FleetSnapshot:
        """A true read of engine, workers and ranks."""
        reply = await self.call(m.GetFleetReqInput, deadline_s=5.0)
        return msgspec.convert(reply.result, m.FleetSnapshot)


def _call(identity: str, deadline_s: float, key: str | None, actor: str) -> m.Call:
    return m.Call(id=identity, deadline=time.time() + deadline_s, key=key, actor=actor)


def _end_with(keeper: asyncio.Task[None]) -> None:
    """A client that no longer joins is a zombie: our bug ends the process, its parent sees it."""
    if not keeper.cancelled() and keeper.exception() is not None:
        log.critical("the engine client's task failed", exc_info=keeper.exception())
        os.kill(os.getpid(), signal.SIGTERM)


def _tokenizer_worker(run: RunFile) -> TokenizerWorker:
    assert run.config is not None
    return TokenizerWorker(
        Tokenizer.load(Path(run.config.model_path)),
        max_context=int(run.model["max_context"]),
        vocab_size=int(run.model["vocab_size"]),
        defaults=SamplingDefaults.of(Path(run.config.model_path)),
    )
