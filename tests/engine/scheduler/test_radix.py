"""The prefix cache as a tree: identity, locks, and who is evicted first."""

from engine.scheduler.blocks import BlockPool
from engine.scheduler.radix import Namespace, Node, PrefixCache

HERE = Namespace(None)


class Tree:
    """A cache of blocks of two tokens; ``add`` puts a chain in as a sequence would."""

    def __init__(self, blocks: int = 16) -> None:
        self.pool = BlockPool(blocks)
        self.cache = PrefixCache(self.pool)

    def add(self, *chain: tuple[int, int], namespace: Namespace = HERE, keep: bool = False) -> Node:
        """Insert (token, epoch) blocks below the root; unlocked again unless ``keep``."""
        node = self.cache.match(namespace, [], None)
        self.cache.lock(node)
        own = self.pool.take(len(chain))
        for block, (token, epoch) in zip(own, chain, strict=True):
            node = self.cache.insert(node, (token, token), ((2, epoch),), block)
        self.pool.drop(own)
        if not keep:
            self.cache.unlock(node)
        return node

    def find(
        self, *tokens: int, epochs: set[int] | None = None, namespace: Namespace = HERE
    ) -> list[tuple[int, ...]]:
        """Epochs of each block of the match."""
        wanted = None if epochs is None else frozenset(epochs)
        node = self.cache.match(namespace, [(token, token) for token in tokens], wanted)
        return [tuple(epoch for _, epoch in step.runs) for step in node.path()]


def test_the_longest_chain_of_equal_blocks_is_found():
    tree = Tree()
    tree.add((1, 0), (2, 0), (3, 0))
    assert len(tree.find(1, 2, 9)) == 2
    assert len(tree.find(1, 2, 3, 4)) == 3
    assert tree.find(2) == []


def test_equal_tokens_of_other_weights_are_another_block():
    tree = Tree()
    tree.add((1, 0), (2, 0))
    tree.add((1, 5), (2, 5))
    assert tree.cache.size == 4
    assert tree.find(1, 2, epochs={5}) == [(5,), (5,)]
    assert tree.find(1, 2, epochs={0}) == [(0,), (0,)]
    assert tree.find(1, 2, epochs={3}) == []


def test_a_match_under_one_epoch_stops_where_another_one_wrote():
    tree = Tree()
    tree.add((1, 0), (2, 1), (3, 1))
    assert tree.find(1, 2, 3, epochs={0}) == [(0,)]
    assert tree.find(1, 2, 3, epochs={1}) == []
    assert tree.find(1, 2, 3, epochs={0, 1}) == [(0,), (1,), (1,)]


def test_of_two_chains_of_equal_length_the_pure_one_is_taken():
    tree = Tree()
    tree.add((1, 0), (2, 7))
    tree.add((1, 3), (2, 3))
    assert tree.find(1, 2) == [(3,), (3,)]


def test_of_two_pure_chains_of_equal_length_the_newer_one_is_taken():
    tree = Tree()
    for epoch in (4, 6, 5):
        tree.add((1, epoch), (2, epoch))
    assert tree.find(1, 2) == [(6,), (6,)]


def test_a_longer_chain_is_taken_before_a_purer_one():
    tree = Tree()
    tree.add((1, 3))
    tree.add((1, 0), (2, 3))
    assert tree.find(1, 2) == [(0,), (3,)]


def test_nothing_crosses_namespaces():
    tree = Tree()
    tree.add((1, 0), namespace=Namespace("tenant-a"))
    assert tree.find(1, namespace=Namespace("tenant-a")) == [(0,)]
    assert tree.find(1, namespace=Namespace("tenant-b")) == []
    assert tree.find(1, namespace=Namespace("tenant-a", adapter=("lora", 1))) == []
    assert tree.find(1) == []


def test_a_block_that_is_known_already_is_not_cached_twice():
    tree = Tree()
    first = tree.add((1, 0), (2, 0))
    assert tree.add((1, 0), (2, 0)) is first
    assert (tree.cache.size, tree.pool.free) == (2, 14)


def test_the_least_recently_used_leaf_goes_first_and_its_parent_after_it():
    tree = Tree()
    tree.add((1, 0), (2, 0))
    tree.add((3, 0))
    tree.add((1, 0), (4, 0))
    assert tree.cache.evict(1) == 1
    assert tree.find(1, 2) == [(0,)]
    assert tree.cache.evict(1) == 1
    assert tree.find(3) == []
    assert tree.find(1, 4) == [(0,), (0,)]
    assert tree.cache.evict(9) == 2
    assert tree.pool.free == 16


def test_use_makes_a_leaf_young_again():
    tree = Tree()
    tree.add((1, 0))
    tree.add((2, 0))
    tree.add((1, 0))
    tree.cache.evict(1)
    assert (tree.find(1), tree.find(2)) == ([(0,)], [])


def test_what_a_sequence_locks_stays_with_all_its_parents():
    tree = Tree()
    node = tree.add((1, 0), (2, 0), keep=True)
    tree.add((1, 0), (3, 0))
    assert tree.cache.evictable == 1
    assert tree.cache.evict(9) == 1
    assert tree.find(1, 2) == [(0,), (0,)]
    tree.cache.check_integrity([node])
    tree.cache.unlock(node)
    assert tree.cache.evict(9) == 2


def test_a_lock_says_beforehand_how_many_blocks_it_takes_away():
    tree = Tree()
    held = tree.add((1, 0), keep=True)
    tree.add((1, 0), (2, 0), (3, 0))
    node = tree.cache.match(HERE, [(1, 1), (2, 2), (3, 3)], None)
    before = tree.cache.evictable
    assert tree.cache.unlocked_on_path(node) == 2
    tree.cache.lock(node)
    assert tree.cache.evictable == before - 2
    assert tree.cache.unlocked_on_path(node) == 0
    tree.cache.check_integrity([held, node])


def test_the_queue_of_leaves_does_not_grow_with_use():
    tree = Tree()
    for _ in range(500):
        tree.add((1, 0), (2, 0))
    assert len(tree.cache._leaves) == 1


def test_an_empty_namespace_is_forgotten():
    tree = Tree()
    for number in range(50):
        tree.add((1, 0), namespace=Namespace(f"session-{number}"))
        tree.cache.evict(1)
    assert not tree.cache._roots
