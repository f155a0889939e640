"""CUDA graphs for decode steps: one captured forward per batch bucket, replayed on padded inputs.

Path: torch_runner.py -> here -> native.py. A decode step of a small model is bound by the launches
of its kernels; a replay makes one launch of them all. A step that no graph fits (it prefills, or is
larger than the largest bucket) runs eagerly.

What a captured forward must keep: it reads its inputs from the tensors of the ``Batch`` it was
captured with, computes nothing on the host from their values, and its weights and cache stay in
their storages (a weight commit copies into them, DESIGN 6). A padded row has context length 0 and
kv slot -1: ``kernels.store_kv`` skips it and ``kernels.paged_attention`` answers zeros. With tp > 1
the collectives inside must be NCCL's.

Written where there was no GPU: the buckets and the padding are tested on a CPU, and so is
``DecodeGraphs`` with a capture that only calls again; ``CudaCapture`` has never run.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Protocol

import torch

from engine.errors import ConfigError
from engine.model.inputs import Batch

Forward = Callable[[Batch], torch.Tensor]  # -> logits [rows, vocabulary]
Replay = Callable[[], torch.Tensor]

_WARM_UPS = 2  # the first compiles the kernels, the second finds the allocator settled


def buckets_up_to(largest: int) -> tuple[int, ...]:
    """1, 2, 4, 8, 16, 24, 32, ... ``largest`` rows.

    Steps of 8, and of a quarter of the size beyond 32, so a padded batch is never more than a
    quarter (or 7 rows) larger than the batch in it, and 256 rows take 19 graphs.
    """
    if largest < 1:
        raise ConfigError(f"the largest decode batch must be at least 1 row, got {largest}")
    sizes = [size for size in (1, 2, 4, 8) if size < largest]
    size = 8
    while (size := size + max(8, 1 << (size.bit_length() - 3))) < largest:
        sizes.append(size)
    return (*sizes, largest)


def bucket_of(batch: Batch, buckets: tuple[int, ...], max_blocks: int) -> int | None:
    """The smallest bucket that holds ``batch``; None if it is no decode step or fits none."""
    if batch.tokens != batch.rows or batch.block_tables.shape[1] > max_blocks:
        return None
    return next((size for size in buckets if size >= batch.rows), None)


class StaticInputs:
    """The tensors that all graphs read: a batch of ``rows`` decode rows, at fixed addresses."""

    def __init__(
        self, *, rows: int, max_blocks: int, block_size: int, device: torch.device
    ) -> None:
        def whole(*shape: int) -> torch.Tensor:
            return torch.zeros(shape, dtype=torch.int64, device=device)

        self._batch = Batch(
            token_ids=whole(rows),
            positions=whole(rows),
            kv_slots=whole(rows),
            query_starts=torch.arange(rows + 1, dtype=torch.int32, device=device),
            context_lengths=torch.zeros(rows, dtype=torch.int32, device=device),
            block_tables=torch.zeros((rows, max_blocks), dtype=torch.int32, device=device),
            block_size=block_size,
        )
        self.pad(0, rows)

    def view(self, rows: int) -> Batch:
        """The first ``rows`` rows, sharing the memory of the whole."""
        whole = self._batch
        return Batch(
            token_ids=whole.token_ids[:rows],
            positions=whole.positions[:rows],
            kv_slots=whole.kv_slots[:rows],
            query_starts=whole.query_starts[: rows + 1],
            context_lengths=whole.context_lengths[:rows],
            block_tables=whole.block_tables[:rows],
            block_size=whole.block_size,
        )

    def fill(self, batch: Batch, rows: int) -> None:
        """Copies a decode batch to the front and pads up to ``rows``; from any device."""
        inside = self.view(batch.rows)
        inside.token_ids.copy_(batch.token_ids, non_blocking=True)
        inside.positions.copy_(batch.positions, non_blocking=True)
        inside.kv_slots.copy_(batch.kv_slots, non_blocking=True)
        inside.context_lengths.copy_(batch.context_lengths, non_blocking=True)
        width = batch.block_tables.shape[1]
        inside.block_tables[:, :width].copy_(batch.block_tables, non_blocking=True)
        self.pad(batch.rows, rows)

    def pad(self, first: int, last: int) -> None:
        """Makes rows ``first`` to ``last`` rows of nothing; their block tables are never read."""
        whole = self._batch
        whole.token_ids[first:last] = 0
        whole.positions[first:last] = 0
        whole.kv_slots[first:last] = -1
        whole.context_lengths[first:last] = 0


class Capture(Protocol):
    """Turns a computation into one that can be repeated on the same memory."""

    def __call__(self, compute: Replay) -> Replay: ...


class CudaCapture:
    """Captures on a stream of its own; all graphs share one memory pool."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, compute: Replay) -> Replay:
        current = torch.cuda.current_stream()
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            for _ in range(_WARM_UPS):
                compute()
        current.wait_stream(self._stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream):
            output = compute()

        def replay() -> torch.Tensor:
            graph.replay()
            return output

        return replay


class DecodeGraphs:
    """A forward that replays a graph where one fits.

    ``forward`` gets a ``Batch`` on ``device`` and returns the logits of every row. The result of a
    call lies in the graph's memory: it is good until the next call.
    """

    def __init__(
        self,
        forward: Forward,
        *,
        largest: int,
        max_blocks: int,
        block_size: int,
        device: torch.device,
        capture: Capture | None = None,
    ) -> None:
        self.buckets = buckets_up_to(largest)
        self.replayed = self.eager = 0  # steps of either kind so far
        self._forward = forward
        self._max_blocks = max_blocks
        self._inputs = StaticInputs(
            rows=largest, max_blocks=max_blocks, block_size=block_size, device=device
        )
        self._capture = capture or CudaCapture(device)
        self._replays: dict[int, Replay] = {}

    @torch.inference_mode()
    def capture(self) -> None:
        """Captures every bucket, the largest first, so that the others find its memory in the pool.

        A second or so per bucket; call it before the first request. Rows of nothing are computed.
        """
        self._inputs.pad(0, self.buckets[-1])
        for rows in reversed(self.buckets):
            batch = self._inputs.view(rows)
            self._replays[rows] = self._capture(partial(self._forward, batch))

    def __call__(self, batch: Batch) -> torch.Tensor:
        """Logits [rows, vocabulary] of a decode batch; of another one what ``forward`` answers.

        The tensors of ``batch`` may be on the host for a replay; an eager step gets them as they
        are.
        """
        rows = bucket_of(batch, self.buckets, self._max_blocks)
        if rows is None or rows not in self._replays:
            self.eager += 1
            return self._forward(batch)
        self._inputs.fill(batch, rows)
        self.replayed += 1
        return self._replays[rows]()[: batch.rows]
