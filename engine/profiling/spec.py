"""What a profile should record: read from a request, checked once, carried to every rank.

Path: HTTP body or form -> here -> the step plan's command -> capture.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import msgspec

from engine.artifacts import check_id
from engine.errors import BadRequest

Activity = Literal["CPU", "GPU", "MEM"]

MAX_STEPS = 10_000
MAX_SECONDS = 600.0
MAX_BYTES = 4 << 30


class CaptureSpec(msgspec.Struct, frozen=True, kw_only=True):
    """One capture. It ends at the first of its bounds, whatever else happens.

    ``num_steps`` counts recorded steps (with ``profile_by_stage``: of each stage), ``max_seconds``
    runs from arming, ``max_bytes`` is of JSON before compression. ``start_step`` is the number of
    the first step to record; None: the next one. MEM adds memory events to the trace: torch's own
    snapshot file is a pickle and is not written.
    """

    profile_id: str
    directory: str
    start_step: int | None = None
    num_steps: int | None = None
    profile_by_stage: bool = False
    activities: tuple[Activity, ...] = ("CPU", "GPU")
    with_stack: bool = False
    record_shapes: bool = False
    max_seconds: float = 60.0
    max_bytes: int = 512 << 20

    @property
    def step_limit(self) -> int:
        return MAX_STEPS if self.num_steps is None else self.num_steps


def parse_spec(raw: Mapping[str, Any]) -> CaptureSpec:
    """The spec in ``raw``; numbers may be strings, as SGLang's bench sends them.

    BadRequest with a sentence for a wrong type, a bound out of range, an unknown activity, or
    ``profile_by_stage`` without ``num_steps``.
    """
    known = {name: raw[name] for name in CaptureSpec.__struct_fields__ if raw.get(name) is not None}
    try:
        spec = msgspec.convert(known, CaptureSpec, strict=False)
    except msgspec.ValidationError as error:
        raise BadRequest(f"profile: {error}") from error
    check_id(spec.profile_id)
    if spec.profile_by_stage and spec.num_steps is None:
        raise BadRequest("profile_by_stage needs num_steps: how many steps of each stage")
    if not spec.activities:
        raise BadRequest("activities must name at least one of CPU, GPU and MEM")
    _check_range("num_steps", spec.step_limit, MAX_STEPS)
    _check_range("max_seconds", spec.max_seconds, MAX_SECONDS)
    _check_range("max_bytes", spec.max_bytes, MAX_BYTES)
    return spec


def _check_range(name: str, value: float, most: float) -> None:
    if not 0 < value <= most:
        raise BadRequest(f"{name} must be above 0 and at most {most:g}, got {value:g}")
