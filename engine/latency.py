"""Histograms of delays: counted by a rank for each token, summed and read by whoever watches.

Counts over fixed edges can be added over ranks and subtracted over time, which percentiles cannot.
Pure: times come in.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

# Upper edges in seconds, ten to a decade: a percentile read between two of them is off by at most
# 26 %, mostly by far less. What is longer than the last one is counted behind it.
EDGES_S = tuple(float(f"{0.0005 * 10 ** (step / 10):.3g}") for step in range(54))  # 0.5 ms .. 100 s


class Delays:
    """One histogram; ``counts[i]``: delays up to ``EDGES_S[i]`` and over the edge before it."""

    __slots__ = ("counts", "sum_s")

    def __init__(self) -> None:
        self.counts = [0] * (len(EDGES_S) + 1)
        self.sum_s = 0.0

    def add(self, delay_s: float) -> None:
        """Clocks of two processes may differ by a little: less than nothing counts as nothing."""
        delay_s = max(0.0, delay_s)
        self.counts[bisect_left(EDGES_S, delay_s)] += 1
        self.sum_s += delay_s


def percentile(counts: Sequence[int], share: float) -> float | None:
    """Seconds under which ``share`` of the delays lie, linear within an edge; None of none."""
    wanted = share * sum(counts)
    if not wanted:
        return None
    below = 0
    for place, count in enumerate(counts):
        if count and below + count >= wanted:
            low, high = ((0.0, *EDGES_S)[place], (*EDGES_S, EDGES_S[-1])[place])
            return low + (high - low) * (wanted - below) / count
        below += count
    return EDGES_S[-1]
