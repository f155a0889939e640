"""``meta_info`` and logprob lists in SGLang's shapes, from rows of the engine."""

from __future__ import annotations

import base64
import struct
from collections.abc import Iterable
from typing import Any, TypeVar

from console.services import fleet
from engine.errors import QuarterdeckError
from engine.messages import (
    Finish,
    InputLogprobs,
    OutputLogprobs,
    StrRow,
    TopLogprobs,
    join_runs,
)
from engine.provenance import label_runs

T = TypeVar("T")
Triple = list[Any]  # [logprob, token id, text or None]
RETRY_S = 2  # after a failure that mends itself: an engine or a rank that restarts


def finish_reason(finish: Finish | None) -> dict[str, Any] | None:
    """None while running; ``matched`` and the abort's fields only where they say something."""
    if finish is None:
        return None
    reason: dict[str, Any] = {"type": finish.type}
    if finish.type == "stop":
        reason["matched"] = finish.matched
    elif finish.type == "abort":
        reason["message"] = finish.message
        reason["status_code"] = finish.status_code
        reason["err_type"] = finish.err_type
    return reason


def raise_failure(finish: Finish | None) -> None:
    """An abort that somebody asked for is an answer; one by a failure is an error."""
    if finish is not None and finish.type == "abort" and finish.status_code:
        raise QuarterdeckError(
            finish.message,
            status_code=finish.status_code,
            err_type=finish.err_type,
            retry_after_s=RETRY_S if finish.status_code == 503 else 0,
        )


async def provenance(row: StrRow, before: int) -> dict[str, Any]:
    """Which weights made which output tokens, over which keys: epochs, labels, trainer's steps.

    ``before``: output tokens ahead of the row's first one; spans count from the answer's start.
    """
    runs = join_runs(row.epochs)
    named = {epoch for _, epoch in (*runs, *(row.kv_epochs or ()))}
    labels = await fleet.epoch_labels(named) if named else {}
    told = label_runs(runs, labels, row.kv_epochs)
    if told.weight_versions:
        version: str | None = told.weight_versions[-1][0]
    else:
        version = await _version_now() if row.finish is not None else None
    return {
        "weight_version": version,
        "token_steps": told.token_steps,
        "weight_versions": _moved(told.weight_versions, before),
        "epochs": _moved(told.epochs, before),
        "kv_token_steps": told.kv_token_steps,
    }


async def _version_now() -> str | None:
    """For an answer without a token no weights spoke; what serves now is named instead."""
    return (await fleet.read_snapshot()).engine.weight_version


def _moved(spans: list[tuple[T, int, int]], by: int) -> list[tuple[T, int, int]]:
    return [(value, start + by, end + by) for value, start, end in spans]


def output_logprobs(
    ids: list[int], part: OutputLogprobs | None, texts: dict[int, str] | None
) -> dict[str, Any]:
    """``output_token_logprobs`` and its companions, each as long as ``ids``."""
    if part is None:
        return {"output_token_logprobs": []}
    return {
        "output_token_logprobs": _triples(part.values, ids, texts),
        **_candidates("output", part.top, part.token_ids, texts),
    }


def input_logprobs(part: InputLogprobs | None, texts: dict[int, str] | None) -> dict[str, Any]:
    if part is None:
        return {"input_token_logprobs": []}
    return {
        "input_token_logprobs": _triples(part.values, part.ids, texts),
        **_candidates("input", part.top, part.token_ids, texts),
    }


def _candidates(
    side: str,
    top: TopLogprobs | None,
    token_ids: TopLogprobs | None,
    texts: dict[int, str] | None,
) -> dict[str, Any]:
    return {
        f"{side}_{name}_logprobs": [
            _triples(values, ids, texts) for ids, values in zip(part.ids, part.values, strict=True)
        ]
        for name, part in (("top", top), ("token_ids", token_ids))
        if part is not None
    }


def _triples(
    values: Iterable[float | None], ids: Iterable[int], texts: dict[int, str] | None
) -> list[Triple]:
    return [
        [value, token, texts[token] if texts is not None else None]
        for value, token in zip(values, ids, strict=True)
    ]


def tokens_of(row: StrRow) -> set[int]:
    """Every token id that the row's logprob lists name."""
    found = set(row.output_ids)
    for part in (row.output_logprobs, row.input_logprobs):
        if part is None:
            continue
        if isinstance(part, InputLogprobs):
            found.update(part.ids)
        for lists in (part.top, part.token_ids):
            for ids in lists.ids if lists is not None else ():
                found.update(ids)
    return found


def hidden_states(row: StrRow) -> list[list[float]]:
    """One list of ``width`` floats per position; the width is 0 where nothing was computed."""
    if row.hidden is None or not row.hidden.width:
        return []
    width, data = row.hidden.width, row.hidden.data
    return [list(values) for values in struct.iter_unpack(f"<{width}f", data)]


def as_base64(data: bytes | None) -> str:
    return base64.b64encode(data or b"").decode()
