"""A step plan as flat tensors: one ragged batch of ``tokens`` positions in ``rows`` sequences.

Path: runner.py -> here -> native.py or hf.py. Prefill chunks, cached prefixes and decode rows are
the same thing here: some new tokens behind some tokens whose keys and values are in the cache.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from engine.model.slots import SlotTable
from engine.scheduler.plan import PlanRow


@dataclass(slots=True, kw_only=True)
class Batch:
    """``tokens`` new tokens of ``rows`` rows, in the order of the plan.

    token_ids, positions, kv_slots: int64 [tokens]; ``kv_slots`` is where a token's K and V go.
    query_starts: int32 [rows + 1], the tokens of row r are ``query_starts[r]:query_starts[r+1]``.
    context_lengths: int32 [rows], tokens of the row that are in the cache after this step.
    block_tables: int32 [rows, blocks of the longest row], padded with 0.
    longest_chunk, longest_context: the most new tokens and the longest context of a row, as far
    as the host knows them; 0 says that it does not.
    """

    token_ids: torch.Tensor
    positions: torch.Tensor
    kv_slots: torch.Tensor
    query_starts: torch.Tensor
    context_lengths: torch.Tensor
    block_tables: torch.Tensor
    block_size: int
    longest_chunk: int = 0
    longest_context: int = 0

    @property
    def rows(self) -> int:
        return self.context_lengths.shape[0]

    @property
    def tokens(self) -> int:
        return self.token_ids.shape[0]

    def to(self, device: torch.device) -> Batch:
        """The same batch with its tensors on ``device``."""
        return Batch(
            token_ids=self.token_ids.to(device, non_blocking=True),
            positions=self.positions.to(device, non_blocking=True),
            kv_slots=self.kv_slots.to(device, non_blocking=True),
            query_starts=self.query_starts.to(device, non_blocking=True),
            context_lengths=self.context_lengths.to(device, non_blocking=True),
            block_tables=self.block_tables.to(device, non_blocking=True),
            block_size=self.block_size,
            longest_chunk=self.longest_chunk,
            longest_context=self.longest_context,
        )

    def context_slots(self, row: int) -> torch.Tensor:
        """int64 [context]: the cache slots of everything that row may look at, by position."""
        length = int(self.context_lengths[row])
        blocks = self.block_tables[row, : -(-length // self.block_size)].long()
        offsets = torch.arange(self.block_size, device=blocks.device)
        return (blocks[:, None] * self.block_size + offsets).flatten()[:length]


def build(rows: list[PlanRow], slots: SlotTable, block_size: int) -> Batch:
    """The batch of ``rows``, whose new blocks ``slots`` has already seen."""
    counts = np.fromiter((len(row.token_ids) for row in rows), np.int32, len(rows))
    starts = np.fromiter((row.start for row in rows), np.int32, len(rows))
    query_starts = np.zeros(len(rows) + 1, np.int32)
    np.cumsum(counts, out=query_starts[1:])
    tables = _block_tables(rows, slots)
    row_of = np.repeat(np.arange(len(rows)), counts)
    positions = np.arange(int(query_starts[-1])) - query_starts[row_of] + starts[row_of]
    kv_slots = tables[row_of, positions // block_size].astype(np.int64) * block_size
    token_ids = np.fromiter((t for row in rows for t in row.token_ids), np.int64, len(positions))
    return Batch(
        token_ids=torch.from_numpy(token_ids),
        positions=torch.from_numpy(positions.astype(np.int64)),
        kv_slots=torch.from_numpy(kv_slots + positions % block_size),
        query_starts=torch.from_numpy(query_starts),
        context_lengths=torch.from_numpy(starts + counts),
        block_tables=torch.from_numpy(tables),
        block_size=block_size,
        longest_chunk=int(counts.max()),
        longest_context=int((starts + counts).max()),
    )


def _block_tables(rows: list[PlanRow], slots: SlotTable) -> np.ndarray:
    blocks = [slots[row.slot].blocks for row in rows]
    tables = np.zeros((len(rows), max(map(len, blocks))), np.int32)
    for table, own in zip(tables, blocks, strict=True):
        table[: len(own)] = own
    return tables
