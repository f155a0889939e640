"""Which dp rank takes a request: the one that has to compute the least to answer it. Pure.

The router knows prefixes only by hash: for each prompt it remembers, per rank, the hashes of the
first 1, 2, 4, ... blocks. The cost of a rank is what it still holds for open requests less the
tokens of this prompt that it has cached already: a long shared prefix outweighs some load, a short
one does not.
"""

from __future__ import annotations

import zlib
from array import array
from collections import OrderedDict
from collections.abc import Mapping

REMEMBERED = 4_096  # prefixes per rank


def prefix_hashes(input_ids: list[int], block_tokens: int, extra_key: str | None) -> list[int]:
    """Hashes of the first 1, 2, 4, ... blocks of the prompt, shortest first."""
    seed = zlib.crc32((extra_key or "").encode())
    hashes = []
    blocks, done = 1, 0
    while blocks * block_tokens <= len(input_ids):
        seed = zlib.crc32(array("q", input_ids[done : blocks * block_tokens]).tobytes(), seed)
        hashes.append(seed)
        done = blocks * block_tokens
        blocks *= 2
    return hashes


class Dispatcher:
    """Chooses ranks and remembers what it sent where."""

    def __init__(self, dp: int, block_tokens: int) -> None:
        self._block_tokens = block_tokens
        self._known: list[OrderedDict[int, None]] = [OrderedDict() for _ in range(dp)]
        self._turn = 0

    def forget(self, dp: int) -> None:
        """The rank restarted: its cache is gone."""
        self._known[dp].clear()

    def choose(
        self, input_ids: list[int], extra_key: str | None, load_tokens: Mapping[int, int]
    ) -> int:
        """A rank among the keys of ``load_tokens`` (tokens that each rank still has to compute
        or hold for open requests)."""
        hashes = prefix_hashes(input_ids, self._block_tokens, extra_key)
        self._turn += 1
        ranks = sorted(load_tokens)
        first = self._turn % len(ranks)  # ties go round
        best = min(
            ranks[first:] + ranks[:first],
            key=lambda rank: load_tokens[rank] - self._cached_tokens(rank, hashes),
        )
        self._remember(best, hashes)
        return best

    def _cached_tokens(self, rank: int, hashes: list[int]) -> int:
        known = self._known[rank]
        for doublings in range(len(hashes) - 1, -1, -1):
            if hashes[doublings] in known:
                return self._block_tokens << doublings
        return 0

    def _remember(self, rank: int, hashes: list[int]) -> None:
        known = self._known[rank]
        for prefix in hashes:
            known[prefix] = None
            known.move_to_end(prefix)
        while len(known) > REMEMBERED:
            known.popitem(last=False)


def detokenizer_of(rid: str, count: int) -> int:
    """The detokenizer of a request: sticky per rid, spread over all of them."""
    return zlib.crc32(rid.encode()) % count
