"""Runs of epochs, in the words of trainers."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from engine.messages import EpochLabel
from engine.provenance import label_runs, spans

LABELS = {
    1: EpochLabel(weight_version="default"),
    2: EpochLabel(weight_version="v2", token_step=10),
    3: EpochLabel(weight_version="v2", token_step=11),
    4: EpochLabel(weight_version="v3", token_step=11),
}
RUNS = st.lists(st.tuples(st.integers(1, 9), st.integers(1, 6)), max_size=8)


def test_an_answer_over_several_epochs_is_labelled_token_by_token():
    told = label_runs([(2, 1), (3, 2), (1, 3)], LABELS)
    assert told.token_steps == [None, None, 10, 10, 10, 11]
    assert told.weight_versions == [("default", 0, 2), ("v2", 2, 6)]
    assert told.epochs == [(1, 0, 2), (2, 2, 5), (3, 5, 6)]
    assert told.kv_token_steps == []


def test_keys_older_than_a_token_show_in_the_steps_of_the_context():
    told = label_runs([(1, 4)], LABELS, kv_runs=[(16, 2), (4, 3), (3, 4)])
    assert told.token_steps == [11]
    assert told.kv_token_steps == [(10, 0, 16), (11, 16, 23)]


def test_an_epoch_that_nobody_knows_is_told_so():
    told = label_runs([(2, 9)], LABELS)
    assert told.token_steps == [None, None] and told.weight_versions == [("unknown", 0, 2)]
    assert told.epochs == [(9, 0, 2)]


@given(RUNS)
def test_spans_tile_the_tokens_and_say_what_the_runs_said(runs):
    expected = [epoch for count, epoch in runs for _ in range(count)]
    found = spans(runs)
    assert [value for value, start, end in found for _ in range(start, end)] == expected
    assert all(a[2] == b[1] and a[0] != b[0] for a, b in zip(found, found[1:], strict=False))
    assert len(label_runs(runs, LABELS).token_steps) == len(expected)
