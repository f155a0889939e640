"""The commit of a weight session, and groups that missed one. Pure.

Path: updates.py and operations.py -> here -> the ranks. From the commit on there is no way back for
a group that took it; one that did not is brought to the new epoch by ``resync``, from the paths in
the ledger.
"""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from engine import messages as m
from engine.router.control import FanOut, Operation, Outcome, Until, gathered, refusal, refused
from engine.router.front import Front
from engine.router.sessions import Sessions, Steps, agreed
from engine.router.weights import EpochRecord, PauseRecord, Session

PAUSE_TIMEOUT_S = 30.0
COMMIT_TIMEOUT_S = 120.0


class Commits:
    """Makes what is staged the weights that serve."""

    def __init__(self, front: Front, sessions: Sessions) -> None:
        self._front, self._sessions = front, sessions

    def commit(self, session: Session, call: m.Call) -> Operation:
        """Drain by policy, then one epoch on every target group, or nothing at all."""
        front, terms = self._front, session.terms
        self._sessions.check(session)
        yield from self._sessions.seal(session, call)
        if terms.dry_run:
            self._sessions.drop(session)
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
            self._sessions.drop(session)
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
        try:
            front.secure_ledger()
        except OSError as error:
            front.ledger.abort_commit()
            self._sessions.drop(session)
            text = f"engine/state.json cannot be written ({error}); nothing was changed"
            raise refusal(507, "no_space", text) from error
        op = m.CommitWeights(
            staging_id=session.id,
            epoch=record.epoch,
            retract=policy == "retract",
            flush=terms.flush_cache is not False,
            empty_cache=terms.torch_empty_cache,
        )
        session.busy = True
        answers = yield FanOut(op, session.groups, front.now() + COMMIT_TIMEOUT_S)
        front.session = None
        taken = _groups_of_one_mind(answers)
        missed = [dp for dp in session.groups if dp not in taken]
        front.tell(m.DropWeights(staging_id=session.id), missed)
        if not taken:
            front.ledger.abort_commit()
            front.save_ledger()
            outcome = gathered(answers)
            return replace(outcome, message=f"{outcome.message}; no group took the weights")
        self._settle(session.groups, taken)
        late = [f"dp{a.dp} tp{a.tp} follows: {a.message}" for a in answers if not a.success]
        return Outcome(
            message="; ".join(late),
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
            outcome = agreed(answers)
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


def _groups_of_one_mind(answers: Sequence[m.RankAnswer]) -> set[int]:
    """Groups all of whose ranks succeeded."""
    return {a.dp for a in answers} - {a.dp for a in answers if not a.success}
