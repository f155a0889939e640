"""Decode steps of a tiny decoder, eager and replayed from graphs, on a CUDA device."""

from __future__ import annotations

from dataclasses import fields, replace

import torch

from engine.model.cuda_graphs import DecodeGraphs
from engine.model.inputs import Batch
from tests.kernels.inputs import relative_error
from tests.kernels.tiny_decoder import TinyDecoder, batch_of

BLOCK, BLOCKS = 16, 4
ROWS = (1, 3, 7, 13, 16)


def on_device(batch: Batch) -> Batch:
    moved = {
        field.name: value.cuda()
        for field in fields(batch)
        if isinstance(value := getattr(batch, field.name), torch.Tensor)
    }
    return replace(batch, **moved)


def largest_graph_error(dtype: torch.dtype) -> float:
    """Over batches of ROWS rows, each decoding four tokens from position 30 on."""
    eager, replayed = (
        TinyDecoder(slots=(1 + max(ROWS) * BLOCKS) * BLOCK, dtype=dtype, device="cuda")
        for _ in range(2)
    )
    graphs = DecodeGraphs(
        replayed,
        largest=max(ROWS),
        max_blocks=BLOCKS,
        block_size=BLOCK,
        device=torch.device("cuda"),
    )
    graphs.capture()
    errors = []
    for rows in ROWS:
        tables = [[1 + row * BLOCKS + block for block in range(BLOCKS)] for row in range(rows)]
        prompts = [[(7 * row + at) % 97 for at in range(30)] for row in range(rows)]
        prefill = on_device(batch_of(prompts, [0] * rows, tables, block_size=BLOCK))
        eager(prefill), graphs(prefill)
        for offset in range(4):
            chunks, starts = [[row + offset] for row in range(rows)], [30 + offset] * rows
            step = batch_of(chunks, starts, tables, block_size=BLOCK)
            errors.append(relative_error(graphs(step), eager(on_device(step))))
    if graphs.replayed != 4 * len(ROWS):
        raise AssertionError(f"{graphs.eager} of {graphs.replayed + graphs.eager} steps were eager")
    return max(errors)
