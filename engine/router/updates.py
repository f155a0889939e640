"""Weight updates, told from top to bottom as generators: stage, seal, drain, commit. Pure.

Path: operations.py -> here -> control.py runs these -> scheduler/control.py on every rank.

Prepare and seal change nothing that serves: a refusal by any rank drops the staging on all. From
the commit on there is no way back for a group that took it; one that did not is brought to the new
epoch by ``resync``, from the paths in the ledger.
"""

from __future__ import annotations

import uuid
from collections.abc import Generator, Sequence
from dataclasses import replace
from typing import Any

import msgspec

from engine import messages as m
from engine.router.control import (
    FanOut,
    Operation,
    Outcome,
    Refusal,
    Until,
    at_once,
    gathered,
    refusal,
    refused,
)
from engine.router.front import Front
from engine.router.weights import EpochRecord, PauseRecord, Session, merged_terms

PAUSE_TIMEOUT_S = 30.0
COMMIT_TIMEOUT_S = 120.0
Steps = Generator[Any, Any, None]


class Updates:
    """Operations that change weights."""

    def __init__(self, front: Front) -> None:
        self._front = front

    # ------------------------------------------------------------------ the calls

    def begin(self, message: m.BeginWeightUpdateReqInput) -> Operation:
        def open_session() -> Outcome:
            session = self._open(message, implicit=False)
            return Outcome(result={"session_id": session.id, "groups": session.groups})

        return at_once(open_session)

    def end(self, message: m.EndWeightUpdateReqInput) -> Operation:
        session = self._find(message.session_id)
        if message.drop:
            self.drop(session)
            return Outcome(message="dropped; the old weights serve on")
        if not session.sources:
            self.drop(session)
            return refused(400, "empty_session", "no weights were staged in this session")
        session.terms = merged_terms(session.terms, message)
        outcome = yield from self.commit(session, message.call)
        return outcome

    def from_disk(self, message: m.UpdateWeightFromDiskReqInput) -> Operation:
        front = self._front
        if message.from_epoch is not None:
            outcome = yield from self._roll_back(message, message.from_epoch)
            return outcome
        source = m.WeightSource(
            kind="disk",
            path=message.model_path,
            load_format=message.load_format,
            spool_path=front.spool.new_path() if message.spool else "",
        )
        outcome = yield from self._one_call(message, source)
        return outcome

    def from_tensor(self, message: m.UpdateWeightsFromTensorReqInput) -> Operation:
        source = m.WeightSource(kind="tensor", path=message.path, load_format=message.load_format)
        outcome = yield from self._one_call(message, source)
        return outcome

    def from_distributed(self, message: m.UpdateWeightsFromDistributedReqInput) -> Operation:
        source = m.WeightSource(
            kind="distributed",
            names=tuple(message.names),
            dtypes=tuple(message.dtypes),
            shapes=tuple(map(tuple, message.shapes)),
            group_name=message.group_name,
            spool_path=self._front.spool.new_path(),
        )
        outcome = yield from self._one_call(message, source)
        return outcome

    def conflict(self, message: Any) -> Outcome | None:
        """Why this call must not even wait for its turn: another update is open."""
        front = self._front
        if not isinstance(message, m.WeightUpdate) or message.session_id is not None:
            return None
        if self._joins_pause(message):
            return None
        if front.session is not None:
            return _in_progress(front.session)
        job = front.open_update()
        if job is not None:
            return refused(409, "update_in_progress", f"update {job} is open", job=job)
        return None

    def drop_idle(self) -> None:
        """A session that nobody touched for too long: its sender is gone."""
        front, session = self._front, self._front.session
        idle_s = front.config.session_idle_s
        if session is not None and session.idle(front.now(), idle_s):
            self._fail(session, f"nobody touched it for {idle_s:g} s")

    # ------------------------------------------------------------------ sessions

    def _joins_pause(self, message: m.WeightUpdate) -> bool:
        """Buckets while paused are one update, which continue commits."""
        kinds = m.UpdateWeightsFromTensorReqInput | m.UpdateWeightsFromDistributedReqInput
        return self._front.state.control == "paused" and isinstance(message, kinds)

    def _open(self, message: m.WeightUpdate, *, implicit: bool) -> Session:
        front = self._front
        if front.session is not None:
            raise Refusal(_in_progress(front.session))
        groups = list(range(front.config.dp)) if message.target is None else message.target
        unknown = set(groups) - set(range(front.config.dp))
        if unknown or not groups or len(set(groups)) < len(groups):
            raise refusal(
                400, "invalid_request_error",
                f"target must name dp ranks in 0..{front.config.dp - 1}, each once",
            )  # fmt: skip
        down = sorted(set(groups) - set(front.state.serving_groups()))
        if down:
            raise refusal(503, "engine_restarting", f"dp ranks {down} are not up; try again")
        if "weights" in front.state.released:
            raise refusal(409, "conflict", "the memory of the weights is released: resume it first")
        session = Session(
            uuid.uuid4().hex[:12], message, sorted(groups), front.now(), implicit=implicit
        )
        front.session = session
        return session

    def _find(self, session_id: str | None) -> Session:
        session = self._front.session
        if session is None or session.id != session_id:
            raise refusal(
                404, "no_such_session",
                f"no weight session {session_id!r} is open; it may have been dropped after "
                f"{self._front.config.session_idle_s:g} s without a call",
            )  # fmt: skip
        return session

    def _session_for(self, message: m.WeightUpdate) -> Session:
        """That which the call names, the pause's, or one of its own."""
        session = self._front.session
        if message.session_id is not None:
            return self._find(message.session_id)
        if not self._joins_pause(message):
            return self._open(message, implicit=False)
        if session is None:
            return self._open(message, implicit=True)
        if not session.implicit:
            raise Refusal(_in_progress(session))
        return session

    def _one_call(self, message: m.WeightUpdate, source: m.WeightSource) -> Operation:
        """One bucket: an update of its own, or a part of an open one."""
        session = self._session_for(message)
        alone = session.terms is message and not session.implicit
        if not alone:
            part = msgspec.structs.replace(message, checksum=None)  # that of a part says nothing
            session.terms = merged_terms(session.terms, part)
        yield from self._stage(session, source, message.call, complete=alone)
        if alone or (session.implicit and message.flush_cache):
            outcome = yield from self.commit(session, message.call)
            return outcome
        return Outcome(
            message="staged",
            result={"session_id": session.id, "staged": len(session.sources),
                    "missing": session.missing},
        )  # fmt: skip

    def _roll_back(self, message: m.UpdateWeightFromDiskReqInput, epoch: int) -> Operation:
        """The weights of an earlier epoch as a new one, under its label unless the call has one."""
        record = self._front.ledger.epochs.get(epoch)
        if record is None:
            raise refusal(404, "not_found", f"epoch {epoch} never existed here")
        terms = msgspec.structs.replace(
            message,
            weight_version=message.weight_version or record.weight_version,
            token_step=record.token_step if message.token_step is None else message.token_step,
            checksum=message.checksum or self._front.ledger.checksum_of(epoch) or None,
        )
        session = self._open(terms, implicit=False)
        for path in record.paths:
            source = m.WeightSource(kind="disk", path=path)
            yield from self._stage(session, source, message.call, complete=False)
        outcome = yield from self.commit(session, message.call)
        return outcome

    # ------------------------------------------------------------------ prepare

    def _stage(
        self, session: Session, source: m.WeightSource, call: m.Call, *, complete: bool
    ) -> Steps:
        """One more bucket is on every rank; else the session is dropped and the call refused."""
        if session.failed and session.implicit:
            raise refusal(
                409, "session_failed",
                f"an earlier part of this pause's update failed ({session.failed}): "
                "continue_generation ends it; then send all of it again",
            )  # fmt: skip
        self._check_failed(session)
        source = msgspec.structs.replace(source, spool_by=session.groups[0])
        op = m.PrepareWeights(staging_id=session.id, source=source, complete=complete)
        answers = yield from self._ask(session, op, call.deadline)
        outcome = _agreed(answers)
        if not outcome.success:
            self._front.spool.discard([source.spool_path or source.path])
            self._fail(session, outcome.message)
            raise Refusal(outcome)
        session.took(source, answers[0])

    def _seal(self, session: Session, call: m.Call) -> Steps:
        """Every rank could commit now; else the session is dropped and the call refused."""
        op = m.SealWeights(staging_id=session.id)
        answers = yield from self._ask(session, op, call.deadline)
        outcome = _agreed(answers)
        if outcome.success:
            session.saw(answers[0])
            outcome = self._checked(session)
        if not outcome.success:
            self._fail(session, outcome.message)
            raise Refusal(outcome)

    def _checked(self, session: Session) -> Outcome:
        wanted = session.terms.checksum
        if wanted and wanted != session.checksum:
            text = f"the weights read as {session.checksum}, expected {wanted}"
            return refused(400, "checksum_mismatch", text)
        serving = {self._front.ledger.epoch_of(dp) for dp in session.groups}
        if session.missing and len(serving) > 1:
            text = f"a part of a model cannot go to groups that serve epochs {sorted(serving)}"
            return refused(409, "conflict", text)
        return Outcome()

    def _ask(
        self, session: Session, op: m.RankOp, deadline: float
    ) -> Generator[Any, Any, list[m.RankAnswer]]:
        session.busy = True
        answers: list[m.RankAnswer] = yield FanOut(op, session.groups, deadline, fail_fast=True)
        session.busy, session.touched_at = False, self._front.now()
        return answers

    def _check_failed(self, session: Session) -> None:
        if session.failed:
            self.drop(session)
            raise refusal(409, "session_failed", f"the update was dropped: {session.failed}")

    def _fail(self, session: Session, why: str) -> None:
        """Nothing of it is left on the ranks. The session of a pause stays, as a refusal of later
        buckets: half of an update must not become an epoch."""
        self.drop(session)
        if session.implicit:
            session.failed = why
            self._front.session = session

    def drop(self, session: Session) -> None:
        """No answer is awaited: what a rank is told next comes after it."""
        front = self._front
        front.session = None
        front.tell(m.DropWeights(staging_id=session.id), session.groups)
        front.spool.discard(session.paths)

    # ------------------------------------------------------------------ commit

    def commit(self, session: Session, call: m.Call) -> Operation:
        """Drain by policy, then one epoch on every target group, or nothing at all."""
        front, terms = self._front, session.terms
        self._check_failed(session)
        yield from self._seal(session, call)
        if terms.dry_run:
            self.drop(session)
            return Outcome(
                message="dry run: every rank could take these weights; they were dropped",
                result={"checksum": session.checksum, **self._impact(session.groups)},
            )
        touched = len(front.live(session.groups))
        if front.state.control == "paused":
            outcome = yield from self._switch(session, call, touched)
            return outcome
        front.hold()
        front.state.control = "updating"
        front.broadcast()
        try:
            yield from self._drain(session, call)
            outcome = yield from self._switch(session, call, touched)
            if terms.keep_pause:
                yield from self._stay_paused(session.groups)
        finally:
            if front.state.control == "updating":
                front.state.control = "running"
                front.release_held()
            front.broadcast()
        return outcome

    def _drain(self, session: Session, call: m.Call) -> Steps:
        front, terms = self._front, session.terms
        policy = self._policy(terms)
        if policy == "abort":
            front.abort_entries(front.live(session.groups), "aborted for a weight update")
        if policy not in ("abort", "finish"):
            return
        deadline = min(front.now() + terms.drain_timeout_s, call.deadline)
        drained = yield Until(lambda: not front.live(session.groups), deadline)
        if not drained:
            left = len(front.live(session.groups))
            self.drop(session)
            raise refusal(
                409, "drain_timeout",
                f"{left} requests were still running after {terms.drain_timeout_s:g} s; "
                "nothing was changed",
            )  # fmt: skip

    def _switch(self, session: Session, call: m.Call, touched: int) -> Operation:
        front, terms = self._front, session.terms
        policy = self._policy(terms)
        record = self._record(session, call)
        front.ledger.begin_commit(record)
        front.save_ledger()
        op = m.CommitWeights(
            staging_id=session.id,
            epoch=record.epoch,
            retract=policy == "retract",
            flush=terms.flush_cache is not False,
        )
        session.busy = True
        answers = yield FanOut(op, session.groups, front.now() + COMMIT_TIMEOUT_S)
        front.session = None
        taken = _groups_of_one_mind(answers)
        front.tell(
            m.DropWeights(staging_id=session.id), [dp for dp in session.groups if dp not in taken]
        )
        if not taken:
            front.ledger.abort_commit()
            front.save_ledger()
            outcome = gathered(answers)
            return replace(outcome, message=f"{outcome.message}; no group took the weights")
        self._settle(session.groups, taken)
        missed = [answer for answer in answers if not answer.success]
        return Outcome(
            message="".join(f"dp{a.dp} tp{a.tp} follows: {a.message}. " for a in missed).strip(),
            result={
                "epoch": record.epoch, "weight_version": record.weight_version,
                "token_step": record.token_step, "checksum": record.checksum,
                "in_flight": policy, "touched": touched,
            },
            ranks=answers,
        )  # fmt: skip

    def _settle(self, groups: list[int], taken: set[int]) -> None:
        """The ledger says what serves; groups that missed it are brought there by ``resync``."""
        front = self._front
        front.ledger.end_commit(groups, everywhere=len(groups) == front.config.dp)
        front.ledger.forget_old()
        front.save_ledger()
        front.state.resyncing -= taken
        front.spool.settle(front.ledger)

    def _stay_paused(self, groups: list[int]) -> Steps:
        front = self._front
        until = front.now() + front.config.pause_lease_s
        front.ledger.pause = PauseRecord(mode="in_place", until=until)
        front.state.control = "paused"
        front.save_ledger()
        yield FanOut(
            m.PauseRank(mode="in_place"), front.state.serving_groups(),
            front.now() + PAUSE_TIMEOUT_S,
        )  # fmt: skip

    def _policy(self, terms: m.WeightUpdate) -> str:
        pause = self._front.ledger.pause
        if self._front.state.control == "paused" and pause is not None:
            return pause.mode  # held requests follow the mode of their pause
        return terms.in_flight or ("abort" if terms.abort_all_requests else "finish")

    def _record(self, session: Session, call: m.Call) -> EpochRecord:
        front, terms = self._front, session.terms
        epoch = front.ledger.next_epoch
        paths = session.paths
        if session.missing:  # the rest of the model is that of the epoch before
            paths = front.ledger.epochs[front.ledger.epoch_of(session.groups[0])].paths + paths
        return EpochRecord(
            epoch=epoch,
            weight_version=terms.weight_version or f"epoch-{epoch}",
            token_step=terms.token_step,
            paths=front.effective_paths(paths),
            checksum=session.checksum,
            complete=not session.missing,
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

    # ------------------------------------------------------------------ groups that missed it

    def resync(self, dp: int) -> Operation:
        """A group serves other weights than it should: bring it there, or say that it cannot be.

        When no other group serves, older weights are better than none; the engine is then degraded
        and says so.
        """
        front, ledger = self._front, self._front.ledger
        epoch = ledger.epoch_of(dp)
        outcome = yield from self._bring(dp, epoch)
        if not outcome.success and front.state.group_up(dp) and not front.state.dispatch_groups():
            for older in ledger.older_than(epoch):
                found = yield from self._bring(dp, older)
                if found.success:
                    ledger.fall_back(older)
                    front.save_ledger()
                    outcome = found
                    break
        if outcome.success:
            front.state.resyncing.discard(dp)
            front.state.reason = ""
        elif front.state.group_up(dp):
            front.state.reason = f"dp{dp} cannot load epoch {epoch}: {outcome.message}"
        front.broadcast()
        return outcome

    def _bring(self, dp: int, epoch: int) -> Operation:
        """One group onto the weights of one known epoch, under its number."""
        front, record = self._front, self._front.ledger.epochs[epoch]
        deadline = front.now() + COMMIT_TIMEOUT_S
        staging = uuid.uuid4().hex[:12]
        ops: list[m.RankOp] = [
            m.PrepareWeights(staging_id=staging, source=m.WeightSource(kind="disk", path=path))
            for path in record.paths
        ]
        for op in (*ops, m.SealWeights(staging_id=staging)):
            answers = yield FanOut(op, [dp], deadline, fail_fast=True)
            outcome = _agreed(answers)
            if not outcome.success:
                break
        wanted = front.ledger.checksum_of(epoch)
        if outcome.success and wanted and answers[0].result.get("checksum") != wanted:
            text = f"the files of epoch {epoch} have changed since it was committed"
            outcome = refused(400, "checksum_mismatch", text)
        if not outcome.success:
            front.tell(m.DropWeights(staging_id=staging), [dp])
            return outcome
        commit = m.CommitWeights(staging_id=staging, epoch=epoch, flush=True)
        answers = yield FanOut(commit, [dp], deadline)
        return gathered(answers)


def _agreed(answers: Sequence[m.RankAnswer]) -> Outcome:
    """Every rank took the same bytes."""
    outcome = gathered(list(answers))
    if outcome.success and len({answer.result.get("checksum") for answer in answers}) > 1:
        return replace(
            refused(400, "checksum_mismatch", "the ranks read different bytes"), ranks=outcome.ranks
        )
    return outcome


def _groups_of_one_mind(answers: Sequence[m.RankAnswer]) -> set[int]:
    """Groups all of whose ranks succeeded."""
    return {a.dp for a in answers} - {a.dp for a in answers if not a.success}


def _in_progress(session: Session) -> Outcome:
    return refused(
        409, "update_in_progress", f"weight session {session.id} is open", session_id=session.id
    )
