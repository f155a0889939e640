"""Dump points of any torch module, for backends that run transformers' own modules.

Path: model/hf.py -> here -> the tap of capture.py. Hooks exist only inside ``hooked``, around one
armed step: outside of it the modules are as transformers made them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

from engine.dumps.capture import RowSpan, Tap
from engine.dumps.points import DumpPoint, Kind

LAYER = re.compile(r"(?:^|\.)(?:layers|h|blocks)\.(\d+)(?:\.|$)")
LOGITS = "lm_head"


def module_points(model: nn.Module, run: Callable[[], object]) -> list[DumpPoint]:
    """The points of ``model`` in the order in which its modules finish during ``run()``, one
    forward of any input. A module that never runs, or gives no tensor, is no point."""
    order: dict[str, dict[Kind, int | None]] = {}

    def note(name: str, module: nn.Module, inputs: Any, output: Any) -> None:
        kinds: dict[Kind, int | None] = {}
        if first_tensor(inputs) is not None:
            kinds["input"] = None
        if first_tensor(output) is not None:
            kinds["logits" if name == LOGITS else "output"] = None
        if isinstance(getattr(module, "weight", None), torch.Tensor):
            kinds["weight"] = None
        if kinds.keys() & {"output", "logits"}:
            order.setdefault(name, kinds)

    with _on_every_module(model, note):
        run()
    return [
        DumpPoint(name=name, layer=layer_of(name), shard_dim=kinds) for name, kinds in order.items()
    ]


@contextmanager
def hooked(
    model: nn.Module, tap: Tap, rows: Sequence[RowSpan], kept: Sequence[RowSpan]
) -> Iterator[None]:
    """One forward of a flat ``[1, tokens]`` batch under the tap.

    ``rows`` are of the batch's tokens, ``kept`` of those whose logits the output layer computes.
    """

    def call(name: str, module: nn.Module, inputs: Any, output: Any) -> None:
        spans = kept if name == LOGITS else rows
        weight = getattr(module, "weight", None)
        if isinstance(weight, torch.Tensor):
            tap(name, "weight", weight, None)
        _tap_rows(tap, name, "input", first_tensor(inputs), spans)
        kind: Kind = "logits" if name == LOGITS else "output"
        _tap_rows(tap, name, kind, first_tensor(output), spans)

    with _on_every_module(model, call):
        yield


def _tap_rows(
    tap: Tap, name: str, kind: Kind, tensor: torch.Tensor | None, spans: Sequence[RowSpan]
) -> None:
    if tensor is None or not spans or not tap.wants(name, kind):
        return
    flat = tensor[0] if tensor.shape[0] == 1 and tensor.dim() > 1 else tensor
    if flat.shape[0] != spans[-1].stop and flat.dim() == 3:  # heads come first: Gemma's query norm
        flat = flat.transpose(0, 1)
    tap(name, kind, flat, spans)


@contextmanager
def _on_every_module(
    model: nn.Module, call: Callable[[str, nn.Module, Any, Any], None]
) -> Iterator[None]:
    """``call(name, module, inputs, output)`` whenever a module below ``model`` finishes."""
    with ExitStack() as stack:
        for name, module in model.named_modules():
            if name:
                hook = _hook(name, call)
                stack.callback(module.register_forward_hook(hook, with_kwargs=True).remove)
        yield


def _hook(name: str, call: Callable[[str, nn.Module, Any, Any], None]) -> Callable[..., None]:
    def hook(
        module: nn.Module, positional: tuple[Any, ...], named: dict[str, Any], out: Any
    ) -> None:
        call(name, module, (*positional, *named.values()), out)

    return hook


def first_tensor(values: Any) -> torch.Tensor | None:
    """The first tensor among a module's inputs or outputs: the hidden states, by convention."""
    if isinstance(values, torch.Tensor):
        return values
    found = values if isinstance(values, tuple | list) else ()
    return next((value for value in found if isinstance(value, torch.Tensor)), None)


def layer_of(name: str) -> int | None:
    """The number of the layer that a module lies in, or is."""
    found = LAYER.search(name)
    return int(found[1]) if found else None


def row_spans(
    rids: Sequence[str], query_starts: Sequence[int], positions: Sequence[int]
) -> list[RowSpan]:
    """Spans of a flat batch: row r has the tokens ``query_starts[r]:query_starts[r + 1]``, the
    first of them at ``positions[r]`` of its context."""
    return [
        RowSpan(rid, query_starts[at], query_starts[at + 1], positions[at])
        for at, rid in enumerate(rids)
    ]


def kept_spans(rows: Sequence[RowSpan], keep: Sequence[int]) -> list[RowSpan]:
    """Spans of a tensor that holds only the tokens ``keep`` of the batch that ``rows`` tells."""
    spans: list[RowSpan] = []
    for at, token in enumerate(keep):
        row = next(span for span in rows if span.start <= token < span.stop)
        position = row.position + token - row.start
        last = spans[-1] if spans else None
        if last and last.rid == row.rid and position == last.position + at - last.start:
            spans[-1] = RowSpan(row.rid, last.start, at + 1, last.position)
        else:
            spans.append(RowSpan(row.rid, at, at + 1, position))
    return spans
