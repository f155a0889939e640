"""Decode graphs: buckets, padding, and when a step stays eager. The capture here calls again."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine.errors import ConfigError
from engine.messages import SamplingParams
from engine.model.cuda_graphs import DecodeGraphs, Replay, StaticInputs, bucket_of, buckets_up_to
from engine.model.inputs import Batch
from engine.model.runner import make_runner
from tests.engine.model import tiny
from tests.engine.model.conftest import engine_config
from tests.engine.model.driver import Driver
from tests.kernels.tiny_decoder import TinyDecoder, batch_of

BLOCK = 4
TABLES = [[5, 2], [7, 1, 3], [6]]


def decode(rows: int) -> Batch:
    """Row r decodes token r at position 3, the last of its only block r + 1."""
    chunks, tables = [[row] for row in range(rows)], [[row + 1] for row in range(rows)]
    return batch_of(chunks, [3] * rows, tables, block_size=BLOCK)


@given(st.integers(1, 2000))
def test_buckets_grow_to_the_largest_and_pad_by_at_most_a_quarter(largest: int):
    buckets = buckets_up_to(largest)
    assert buckets[-1] == largest
    assert list(buckets) == sorted(set(buckets))
    for smaller, larger in zip(buckets, buckets[1:], strict=False):
        assert larger - smaller <= max(8, (smaller + 3) // 4)


def test_the_first_buckets_are_those_that_are_used_most():
    assert buckets_up_to(64) == (1, 2, 4, 8, 16, 24, 32, 40, 48, 56, 64)


def test_no_rows_at_all_are_refused():
    with pytest.raises(ConfigError, match="at least 1 row"):
        buckets_up_to(0)


@given(st.integers(1, 40), st.integers(1, 40))
def test_a_decode_batch_takes_the_smallest_bucket_that_holds_it(rows: int, largest: int):
    buckets = buckets_up_to(largest)
    found = bucket_of(decode(rows), buckets, max_blocks=1)
    assert found == min((size for size in buckets if size >= rows), default=None)


def test_a_prefill_and_a_context_beyond_the_tables_take_no_bucket():
    prefill = batch_of([[1, 2], [3]], [0, 0], [[1], [2]], block_size=BLOCK)
    assert bucket_of(prefill, (1, 2, 4), max_blocks=1) is None
    assert bucket_of(batch_of([[1]], [5], [[1, 2]], block_size=BLOCK), (1,), max_blocks=1) is None


def test_what_an_earlier_batch_left_behind_is_padding_for_a_smaller_one():
    inputs = StaticInputs(rows=8, max_blocks=2, block_size=BLOCK, device=torch.device("cpu"))
    addresses = [t.data_ptr() for t in (inputs.view(8).token_ids, inputs.view(2).block_tables)]
    inputs.fill(decode(7), 8)
    inputs.fill(decode(3), 4)
    view = inputs.view(4)
    assert view.token_ids.tolist() == [0, 1, 2, 0]
    assert view.kv_slots.tolist() == [7, 11, 15, -1]
    assert view.context_lengths.tolist() == [4, 4, 4, 0]
    assert view.query_starts.tolist() == [0, 1, 2, 3, 4]
    assert addresses == [view.token_ids.data_ptr(), view.block_tables.data_ptr()]


class CallsAgain:
    """A capture without a device: a replay computes on the same tensors once more."""

    def __init__(self) -> None:
        self.captured: list[torch.Tensor] = []

    def __call__(self, compute: Replay) -> Replay:
        self.captured.append(compute())
        return compute


def graphs_over(forward: TinyDecoder, capture: CallsAgain) -> DecodeGraphs:
    return DecodeGraphs(
        forward,
        largest=4,
        max_blocks=3,
        block_size=BLOCK,
        device=torch.device("cpu"),
        capture=capture,
    )


def test_replayed_steps_give_the_logits_of_eager_ones_and_touch_no_other_slot():
    plain, padded = (TinyDecoder(slots=32, dtype=torch.float32, device="cpu") for _ in range(2))
    graphs = graphs_over(padded, CallsAgain())
    graphs.capture()
    assert not padded.cache.any(), "capturing rows of nothing wrote to the cache"
    prompts = [[3, 1, 4, 1, 5], [9, 2, 6, 5, 3, 5, 8, 9], [7]]
    step = batch_of(prompts, [0, 0, 0], TABLES, block_size=BLOCK)
    torch.testing.assert_close(graphs(step), plain(step))
    for offset in range(3):
        starts = [len(prompt) + offset for prompt in prompts]
        step = batch_of([[11 + offset], [22], [33]], starts, TABLES, block_size=BLOCK)
        torch.testing.assert_close(graphs(step), plain(step))
    torch.testing.assert_close(padded.cache, plain.cache)
    assert (graphs.replayed, graphs.eager) == (3, 1)


def test_every_bucket_is_captured_the_largest_first():
    capture = CallsAgain()
    graphs_over(TinyDecoder(slots=8, dtype=torch.float32, device="cpu"), capture).capture()
    assert [logits.shape[0] for logits in capture.captured] == [4, 2, 1]


def test_before_the_capture_every_step_is_eager():
    decoder = TinyDecoder(slots=32, dtype=torch.float32, device="cpu")
    graphs = graphs_over(decoder, CallsAgain())
    assert graphs(decode(2)).shape[0] == 2
    assert (graphs.replayed, graphs.eager) == (0, 1)


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_a_runner_whose_decode_steps_are_replayed_answers_as_without(
    tiny_model: Callable[[str], Path], family: str
):
    """Rows join and leave, so buckets change and are padded."""
    config = engine_config(tiny_model(family), backend="eager")
    prompts = [[5], [9, 8, 7], list(range(20, 60)), list(range(100, 131))]
    answers = []
    for replays in (False, True):
        runner = make_runner(config, dp=0, tp=0, group=None)
        backend = runner._backend  # type: ignore[attr-defined]
        if replays:
            backend.replay_decode_steps(config, CallsAgain())
        greedy = SamplingParams(temperature=0.0, max_new_tokens=20)
        answers.append(Driver(runner, chunk=16).generate(prompts, greedy))
    assert answers[0] == answers[1]
    assert backend.graphs.replayed >= 17
