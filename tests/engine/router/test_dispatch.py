"""Choice of dp rank and detokenizer."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from engine.router.dispatch import Dispatcher, detokenizer_of, prefix_hashes

IDS = st.lists(st.integers(0, 50_000), max_size=300)


def test_equal_ranks_take_turns():
    dispatcher = Dispatcher(4, block_tokens=16)
    chosen = Counter(dispatcher.choose([i], None, dict.fromkeys(range(4), 0)) for i in range(100))
    assert sorted(chosen.values()) == [25, 25, 25, 25]


def test_the_rank_that_has_the_prefix_wins_while_it_is_worth_it():
    dispatcher = Dispatcher(2, block_tokens=16)
    prompt = list(range(256))
    first = dispatcher.choose(prompt, None, {0: 0, 1: 0})
    other = 1 - first
    assert dispatcher.choose(prompt + [7], None, {first: 200, other: 0}) == first
    assert dispatcher.choose(prompt + [8], None, {first: 400, other: 0}) == other


def test_another_extra_key_shares_no_prefix():
    dispatcher = Dispatcher(2, block_tokens=16)
    prompt = list(range(64))
    first = dispatcher.choose(prompt, "tenant-a", {0: 0, 1: 0})
    assert dispatcher.choose(prompt, "tenant-b", {first: 10, 1 - first: 0}) == 1 - first


def test_a_restarted_rank_has_forgotten_its_prefixes():
    dispatcher = Dispatcher(2, block_tokens=16)
    prompt = list(range(64))
    first = dispatcher.choose(prompt, None, {0: 0, 1: 0})
    dispatcher.forget(first)
    assert dispatcher.choose(prompt, None, {first: 10, 1 - first: 0}) == 1 - first


@given(ids=IDS, loads=st.dictionaries(st.integers(0, 3), st.integers(0, 10_000), min_size=1))
def test_only_offered_ranks_are_chosen(ids, loads):
    assert Dispatcher(4, block_tokens=16).choose(ids, None, loads) in loads


@given(ids=IDS, tail=IDS)
def test_a_longer_prompt_keeps_the_hashes_of_its_prefix(ids, tail):
    short = prefix_hashes(ids, 16, None)
    assert prefix_hashes(ids + tail, 16, None)[: len(short)] == short


def test_one_worker_s_requests_spread_over_all_detokenizers():
    """E8: the choice is by rid, not by the worker's address."""
    counts = Counter(detokenizer_of(f"request-{i}", 4) for i in range(100))
    assert len(counts) == 4 and min(counts.values()) >= 10
