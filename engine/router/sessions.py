"""Weight sessions: who may open one, and its buckets up to the moment before the commit. Pure.

Path: updates.py and commits.py -> here -> the ranks. Stage and seal change nothing that serves: a
refusal by any rank drops the staging on all.
"""

from __future__ import annotations

import uuid
from collections.abc import Generator, Sequence
from dataclasses import replace
from typing import Any

import msgspec

from engine import messages as m
from engine.router.control import FanOut, Outcome, Refusal, gathered, refusal, refused
from engine.router.front import Front
from engine.router.weights import Session

Steps = Generator[Any, Any, None]


class Sessions:
    """The one open session of the engine, ``front.session``."""

    def __init__(self, front: Front) -> None:
        self._front = front

    def joins_pause(self, message: m.WeightUpdate) -> bool:
        """Buckets while paused are one update, which continue commits."""
        kinds = m.UpdateWeightsFromTensorReqInput | m.UpdateWeightsFromDistributedReqInput
        return self._front.state.control == "paused" and isinstance(message, kinds)

    def open(self, message: m.WeightUpdate, *, implicit: bool) -> Session:
        front = self._front
        if front.session is not None:
            raise Refusal(in_progress(front.session))
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

    def find(self, session_id: str | None) -> Session:
        session = self._front.session
        if session is None or session.id != session_id:
            raise refusal(
                404, "no_such_session",
                f"no weight session {session_id!r} is open; it may have been dropped after "
                f"{self._front.config.session_idle_s:g} s without a call",
            )  # fmt: skip
        return session

    def session_for(self, message: m.WeightUpdate) -> Session:
        """That which the call names, the pause's, or one of its own."""
        session = self._front.session
        if message.session_id is not None:
            return self.find(message.session_id)
        if not self.joins_pause(message):
            return self.open(message, implicit=False)
        if session is None:
            return self.open(message, implicit=True)
        if not session.implicit:
            raise Refusal(in_progress(session))
        return session

    def stage(
        self, session: Session, source: m.WeightSource, call: m.Call, *, complete: bool
    ) -> Steps:
        """One more bucket is on every rank; else the session is dropped and the call refused."""
        if session.failed and session.implicit:
            raise refusal(
                409, "session_failed",
                f"an earlier part of this pause's update failed ({session.failed}): "
                "continue_generation ends it; then send all of it again",
            )  # fmt: skip
        self.check(session)
        source = msgspec.structs.replace(source, spool_by=session.groups[0])
        op = m.PrepareWeights(staging_id=session.id, source=source, complete=complete)
        answers = yield from self._ask(session, op, call.deadline)
        outcome = agreed(answers)
        if not outcome.success:
            self._front.spool.discard([source.spool_path or source.path])
            self.fail(session, outcome.message)
            raise Refusal(outcome)
        session.took(source, answers[0])

    def seal(self, session: Session, call: m.Call) -> Steps:
        """Every rank could commit now; else the session is dropped and the call refused."""
        op = m.SealWeights(staging_id=session.id)
        answers = yield from self._ask(session, op, call.deadline)
        outcome = agreed(answers)
        if outcome.success:
            session.saw(answers[0])
            outcome = self._checked(session)
        if not outcome.success:
            self.fail(session, outcome.message)
            raise Refusal(outcome)

    def _checked(self, session: Session) -> Outcome:
        wanted = session.terms.checksum
        if wanted and wanted != session.checksum:
            text = f"the weights read as {session.checksum}, expected {wanted}"
            return refused(400, "checksum_mismatch", text)
        if session.missing:
            return self._checked_base(session.groups)
        return Outcome()

    def _checked_base(self, groups: list[int]) -> Outcome:
        """A part of a model lies over what serves: the same on every target, and the right one."""
        ledger, state = self._front.ledger, self._front.state
        serving = {ledger.epoch_of(dp) for dp in groups}
        if len(serving) > 1:
            text = f"a part of a model cannot go to groups that serve epochs {sorted(serving)}"
            return refused(409, "conflict", text)
        astray = [dp for dp in groups if state.epoch_of(dp) != ledger.epoch_of(dp)]
        if astray:
            text = f"dp ranks {astray} do not have the weights that this is a part for"
            return refused(409, "conflict", text)
        return Outcome()

    def _ask(
        self, session: Session, op: m.RankOp, deadline: float
    ) -> Generator[Any, Any, list[m.RankAnswer]]:
        session.busy = True
        answers: list[m.RankAnswer] = yield FanOut(op, session.groups, deadline, fail_fast=True)
        session.busy, session.touched_at = False, self._front.now()
        return answers

    def check(self, session: Session) -> None:
        if session.failed:
            self.drop(session)
            raise refusal(409, "session_failed", f"the update was dropped: {session.failed}")

    def fail(self, session: Session, why: str) -> None:
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


def agreed(answers: Sequence[m.RankAnswer]) -> Outcome:
    """Every rank took the same bytes."""
    outcome = gathered(list(answers))
    if outcome.success and len({answer.result.get("checksum") for answer in answers}) > 1:
        return replace(
            refused(400, "checksum_mismatch", "the ranks read different bytes"), ranks=outcome.ranks
        )
    return outcome


def in_progress(session: Session) -> Outcome:
    return refused(
        409, "update_in_progress", f"weight session {session.id} is open", session_id=session.id
    )
