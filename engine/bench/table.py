"""Samples to rows, rows to the printed table and to the JSON that scripts outside read.

Path: every module of this package -> here -> ``QUARTERDECK_HOME/bench/*.json`` and the terminal.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import msgspec

Samples = Sequence[float]


class Row(msgspec.Struct, kw_only=True):
    """One line. Values are medians; ``spread`` is the distance from our least to our greatest.

    ``ratio`` says how many times better ours is than the best rival. ``target`` is a ratio, or a
    value in ``unit`` where no rival is named. A value that could not be measured is None.
    """

    name: str
    unit: str
    ours: float | None
    spread: float | None
    peers: dict[str, float | None] = {}
    ratio: float | None = None
    target: float | None = None
    met: bool | None = None
    samples: dict[str, list[float]] = {}
    note: str = ""


class Document(msgspec.Struct, kw_only=True):
    """A whole run; ``missing`` names who could not be measured, and why."""

    machine: dict[str, Any]
    versions: dict[str, str]
    commit: str
    rows: list[Row]
    missing: dict[str, str] = {}


def median(samples: Samples | None) -> float | None:
    return statistics.median(samples) if samples else None


def compare(
    name: str,
    unit: str,
    *,
    ours: Samples,
    peers: Mapping[str, Samples | None],
    rivals: Sequence[str],
    target: float | None,
    better: Literal["more", "less"],
    note: str = "",
) -> Row:
    """A row against ``rivals``, the peers that count for the ratio; the others are only shown."""
    mine, medians = median(ours), {peer: median(theirs) for peer, theirs in peers.items()}
    values = [value for peer in rivals if (value := medians.get(peer)) is not None]
    ratio = None
    if mine and values:
        ratio = mine / max(values) if better == "more" else min(values) / mine
    return Row(
        name=name,
        unit=unit,
        ours=_rounded(mine),
        spread=_rounded(max(ours) - min(ours)) if ours else None,
        peers={peer: _rounded(value) for peer, value in medians.items()},
        ratio=_rounded(ratio),
        target=target,
        met=None if ratio is None or target is None else ratio >= target,
        samples={"ours": list(ours)} | {peer: list(s) for peer, s in peers.items() if s},
        note=note,
    )


def absolute(
    name: str,
    unit: str,
    *,
    ours: Samples,
    target: float | None,
    better: Literal["more", "less"],
    peers: Mapping[str, Samples | None] | None = None,
    note: str = "",
) -> Row:
    """A row whose target is a value in ``unit``; peers are only shown."""
    row = compare(
        name, unit, ours=ours, peers=peers or {}, rivals=(), target=target, better=better, note=note
    )
    mine = median(ours)
    if mine is not None and target is not None:
        row.met = mine >= target if better == "more" else mine <= target
    return row


def _rounded(value: float | None) -> float | None:
    """Four significant digits."""
    return None if value is None else float(f"{value:.4g}")


# --------------------------------------------------------------------------- printing

HEAD = ("row", "ours", "spread", "unit", "ratio", "target", "met", "peers")


def render(document: Document) -> str:
    """The table for a terminal, then who is missing from it."""
    lines = [HEAD, *map(_cells, document.rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(HEAD) - 1)]
    text = [
        "  ".join([*(c.ljust(w) for c, w in zip(line, widths, strict=False)), line[-1]]).rstrip()
        for line in lines
    ]
    text += [f"not measured: {name}: {reason}" for name, reason in document.missing.items()]
    return "\n".join(text) + "\n"


def _cells(row: Row) -> tuple[str, ...]:
    peers = ", ".join(f"{name} {_shown(value)}" for name, value in row.peers.items())
    return (
        row.name,
        _shown(row.ours),
        _shown(row.spread),
        row.unit,
        f"{row.ratio:.2f} x" if row.ratio is not None else "-",
        _target(row),
        {True: "yes", False: "no", None: "-"}[row.met],
        peers + (f" ({row.note})" if row.note else ""),
    )


def _target(row: Row) -> str:
    if row.target is None:
        return "-"
    in_units = row.ratio is None and row.met is not None
    return f"{row.target:g}" if in_units else f"{row.target:g} x"


def _shown(value: float | None) -> str:
    return "-" if value is None else f"{value:,.4g}" if value < 1000 else f"{value:,.0f}"
