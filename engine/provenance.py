"""Which weights made which token: epoch runs of an answer, put into the words of trainers. Pure.

Path: client.py (rows with runs, labels of epochs) -> here -> console/api and console/services.

Rows carry runs ``(count, epoch)``. Token positions are those of the output, 0 first; for
``kv_token_steps`` those of the whole context, prompt included. ``start`` is inclusive, ``end`` not.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TypeVar

import msgspec

from engine.messages import EpochLabel

UNKNOWN = EpochLabel(weight_version="unknown")
ValueT = TypeVar("ValueT")
Span = tuple[ValueT, int, int]


class Provenance(msgspec.Struct, frozen=True):
    """The HTTP fields of one answer, under their names there."""

    token_steps: list[int | None]  # one per output token
    weight_versions: list[Span[str]]
    epochs: list[Span[int]]
    kv_token_steps: list[Span[int | None]]


def label_runs(
    runs: Iterable[tuple[int, int]],
    labels: Mapping[int, EpochLabel],
    kv_runs: Iterable[tuple[int, int]] | None = None,
) -> Provenance:
    """``runs`` over the output and ``kv_runs`` over the context, looked up in ``labels``."""
    made = list(runs)
    return Provenance(
        token_steps=[
            labels.get(epoch, UNKNOWN).token_step for count, epoch in made for _ in range(count)
        ],
        weight_versions=spans((n, labels.get(epoch, UNKNOWN).weight_version) for n, epoch in made),
        epochs=spans(made),
        kv_token_steps=spans(
            (n, labels.get(epoch, UNKNOWN).token_step) for n, epoch in kv_runs or ()
        ),
    )


def spans(runs: Iterable[tuple[int, ValueT]]) -> list[Span[ValueT]]:
    """Runs ``(count, value)`` as ``(value, start, end)``, neighbours of equal value joined."""
    found: list[Span[ValueT]] = []
    at = 0
    for count, value in runs:
        if found and found[-1][0] == value:
            found[-1] = (value, found[-1][1], at + count)
        elif count:
            found.append((value, at, at + count))
        at += count
    return found
