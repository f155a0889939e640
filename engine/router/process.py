"""Router process: the front desk of the engine.

Path: client.py -> here -> scheduler/process.py. Token rows never pass; only ends that the router
makes itself (a rank died) go from here through that request's detokenizer.

One thread, one loop. ``requests`` carries Reserve and submits; ``reports`` carries leases, aborts,
rank heartbeats and the launcher's news, and is drained first, so neither waits behind a burst.
"""

from __future__ import annotations

import logging
import sys
import time
import uuid
from collections import deque
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import msgspec

from engine import messages as m
from engine.config import EngineConfig
from engine.process_guard import StopFlag, die_with_parent, report_ready, set_up_logging
from engine.router.dispatch import Dispatcher, detokenizer_of
from engine.router.registry import Entry, Registry
from engine.router.state import EngineState, Weights
from engine.wire import PullSocket, PushSocket, wait_any

log = logging.getLogger(__name__)

HEARTBEAT_S = 1.0
TICK_S = 0.05
QUARANTINE_S = 600.0
DEATHS_BEFORE_QUARANTINE = 2


class Outbox:
    """Sends to inboxes without ever blocking; what a full inbox refuses waits, bounded."""

    LIMIT = 10_000

    def __init__(self) -> None:
        self._sockets: dict[str, PushSocket] = {}
        self._waiting: dict[str, deque[msgspec.Struct]] = {}
        self.dropped = 0

    def send(self, inbox: str, message: msgspec.Struct) -> None:
        waiting = self._waiting.get(inbox)
        if waiting:
            waiting.append(message)
        elif not self._socket(inbox).send(message):
            self._waiting[inbox] = deque([message])

    def send_if_free(self, inbox: str, message: msgspec.Struct) -> None:
        """For news that the next one replaces."""
        if not self._waiting.get(inbox):
            self._socket(inbox).send(message)

    def retry(self) -> None:
        for inbox, waiting in list(self._waiting.items()):
            while waiting and self._sockets[inbox].send(waiting[0]):
                waiting.popleft()
            if not waiting:
                del self._waiting[inbox]
            elif len(waiting) > self.LIMIT:
                self.dropped += len(waiting)
                del self._waiting[inbox]

    def forget(self, inbox: str) -> None:
        self._waiting.pop(inbox, None)
        socket = self._sockets.pop(inbox, None)
        if socket:
            socket.close()

    def _socket(self, inbox: str) -> PushSocket:
        if inbox not in self._sockets:
            self._sockets[inbox] = PushSocket(inbox)
        return self._sockets[inbox]


class Router:
    """All of the router's state, and what each message does to it."""

    def __init__(self, config: EngineConfig, weights: Weights) -> None:
        self.config = config
        self.registry = Registry()
        self.dispatcher = Dispatcher(config.dp, config.limits.block_tokens)
        self.state = EngineState(
            dp=config.dp,
            tp=config.tp,
            model=config.model_path,
            generation=config.generation,
            weights={weights.epoch: weights},
        )
        self.counters: dict[str, int] = {}
        self.outbox = Outbox()
        self.requests = PullSocket(config.router_address)
        self.reports = PullSocket(config.router_reply_address)
        self._ranks: dict[int, PushSocket] = {}
        self._detokenizers = [
            PushSocket(config.detokenizer_address(index)) for index in range(config.detokenizers)
        ]
        self._open_tokens: dict[int, dict[str, int]] = {dp: {} for dp in range(config.dp)}
        self._deaths: dict[int, tuple[int, float]] = {}  # fingerprint -> (deaths, newest)
        self._heartbeat_at = 0.0
        self._inbox = config.router_reply_address
        self._handlers: dict[type, Callable[[Any], None]] = {
            m.Lease: self._on_lease,
            m.LeaseEnd: self._on_lease_end,
            m.Reserve: self._on_reserve,
            m.TokenizedGenerateReqInput: self._on_submit,
            m.Release: self._on_release,
            m.AbortReq: self._on_abort,
            m.GetFleetReqInput: self._on_get_fleet,
            m.RequestEnded: self._on_request_ended,
            m.RankLoad: self._on_rank_load,
            m.ProcessUp: self._on_process_up,
            m.ProcessDown: self._on_process_down,
            m.RowsUndelivered: self._on_rows_undelivered,
        }

    # ------------------------------------------------------------------ the loop

    def run(self, stop: StopFlag) -> None:
        while not stop.requested:
            wait_any((self.reports, self.requests), TICK_S)
            for message in self.reports.drain():
                self._handle(message)
            for message in self.requests.drain(200):
                self._handle(message)
            self._tick(time.time())

    def _handle(self, message: Any) -> None:
        handler = self._handlers.get(type(message))
        if handler is None:
            self._refuse_unknown(message)
            return
        try:
            handler(message)
        except Exception:  # noqa: BLE001 - the boundary around the work of one message
            self._end_broken(message)

    def _refuse_unknown(self, message: Any) -> None:
        self._count("unknown_messages")
        call = getattr(message, "call", None)
        if isinstance(message, m.Request) and call is not None:
            self._answer(
                message,
                False,
                501,
                "not_supported",
                f"the router does not know {type(message).__name__}",
            )

    def _end_broken(self, message: Any) -> None:
        incident = uuid.uuid4().hex[:8]
        log.exception("internal_error %s while handling %s", incident, type(message).__name__)
        self._count("internal_errors")
        text = f"internal error {incident}; the router's log has the details"
        if isinstance(message, m.TokenizedGenerateReqInput):
            self._refuse(message, 500, "internal_error", text)
        elif isinstance(message, m.Request) and hasattr(message, "call"):
            self._answer(message, False, 500, "internal_error", text)

    def _tick(self, now: float) -> None:
        self.outbox.retry()
        if now - self._heartbeat_at < HEARTBEAT_S:
            return
        self._heartbeat_at = now
        for inbox in self.registry.lapsed(now):
            log.warning("lease of %s lapsed", inbox)
            self._count("leases_lapsed")
            self.outbox.send_if_free(inbox, m.Rejoin(inbox=inbox, reason="lease lapsed"))
            self._drop_lease(inbox, "the web worker's lease lapsed")
        for entry in self.registry.stale_reservations(now):
            self.registry.remove(entry.rid)
            self._count("reservations_expired")
        self._deaths = {
            key: value for key, value in self._deaths.items() if now - value[1] < QUARANTINE_S
        }
        self.state.seq += 1
        snapshot = self._snapshot(now)
        for inbox in self.registry.leases:
            self.outbox.send_if_free(inbox, snapshot)

    def _snapshot(self, now: float) -> m.FleetSnapshot:
        return m.FleetSnapshot(
            seq=self.state.seq,
            at=now,
            engine=self.state.engine_view(),
            workers=self.registry.worker_views(),
            ranks=self.state.rank_views(),
            counters={
                **self.counters,
                "live_requests": len(self.registry.entries),
                "malformed": self.requests.malformed + self.reports.malformed,
                "dropped_replies": self.outbox.dropped,
            },
        )

    def _count(self, name: str, by: int = 1) -> None:
        self.counters[name] = self.counters.get(name, 0) + by

    # ------------------------------------------------------------------ leases

    def _on_lease(self, lease: m.Lease) -> None:
        now = time.time()
        for inbox in self.registry.superseded(lease):
            self._drop_lease(inbox, "the web worker joined again")
        if self.registry.renew(lease, now):
            log.info("%s %s joined (pid %d)", lease.kind, lease.worker_id, lease.pid)
            self.outbox.send(lease.inbox, self._snapshot(now))

    def _on_lease_end(self, message: m.LeaseEnd) -> None:
        if message.inbox in self.registry.leases:
            self._drop_lease(message.inbox, "the web worker left")

    def _drop_lease(self, inbox: str, reason: str) -> None:
        orphans = self.registry.drop_lease(inbox)
        self._count("orphaned_requests", len(orphans))
        self._end_in_ranks(orphans, reason, silent=True)
        for detokenizer in self._detokenizers:
            detokenizer.send(m.InboxGone(inbox=inbox))
        self.outbox.forget(inbox)

    # ------------------------------------------------------------------ generation

    def _on_reserve(self, message: m.Reserve) -> None:
        refusal = self._reserve_refusal(message)
        if refusal is None:
            self.registry.reserve(message, time.time())
            refusal = {"epoch": self.state.engine_view().epoch or 0}
        else:
            self._count("refused")
        self.outbox.send(
            message.http_worker_ipc,
            m.reply_to(message, m.ReserveReply, parent=message.parent, **refusal),
        )

    def _reserve_refusal(self, message: m.Reserve) -> dict[str, Any] | None:
        if message.http_worker_ipc not in self.registry.leases:
            self.outbox.send(
                message.http_worker_ipc,
                m.Rejoin(inbox=message.http_worker_ipc, reason="no lease"),
            )
            return _refusal(503, "engine_unreachable", "this worker has no lease; try again", 1)
        if taken := self.registry.taken(message.rids):
            return _refusal(409, "duplicate_rid", f"request id {taken[0]!r} is in use")
        groups = self.state.serving_groups()
        if message.dp_rank is not None and not 0 <= message.dp_rank < self.config.dp:
            return _refusal(
                400,
                "invalid_request_error",
                f"data_parallel_rank {message.dp_rank} does not exist; "
                f"this engine has {self.config.dp}",
            )
        if not groups or (message.dp_rank is not None and message.dp_rank not in groups):
            return _refusal(503, "engine_restarting", "no rank can take the request now", 2)
        limits = self.config.limits
        room = len(groups) * limits.max_running + limits.max_waiting - len(self.registry.entries)
        if len(message.rids) > room:
            return _refusal(
                503,
                "overloaded",
                f"{len(self.registry.entries)} requests are open, no room for "
                f"{len(message.rids)} more",
                1,
            )
        return None

    def _on_release(self, message: m.Release) -> None:
        for rid in message.rids:
            entry = self.registry.entries.get(rid)
            if entry is not None and entry.inbox == message.http_worker_ipc and entry.dp is None:
                self.registry.remove(rid)

    def _on_submit(self, message: m.TokenizedGenerateReqInput) -> None:
        entry = self.registry.entries.get(message.rid)
        if entry is None or entry.inbox != message.http_worker_ipc or entry.dp is not None:
            self._refuse(message, 409, "not_reserved", f"{message.rid!r} holds no reservation")
            return
        now = time.time()
        if entry.aborted is not None:
            self.registry.remove(entry.rid)
            self._refuse(message, 499, "aborted", entry.aborted)
            return
        entry.fingerprint = hash((tuple(message.input_ids), message.sampling.max_new_tokens))
        deaths, _ = self._deaths.get(entry.fingerprint, (0, 0.0))
        if deaths >= DEATHS_BEFORE_QUARANTINE:
            self.registry.remove(entry.rid)
            self._refuse(
                message,
                503,
                "quarantined",
                "a rank died twice while it ran this request; it is refused for 10 min",
            )
            return
        loads = {
            dp: sum(self._open_tokens[dp].values())
            for dp in self.state.serving_groups()
            if entry.pinned_dp in (None, dp)
        }
        if not loads:
            self.registry.remove(entry.rid)
            self._refuse(message, 503, "engine_restarting", "the rank went down; try again")
            return
        dp = self.dispatcher.choose(message.input_ids, message.extra_key, loads)
        if not self._ranks[dp].send(message):
            self.registry.remove(entry.rid)
            self._refuse(message, 503, "overloaded", f"rank dp{dp} takes no more messages now")
            return
        entry.dp, entry.accepted_at = dp, now
        self._open_tokens[dp][entry.rid] = len(message.input_ids) + message.sampling.max_new_tokens
        self._count("dispatched")

    def _refuse(
        self, request: m.TokenizedGenerateReqInput, status: int, kind: str, text: str
    ) -> None:
        """The terminal row of a request that no rank has seen: straight to its inbox."""
        self._count("refused")
        finish = m.Finish(type="abort", message=text, status_code=status, err_type=kind)
        self._send_rows(request.http_worker_ipc, [m.row_for(request, m.StrRow, finish=finish)])

    def _send_rows(self, inbox: str, rows: list[m.StrRow]) -> None:
        self.outbox.send(inbox, m.BatchStrOutput(rows=rows))

    def _on_request_ended(self, message: m.RequestEnded) -> None:
        for rid in message.rids:
            entry = self.registry.entries.get(rid)
            if entry is not None and entry.dp == message.dp:
                self._forget(entry)

    def _forget(self, entry: Entry) -> None:
        self.registry.remove(entry.rid)
        if entry.dp is not None:
            self._open_tokens[entry.dp].pop(entry.rid, None)

    # ------------------------------------------------------------------ abort

    def _on_abort(self, message: m.AbortReq) -> None:
        if not message.rid and not message.abort_all:
            self._answer(
                message,
                False,
                400,
                "invalid_request_error",
                "rid is empty; to end every request say abort_all",
            )
            return
        entries = (
            list(self.registry.entries.values())
            if message.abort_all
            else self.registry.named(message.rid, prefix=message.prefix)
        )
        for entry in entries:
            entry.aborted = entry.aborted or message.reason
        self._end_in_ranks(entries, message.reason, silent=False)
        self._count("aborted", len(entries))
        if message.call.id:
            self._answer(message, True, result={"found": sorted(entry.rid for entry in entries)})

    def _end_in_ranks(self, entries: Iterable[Entry], reason: str, *, silent: bool) -> None:
        per_rank: dict[int, list[str]] = {}
        for entry in entries:
            if entry.dp is not None:
                per_rank.setdefault(entry.dp, []).append(entry.rid)
                if silent:
                    self._open_tokens[entry.dp].pop(entry.rid, None)
        for dp, rids in per_rank.items():
            if dp in self._ranks:
                self._ranks[dp].send(
                    m.EndRequests(
                        http_worker_ipc=self._inbox, rids=rids, reason=reason, silent=silent
                    )
                )

    # ------------------------------------------------------------------ processes

    def _on_rank_load(self, load: m.RankLoad) -> None:
        rank = self.state.ranks.get((load.dp, load.tp))
        if rank is not None and rank.generation == load.generation:
            rank.load = load

    def _on_process_up(self, message: m.ProcessUp) -> None:
        if message.role == "detokenizer":
            return
        rank = self.state.ranks[message.index, message.tp]
        rank.up, rank.address, rank.pid = True, message.address, message.pid
        rank.generation = message.generation
        if message.tp == 0:
            old = self._ranks.pop(message.index, None)
            if old:
                old.close()
            self._ranks[message.index] = PushSocket(message.address)
        log.info("rank dp%d tp%d is up (pid %d)", message.index, message.tp, message.pid)

    def _on_process_down(self, message: m.ProcessDown) -> None:
        if message.role == "rank":
            self._rank_down(message)
        else:
            self._detokenizer_down(message)

    def _rank_down(self, message: m.ProcessDown) -> None:
        dp = message.index
        self.state.group_down(dp)
        self.dispatcher.forget(dp)
        socket = self._ranks.pop(dp, None)
        if socket:
            socket.close(linger_s=0)
        finish = m.Finish(
            type="abort",
            status_code=503,
            err_type="engine_restarting",
            message=f"rank dp{dp} tp{message.tp} died ({message.reason}); "
            "it restarts, please try again",
        )
        now = time.time()
        for entry in self.registry.of_rank(dp):
            deaths, _ = self._deaths.get(entry.fingerprint, (0, 0.0))
            self._deaths[entry.fingerprint] = (deaths + 1, now)
            self._forget(entry)
            row = m.TokenIDRow(rid=entry.rid, http_worker_ipc=entry.inbox, finish=finish)
            detokenizer = self._detokenizers[detokenizer_of(entry.rid, len(self._detokenizers))]
            detokenizer.send(m.BatchTokenIDOutput(rows=[row]))
        self._count("rank_deaths")

    def _detokenizer_down(self, message: m.ProcessDown) -> None:
        finish = m.Finish(
            type="abort",
            status_code=503,
            err_type="engine_restarting",
            message="the detokenizer died; it restarts, please try again",
        )
        lost = [
            entry
            for entry in self.registry.entries.values()
            if entry.dp is not None
            and detokenizer_of(entry.rid, len(self._detokenizers)) == message.index
        ]
        self._end_in_ranks(lost, "its detokenizer died", silent=True)
        for entry in lost:
            self._forget(entry)
            row = m.StrRow(rid=entry.rid, http_worker_ipc=entry.inbox, finish=finish)
            self._send_rows(entry.inbox, [row])
        self._count("detokenizer_deaths")

    def _on_rows_undelivered(self, message: m.RowsUndelivered) -> None:
        if message.evict:
            self._count("evicted_inboxes")
            self.outbox.send_if_free(
                message.inbox, m.Rejoin(inbox=message.inbox, reason="took no rows for too long")
            )
            self._drop_lease(message.inbox, "its web worker took no rows for too long")
            return
        slow = [self.registry.entries[rid] for rid in message.rids if rid in self.registry.entries]
        self._count("slow_consumers", len(slow))
        self._end_in_ranks(slow, "slow_consumer", silent=True)

    # ------------------------------------------------------------------ reads

    def _on_get_fleet(self, message: m.GetFleetReqInput) -> None:
        snapshot = msgspec.to_builtins(self._snapshot(time.time()))
        self._answer(message, True, result=snapshot)

    def _answer(
        self,
        message: Any,
        success: bool,
        status: int = 200,
        kind: str = "",
        text: str = "",
        result: dict[str, Any] | None = None,
    ) -> None:
        self.outbox.send(
            message.http_worker_ipc,
            m.reply_to(
                message,
                m.ControlReply,
                call_id=message.call.id,
                success=success,
                status_code=status,
                err_type=kind,
                message=text,
                result=result or {},
            ),
        )


def _refusal(status: int, kind: str, text: str, retry_after_s: int = 0) -> dict[str, Any]:
    return {
        "status_code": status,
        "err_type": kind,
        "message": text,
        "retry_after_s": retry_after_s,
    }


def main(config_path: str) -> None:
    config = EngineConfig.from_json(Path(config_path).read_bytes())
    die_with_parent("router")
    set_up_logging("router")
    stop = StopFlag()
    router = Router(config, Weights(config.epoch, config.weight_version, config.token_step))
    report_ready({"pid": 0})
    router.run(stop)


if __name__ == "__main__":
    main(sys.argv[1])
