"""What people and programs can make the engine do: one class per action, its fields are SGLang's.

Path: control.py decodes, previews, sends and records them; ``catalogue.py`` lists them all.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, Self

import msgspec

from console.fields import BadField, Count, Seconds, read_fields
from console.services.load import Load
from engine import messages as m

Label = Annotated[str, msgspec.Meta(min_length=1, max_length=200)]


class Action(msgspec.Struct, frozen=True, kw_only=True):
    """Fields of one control action.

    ``emergency``: it is done even while the database is away, and written down later. ``route`` is
    the HTTP route of the same action, "" where only ``/api/control/NAME`` does it. ``derived`` are
    fields that ``identified`` fills in. ``answers_early``: the engine answers when it has begun.
    """

    name: ClassVar[str]
    message: ClassVar[type[m.ControlReq]]
    route: ClassVar[str] = ""
    permission: ClassVar[str] = "control_engine"
    emergency: ClassVar[bool] = False
    deadline_s: ClassVar[float] = 30.0
    also: ClassVar[Mapping[str, str]] = {}  # other spellings of fields
    derived: ClassVar[frozenset[str]] = frozenset()
    answers_early: ClassVar[bool] = False

    @classmethod
    def read(cls, given: Mapping[str, Any]) -> Self:
        """Raises ``BadField``. Values may be strings; unknown fields are let through."""
        return read_fields({cls.also.get(name, name): v for name, v in given.items()}, cls)

    def checked(self) -> Self:
        """With paths resolved; raises ``BadField`` for what no type can tell."""
        return self

    def identified(self, key: str) -> Self:
        """With a name for what it makes, if the caller gave none; ``key`` is the engine's."""
        return self

    @property
    def args(self) -> dict[str, Any]:
        """The fields that do not hold their default, as the job's row keeps them for ``read``."""
        return {
            field.name: msgspec.to_builtins(getattr(self, field.name))
            for field in msgspec.structs.fields(self)
            if getattr(self, field.name) != field.default
        }

    @property
    def title(self) -> str:
        """A verb and its object, as the job is called."""
        raise NotImplementedError

    @property
    def aim(self) -> str:
        """What it is aimed at, for job and audit."""
        return "engine"

    @property
    def wait_s(self) -> float:
        """How long the engine may take."""
        return self.deadline_s

    def will(self) -> list[str]:
        """What will happen, in sentences."""
        raise NotImplementedError

    def impact(self, load: Load) -> str:
        """Whom it touches, counted now."""
        return load.sentence()

    def refusal(self, load: Load) -> str:
        """Why it would be refused now, or ""."""
        return load.unreachable

    def engine_fields(self) -> dict[str, Any]:
        """The fields of ``message``."""
        known = self.message.__struct_fields__
        return {name: getattr(self, name) for name in self.__struct_fields__ if name in known}


class Pause(Action, frozen=True, kw_only=True):
    name = "pause"
    message = m.PauseGenerationReqInput
    route = "/pause_generation"
    emergency = True

    mode: Literal["abort", "retract", "in_place"] = "abort"
    lease_s: Annotated[float, msgspec.Meta(gt=0, le=1e9)] | None = None

    @property
    def title(self) -> str:
        return "Pause engine"

    def will(self) -> list[str]:
        what = {
            "abort": "Running requests end now with what they have.",
            "retract": "Running requests stop, their KV is dropped; they go on later.",
            "in_place": "Running requests stop where they are and keep their KV.",
        }
        lease = f"after {self.lease_s:g} s" if self.lease_s else "when its lease runs out"
        return [
            what[self.mode],
            "New requests wait. No rank makes a token until you continue.",
            f"The pause ends by itself {lease}.",
        ]

    def impact(self, load: Load) -> str:
        ends = {"abort": "they end now", "retract": "they wait", "in_place": "they wait"}
        return load.sentence(f"mode {self.mode}: {ends[self.mode]}")


class Continue(Action, frozen=True, kw_only=True):
    name = "continue"
    message = m.ContinueGenerationReqInput
    route = "/continue_generation"
    emergency = True
    deadline_s = 180.0  # it commits what was staged during the pause

    @property
    def title(self) -> str:
        return "Continue engine"

    def will(self) -> list[str]:
        return [
            "Weights that were staged during the pause become one new epoch.",
            "Held and paused requests go on.",
        ]


class FlushCache(Action, frozen=True, kw_only=True):
    name = "flush_cache"
    message = m.FlushCacheReqInput
    route = "/flush_cache"

    timeout_s: Seconds = 0.0

    @property
    def title(self) -> str:
        return "Flush cache"

    @property
    def wait_s(self) -> float:
        return self.deadline_s + self.timeout_s

    def will(self) -> list[str]:
        wait = (
            f"It waits up to {self.timeout_s:g} s for running requests, then "
            if (self.timeout_s)
            else "Now "
        )
        return [f"{wait}every cached block that no live request holds is dropped, on every rank."]

    def impact(self, load: Load) -> str:
        return load.sentence("their blocks stay")


class AbortRequest(Action, frozen=True, kw_only=True):
    name = "abort_request"
    message = m.AbortReq
    route = "/abort_request"
    emergency = True
    deadline_s = 10.0

    rid: Annotated[str, msgspec.Meta(min_length=1, max_length=128)]
    prefix: bool = False

    @property
    def title(self) -> str:
        return f"Abort {self.rid}{'*' if self.prefix else ''}"

    @property
    def aim(self) -> str:
        return self.rid

    def will(self) -> list[str]:
        which = "Every request whose id begins so" if self.prefix else "That request"
        return [f"{which} ends within one step and keeps the tokens it has."]

    def impact(self, load: Load) -> str:
        return ""


class AbortAll(Action, frozen=True, kw_only=True):
    name = "abort_all"
    message = m.AbortReq
    route = "/abort_request"
    emergency = True
    deadline_s = 10.0

    @property
    def title(self) -> str:
        return "Abort all requests"

    def will(self) -> list[str]:
        return ["Every request of every rank ends within one step and keeps the tokens it has."]

    def impact(self, load: Load) -> str:
        return load.sentence("they end now")

    def engine_fields(self) -> dict[str, Any]:
        return {"abort_all": True, "reason": "an operator ended every request"}


class DrainRank(Action, frozen=True, kw_only=True):
    name = "drain_rank"
    message = m.DrainRankReqInput

    dp: Count
    drain: bool = True

    @property
    def title(self) -> str:
        return f"{'Drain' if self.drain else 'Put back'} dp{self.dp}"

    @property
    def aim(self) -> str:
        return f"dp{self.dp}"

    def will(self) -> list[str]:
        if self.drain:
            return [f"dp{self.dp} takes no new requests; those that run there end normally."]
        return [f"dp{self.dp} takes new requests again."]

    def impact(self, load: Load) -> str:
        return load.only([self.dp]).sentence("they end normally" if self.drain else "")


class ReleaseMemory(Action, frozen=True, kw_only=True):
    name = "release_memory"
    message = m.ReleaseMemoryOccupationReqInput
    route = "/release_memory_occupation"
    deadline_s = 60.0

    tags: list[Literal["kv_cache", "weights"]] | None = None

    @property
    def title(self) -> str:
        return f"Release memory of {' and '.join(self.tags or ('kv_cache', 'weights'))}"

    def will(self) -> list[str]:
        return ["Every rank gives that memory back; nothing runs until it is resumed."]


class ResumeMemory(Action, frozen=True, kw_only=True):
    name = "resume_memory"
    message = m.ResumeMemoryOccupationReqInput
    route = "/resume_memory_occupation"
    deadline_s = 300.0

    tags: list[Literal["kv_cache", "weights"]] | None = None

    @property
    def title(self) -> str:
        return f"Resume memory of {' and '.join(self.tags or ('kv_cache', 'weights'))}"

    def will(self) -> list[str]:
        return ["Every rank takes that memory again; weights are read from their files."]


class SlowDown(Action, frozen=True, kw_only=True):
    name = "slow_down"
    message = m.SlowDownReqInput
    route = "/slow_down"
    deadline_s = 10.0

    forward_sleep_time: Seconds | None = None

    @property
    def title(self) -> str:
        if not self.forward_sleep_time:
            return "End the slow-down"
        return f"Slow down by {self.forward_sleep_time:g} s per step"

    def will(self) -> list[str]:
        if not self.forward_sleep_time:
            return ["Every rank runs at full speed again."]
        return [f"Every rank sleeps {self.forward_sleep_time:g} s before each forward."]


class FreezeGC(Action, frozen=True, kw_only=True):
    name = "freeze_gc"
    message = m.FreezeGCReq
    route = "/freeze_gc"
    deadline_s = 10.0

    @property
    def title(self) -> str:
        return "Freeze the garbage collector"

    def will(self) -> list[str]:
        return ["Every rank's garbage collector stops looking at what exists now."]


class ConfigureLogging(Action, frozen=True, kw_only=True):
    name = "configure_logging"
    message = m.ConfigureLoggingReq
    route = "/configure_logging"
    deadline_s = 10.0
    also = {"log_level": "level"}

    level: Literal["debug", "info", "warning", "error"]

    @property
    def title(self) -> str:
        return f"Log level {self.level}"

    def will(self) -> list[str]:
        return [f"Every rank logs from {self.level} on."]


def parse_groups(target: str | int | list[int] | None) -> list[int] | None:
    """``"0,2"``, ``0`` or ``[0, 2]`` -> dp groups; None and "all" mean all of them."""
    if target is None or isinstance(target, list):
        return target
    if isinstance(target, int):
        return [target]
    words = target.replace(",", " ").split()
    if not words or words == ["all"]:
        return None
    if not all(word.isdecimal() and len(word) < 10 for word in words):
        raise BadField(f"target must name dp groups, for example 0,2; got {target!r}",
                       param="target")  # fmt: skip
    return [int(word) for word in words]
