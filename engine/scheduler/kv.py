"""The KV space of one dp rank: places for running sequences, and the prefix cache behind them.

Path: core.py decides who runs; here a sequence gets blocks, grows, seals full blocks into the
cache, and gives everything back. Joins blocks.py (who holds what) and radix.py (what is in it).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from engine.messages import TokenizedGenerateReqInput
from engine.scheduler.blocks import BlockPool
from engine.scheduler.radix import Node, PrefixCache
from engine.scheduler.sequence import Sequence


@dataclass(frozen=True, slots=True)
class Flushed:
    """What a cache flush did, in blocks."""

    dropped: int
    kept: int  # held by live requests


def accepted_epochs(request: TokenizedGenerateReqInput, epoch: int) -> frozenset[int] | None:
    """Epochs whose KV the request accepts while ``epoch`` serves; None: any.

    ``group`` means epochs that the request's extra_key group used; as nothing crosses namespaces,
    every block it can meet is of its group. Requests without an extra_key are no group.
    """
    reuse = request.kv_reuse
    if reuse == "share" or (reuse == "group" and request.extra_key is not None):
        return None
    return frozenset((epoch,))


class KVSpace:
    """``num_blocks`` blocks of ``block_size`` tokens, held by live sequences and by the cache."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.total_tokens = num_blocks * block_size
        self._block_size = block_size
        self._pool = BlockPool(num_blocks)
        self._cache = PrefixCache(self._pool)

    @property
    def available(self) -> int:
        """Blocks that are free or can be made so without touching a live sequence."""
        return self._pool.free + self._cache.evictable

    @property
    def used_tokens(self) -> int:
        """Tokens of the blocks that are not available."""
        return self.total_tokens - self.available * self._block_size

    def match(self, sequence: Sequence, epoch: int) -> Node:
        """The end of the longest cached chain with which the sequence may begin."""
        contents = map(sequence.content, range(sequence.reusable_blocks()))
        accepted = accepted_epochs(sequence.request, epoch)
        return self._cache.match(sequence.namespace, contents, accepted)

    def demand(self, sequence: Sequence, node: Node) -> int:
        """Available blocks that it takes to begin behind ``node``."""
        fresh = sequence.blocks_needed - node.depth
        return fresh + self._cache.unlocked_on_path(node)

    def begin(self, sequence: Sequence, slot: int, node: Node) -> None:
        """Place the sequence with all blocks of the tokens it has; its demand is available."""
        self._cache.lock(node)
        path = node.path()
        shared = [step.block for step in path]
        self._pool.hold(shared)
        table = shared + self._take(sequence.blocks_needed - node.depth)
        sequence.take_place(slot, node, table, [step.runs for step in path])

    def grow(self, sequence: Sequence) -> None:
        """One block more; at least one is available."""
        sequence.table += self._take(1)

    def seal(self, sequence: Sequence) -> None:
        """Put blocks that became full into the cache, where others find them at once."""
        node = sequence.place
        for index in range(node.depth, len(sequence.block_runs)):
            node = self._cache.insert(
                node, sequence.content(index), sequence.block_runs[index], sequence.table[index]
            )
        sequence.node = node

    def release(self, sequence: Sequence) -> None:
        """Take everything back; sealed blocks live on in the cache until they are evicted."""
        self._cache.unlock(sequence.place)
        self._pool.drop(reversed(sequence.table))
        sequence.leave_place()

    def flush(self) -> Flushed:
        """Drop every cached block that no live sequence holds."""
        dropped = self._cache.evict(self._cache.size)
        return Flushed(dropped=dropped, kept=self._cache.size)

    def _take(self, count: int) -> list[int]:
        self._cache.evict(count - self._pool.free)
        return self._pool.take(count)

    def check_integrity(self, running: Iterable[Sequence]) -> None:
        """AssertionError if a block or a lock is lost or counted twice."""
        holders = Counter(node.block for node in self._cache.nodes())
        places = []
        for sequence in running:
            holders.update(sequence.table)
            places.append(sequence.place)
            written = sum(count for count, _ in sequence.kv_epochs())
            assert written == sequence.computed <= len(sequence.table) * self._block_size
        self._pool.check_integrity(holders)
        self._cache.check_integrity(places)
