"""Release and resume of a rank's memory as states."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.errors import BadRequest
from engine.scheduler.memory import TAGS, Memory


class Storages:
    """Complains like a real allocator: nothing is released or restored twice."""

    def __init__(self) -> None:
        self.there = set(TAGS)

    def release(self, tag: str) -> None:
        self.there.remove(tag)

    def restore(self, tag: str) -> None:
        assert tag not in self.there
        self.there.add(tag)


MOVES = st.lists(st.tuples(st.sampled_from(["release", "restore", "loaded"]), st.sets(
    st.sampled_from(TAGS), min_size=1)), max_size=12)  # fmt: skip


@given(moves=MOVES)
def test_any_order_of_moves_keeps_the_books(moves):
    storages = Storages()
    memory = Memory(storages)
    content = set(TAGS)
    for move, tags in moves:
        if move == "release":
            memory.release(tags)
            content -= tags
        elif move == "restore":
            needs_weights = memory.restore(tags)
            content |= tags & {"kv_cache"}
            assert needs_weights == ("weights" in tags and "weights" not in content)
        elif "weights" in storages.there:
            memory.loaded()
            content.add("weights")
        assert set(memory.absent) == set(TAGS) - content


def test_weights_that_came_back_empty_take_only_a_whole_set():
    memory = Memory(Storages())
    assert memory.takes_weights(complete=False)
    memory.release(["weights"])
    assert not memory.takes_weights(complete=True)
    assert memory.restore(["weights"])
    assert memory.takes_weights(complete=True) and not memory.takes_weights(complete=False)
    memory.loaded()
    assert memory.takes_weights(complete=False) and memory.absent == []


def test_an_unknown_tag_is_refused_before_anything_is_done():
    storages = Storages()
    with pytest.raises(BadRequest, match="unknown memory tag 'soul'"):
        Memory(storages).release(["weights", "soul"])
    assert storages.there == set(TAGS)
