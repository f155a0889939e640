"""The last fifteen minutes of the fleet as numbers: what the charts draw, also after a reload.

Path: engine/client.py (once a second) -> feed.py -> here -> ``GET /api/fleet/history`` and, the
newest sample alone, ``/ws/fleet/``. Of one web worker, in memory: a new worker begins anew.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

from engine.latency import percentile
from engine.messages import FleetSnapshot, Histogram, RankView

KEPT_S = 900
WINDOW_S = 30  # percentiles are those of so many seconds
MAX_SAMPLES = KEPT_S + 60  # silence is sampled too, about once a second

Sample = dict[str, float | None]


class FleetHistory:
    """``put`` gets every picture and returns its sample; an unreachable engine is an empty one.

    Names: ``speed`` (tok/s), ``running``, ``waiting``; of a group ``speed.dp0``, ``kv.dp0`` (%),
    ``epoch.dp0``; ``step``, ``ttft`` and ``itl`` with ``.p50`` and a high percentile, in ms over
    ``WINDOW_S``.
    """

    def __init__(self) -> None:
        self._samples: deque[tuple[float, Sample]] = deque(maxlen=MAX_SAMPLES)
        self._window: deque[FleetSnapshot] = deque(maxlen=2 * WINDOW_S)

    def put(self, snapshot: FleetSnapshot) -> Sample:
        self._forget(snapshot.at)
        self._window.append(snapshot)
        sample = self._sample(snapshot)
        self._samples.append((snapshot.at, sample))
        return sample

    def as_columns(self) -> dict[str, Any]:
        """One list of times and one list a name, equally long; null where nothing is known."""
        names = dict.fromkeys(name for _, sample in self._samples for name in sample)
        return {
            "times": [at for at, _ in self._samples],
            "columns": {name: [s.get(name) for _, s in self._samples] for name in names},
        }

    def _forget(self, now: float) -> None:
        while self._samples and self._samples[0][0] < now - KEPT_S:
            self._samples.popleft()
        while self._window and self._window[0].at < now - WINDOW_S:
            self._window.popleft()

    def _sample(self, snapshot: FleetSnapshot) -> Sample:
        leaders = [rank for rank in snapshot.ranks if rank.tp == 0]
        if not leaders:
            return {}
        sample: Sample = {
            "speed": round(sum(rank.tokens_per_s for rank in leaders), 1),
            "running": sum(rank.running for rank in leaders),
            "waiting": sum(rank.waiting for rank in leaders),
        }
        for rank in leaders:
            if not rank.seen_at:
                continue  # it loads its model and has nothing to tell
            share = rank.kv_used / rank.kv_total if rank.kv_total else 0.0
            sample[f"speed.dp{rank.dp}"] = round(rank.tokens_per_s, 1)
            sample[f"kv.dp{rank.dp}"] = round(100 * share, 1)
            sample[f"epoch.dp{rank.dp}"] = rank.epoch
        return sample | self._steps() | self._delays("ttft", _ttft) | self._delays("itl", _itl)

    def _steps(self) -> Sample:
        steps = sorted(
            rank.step_s
            for snapshot in self._window
            for rank in snapshot.ranks
            if rank.tp == 0 and rank.running
        )
        return {
            f"step.p{share}": _milliseconds(steps[len(steps) * share // 100] if steps else None)
            for share in (50, 99)
        }

    def _delays(self, name: str, histogram: Callable[[RankView], Histogram]) -> Sample:
        counts = _grown(self._window, histogram)
        return {
            f"{name}.p{share}": _milliseconds(percentile(counts, share / 100)) for share in (50, 95)
        }


def _grown(window: deque[FleetSnapshot], histogram: Callable[[RankView], Histogram]) -> list[int]:
    """Counts that came within the window, over all ranks. A rank that restarted is another one."""
    oldest: dict[tuple[int, int], list[int]] = {}
    newest: dict[tuple[int, int], list[int]] = {}
    for snapshot in window:
        for rank in snapshot.ranks:
            if counts := histogram(rank).counts:
                oldest.setdefault((rank.dp, rank.pid), counts)
                newest[rank.dp, rank.pid] = counts
    grown = [
        [after - before for before, after in zip(oldest[key], newest[key], strict=True)]
        for key in newest
    ]
    return [sum(column) for column in zip(*grown, strict=True)]


def _ttft(rank: RankView) -> Histogram:
    return rank.ttft


def _itl(rank: RankView) -> Histogram:
    return rank.itl


def _milliseconds(seconds: float | None) -> float | None:
    return None if seconds is None else round(1000 * seconds, 2)
