"""Actions that record: profiles, tensor dumps, the merge of a profile.

The engine answers a start when every rank has armed; the job goes on until every rank has written
(``sending.py`` asks by its key), and the merge of a profile is a file job of its own after it.
"""

from __future__ import annotations

import datetime
import re
import sys
from pathlib import Path
from typing import Annotated, Any, ClassVar, Self

import msgspec
from django.conf import settings

from console.fields import BadField, Int, Number, Seconds
from console.services import roots
from console.services.actions import Action, Label
from console.services.file_actions import FileAction
from console.services.load import Load
from engine import messages as m
from engine.dumps.points import DumpSpec
from engine.dumps.points import parse_spec as parse_dump
from engine.profiling.spec import CaptureSpec
from engine.profiling.spec import parse_spec as parse_profile

Note = Annotated[str, msgspec.Meta(max_length=500)]
RESERVED = frozenset({"compare"})  # a page of that name stands beside those of the recordings
ID_STEM = re.compile(r"[^0-9a-zA-Z]")


class Record(Action, frozen=True, kw_only=True):
    """``output_dir``: under the root of its kind; files of several recordings may share it."""

    kind: ClassVar[m.RecordingKind]
    derived = frozenset({"recording_id"})
    answers_early = True
    deadline_s = 60.0

    recording_id: str = ""
    output_dir: str | None = None
    note: Note = ""

    @property
    def directory(self) -> Path:
        root = (settings.QUARTERDECK_HOME / f"{self.kind}s").resolve()
        if self.output_dir is None:
            return root / self.recording_id
        path = roots.resolved(root, self.output_dir, param="output_dir")
        if not roots.inside(path, [root]):
            raise BadField(f"{self.output_dir!r} is not under {root}", param="output_dir")
        return path

    @property
    def aim(self) -> str:
        return self.recording_id or "every rank"

    def identified(self, key: str) -> Self:
        if self.recording_id:
            return self
        now = datetime.datetime.now(tz=datetime.UTC)
        stem = ID_STEM.sub("", key)[:6]
        return msgspec.structs.replace(self, recording_id=f"{now:%Y%m%d-%H%M%S}-{stem}")

    def checked(self) -> Self:
        if self.recording_id in RESERVED:
            raise BadField(f"{self.recording_id!r} cannot be an id", param=f"{self.kind}_id")
        self.spec()
        return self

    def spec(self) -> Any:
        """Of the engine; raises ``BadRequest``."""
        raise NotImplementedError

    def engine_fields(self) -> dict[str, Any]:
        return {"spec": self.spec()}

    def _placed(self) -> dict[str, Any]:
        given = {name: getattr(self, name) for name in self.__struct_fields__}
        place = {f"{self.kind}_id": self.recording_id or "new", "directory": str(self.directory)}
        return {name: value for name, value in given.items() if value is not None} | place


class Profile(Record, frozen=True, kw_only=True):
    """SGLang's fields; numbers may be strings. Bounds that are not given are the engine's."""

    name = "profile"
    kind = "profile"
    message = m.ProfileReqInput
    route = "/start_profile"
    also = {"profile_id": "recording_id"}

    start_step: Int | None = None
    num_steps: Int | None = None
    activities: list[str] | None = None
    profile_by_stage: bool = False
    with_stack: bool = False
    record_shapes: bool = False
    merge_profiles: bool = False
    max_seconds: Number | None = None
    max_bytes: Int | None = None

    @property
    def title(self) -> str:
        return f"Profile {self.recording_id}".strip()

    def spec(self) -> CaptureSpec:
        return parse_profile(self._placed())

    def will(self) -> list[str]:
        spec = self.spec()
        steps = f"{spec.num_steps} steps" if spec.num_steps else "every step"
        each = " of each stage" if spec.profile_by_stage else ""
        lines = [
            f"Every rank records {steps}{each}, for at most {spec.max_seconds:g} s and "
            f"{spec.max_bytes >> 20} MiB. It ends by itself."
        ]
        if self.merge_profiles:
            lines.append("Afterwards the traces of all ranks are merged into one, off the engine.")
        return lines

    def impact(self, load: Load) -> str:
        return load.sentence("their tokens come slower meanwhile")


class StopProfile(Action, frozen=True, kw_only=True):
    name = "stop_profile"
    message = m.StopRecordingReqInput
    route = "/stop_profile"
    deadline_s = 180.0
    also = {"profile_id": "id"}

    id: str | None = None

    @property
    def title(self) -> str:
        return "Stop the profile"

    def will(self) -> list[str]:
        return ["The profile that runs ends now; the answer comes when all files are written."]

    def engine_fields(self) -> dict[str, Any]:
        return {"recording": "profile", "id": self.id}


class DumpTensors(Record, frozen=True, kw_only=True):
    """``modules``, ``ranks`` and ``rids`` are lists, or texts with commas; see dumps/points.py."""

    name = "dump"
    kind = "dump"
    message = m.LazyDumpTensorsReqInput
    route = "/lazy_dump_tensors"
    also = {"dump_id": "recording_id", "num_steps": "max_steps"}

    modules: list[str] | str | None = None
    layers: list[Int] | str | None = None
    kinds: list[str] | str | None = None
    ranks: list[str] | str | None = None
    rids: list[str] | str | None = None
    max_steps: Int | None = None
    max_seconds: Seconds | None = None
    max_bytes: Int | None = None

    @property
    def title(self) -> str:
        return f"Dump {self.recording_id}".strip()

    def spec(self) -> DumpSpec:
        raw = self._placed()
        for name in ("modules", "ranks", "rids"):
            raw[name] = _words(raw.get(name))
        return parse_dump({name: value for name, value in raw.items() if value})

    def will(self) -> list[str]:
        spec = self.spec()
        whose = f"requests {', '.join(sorted(spec.rids))}" if spec.rids else "any request"
        return [
            f"Steps that hold {whose} run in the instrumented forward, {spec.max_steps} of them at "
            f"most, for at most {spec.max_seconds:g} s.",
            f"{', '.join(sorted(spec.kinds))} of {', '.join(spec.modules)} are described at once "
            f"and kept up to {spec.max_bytes >> 20} MiB on each rank.",
        ]

    def impact(self, load: Load) -> str:
        return load.sentence("those beside a wanted request are slower meanwhile")


class StopDump(Action, frozen=True, kw_only=True):
    name = "stop_dump"
    message = m.StopRecordingReqInput
    deadline_s = 180.0
    also = {"dump_id": "id"}

    id: str | None = None

    @property
    def title(self) -> str:
        return "Stop the dump"

    def will(self) -> list[str]:
        return ["The armed dump ends now; the answer comes when all files are written."]

    def engine_fields(self) -> dict[str, Any]:
        return {"recording": "dump", "id": self.id}


class MergeProfile(FileAction, frozen=True, kw_only=True):
    """Merge and summary of a profile, by its id."""

    name = "merge_profile"

    recording_id: Label
    directory: str

    @property
    def title(self) -> str:
        return f"Merge profile {self.recording_id}"

    @property
    def aim(self) -> str:
        return self.recording_id

    def checked(self) -> Self:
        root = (settings.QUARTERDECK_HOME / "profiles").resolve()
        if not roots.inside(roots.resolved(root, self.directory, param="directory"), [root]):
            raise BadField(f"{self.directory!r} is not under {root}", param="directory")
        return self

    def will(self) -> list[str]:
        return ["The traces of all ranks become one, and a summary, in a process of its own."]

    def command(self) -> list[str]:
        program = [sys.executable, "-m", "engine.profiling.report"]
        return [*program, self.directory, self.recording_id]


def _words(value: list[str] | str | None) -> list[str]:
    if isinstance(value, str):
        return [word.strip() for word in value.split(",") if word.strip() not in ("", "all")]
    return list(value or ())
