"""Profiles and dumps on one rank: armed in band, recorded around forwards, answered when written.

Path: router/recordings.py -> control.py (a command in the step plan) -> here ->
profiling/capture.py and dumps/capture.py. All ranks of a group start before the same forward; a
profile ends by its own bounds on each rank, a dump ends on tp rank 0 and the others follow.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from engine import messages as m
from engine.artifacts import Rank
from engine.errors import Conflict, NotFound
from engine.model.runner import ModelRunner
from engine.scheduler.plan import InBand, StepPlan, StepResult

if TYPE_CHECKING:
    from engine.dumps.capture import DumpCapture, RowSpan
    from engine.profiling.capture import Capture

TICK_S = 0.1  # between looks at a capture that no step moves on
Answer = dict[str, Any]


class Untapped:
    """For a rank that must run the instrumented forward with its group and records nothing."""

    def wants(self, name: str, kind: str) -> bool:
        return False

    def __call__(
        self, name: str, kind: str, tensor: object, rows: Sequence[RowSpan] | None
    ) -> None:
        """Nothing is kept."""


@dataclass(slots=True)
class Open:
    """A recording whose files are not all written yet."""

    id: str
    waiting: list[str] = field(default_factory=list)  # call ids


class Recorder:
    """One rank's captures, used from its step thread alone (``prepare_dump`` from another one).

    ``answer(call_id, result)`` answers a ``WaitRecording`` whose recording has ended.
    """

    def __init__(
        self, rank: Rank, runner: ModelRunner, *, leads: bool, answer: Callable[[str, Answer], None]
    ) -> None:
        self._rank, self._runner, self._leads, self._answer = rank, runner, leads, answer
        self._profile: Capture | None = None
        self._dump: DumpCapture | None = None
        self._open: dict[m.RecordingKind, Open] = {}
        self._ended: dict[m.RecordingKind, tuple[str, Answer]] = {}
        self._rids: dict[int, str] = {}  # by slot
        self._looked_at = 0.0
        self._prepared: int | None = None  # the epoch that the instrument's weights are of

    @property
    def busy(self) -> bool:
        """Something records, or is being written: ``collect`` often."""
        return bool(self._open)

    # ------------------------------------------------------------------ the router's ops

    def start_profile(self, op: m.StartProfile) -> Answer:
        """Conflict while another profile runs; BadRequest for a directory that takes no files."""
        if self._profile is None:
            from engine.profiling.capture import Capture  # torch

            self._profile = Capture(self._rank)
        self._profile.arm(op.spec)
        self._open["profile"] = Open(op.spec.profile_id)
        return {}

    def arm_dump(self, op: m.ArmDump) -> Answer:
        """Conflict while another dump runs; BadRequest for points that are not here."""
        if self._dump is None:
            from engine.dumps.capture import DumpCapture  # torch

            instrument = self._runner.instrument
            self._dump = DumpCapture(self._rank, instrument.points(), instrument.form)
        if self._prepared != self._runner.epoch:
            raise Conflict("the weights were switched while the dump was prepared: start it again")
        self._dump.arm(op.spec)
        self._open["dump"] = Open(op.spec.dump_id)
        return {}

    def stop(self, op: m.StopRecording) -> Answer:
        """Nothing happens where no such recording runs: it may have ended by itself."""
        open_ = self._open.get(op.kind)
        if open_ is not None and open_.id == op.id:
            capture = self._capture(op.kind)
            assert capture is not None
            capture.stop(op.reason)
        return {}

    def write_dump(self, op: m.WriteDump) -> Answer:
        """Writes what is kept by now, on a thread; the dump goes on."""
        if self._dump is None or "dump" not in self._open:
            raise Conflict("no dump is armed")
        self._dump.materialise()
        return {}

    def wait(self, op: m.WaitRecording, call_id: str) -> None:
        """Answers when the recording's files are written. NotFound for one that is not here."""
        open_ = self._open.get(op.kind)
        if open_ is not None and open_.id == op.id:
            open_.waiting.append(call_id)
            return
        ended_id, result = self._ended.get(op.kind, ("", {}))
        if ended_id != op.id:
            raise NotFound(f"this rank knows no {op.kind} {op.id}; it may have restarted")
        self._answer(call_id, result)

    def prepare_dump(self, op: m.PrepareDump) -> Answer:
        self._runner.instrument.prepare(op.paths)
        self._prepared = op.epoch
        return {}

    def list_points(self, op: m.ListDumpPoints) -> Answer:
        points = self._runner.instrument.points()
        return {
            "points": [
                {"name": point.name, "layer": point.layer, "kinds": list(point.shard_dim)}
                for point in points
            ],
            "form": self._runner.instrument.form,
        }

    # ------------------------------------------------------------------ the loop's side

    def taps(self, plan: StepPlan) -> bool:
        """Whether a step must run the instrumented forward: tp rank 0 decides for its group."""
        if self._dump is None or not self._dump.armed:
            return False
        rids = self._rids | {begin.slot: begin.rid for begin in plan.begins}
        return self._dump.wants([rids[row.slot] for row in plan.rows])

    def forward(self, plan: StepPlan) -> StepResult:
        """The step, inside whatever records it."""
        for slot in plan.ends:
            del self._rids[slot]
        for begin in plan.begins:
            self._rids[begin.slot] = begin.rid
        if self._profile is None or not self._profile.armed or not plan.rows:
            return self._forward(plan)
        self._looked_at = time.monotonic()
        tokens = sum(len(row.token_ids) for row in plan.rows)
        prefills = any(len(row.token_ids) > 1 for row in plan.rows)
        stage = self._profile.step(
            plan.step, "prefill" if prefills else "decode", rows=len(plan.rows), tokens=tokens
        )
        with stage:
            return self._forward(plan)

    def _forward(self, plan: StepPlan) -> StepResult:
        if not plan.tapped:
            return self._runner.forward(plan)
        if self._dump is None or not self._dump.armed:
            return self._runner.forward(plan, Untapped())
        with self._dump.step(plan.step, epoch=self._runner.epoch) as tap:
            return self._runner.forward(plan, tap)

    def weights_switch(self, epoch: int) -> None:
        """A dump whose instrumented forward has weights of its own ends before they differ."""
        if self._dump is not None and self._dump.armed and not self._runner.instrument.is_live:
            self._dump.stop(f"the weights were switched to epoch {epoch}")

    def requests_ended(self, rids: Sequence[str]) -> None:
        """A dump of named requests ends with the last of them."""
        if self._dump is not None:
            self._dump.requests_ended(rids)

    def collect(self) -> list[InBand]:
        """Ends what is over time and answers for what is written; call it often while ``busy``.

        Returns what the followers must be told: a dump that has ended here.
        """
        if not self._open:
            return []
        now = time.monotonic()
        if now - self._looked_at > TICK_S:
            self._looked_at = now
            for kind in self._open:
                if capture := self._capture(kind):
                    capture.tick()
        told: list[InBand] = []
        if self._profile and (profile := self._profile.take_manifest()):
            self._end("profile", profile_answer(profile))
        if self._dump and (dump := self._dump.take_manifest()):
            self._runner.instrument.drop()
            if self._leads:
                stop = m.StopRecording(kind="dump", id=dump.dump_id, reason=dump.reason)
                told.append(InBand(call_id="", op=stop))
            self._end("dump", dump_answer(dump))
        return told

    def close(self) -> None:
        """With the rank: what records is written, nobody is answered."""
        for kind in self._open:
            if capture := self._capture(kind):
                capture.close()

    def _capture(self, kind: m.RecordingKind) -> Capture | DumpCapture | None:
        return self._profile if kind == "profile" else self._dump

    def _end(self, kind: m.RecordingKind, result: Answer) -> None:
        open_ = self._open.pop(kind)
        self._ended[kind] = open_.id, result
        for call_id in open_.waiting:
            self._answer(call_id, result)


def profile_answer(manifest: Any) -> Answer:
    """What a rank tells of its ``RankManifest``."""
    return {
        "reason": manifest.reason,
        "error": "; ".join(manifest.errors),
        "files": len(manifest.segments),
        "bytes": sum(segment.bytes for segment in manifest.segments),
        "events": sum(segment.events for segment in manifest.segments),
        "steps": sum(step.recorded for step in manifest.steps),
    }


def dump_answer(manifest: Any) -> Answer:
    """What a rank tells of its ``DumpManifest``."""
    return {
        "reason": manifest.reason,
        "error": manifest.error,
        "files": len({record.file for record in manifest.records if record.file}),
        "tensors": len(manifest.records),
        "evicted": manifest.evicted,
        "form": manifest.form,
    }
