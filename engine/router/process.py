"""Router process: the front desk of the engine, and the one owner of its state.

Path: client.py -> here -> scheduler/process.py. Token rows never pass; only ends that the router
makes itself (a rank died) go from here through that request's detokenizer.

One thread, one loop. ``requests`` carries Reserve and submits; ``reports`` carries leases, aborts,
control calls, rank heartbeats and the launcher's news, and is drained first, so that none of them
waits behind a burst of prompts.
"""

from __future__ import annotations

import logging
import os
import sys
import time
import uuid
from collections import deque
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from engine import messages as m
from engine.config import EngineConfig
from engine.process_guard import StopFlag, die_with_parent, report_ready, set_up_logging
from engine.router.control import ControlDesk, Operation, Outcome
from engine.router.ledger import LedgerFile, Spool, load_ledger
from engine.router.operations import Operations
from engine.router.recording_files import drop_recording, open_recording
from engine.router.registry import Entry, Registry
from engine.router.requests import RequestDesk
from engine.router.state import EngineState
from engine.router.weights import Session
from engine.weights.checkpoint import WeightError, effective
from engine.wire import PullSocket, PushSocket, wait_any

log = logging.getLogger(__name__)

HEARTBEAT_S = 1.0
TICK_S = 0.05
INTERNAL_DEADLINE_S = 300.0
RESYNC_EVERY_S = 30.0  # between tries to bring a group to its weights
UPDATES = frozenset(kind.__name__ for kind in m.WeightUpdate.__subclasses__())
EPOCHS_IN_SNAPSHOT = 64
NOTICES = 32  # kept for workers that join late or miss a snapshot


class Outbox:
    """Sends to inboxes without ever blocking; what a full inbox refuses waits, bounded."""

    LIMIT = 10_000

    def __init__(self) -> None:
        self._sockets: dict[str, PushSocket] = {}
        self._waiting: dict[str, deque[msgspec.Struct]] = {}
        self.dropped = 0

    def send(self, inbox: str, message: msgspec.Struct) -> None:
        waiting, socket = self._waiting.get(inbox), self._socket(inbox)
        if socket is None:
            self.dropped += 1
        elif waiting:
            waiting.append(message)
        elif not socket.send(message):
            self._waiting[inbox] = deque([message])

    def send_if_free(self, inbox: str, message: msgspec.Struct) -> None:
        """For news that the next one replaces."""
        socket = self._socket(inbox)
        if socket is not None and not self._waiting.get(inbox):
            socket.send(message)

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

    def _socket(self, inbox: str) -> PushSocket | None:
        """None for what can be nobody's address."""
        if inbox not in self._sockets:
            try:
                self._sockets[inbox] = PushSocket(inbox)
            except (ValueError, OSError):
                return None
        return self._sockets[inbox]


class RouterSockets:
    """Every socket of the router; none of the sends blocks."""

    def __init__(self, config: EngineConfig) -> None:
        self.inbox = config.router_reply_address
        self.outbox = Outbox()
        self.requests = PullSocket(config.router_address)
        self.reports = PullSocket(config.router_reply_address)
        self._ranks: dict[int, PushSocket] = {}
        self._detokenizers = [
            PushSocket(config.detokenizer_address(index)) for index in range(config.detokenizers)
        ]

    def to_inbox(self, inbox: str, message: msgspec.Struct) -> None:
        self.outbox.send(inbox, message)

    def to_rank(self, dp: int, message: msgspec.Struct) -> bool:
        return dp in self._ranks and self._ranks[dp].send(message)

    def to_detokenizer(self, index: int, message: msgspec.Struct) -> None:
        self._detokenizers[index].send(message)

    def forget_inbox(self, inbox: str) -> None:
        for detokenizer in self._detokenizers:
            detokenizer.send(m.InboxGone(inbox=inbox))
        self.outbox.forget(inbox)

    def connect_rank(self, dp: int, address: str) -> None:
        self.disconnect_rank(dp)
        self._ranks[dp] = PushSocket(address)

    def disconnect_rank(self, dp: int) -> None:
        socket = self._ranks.pop(dp, None)
        if socket:
            socket.close(linger_s=0)

    @property
    def malformed(self) -> int:
        return self.requests.malformed + self.reports.malformed


class Router:
    """Ties desk, control and state together; the ``Front`` that operations see."""

    def __init__(self, config: EngineConfig) -> None:
        self.config = config
        self.ledger = load_ledger(config)
        self._ledger_file = LedgerFile(config)
        self.spool = Spool(config)
        self.spool.sweep(self.ledger, time.time())
        self.session: Session | None = None
        self.registry = Registry()
        self.state = EngineState(
            dp=config.dp,
            tp=config.tp,
            model=config.model_path,
            generation=config.generation,
            ledger=self.ledger,
        )
        self.counters: dict[str, int] = {}
        self.sockets = RouterSockets(config)
        self.desk = RequestDesk(config, self.registry, self.state, self.sockets, self._count)
        self.operations = Operations(self)
        self.control = ControlDesk(
            tensor_ranks=config.tp, send=self._send_call, on_idle=self._reconcile
        )
        self._resynced_at: dict[int, float] = {}
        self._notices: deque[m.Notice] = deque(maxlen=NOTICES)
        self._lost_noted = ""
        self._heartbeat_at = 0.0
        self._handlers: dict[type, Callable[[Any], None]] = {
            m.Lease: self._on_lease,
            m.LeaseEnd: self._on_lease_end,
            m.ClientDown: self._on_client_down,
            m.Reserve: self.desk.reserve,
            m.Release: self.desk.release,
            m.TokenizedGenerateReqInput: self.desk.submit,
            m.AbortReq: self._on_abort,
            m.GetFleetReqInput: self._on_get_fleet,
            m.GetOutcomeReqInput: self._on_get_outcome,
            m.RequestEnded: self._on_request_ended,
            m.RankLoad: self._on_rank_load,
            m.RankReply: self._on_rank_reply,
            m.ProcessUp: self._on_process_up,
            m.ProcessDown: self._on_process_down,
            m.RowsUndelivered: self._on_rows_undelivered,
        }
        self._restore_pause()

    # ------------------------------------------------------------------ the loop

    def run(self, stop: StopFlag) -> None:
        while not stop.requested:
            wait_any((self.sockets.reports, self.sockets.requests), TICK_S)
            for message in self.sockets.reports.drain():
                self._handle(message)
            for message in self.sockets.requests.drain(200):
                self._handle(message)
            self._tick(time.time())

    def _handle(self, message: Any) -> None:
        try:
            handler = self._handlers.get(type(message))
            if handler is not None:
                handler(message)
            elif isinstance(message, m.ControlReq) and self.operations.knows(message):
                self._on_control(message)
            else:
                self._refuse_unknown(message)
        except Exception:  # noqa: BLE001 - the boundary around the work of one message
            self._end_broken(message)

    def _refuse_unknown(self, message: Any) -> None:
        self._count("unknown_messages")
        if isinstance(message, m.ControlReq):
            text = f"the router does not know {type(message).__name__}"
            self._answer(message, Outcome(False, 501, "not_supported", text))

    def _end_broken(self, message: Any) -> None:
        incident = uuid.uuid4().hex[:8]
        log.exception("internal_error %s while handling %s", incident, type(message).__name__)
        self._count("internal_errors")
        text = f"internal error {incident}; the router's log has the details"
        if isinstance(message, m.TokenizedGenerateReqInput):
            finish = m.Finish(type="abort", message=text, status_code=500,
                              err_type="internal_error")  # fmt: skip
            row = m.row_for(message, m.StrRow, finish=finish)
            self.sockets.to_inbox(message.http_worker_ipc, m.BatchStrOutput(rows=[row]))
        elif isinstance(message, m.ControlReq):
            self._answer(message, Outcome(False, 500, "internal_error", text))

    def _tick(self, now: float) -> None:
        self.sockets.outbox.retry()
        self.control.tick(now)
        if now - self._heartbeat_at < HEARTBEAT_S:
            return
        for inbox in self.registry.lapsed(now):
            log.warning("lease of %s lapsed", inbox)
            self._count("leases_lapsed")
            self._fence(inbox, "its lease lapsed")
        self.desk.expire(now)
        if self._ledger_file.unsaved:
            self.save_ledger()
        self._note_lost_weights()
        if self.control.open_exclusive is None:
            self._end_what_nobody_holds(now)
            self._reconcile()
        self.broadcast()

    def _end_what_nobody_holds(self, now: float) -> None:
        session, pause = self.session, self.ledger.pause
        if session is not None and session.idle(now, self.config.session_idle_s):
            self._note("session_dropped", f"weight session {session.id} was idle for "
                       f"{self.config.session_idle_s:g} s: what it staged is dropped")  # fmt: skip
            self._count("weight_sessions_dropped")
            self.operations.updates.drop_idle()
        if pause is not None and now > pause.until:
            self._note("pause_lease_expired", "the pause's lease ran out: generation goes on")
            self._count("pause_leases_expired")
            self._run_internal("end_pause", self.operations.end_pause())

    def _reconcile(self) -> None:
        """Groups that serve other weights than they should are brought there, out of dispatch."""
        now = time.time()
        for dp in self.state.serving_groups():
            epoch = self.state.epoch_of(dp)
            if epoch == self.ledger.epoch_of(dp):
                self.state.resyncing.discard(dp)
                continue
            self.state.resyncing.add(dp)
            if now - self._resynced_at.get(dp, 0.0) > RESYNC_EVERY_S:
                self._resynced_at[dp] = now
                self._count("resyncs")
                self._run_internal(f"resync dp{dp}", self.operations.updates.commits.resync(dp))

    # ------------------------------------------------------------------ what operations use

    def now(self) -> float:
        return time.time()

    def save_ledger(self) -> None:
        self._ledger_file.keep(self.ledger)

    def secure_ledger(self) -> None:
        self._ledger_file.write(self.ledger)

    def broadcast(self) -> None:
        """The heartbeat, also sent at once after a change of state."""
        now = self._heartbeat_at = time.time()
        self.state.seq += 1
        snapshot = self._snapshot(now)
        for inbox in self.registry.leases:
            self.sockets.outbox.send_if_free(inbox, snapshot)

    def live(self, groups: list[int]) -> list[Entry]:
        return self.desk.live(groups)

    def hold(self) -> None:
        self.desk.hold()

    def release_held(self) -> None:
        self.desk.release_held()

    def abort_entries(self, entries: list[Entry], reason: str) -> None:
        self.desk.abort(entries, reason)

    def request_table(self) -> list[dict[str, Any]]:
        return self.desk.table()

    def tell(self, op: m.RankOp, groups: list[int]) -> None:
        for dp in groups:
            self._send_call("", op, dp)

    def open_recording(self, kind: m.RecordingKind, directory: str, recording_id: str) -> None:
        open_recording(self.config, kind, Path(directory), recording_id)

    def drop_recording(self, kind: m.RecordingKind, directory: str, recording_id: str) -> None:
        drop_recording(kind, Path(directory), recording_id)

    def effective_paths(self, paths: tuple[str, ...]) -> tuple[str, ...]:
        try:
            return effective(paths)
        except WeightError as error:  # a source that is gone already: a restart will say so
            log.warning("cannot tell which weight files still matter: %s", error.message)
            return paths

    def open_update(self) -> str | None:
        running = self.control.open_of(UPDATES)
        return running.job if running else None

    def _note(self, kind: str, text: str) -> None:
        """Something that nobody asked for: goes out with the next snapshots."""
        log.warning("%s: %s", kind, text)
        self._notices.append(m.Notice(id=uuid.uuid4().hex, at=time.time(), kind=kind, text=text))

    def _note_lost_weights(self) -> None:
        if self.ledger.lost and self.ledger.lost != self._lost_noted:
            self._note("weights_lost", self.ledger.lost)
        self._lost_noted = self.ledger.lost

    def _snapshot(self, now: float) -> m.FleetSnapshot:
        newest = sorted(self.ledger.epochs)[-EPOCHS_IN_SNAPSHOT:]
        return m.FleetSnapshot(
            seq=self.state.seq,
            at=now,
            engine=self.state.engine_view(),
            workers=self.registry.worker_views(),
            ranks=self.state.rank_views(),
            epochs={
                epoch: m.EpochLabel(
                    weight_version=self.ledger.epochs[epoch].weight_version,
                    token_step=self.ledger.epochs[epoch].token_step,
                    job=self.ledger.epochs[epoch].job,
                )
                for epoch in newest
            },
            pause_until=self.ledger.pause.until if self.ledger.pause else None,
            session=self.session.id if self.session else None,
            notices=list(self._notices),
            counters={
                **self.counters,
                "live_requests": len(self.registry.entries),
                "malformed": self.sockets.malformed,
                "dropped_replies": self.sockets.outbox.dropped,
                "late_answers": self.control.late_answers,
            },
        )

    def _count(self, name: str, by: int = 1) -> None:
        self.counters[name] = self.counters.get(name, 0) + by

    # ------------------------------------------------------------------ leases

    def _on_lease(self, lease: m.Lease) -> None:
        now = time.time()
        for inbox in self.registry.superseded(lease):
            self._drop_lease(inbox, "the worker joined again")
        if self.registry.renew(lease, now):
            log.info("%s %s joined (pid %d)", lease.kind, lease.worker_id, lease.pid)
            self.sockets.to_inbox(lease.inbox, self._snapshot(now))

    def _on_lease_end(self, message: m.LeaseEnd) -> None:
        if message.inbox in self.registry.leases:
            self._drop_lease(message.inbox, "the worker left")

    def _on_client_down(self, message: m.ClientDown) -> None:
        for inbox in self.registry.of_pid(message.pid):
            self._drop_lease(inbox, "its process ended")

    def _fence(self, inbox: str, reason: str) -> None:
        self.sockets.outbox.send_if_free(inbox, m.Rejoin(inbox=inbox, reason=reason))
        self._drop_lease(inbox, reason)

    def _drop_lease(self, inbox: str, reason: str) -> None:
        self.desk.drop_owner(inbox, reason)
        self.sockets.forget_inbox(inbox)

    def _on_rows_undelivered(self, message: m.RowsUndelivered) -> None:
        if message.evict:
            self._count("evicted_inboxes")
            self._fence(message.inbox, "it took no rows for too long")
        else:
            self.desk.slow_consumers(message.rids)

    # ------------------------------------------------------------------ calls

    def _on_abort(self, message: m.AbortReq) -> None:
        if not message.rid and not message.abort_all:
            text = "rid is empty; to end every request say abort_all"
            self._answer(message, Outcome(False, 400, "invalid_request_error", text))
            return
        entries = (
            list(self.registry.entries.values())
            if message.abort_all
            else self.registry.named(message.rid, prefix=message.prefix)
        )
        found = sorted(entry.rid for entry in entries)
        self.desk.abort(entries, message.reason)
        self._answer(message, Outcome(result={"found": found}))

    def _on_get_fleet(self, message: m.GetFleetReqInput) -> None:
        self._answer(message, Outcome(result=msgspec.to_builtins(self._snapshot(time.time()))))

    def _on_get_outcome(self, message: m.GetOutcomeReqInput) -> None:
        known = self.control.outcome_of(message.key)
        state = "unknown" if known is None else "open" if known.outcome is None else "ended"
        outcome = known.outcome if known else None
        result: dict[str, Any] = {"state": state}
        if outcome is not None:
            result |= {
                "success": outcome.success,
                "status_code": outcome.status_code,
                "err_type": outcome.err_type,
                "message": outcome.message,
                "result": outcome.result,
                "ranks": msgspec.to_builtins(outcome.ranks),
            }
        self._answer(message, Outcome(result=result))

    def _on_control(self, message: m.ControlReq) -> None:
        call = message.call
        answer: Callable[[Outcome], None] = partial(self._answer, message)
        if isinstance(message, m.UpdateWeightFromDiskReqInput) and message.is_async:
            call = msgspec.structs.replace(call, key=call.key or call.id)
            answer = self._answer_at_start(message, call)
        self.control.submit(
            type(message).__name__,
            call,
            self.operations.of(message),
            answer,
            exclusive=isinstance(message, Operations.EXCLUSIVE),
            now=time.time(),
            conflict=self.operations.updates.conflict(message),
        )

    def _answer_at_start(self, message: m.ControlReq, call: m.Call) -> Callable[[Outcome], None]:
        """The caller is told at once that its update goes on; only refusals come later to it."""

        def note(outcome: Outcome) -> None:
            log.info("update %s: %s %s", call.key, outcome.status_code, outcome.message)

        conflict = self.operations.updates.conflict(message)
        text = "the update goes on; ask for the outcome of its job"
        self._answer(message, conflict or Outcome(message=text, result={"job": call.key}))
        return note

    def _run_internal(self, name: str, operation: Operation) -> None:
        self._run_uncalled(name, operation, time.time() + INTERNAL_DEADLINE_S, exclusive=True)

    def run_beside(self, name: str, operation: Operation, deadline: float) -> None:
        self._run_uncalled(name, operation, deadline, exclusive=False)

    def _run_uncalled(
        self, name: str, operation: Operation, deadline: float, *, exclusive: bool
    ) -> None:
        """An operation that nobody called: its outcome goes to the log."""
        call = m.Call(id="", deadline=deadline, actor="router")

        def note(outcome: Outcome) -> None:
            log.info("%s: %s %s", name, "done" if outcome.success else "failed", outcome.message)

        self.control.submit(name, call, operation, note, exclusive=exclusive, now=time.time())

    def _answer(self, message: m.ControlReq, outcome: Outcome) -> None:
        if not message.call.id:
            return  # an abort whose answer nobody wants
        reply = m.reply_to(
            message,
            m.ControlReply,
            call_id=message.call.id,
            success=outcome.success,
            status_code=outcome.status_code,
            err_type=outcome.err_type,
            message=outcome.message,
            result=outcome.result,
            ranks=outcome.ranks,
        )
        self.sockets.to_inbox(message.http_worker_ipc, reply)

    def _send_call(self, call_id: str, op: m.RankOp, dp: int) -> bool:
        call = m.stamped(self.sockets.inbox, m.RankCall, call_id=call_id, op=op)
        return self.sockets.to_rank(dp, call)

    def _on_rank_reply(self, message: m.RankReply) -> None:
        self.control.on_answer(message.call_id, message.answer, time.time())

    # ------------------------------------------------------------------ processes

    def _on_request_ended(self, message: m.RequestEnded) -> None:
        self.desk.ended(message)
        self.operations.recordings.requests_ended(message.rids)

    def _on_rank_load(self, load: m.RankLoad) -> None:
        rank = self.state.ranks.get((load.dp, load.tp))
        if rank is not None and rank.generation == load.generation:
            rank.load = load

    def _on_process_up(self, message: m.ProcessUp) -> None:
        if message.role != "rank":
            return
        rank = self.state.ranks[message.index, message.tp]
        rank.up, rank.address, rank.pid = True, message.address, message.pid
        rank.generation = message.generation
        rank.started_on = int(message.info.get("epoch", 0))
        log.info("rank dp%d tp%d is up (pid %d)", message.index, message.tp, message.pid)
        if message.tp == 0:
            self.sockets.connect_rank(message.index, message.address)
        if self.state.group_up(message.index):
            self._on_group_up(message.index)

    def _on_group_up(self, dp: int) -> None:
        """A group that starts into a pause pauses; one with old weights is brought up to date."""
        if self.ledger.pause is not None:
            self._send_call("", m.PauseRank(mode="in_place"), dp)
        self._resynced_at.pop(dp, None)
        if self.state.epoch_of(dp) != self.ledger.epoch_of(dp):
            self.state.resyncing.add(dp)  # at once; the next heartbeat does something about it
        self.broadcast()

    def _on_process_down(self, message: m.ProcessDown) -> None:
        if message.role == "detokenizer":
            self.desk.detokenizer_down(message)
            return
        dp, why = message.index, f"died ({message.reason})"
        self._note("rank_died", f"rank dp{dp} tp{message.tp} {why}; its group restarts")
        self.state.group_down(dp)
        self.sockets.disconnect_rank(dp)
        self.desk.rank_down(message)
        session = self.session
        if session is not None and dp in session.groups and not session.busy:
            session.failed = session.failed or f"rank dp{dp} tp{message.tp} {why}"
        self.control.on_group_down(dp, why, time.time())
        self.broadcast()

    def _restore_pause(self) -> None:
        """A pause outlives an engine restart, and so does its lease."""
        if self.ledger.pause is not None:
            self.state.control = "paused"
            self.desk.hold()


def main(config_path: str) -> None:
    config = EngineConfig.from_json(Path(config_path).read_bytes())
    die_with_parent("router")
    set_up_logging("router")
    stop = StopFlag()
    router = Router(config)
    report_ready({"pid": os.getpid()})
    router.run(stop)


if __name__ == "__main__":
    main(sys.argv[1])
