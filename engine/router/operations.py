"""What each control call does, told from top to bottom as a generator. Pure but for its ``Front``.

Path: client.py -> router/process.py -> control.py runs these -> scheduler/control.py on every rank.
Weight updates are in updates.py, profiles and dumps in recordings.py.
"""

from __future__ import annotations

from collections.abc import Callable
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
)
from engine.router.front import Front
from engine.router.recordings import Recordings
from engine.router.updates import Updates
from engine.router.weights import PauseRecord
from engine.scheduler.memory import TAGS

RESUME_TIMEOUT_S = 30.0
MEMORY_TIMEOUT_S = 300.0
JOIN_MARGIN_S = 2.0  # the ranks give up so long before the caller does


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
        self.updates = Updates(front)
        self.recordings = Recordings(front)
        self._table: dict[type, Callable[[Any], Operation]] = {
            m.PauseGenerationReqInput: self.pause,
            m.ContinueGenerationReqInput: self.resume,
            m.FlushCacheReqInput: self.flush,
            m.DrainRankReqInput: self.drain,
            m.BeginWeightUpdateReqInput: self.updates.begin,
            m.EndWeightUpdateReqInput: self.updates.end,
            m.UpdateWeightFromDiskReqInput: self.updates.from_disk,
            m.UpdateWeightsFromTensorReqInput: self.updates.from_tensor,
            m.UpdateWeightsFromDistributedReqInput: self.updates.from_distributed,
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
            m.ProfileReqInput: self.recordings.profile,
            m.LazyDumpTensorsReqInput: self.recordings.dump,
            m.StopRecordingReqInput: self.recordings.stop,
            m.WaitRecordingReqInput: self.recordings.wait,
            m.GetRecordingsReqInput: self.recordings.running,
            m.WriteDumpReqInput: self.recordings.write_dump,
            m.GetDumpPointsReqInput: self.recordings.points,
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

    def _of_live(self, answers: list[m.RankAnswer], **result: Any) -> Outcome:
        """The outcome for the groups that still serve; one that died has nothing to do it to."""
        up = self._front.state.serving_groups()
        return replace(gathered([a for a in answers if a.dp in up], **result), ranks=answers)

    # ------------------------------------------------------------------ pause and continue

    def pause(self, message: m.PauseGenerationReqInput) -> Operation:
        """A second pause applies its mode to what is held, and renews the lease."""
        front = self._front
        lease_s = message.lease_s or front.config.pause_lease_s
        front.hold()
        if front.state.control != "paused":
            front.state.control = "pausing"
        front.ledger.pause = PauseRecord(mode=message.mode, until=front.now() + lease_s)
        front.save_ledger()
        op = m.PauseRank(mode=message.mode)
        answers = yield FanOut(op, front.state.serving_groups(), message.call.deadline)
        front.state.control = "paused"
        front.broadcast()
        return self._of_live(answers, mode=message.mode, lease_s=lease_s)

    def resume(self, message: m.ContinueGenerationReqInput) -> Operation:
        """Whatever becomes of the pause's update, generation goes on; the answer tells."""
        front, session = self._front, self._front.session
        if front.state.released:
            names = " and ".join(sorted(front.state.released))
            raise refusal(409, "conflict", f"memory is released ({names}): resume it first")
        update = Outcome()
        if session is not None and session.implicit:
            try:
                update = yield from self.updates.commits.commit(session, message.call)
            except Refusal as end:
                update = end.outcome
        if front.state.control != "paused":
            return replace(update, message=update.message or "not paused")
        resumed = yield from self._run_again()
        return resumed if update.success and not resumed.success else update

    def _run_again(self) -> Operation:
        front = self._front
        front.ledger.pause = None  # first: a group that comes up now must not pause
        front.save_ledger()
        deadline = front.now() + RESUME_TIMEOUT_S
        answers = yield FanOut(m.ResumeRank(), front.state.serving_groups(), deadline)
        front.state.control = "running"
        front.release_held()
        front.broadcast()
        return self._of_live(answers)

    def end_pause(self) -> Operation:
        """The pause's lease ran out: whoever paused is gone, and with it what it was sending."""
        front, session = self._front, self._front.session
        if session is not None and session.implicit:
            self.updates.sessions.drop(session)
        if front.state.released:
            outcome = yield from self._resume_memory(TAGS, front.now() + MEMORY_TIMEOUT_S)
            if not outcome.success:
                return outcome
        outcome = yield from self._run_again()
        return outcome

    # ------------------------------------------------------------------ cache, ranks, memory

    def flush(self, message: m.FlushCacheReqInput) -> Operation:
        front = self._front
        groups = front.state.serving_groups()
        paused = front.state.control == "paused"
        if message.timeout_s > 0 and not paused:
            deadline = min(front.now() + message.timeout_s, message.call.deadline)
            yield Until(lambda: not front.live(groups), deadline)
        answers = yield FanOut(m.FlushRank(), groups, message.call.deadline)
        outcome = self._of_live(answers)
        live = len(front.live(groups))
        if outcome.success and live and not paused:
            return Outcome(
                False, 400, "busy",
                f"dropped all blocks but those that {live} live requests hold; "
                "call again when they have ended or give timeout_s",
                ranks=answers,
            )  # fmt: skip
        return outcome

    def drain(self, message: m.DrainRankReqInput) -> Operation:
        front, state = self._front, self._front.state

        def work() -> Outcome:
            if not 0 <= message.dp < front.config.dp:
                raise refusal(404, "not_found", f"there is no dp rank {message.dp}")
            if message.drain and not set(state.dispatch_groups()) - {message.dp}:
                text = "this is the last rank that takes requests; pause instead"
                raise refusal(409, "conflict", text)
            (state.drained.add if message.drain else state.drained.discard)(message.dp)
            front.broadcast()
            return Outcome(result={"running": len(front.live([message.dp]))})

        return at_once(work)

    def release_memory(self, message: m.ReleaseMemoryOccupationReqInput) -> Operation:
        front, tags = self._front, tuple(message.tags or TAGS)
        if unknown := set(tags) - set(TAGS):
            text = f"unknown memory tags {sorted(unknown)}, known are {' and '.join(TAGS)}"
            raise refusal(400, "invalid_request_error", text)
        if front.state.control != "paused":
            raise refusal(409, "conflict", "pause generation before releasing memory")
        if front.session is not None and "weights" in tags:
            raise refusal(409, "conflict", f"weight session {front.session.id} is open")
        before = set(front.state.released)
        front.state.released |= set(tags)
        outcome = yield from self._to_all(m.ReleaseMemory(tags=tags), message)
        if not outcome.success:  # all groups or none
            again = tuple(tag for tag in tags if tag not in before)
            yield from self._resume_memory(again, message.call.deadline)
        return outcome

    def resume_memory(self, message: m.ResumeMemoryOccupationReqInput) -> Operation:
        tags = tuple(message.tags or TAGS)
        outcome = yield from self._resume_memory(tags, message.call.deadline)
        return outcome

    def _resume_memory(self, tags: tuple[str, ...], deadline: float) -> Operation:
        """Each group loads the weights of its own epoch again."""
        front, ranks = self._front, []
        outcome = Outcome()
        for dp in front.state.serving_groups():
            paths = front.ledger.epochs[front.ledger.epoch_of(dp)].paths
            answers = yield FanOut(m.ResumeMemory(tags=tags, paths=paths), [dp], deadline)
            ranks += answers
            outcome = gathered(answers) if outcome.success else outcome
        if outcome.success:
            front.state.released -= set(tags)
        return replace(outcome, ranks=ranks)

    # ------------------------------------------------------------------ small ones

    def relabel(self, message: m.UpdateWeightVersionReqInput) -> Operation:
        front = self._front

        def work() -> Outcome:
            present = front.ledger.present(front.config.dp)
            if len(present) > 1:
                text = f"the dp groups serve epochs {sorted(present)}: there is no one version"
                raise refusal(409, "mixed", text)
            if message.abort_all_requests:
                everybody = front.live(list(range(front.config.dp)))
                front.abort_entries(everybody, "aborted by a relabel")
            epoch = present.pop()
            front.ledger.relabel(epoch, message.new_version, front.now())
            front.save_ledger()
            front.broadcast()
            return Outcome(result={"new_version": message.new_version, "epoch": epoch})

        return at_once(work)

    def join_group(self, message: m.InitWeightsUpdateGroupReqInput) -> Operation:
        """Every rank joins, or none is left in the group."""
        front = self._front
        ranks = front.config.dp * front.config.tp
        if message.world_size < message.rank_offset + ranks:
            raise refusal(
                400, "invalid_request_error",
                f"world_size {message.world_size} has no room for {ranks} engine ranks from "
                f"{message.rank_offset} on",
            )  # fmt: skip
        op = m.JoinGroup(
            master_address=message.master_address,
            master_port=message.master_port,
            rank_offset=message.rank_offset,
            world_size=message.world_size,
            group_name=message.group_name,
            backend=message.backend,
            timeout_s=max(1.0, message.call.deadline - front.now() - JOIN_MARGIN_S),
        )
        groups = front.state.serving_groups()
        answers = yield FanOut(op, groups, message.call.deadline)
        outcome = gathered(answers)
        if not outcome.success and outcome.err_type != "conflict":
            leave = m.LeaveGroup(group_name=message.group_name)
            yield FanOut(leave, groups, front.now() + RESUME_TIMEOUT_S)
        return outcome

    def leave_group(self, message: m.DestroyWeightsUpdateGroupReqInput) -> Operation:
        return self._to_all(m.LeaveGroup(group_name=message.group_name), message)

    def read_weights(self, message: m.GetWeightsByNameReqInput) -> Operation:
        op = m.ReadWeights(name=message.name, truncate_size=message.truncate_size)
        return self._to_all(op, message)

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
        def work() -> Outcome:
            ledger = self._front.ledger
            if message.epoch is not None and message.epoch not in ledger.epochs:
                raise refusal(404, "not_found", f"epoch {message.epoch} never existed here")
            if message.epoch is not None:
                wanted = [message.epoch]
            elif message.epochs is not None:
                wanted = [epoch for epoch in message.epochs if epoch in ledger.epochs]
            else:
                wanted = sorted(ledger.epochs)
            return Outcome(
                result={
                    "epochs": [msgspec.to_builtins(ledger.epochs[epoch]) for epoch in wanted],
                    "relabels": [list(row) for row in ledger.relabels if row[1] in wanted],
                }
            )

        return at_once(work)
