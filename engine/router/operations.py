"""What each control call does, told from top to bottom as a generator. Pure but for its ``Front``.

Path: client.py -> router/process.py -> control.py runs these -> scheduler/control.py on every rank.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Protocol

import msgspec

from engine import messages as m
from engine.config import EngineConfig
from engine.router.control import FanOut, Operation, Outcome, Until, refused
from engine.router.registry import Entry
from engine.router.state import EngineState
from engine.router.weights import EpochRecord, Ledger, PauseRecord, Session

RESUME_TIMEOUT_S = 30.0
COMMIT_TIMEOUT_S = 120.0


class Front(Protocol):
    """What an operation may do to the rest of the router."""

    config: EngineConfig
    state: EngineState
    ledger: Ledger
    session: Session | None

    def now(self) -> float: ...
    def save_ledger(self) -> None: ...
    def broadcast(self) -> None: ...
    def live(self, groups: list[int]) -> list[Entry]: ...
    def hold(self) -> None: ...
    def release_held(self) -> None: ...
    def abort_entries(self, entries: list[Entry], reason: str) -> None: ...
    def request_table(self) -> list[dict[str, Any]]: ...


class Operations:
    """Makes the generator for a message. ``EXCLUSIVE`` ones run one at a time."""

    EXCLUSIVE = (
        m.PauseGenerationReqInput,
        m.ContinueGenerationReqInput,
        m.FlushCacheReqInput,
        m.DrainRankReqInput,
        m.WeightUpdate,
        m.UpdateWeightVersionReqInput,
        m.ReleaseMemoryOccupationReqInput,
        m.ResumeMemoryOccupationReqInput,
    )

    def __init__(self, front: Front) -> None:
        self._front = front
        self._table: dict[type, Callable[[Any], Operation]] = {
            m.PauseGenerationReqInput: self.pause,
            m.ContinueGenerationReqInput: self.resume,
            m.FlushCacheReqInput: self.flush,
            m.DrainRankReqInput: self.drain,
            m.BeginWeightUpdateReqInput: self.begin_update,
            m.EndWeightUpdateReqInput: self.end_update,
            m.UpdateWeightFromDiskReqInput: self.update_from_disk,
            m.UpdateWeightsFromTensorReqInput: self.update_from_tensor,
            m.UpdateWeightsFromDistributedReqInput: self.update_from_distributed,
            m.UpdateWeightVersionReqInput: self.relabel,
            m.InitWeightsUpdateGroupReqInput: self.join_group,
            m.DestroyWeightsUpdateGroupReqInput: self.leave_group,
            m.GetWeightsByNameReqInput: self.read_weights,
            m.ReleaseMemoryOccupationReqInput: self.release_memory,
            m.ResumeMemoryOccupationReqInput: self.resume_memory,
            m.SlowDownReqInput: self.slow_down,
            m.FreezeGCReq: self.freeze_gc,
            m.ConfigureLoggingReq: self.configure_logging,
            m.GetRequestsReqInput: self.list_requests,
            m.GetEpochReqInput: self.get_epoch,
        }

    def knows(self, message: Any) -> bool:
        return type(message) in self._table

    def of(self, message: Any) -> Operation:
        return self._table[type(message)](message)

    # ------------------------------------------------------------------ helpers

    def _to_all(self, op: m.RankOp, message: m.ControlReq) -> Operation:
        """The plain fan-out: success when every rank of every serving group says so."""
        answers = yield FanOut(op, self._front.state.serving_groups(), message.call.deadline)
        return gathered(answers)

    # ------------------------------------------------------------------ pause, continue, flush

    def pause(self, message: m.PauseGenerationReqInput) -> Operation:
        front = self._front
        lease_s = message.lease_s or front.config.pause_lease_s
        record = PauseRecord(mode=message.mode, until=front.now() + lease_s)
        if front.ledger.pause is not None and front.state.control == "paused":
            front.ledger.pause = msgspec.structs.replace(record, mode=front.ledger.pause.mode)
            front.save_ledger()
            return Outcome(message="already paused; the lease was renewed")
        front.hold()
        front.state.control = "pausing"
        front.ledger.pause = record
        groups = front.state.serving_groups()
        answers = yield FanOut(m.PauseRank(mode=message.mode), groups, message.call.deadline)
        front.state.control = "paused"
        front.save_ledger()
        front.broadcast()
        return gathered(answers, mode=message.mode, lease_s=lease_s)

    def resume(self, message: m.ContinueGenerationReqInput) -> Operation:
        front = self._front
        result: dict[str, Any] = {}
        if front.session is not None and front.session.implicit:
            committed = yield from self._commit(front.session, front.session.terms, message.call)
            if not committed.success:
                return committed
            result = committed.result
        if front.state.control != "paused":
            return Outcome(message="not paused", result=result)
        answers = yield FanOut(
            m.ResumeRank(), front.state.serving_groups(), front.now() + RESUME_TIMEOUT_S
        )
        front.state.control = "running"
        front.ledger.pause = None
        front.save_ledger()
        front.release_held()
        front.broadcast()
        return gathered(answers, **result)

    def flush(self, message: m.FlushCacheReqInput) -> Operation:
        front = self._front
        groups = front.state.serving_groups()
        if message.timeout_s > 0:
            deadline = min(front.now() + message.timeout_s, message.call.deadline)
            yield Until(lambda: not front.live(groups), deadline)
        answers = yield FanOut(m.FlushRank(), groups, message.call.deadline)
        outcome = gathered(answers)
        live = len(front.live(groups))
        if outcome.success and live and front.state.control != "paused":
            return Outcome(
                False, 400, "busy",
                f"dropped all blocks but those that {live} live requests hold; "
                "call again when they have ended or give timeout_s",
                ranks=answers,
            )  # fmt: skip
        return outcome

    def drain(self, message: m.DrainRankReqInput) -> Operation:
        front = self._front
        if not 0 <= message.dp < front.config.dp:
            return refused(404, "not_found", f"there is no dp rank {message.dp}")
        if message.drain and not set(front.state.dispatch_groups()) - {message.dp}:
            return refused(
                409, "conflict", "this is the last rank that takes requests; pause instead"
            )  # fmt: skip
        (front.state.drained.add if message.drain else front.state.drained.discard)(message.dp)
        front.broadcast()
        yield Until(lambda: True, message.call.deadline)
        return Outcome(result={"running": len(front.live([message.dp]))})

    # ------------------------------------------------------------------ weight sessions

    def begin_update(self, message: m.BeginWeightUpdateReqInput) -> Operation:
        session = self._open_session(message)
        yield Until(lambda: True, message.call.deadline)
        if isinstance(session, Outcome):
            return session
        return Outcome(result={"session_id": session.id, "groups": session.groups})

    def end_update(self, message: m.EndWeightUpdateReqInput) -> Operation:
        session = self._front.session
        if session is None or session.id != message.session_id:
            return refused(
                404,
                "no_such_session",
                f"no weight session {message.session_id!r} is open; it may have been "
                "dropped after 60 s without a call",
            )
        if message.drop:
            yield from self._drop(session)
            return Outcome(message="dropped; the old weights serve on")
        if not session.sources:
            yield from self._drop(session)
            return refused(400, "empty_session", "no weights were staged in this session")
        outcome = yield from self._commit(session, _terms(session.terms, message), message.call)
        return outcome

    def update_from_disk(self, message: m.UpdateWeightFromDiskReqInput) -> Operation:
        source = m.WeightSource(
            kind="disk", path=message.model_path, load_format=message.load_format
        )
        outcome = yield from self._stage_and_maybe_commit(message, source, complete=False)
        return outcome

    def update_from_tensor(self, message: m.UpdateWeightsFromTensorReqInput) -> Operation:
        source = m.WeightSource(kind="tensor", path=message.path)
        outcome = yield from self._stage_and_maybe_commit(message, source, complete=True)
        return outcome

    def update_from_distributed(self, message: m.UpdateWeightsFromDistributedReqInput) -> Operation:
        source = m.WeightSource(
            kind="distributed",
            names=tuple(message.names),
            dtypes=tuple(message.dtypes),
            shapes=tuple(map(tuple, message.shapes)),
            group_name=message.group_name,
            spool_path=f"{self._front.config.home}/spool/{uuid.uuid4().hex}.safetensors",
        )
        outcome = yield from self._stage_and_maybe_commit(message, source, complete=True)
        return outcome

    def _stage_and_maybe_commit(
        self, message: m.WeightUpdate, source: m.WeightSource, *, complete: bool
    ) -> Operation:
        """One bucket: into its session, the pause's implicit one, or one of its own."""
        front = self._front
        paused = front.state.control == "paused" and source.kind != "disk"
        session: Session | Outcome
        if message.session_id is not None or (front.session and front.session.implicit and paused):
            session = self._open_one(message)
        else:
            session = self._open_session(message, implicit=paused)
        if isinstance(session, Outcome):
            return session
        alone = message.session_id is None and not session.implicit
        failed: Outcome | None = yield from self._stage(
            session, source, message, complete=complete and alone
        )
        if failed is not None:
            return failed
        if alone or (session.implicit and message.flush_cache):
            outcome = yield from self._commit(session, message, message.call)
            return outcome
        return Outcome(
            message="staged", result={"session_id": session.id, "staged": len(session.sources)}
        )

    def _open_session(
        self, message: m.WeightUpdate, *, implicit: bool = False
    ) -> Session | Outcome:
        front = self._front
        if front.session is not None:
            return refused(
                409,
                "update_in_progress",
                f"weight session {front.session.id} is open",
                session_id=front.session.id,
            )
        groups = message.target if message.target is not None else list(range(front.config.dp))
        down = sorted(set(groups) - set(front.state.serving_groups()))
        if down or not groups:
            return refused(503, "engine_restarting", f"dp ranks {down} are not up; try again")
        front.session = Session(uuid.uuid4().hex[:12], message, groups, front.now(), implicit)
        return front.session

    def _open_one(self, message: m.WeightUpdate) -> Session | Outcome:
        session = self._front.session
        if session is None or (message.session_id not in (None, session.id)):
            return refused(
                404, "no_such_session", f"no weight session {message.session_id!r} is open"
            )
        return session

    def _stage(
        self, session: Session, source: m.WeightSource, message: m.WeightUpdate, *, complete: bool
    ) -> Any:
        """None when every rank has it; else the refusal, with all staging dropped."""
        op = m.PrepareWeights(staging_id=session.id, source=source, complete=complete)
        session.busy = True
        answers = yield FanOut(op, session.groups, message.call.deadline)
        session.busy, session.touched_at = False, self._front.now()
        outcome = gathered(answers)
        if outcome.success and len({answer.result.get("checksum") for answer in answers}) > 1:
            outcome = refused(400, "checksum_mismatch", "the ranks read different bytes")
        wanted = message.checksum if session.terms is message else None
        read = str(answers[0].result.get("checksum", ""))
        if outcome.success and wanted and wanted != read:
            outcome = refused(400, "checksum_mismatch", f"read {read}, expected {wanted}")
        if not outcome.success:
            yield from self._drop(session)
            return replace(outcome, ranks=answers)
        session.sources.append(source)
        session.checksums.append(read)
        return None

    def _drop(self, session: Session) -> Any:
        self._front.session = None
        groups = [g for g in session.groups if g in self._front.state.serving_groups()]
        deadline = self._front.now() + RESUME_TIMEOUT_S
        yield FanOut(m.DropWeights(staging_id=session.id), groups, deadline)

    def _commit(self, session: Session, terms: m.WeightUpdate, call: m.Call) -> Operation:
        """Drain by policy, then one epoch on every target group, or nothing at all."""
        front = self._front
        if terms.dry_run:
            yield from self._drop(session)
            return Outcome(
                message="dry run: every rank could take these weights; dropped",
                result={"checksums": session.checksums, **self._impact(session.groups)},
            )
        paused = front.state.control == "paused"
        policy = self._policy(terms)
        touched = len(front.live(session.groups))
        if not paused:
            front.hold()
            front.state.control = "updating"
            front.broadcast()
        drained = True
        if policy == "abort":
            front.abort_entries(front.live(session.groups), "aborted for a weight update")
        if policy in ("abort", "finish") and not paused:
            deadline = min(front.now() + terms.drain_timeout_s, call.deadline)
            drained = yield Until(lambda: not front.live(session.groups), deadline)
        if not drained:
            yield from self._drop(session)
            self._run_again(paused)
            return refused(
                409,
                "drain_timeout",
                f"{len(front.live(session.groups))} requests were still running after "
                f"{terms.drain_timeout_s:g} s; nothing was changed",
            )
        record = self._record(session, terms, call)
        front.ledger.begin_commit(record)
        front.save_ledger()
        answers = yield FanOut(
            m.CommitWeights(staging_id=session.id, epoch=record.epoch,
                            retract=policy == "retract", flush=terms.flush_cache),
            session.groups, front.now() + COMMIT_TIMEOUT_S,
        )  # fmt: skip
        front.ledger.end_commit(session.groups, everywhere=len(session.groups) == front.config.dp)
        front.save_ledger()
        front.session = None
        self._run_again(paused)
        return gathered(
            answers,
            partial_ok=True,
            epoch=record.epoch,
            weight_version=record.weight_version,
            token_step=record.token_step,
            in_flight=policy,
            touched=touched,
            checksum=record.checksum,
        )

    def _run_again(self, stay_paused: bool) -> None:
        front = self._front
        if not stay_paused:
            front.state.control = "running"
            front.release_held()
        front.broadcast()

    def _policy(self, terms: m.WeightUpdate) -> str:
        pause = self._front.ledger.pause
        if self._front.state.control == "paused" and pause is not None:
            return pause.mode  # held requests follow the mode of their pause
        return terms.in_flight or ("abort" if terms.abort_all_requests else "finish")

    def _record(self, session: Session, terms: m.WeightUpdate, call: m.Call) -> EpochRecord:
        front = self._front
        epoch = front.ledger.next_epoch
        paths = tuple(source.path or source.spool_path for source in session.sources)
        if any(source.kind != "disk" for source in session.sources):
            before = front.ledger.epoch_of(session.groups[0])
            paths = front.ledger.epochs[before].paths + paths
        return EpochRecord(
            epoch=epoch,
            weight_version=terms.weight_version or f"epoch-{epoch}",
            token_step=terms.token_step,
            paths=paths,
            checksum=session.checksums[-1] if session.checksums else "",
            source=session.sources[-1].kind,
            job=call.key or call.id,
            actor=call.actor,
            at=front.now(),
            groups=tuple(session.groups),
        )

    def _impact(self, groups: list[int]) -> dict[str, Any]:
        live = self._front.live(groups)
        return {
            "running": len(live),
            "by_rank": {str(dp): sum(entry.dp == dp for entry in live) for dp in groups},
        }

    def resync(self, dp: int) -> Operation:
        """A group came back with older weights than it should serve: bring it there."""
        front = self._front
        epoch = front.ledger.epoch_of(dp)
        staging = uuid.uuid4().hex[:12]
        for path in front.ledger.epochs[epoch].paths:
            source = m.WeightSource(kind="disk", path=path)
            answers = yield FanOut(
                m.PrepareWeights(staging_id=staging, source=source),
                [dp],
                front.now() + COMMIT_TIMEOUT_S,
            )
            if not gathered(answers).success:
                front.state.reason = f"weights of epoch {epoch} are gone on dp{dp}"
                return gathered(answers)
        answers = yield FanOut(
            m.CommitWeights(staging_id=staging, epoch=epoch), [dp], front.now() + COMMIT_TIMEOUT_S
        )
        front.state.resyncing.discard(dp)
        front.broadcast()
        return gathered(answers)

    def drop_idle(self) -> Operation:
        """A session that nobody touched for 60 s."""
        session = self._front.session
        if session is not None and session.idle(self._front.now()):
            yield from self._drop(session)
        return Outcome()

    # ------------------------------------------------------------------ small ones

    def relabel(self, message: m.UpdateWeightVersionReqInput) -> Operation:
        front = self._front
        if message.abort_all_requests:
            front.abort_entries(front.live(list(range(front.config.dp))), "aborted by a relabel")
        front.ledger.relabel(message.new_version, front.now())
        front.save_ledger()
        front.broadcast()
        yield Until(lambda: True, message.call.deadline)
        return Outcome(result={"new_version": message.new_version, "epoch": front.ledger.committed})

    def join_group(self, message: m.InitWeightsUpdateGroupReqInput) -> Operation:
        op = m.JoinGroup(
            master_address=message.master_address,
            master_port=message.master_port,
            rank_offset=message.rank_offset,
            world_size=message.world_size,
            group_name=message.group_name,
            backend=message.backend,
        )
        return self._to_all(op, message)

    def leave_group(self, message: m.DestroyWeightsUpdateGroupReqInput) -> Operation:
        return self._to_all(m.LeaveGroup(group_name=message.group_name), message)

    def read_weights(self, message: m.GetWeightsByNameReqInput) -> Operation:
        return self._to_all(
            m.ReadWeights(name=message.name, truncate_size=message.truncate_size), message
        )

    def release_memory(self, message: m.ReleaseMemoryOccupationReqInput) -> Operation:
        if self._front.state.control != "paused":
            return self._refuse(409, "conflict", "pause generation before releasing memory")
        tags = tuple(message.tags or ("kv_cache", "weights"))
        return self._to_all(m.ReleaseMemory(tags=tags), message)

    def resume_memory(self, message: m.ResumeMemoryOccupationReqInput) -> Operation:
        tags = tuple(message.tags or ("kv_cache", "weights"))
        return self._to_all(m.ResumeMemory(tags=tags), message)

    def slow_down(self, message: m.SlowDownReqInput) -> Operation:
        return self._to_all(m.SlowDown(seconds=message.forward_sleep_time or 0.0), message)

    def freeze_gc(self, message: m.FreezeGCReq) -> Operation:
        return self._to_all(m.FreezeGC(), message)

    def configure_logging(self, message: m.ConfigureLoggingReq) -> Operation:
        return self._to_all(m.SetLogging(level=message.level), message)

    def list_requests(self, message: m.GetRequestsReqInput) -> Operation:
        groups = self._front.state.serving_groups()
        answers = yield FanOut(m.ListRequests(), groups, message.call.deadline)
        phases = {
            row["rid"]: row
            for answer in answers
            if answer.success
            for row in answer.result.get("requests", ())
        }
        table = [{**row, **phases.get(row["rid"], {})} for row in self._front.request_table()]
        return Outcome(result={"requests": table})

    def get_epoch(self, message: m.GetEpochReqInput) -> Operation:
        yield Until(lambda: True, message.call.deadline)
        known = self._front.ledger.epochs
        if message.epoch is not None and message.epoch not in known:
            return refused(404, "not_found", f"epoch {message.epoch} never existed here")
        wanted = [message.epoch] if message.epoch is not None else sorted(known)
        return Outcome(result={"epochs": [msgspec.to_builtins(known[e]) for e in wanted]})

    def _refuse(self, status: int, kind: str, text: str) -> Operation:
        yield Until(lambda: True, 0.0)
        return refused(status, kind, text)


def gathered(answers: list[m.RankAnswer], *, partial_ok: bool = False, **result: Any) -> Outcome:
    """Success when every rank said so; else the first refusal, named by rank."""
    bad = [answer for answer in answers if not answer.success]
    if not bad or (partial_ok and len(bad) < len(answers)):
        return Outcome(result=result, ranks=answers)
    first = bad[0]
    status = int(first.result.get("status_code", 400))
    return Outcome(
        False, status, str(first.result.get("err_type", "rank_refused")),
        f"rank dp{first.dp} tp{first.tp}: {first.message}", result, answers,
    )  # fmt: skip


def _terms(begin: m.WeightUpdate, end: m.WeightUpdate) -> m.WeightUpdate:
    """The begin call's terms; what the end call says explicitly wins."""
    changed = {
        name: getattr(end, name)
        for name in ("token_step", "weight_version", "in_flight", "dry_run")
        if getattr(end, name) not in (None, False)
    }
    return msgspec.structs.replace(begin, **changed)
