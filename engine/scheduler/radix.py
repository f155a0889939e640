"""Prefix cache: which full KV blocks can begin the context of a new sequence.

Path: core.py -> here -> blocks.py. SGLang's radix cache at block granularity: one node per block.

The identity of a cached block is its parent's identity, its content and the epoch runs of its
slots, below one root per ``Namespace``. So equal tokens written by other weights are another node,
and nothing is ever shared between namespaces. A live sequence locks the path from its node to the
root; nodes without a lock are evicted, leaves first, least recently used first.
"""

from __future__ import annotations

import heapq
import itertools
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from engine.scheduler.blocks import BlockPool

Runs = tuple[tuple[int, int], ...]  # (count, epoch) over the slots of one block
Content = tuple[int, ...]  # token ids of one block; hashes of media in the block join them here


class Namespace(NamedTuple):
    """What must be equal for two requests to share KV at all."""

    extra_key: str | None
    adapter: tuple[str, int] | None = None  # id and generation


class Node:
    """One cached block, or a root (no parent, no block).

    ``depth`` counts the blocks from the root to here and ``epochs`` are all epochs in them.
    """

    __slots__ = (
        "block",
        "children",
        "content",
        "depth",
        "epochs",
        "locks",
        "namespace",
        "parent",
        "queued",
        "runs",
        "used",
    )

    def __init__(self, namespace: Namespace, parent: Node | None = None) -> None:
        self.namespace = namespace
        self.parent = parent
        self.content: Content = ()
        self.runs: Runs = ()
        self.block = -1
        self.depth: int = 0 if parent is None else parent.depth + 1
        self.epochs: frozenset[int] = frozenset() if parent is None else parent.epochs
        self.children: dict[Content, list[Node]] = {}
        self.locks = 0
        self.used = 0  # the cache's clock when the last lock went
        self.queued = False  # stands in the cache's queue of leaves

    def path(self) -> list[Node]:
        """The nodes from the root's child down to this one; a root has none."""
        nodes = list(itertools.takewhile(lambda node: node.parent is not None, self.upwards()))
        return nodes[::-1]

    def upwards(self) -> Iterator[Node]:
        """This node, its parent and so on to the root."""
        node: Node | None = self
        while node is not None:
            yield node
            node = node.parent


class PrefixCache:
    """The tree of cached blocks; each node is one holder of its block in ``pool``.

    Between ``match`` and ``lock`` of its answer nothing may be evicted.
    """

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self._roots: dict[Namespace, Node] = {}
        self._leaves: list[tuple[int, int, Node]] = []  # heap of (used, tie-breaker, leaf)
        self._ties = itertools.count()
        self._clock = 0
        self.size = 0  # cached blocks
        self.evictable = 0  # of them, those that no live sequence locks

    def match(
        self, namespace: Namespace, contents: Iterable[Content], epochs: frozenset[int] | None
    ) -> Node:
        """The end of the longest cached chain that begins with ``contents``; a root for no hit.

        Only blocks written under ``epochs`` count; None allows every epoch. Of several longest
        chains the purest wins (fewest epochs), then the newest.
        """
        level = [self._roots.get(namespace) or Node(namespace)]
        for content in contents:
            below = [
                child
                for node in level
                for child in node.children.get(content, ())
                if epochs is None or child.epochs <= epochs
            ]
            if not below:
                break
            level = below
        return min(level, key=lambda node: (len(node.epochs), -max(node.epochs, default=0)))

    def lock(self, node: Node) -> None:
        """Keep the path of ``node``; a root joins the tree with its first lock."""
        for step in node.upwards():
            if step.parent is None:
                self._roots[step.namespace] = step
            elif not step.locks:
                self.evictable -= 1
            step.locks += 1

    def unlock(self, node: Node) -> None:
        """Take back one ``lock`` (or the lock of an ``insert`` with those of its parents)."""
        self._clock += 1
        for step in node.upwards():
            step.locks -= 1
            if step.locks:
                continue
            if step.parent is not None:
                self.evictable += 1
                step.used = self._clock
            self._maybe_leaf(step)

    def unlocked_on_path(self, node: Node) -> int:
        """How many evictable blocks a lock of ``node`` would take away."""
        free = itertools.takewhile(lambda step: not step.locks and step.depth, node.upwards())
        return sum(1 for _ in free)

    def insert(self, parent: Node, content: Content, runs: Runs, block: int) -> Node:
        """The child of ``parent`` with this identity, locked once more.

        ``parent`` is locked by the caller. A new child holds ``block``; when the identity is known
        already its own block stays, and ``block`` remains the caller's alone.
        """
        siblings = parent.children.setdefault(content, [])
        for node in siblings:
            if node.runs == runs:
                break
        else:
            node = Node(parent.namespace, parent)
            node.content, node.runs, node.block = content, runs, block
            written = {epoch for _, epoch in runs}
            if not written <= parent.epochs:
                node.epochs = parent.epochs | written
            siblings.append(node)
            self._pool.hold((block,))
            self.size += 1
            self.evictable += 1
        if not node.locks:
            self.evictable -= 1
        node.locks += 1
        return node

    def evict(self, count: int) -> int:
        """Free up to ``count`` blocks that no live sequence locks; returns how many were freed."""
        freed = 0
        while freed < count and self._leaves:
            used, _, node = heapq.heappop(self._leaves)
            node.queued = False
            if node.locks or node.children:
                continue
            if node.used != used:  # used again since it was queued: back to its new place
                self._maybe_leaf(node)
                continue
            self._remove(node)
            freed += 1
        return freed

    def _remove(self, node: Node) -> None:
        parent = node.parent
        assert parent is not None
        siblings = parent.children[node.content]
        siblings.remove(node)
        if not siblings:
            del parent.children[node.content]
        self.size -= 1
        self.evictable -= 1
        self._pool.drop((node.block,))
        self._maybe_leaf(parent)

    def _maybe_leaf(self, node: Node) -> None:
        """Queue an unlocked leaf for eviction; forget a root that has neither lock nor child."""
        if node.locks or node.children or node.queued:
            return
        if node.parent is None:
            del self._roots[node.namespace]
        else:
            node.queued = True
            heapq.heappush(self._leaves, (node.used, next(self._ties), node))

    def nodes(self) -> Iterator[Node]:
        """Every cached block, parents before children."""
        waiting = list(self._roots.values())
        while waiting:
            node = waiting.pop()
            if node.parent is not None:
                yield node
            waiting += itertools.chain.from_iterable(node.children.values())

    def check_integrity(self, tenants: Iterable[Node]) -> None:
        """AssertionError unless the locks are exactly those of ``tenants``, one each."""
        locks = Counter(step for tenant in tenants for step in tenant.upwards())
        nodes = list(self.nodes())
        for node in (*self._roots.values(), *nodes):
            assert node.locks == locks.pop(node, 0), f"node of block {node.block}: wrong locks"
            unlocked_leaf = not node.locks and not node.children
            assert node.parent is None or not unlocked_leaf or node.queued, "a leaf is lost"
            assert node.parent is not None or not unlocked_leaf, "an empty root is kept"
        assert not locks, "a sequence locks a node outside the tree"
        assert self.size == len(nodes)
        assert self.evictable == sum(1 for node in nodes if not node.locks)
