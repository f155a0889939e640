"""The live picture of the fleet: each snapshot is encoded once for all sockets of this worker.

Path: engine/client.py (once a second) -> here -> consumers/fleet.py.
"""

from __future__ import annotations

import asyncio
import time
from typing import Any

import msgspec

from console.services.history import FleetHistory
from engine.messages import EngineView, FleetSnapshot, Histogram

QUIET_S = 2.0  # without a snapshot for so long the picture says that the engine is unreachable
PARTS = ("engine", "workers", "ranks", "epochs", "pause_until", "session", "counters", "sample")


def unreachable(reason: str) -> FleetSnapshot:
    """The picture when no router answers."""
    engine = EngineView(
        state="unreachable",
        epoch=None,
        weight_version=None,
        token_step=None,
        model="",
        generation=0,
        reason=reason,
    )
    return FleetSnapshot(seq=0, at=time.time(), engine=engine, workers=[], ranks=[])


def as_json(snapshot: FleetSnapshot) -> dict[str, Any]:
    """Plain data with every field, also those that hold their default.

    Histograms stay behind: charts get their percentiles (``history.py``), ``/metrics`` all of them.
    """
    workers = [_fields(view) | {"lag": view.lag_s} for view in snapshot.workers]
    return {
        "at": snapshot.at,
        "engine": _fields(snapshot.engine),
        "workers": workers,
        "ranks": [_fields(view) for view in snapshot.ranks],
        "epochs": {str(epoch): _fields(label) for epoch, label in snapshot.epochs.items()},
        "pause_until": snapshot.pause_until,
        "session": snapshot.session,
        "counters": snapshot.counters,
    }


def _fields(part: msgspec.Struct) -> dict[str, Any]:
    fields = {name: getattr(part, name) for name in part.__struct_fields__}
    return {name: value for name, value in fields.items() if not isinstance(value, Histogram)}


class FleetFeed:
    """The newest picture as two frames: whole, and what changed since the one before."""

    def __init__(self) -> None:
        self.seq = 0
        self.history = FleetHistory()
        self.snapshot = b""
        self.delta = b""
        self._parts: dict[str, Any] = {}
        self._changed = asyncio.Event()
        self._heard_at = 0.0
        self._show(unreachable("starting"))

    def put(self, snapshot: FleetSnapshot) -> None:
        self._heard_at = time.monotonic()
        self._show(snapshot)

    async def after(self, seq: int) -> None:
        """Returns once the picture is newer than ``seq``."""
        while self.seq <= seq:
            await self._changed.wait()

    async def watch(self) -> None:
        """Until cancelled: shows silence as silence, once a second."""
        while True:
            await asyncio.sleep(1.0)
            if time.monotonic() - self._heard_at > QUIET_S:
                self._show(unreachable("no heartbeat of the engine"))

    def _show(self, snapshot: FleetSnapshot) -> None:
        parts = as_json(snapshot) | {"sample": self.history.put(snapshot)}
        changed = {name: parts[name] for name in PARTS if parts[name] != self._parts.get(name)}
        self.seq += 1
        head = {"seq": self.seq, "at": parts["at"]}
        self.snapshot = msgspec.json.encode({"type": "snapshot", **head, **parts})
        self.delta = msgspec.json.encode({"type": "delta", **head, **changed})
        self._parts = parts
        self._changed.set()
        self._changed = asyncio.Event()
