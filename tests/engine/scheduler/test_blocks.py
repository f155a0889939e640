"""Reference-counted blocks."""

import pytest

from engine.scheduler.blocks import BlockPool


def test_a_block_is_free_again_when_its_last_holder_drops_it():
    pool = BlockPool(4)
    taken = pool.take(3)
    pool.hold(taken[:1])
    pool.drop(taken)
    assert pool.free == 3
    pool.check_integrity({taken[0]: 1})
    pool.drop(taken[:1])
    assert pool.free == 4


def test_no_block_is_given_twice():
    pool = BlockPool(5)
    assert sorted(pool.take(2) + pool.take(3)) == [0, 1, 2, 3, 4]


def test_taking_more_than_is_free_takes_nothing():
    pool = BlockPool(2)
    with pytest.raises(ValueError, match="3 blocks wanted, 2 free"):
        pool.take(3)
    assert pool.free == 2


def test_dropping_twice_and_sharing_a_free_block_are_noticed():
    pool = BlockPool(1)
    pool.drop(pool.take(1))
    with pytest.raises(AssertionError, match="dropped twice"):
        pool.drop([0])
    with pytest.raises(AssertionError, match="free"):
        pool.hold([0])


def test_the_integrity_check_compares_with_the_books_of_the_holders():
    pool = BlockPool(2)
    (block,) = pool.take(1)
    pool.check_integrity({block: 1})
    with pytest.raises(AssertionError, match=f"block {block}: 1 holders, 2 expected"):
        pool.check_integrity({block: 2})
