"""KV blocks as numbers: who holds which, which are free.

Path: core.py and radix.py -> here. The tensors behind the numbers live in model/kv_cache.py.

A block is held by every sequence that has it in its table and, once, by the prefix cache. It is
free when nobody holds it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping


class BlockPool:
    """``num_blocks`` reference-counted blocks, numbered from 0."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._holders = [0] * num_blocks
        self._free = list(range(num_blocks - 1, -1, -1))

    @property
    def free(self) -> int:
        """How many blocks nobody holds."""
        return len(self._free)

    def take(self, count: int) -> list[int]:
        """``count`` free blocks, each with one holder; ValueError when there are not so many."""
        if count > len(self._free):
            raise ValueError(f"{count} blocks wanted, {len(self._free)} free")
        taken = [self._free.pop() for _ in range(count)]
        for block in taken:
            self._holders[block] = 1
        return taken

    def hold(self, blocks: Iterable[int]) -> None:
        """One holder more for each block, which somebody must hold already."""
        for block in blocks:
            assert self._holders[block] > 0, f"block {block} is free and cannot be shared"
            self._holders[block] += 1

    def drop(self, blocks: Iterable[int]) -> None:
        """One holder less for each block; the last one frees it."""
        for block in blocks:
            assert self._holders[block] > 0, f"block {block} is dropped twice"
            self._holders[block] -= 1
            if not self._holders[block]:
                self._free.append(block)

    def check_integrity(self, holders: Mapping[int, int]) -> None:
        """AssertionError unless ``holders`` (block: count, by the callers' books) is true."""
        for block, count in enumerate(self._holders):
            expected = holders.get(block, 0)
            assert count == expected, f"block {block}: {count} holders, {expected} expected"
        assert sorted(self._free) == [
            block for block, count in enumerate(self._holders) if not count
        ], "the free list is not the set of blocks without a holder"
