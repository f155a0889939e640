"""How many requests run where, out of the newest snapshot: what previews count."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

from engine.messages import FleetSnapshot


@dataclass(frozen=True, slots=True)
class Load:
    """``live``: requests that a dp group runs or queues. ``unreachable`` says why nothing is
    known, or is ""."""

    state: str = "unreachable"
    epoch: int | None = None
    weight_version: str | None = None
    token_step: int | None = None
    live: dict[int, int] = field(default_factory=dict)
    unreachable: str = ""

    @staticmethod
    def of(snapshot: FleetSnapshot | None) -> Load:
        if snapshot is None:
            return Load(unreachable="The engine is not reachable now.")
        engine = snapshot.engine
        return Load(
            state=engine.state,
            epoch=engine.epoch,
            weight_version=engine.weight_version,
            token_step=engine.token_step,
            live={r.dp: r.running + r.waiting for r in snapshot.ranks if r.tp == 0},
        )

    def only(self, groups: Iterable[int] | None) -> Load:
        """Of these dp groups; None means all."""
        if groups is None:
            return self
        return replace(self, live={dp: n for dp, n in self.live.items() if dp in set(groups)})

    def sentence(self, what: str = "") -> str:
        """``14 running requests: 9 on dp0, 5 on dp1; policy finish: they end on ...``"""
        total = sum(self.live.values())
        if not total:
            return "No request is running."
        noun = "request" if total == 1 else "requests"
        places = ", ".join(f"{count} on dp{dp}" for dp, count in self.live.items() if count)
        return f"{total} running {noun}: {places}{'; ' + what if what else ''}."

    def as_json(self) -> dict[str, Any]:
        """What a job keeps as ``before`` and ``after``."""
        return {
            "state": self.state,
            "epoch": self.epoch,
            "weight_version": self.weight_version,
            "token_step": self.token_step,
            "running": sum(self.live.values()),
        }
