"""Profiles and dumps as the router runs them: one of each kind at a time, over all ranks.

Path: client.py -> operations.py -> here -> scheduler/recording.py on every rank. A start is
answered when every rank has armed; a watch of the router's own then waits until every rank has
written, so a recording is over when its files are complete or its rank is gone.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

from engine import messages as m
from engine.router.control import FanOut, Operation, Outcome, Say, Until, at_once, gathered, refusal
from engine.router.front import Front

WRITE_S = 120.0  # after a recording's last second: for the ranks to write their files
KEEP_ENDED = 64


@dataclass(slots=True)
class Active:
    """A recording that some rank may still write; ``writing`` are the groups of those ranks.

    ``rids``: the requests that a dump wants, empty for all; ``gone``: those of them that ended.
    """

    kind: m.RecordingKind
    id: str
    directory: str
    groups: list[int]
    ranks: list[str]
    started_at: float
    until: float
    rids: frozenset[str] = frozenset()
    gone: set[str] = field(default_factory=set)
    writing: set[int] = field(default_factory=set)
    answers: list[m.RankAnswer] = field(default_factory=list)

    def told(self) -> dict[str, Any]:
        return {
            f"{self.kind}_id": self.id,
            "directory": self.directory,
            "ranks": self.ranks,
            "started_at": self.started_at,
            "until": self.until,
        }


class Recordings:
    """The operations of profiles and dumps."""

    def __init__(self, front: Front) -> None:
        self._front = front
        self._open: dict[m.RecordingKind, Active] = {}
        self._ended: dict[tuple[str, str], Outcome] = {}

    def profile(self, message: m.ProfileReqInput) -> Operation:
        spec = message.spec
        active = self._begin("profile", spec.profile_id, spec.directory, spec.max_seconds)
        op = m.StartProfile(spec=spec)
        answers = yield FanOut(op, active.groups, message.call.deadline)
        outcome = yield from self._record(active, answers)
        return outcome

    def dump(self, message: m.LazyDumpTensorsReqInput) -> Operation:
        """Every rank makes its second forward ready, then all of them arm."""
        spec, front = message.spec, self._front
        active = self._begin("dump", spec.dump_id, spec.directory, spec.max_seconds, spec.rids)
        for dp in active.groups:
            epoch = front.ledger.epoch_of(dp)
            prepare = m.PrepareDump(epoch=epoch, paths=front.ledger.epochs[epoch].paths)
            answers = yield FanOut(prepare, [dp], message.call.deadline)
            if not (outcome := gathered(answers)).success:
                self._discard(active, outcome.message)
                return outcome
        op = m.ArmDump(spec=spec)
        answers = yield FanOut(op, active.groups, message.call.deadline)
        outcome = yield from self._record(active, answers)
        return outcome

    def stop(self, message: m.StopRecordingReqInput) -> Operation:
        active = self._open.get(message.recording)
        if active is None or message.id not in (None, active.id):
            raise refusal(409, "conflict", f"no such {message.recording} is running")
        reason = f"stopped by {message.call.actor}"
        op = m.StopRecording(kind=message.recording, id=active.id, reason=reason)
        yield FanOut(op, active.groups, message.call.deadline)
        outcome = yield from self._until_ended(active, message.call.deadline)
        return outcome

    def wait(self, message: m.WaitRecordingReqInput) -> Operation:
        active = self._open.get(message.recording)
        if active is not None and active.id == message.id:
            outcome: Outcome = yield from self._until_ended(active, message.call.deadline)
            return outcome
        ended = self._ended.get((message.recording, message.id))
        if ended is None:
            raise refusal(404, "not_found", f"this engine ran no {message.recording} {message.id}")
        return ended

    def running(self, message: m.GetRecordingsReqInput) -> Operation:
        def work() -> Outcome:
            return Outcome(result={"open": {a.kind: a.told() for a in self._open.values()}})

        return at_once(work)

    def write_dump(self, message: m.WriteDumpReqInput) -> Operation:
        active = self._open.get("dump")
        if active is None:
            raise refusal(409, "conflict", "no dump is armed")
        answers = yield FanOut(m.WriteDump(), active.groups, message.call.deadline)
        return gathered(answers)

    def points(self, message: m.GetDumpPointsReqInput) -> Operation:
        """Of one group: all run the same model."""
        groups = self._front.state.serving_groups()[:1]
        if not groups:
            raise refusal(503, "engine_unreachable", "no dp group serves")
        answers = yield FanOut(m.ListDumpPoints(), groups, message.call.deadline)
        return gathered(answers, **answers[0].result)

    # ------------------------------------------------------------------ helpers

    def requests_ended(self, rids: Iterable[str]) -> None:
        """A dump of named requests ends with the last of them, on every group."""
        active = self._open.get("dump")
        if active is None or not active.rids:
            return
        active.gone |= active.rids.intersection(rids)
        if active.gone == active.rids:
            self._tell_stop(active, active.groups, "the requests ended")

    def _begin(
        self,
        kind: m.RecordingKind,
        id_: str,
        directory: str,
        seconds: float,
        rids: frozenset[str] = frozenset(),
    ) -> Active:
        front = self._front
        if (other := self._open.get(kind)) is not None:
            text = f"{kind} {other.id} is running"
            raise refusal(409, "conflict", text, **{f"{kind}_id": other.id})
        groups = front.state.serving_groups()
        if not groups:
            raise refusal(503, "engine_unreachable", "no dp group serves")
        now = front.now()
        ranks = [f"dp{dp}-tp{tp}" for dp in range(front.config.dp) for tp in range(front.config.tp)]
        active = Active(kind, id_, directory, groups, ranks, now, now + seconds, rids)
        try:
            front.open_recording(kind, directory, id_)
        except OSError as error:
            text = f"cannot write into {directory}: {error.strerror}"
            raise refusal(507, "no_space", text) from error
        self._open[kind] = active
        return active

    def _record(self, active: Active, answers: list[m.RankAnswer]) -> Operation:
        """From arming to the last written file."""
        outcome = gathered(answers)
        if not outcome.success:
            self._discard(active, outcome.message)
            return outcome
        active.writing = set(active.groups)
        for dp in active.groups:
            name = f"{active.kind} {active.id} on dp{dp}"
            self._front.run_beside(name, self._watch(active, dp), active.until + WRITE_S)
        text = f"{active.kind} {active.id} records"
        yield Say(replace(outcome, message=text, result={**active.told(), "open": True}))
        outcome = yield from self._until_ended(active, active.until + 2 * WRITE_S)
        return outcome

    def _discard(self, active: Active, why: str) -> None:
        """It did not start everywhere, so it starts nowhere."""
        del self._open[active.kind]
        self._tell_stop(active, active.groups, why)
        self._front.drop_recording(active.kind, active.directory, active.id)

    def _tell_stop(self, active: Active, groups: list[int], reason: str) -> None:
        self._front.tell(m.StopRecording(kind=active.kind, id=active.id, reason=reason), groups)

    def _watch(self, active: Active, dp: int) -> Operation:
        op = m.WaitRecording(kind=active.kind, id=active.id)
        answers = yield FanOut(op, [dp], active.until + WRITE_S)
        active.answers += answers
        active.writing.discard(dp)
        if active.writing:
            self._stop_idle(active)
        else:
            del self._open[active.kind]
            self._ended[active.kind, active.id] = ended(active)
            while len(self._ended) > KEEP_ENDED:
                del self._ended[next(iter(self._ended))]
        return gathered(answers)

    def _stop_idle(self, active: Active) -> None:
        """Groups that wait for requests which run elsewhere, where the dump is over."""
        over = [dp for dp in active.groups if dp not in active.writing]
        placed = active.gone | {entry.rid for entry in self._front.live(over)}
        if active.rids and active.rids <= placed:
            self._tell_stop(active, sorted(active.writing), "its requests ran elsewhere")

    def _until_ended(self, active: Active, deadline: float) -> Operation:
        over = yield Until(lambda: self._open.get(active.kind) is not active, deadline)
        if not over:
            text = f"{active.kind} {active.id} is still being written"
            raise refusal(504, "deadline_exceeded", text)
        return self._ended[active.kind, active.id]


def ended(active: Active) -> Outcome:
    """What became of it, rank by rank: success if any rank wrote all it had to write."""
    by_name = {f"dp{answer.dp}-tp{answer.tp}": answer for answer in active.answers}
    recorded: dict[str, Any] = {}
    for name in active.ranks:
        answer = by_name.get(name)
        if answer is None:
            recorded[name] = {"error": "its group did not serve", "missing": True}
        elif not answer.success:
            recorded[name] = {"error": answer.message, "missing": True}
        else:
            recorded[name] = {**answer.result, "missing": False}
    errors = [f"{name}: {said['error']}" for name, said in recorded.items() if said["error"]]
    missing = [name for name, said in recorded.items() if said["missing"]]
    result = {**active.told(), "recorded": recorded, "missing": missing}
    ranks = [_as_answer(name, said) for name, said in recorded.items()]
    if not errors:
        return Outcome(result=result, ranks=ranks)
    text = "; ".join(errors)
    if len(errors) < len(active.ranks):
        return Outcome(message=text, result=result, ranks=ranks)
    return Outcome(False, 507, "not_written", text, result, ranks)


def _as_answer(name: str, said: dict[str, Any]) -> m.RankAnswer:
    dp, tp = (int(part[2:]) for part in name.split("-"))
    message = said["error"] or said["reason"]
    return m.RankAnswer(dp=dp, tp=tp, success=not said["error"], message=message)
