"""The sampler against definitions written out in numpy."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.messages import LogprobParams, SamplingParams
from engine.model.noise import uniform
from engine.model.runner import make_runner
from engine.model.sampler import Draw, DrawRequest, Sampler, draw_rows, draw_together
from engine.model.slots import Slot
from engine.scheduler.plan import SampledRow
from tests.engine.model.conftest import engine_config

Sample = Callable[..., list[SampledRow]]
VOCABULARY = 50
EOS = (7, 9)


def slot_of(output_ids: list[int] | None = None, **fields: Any) -> Slot:
    options = {name: fields.pop(name) for name in ("logprob", "return_entropy") if name in fields}
    output_ids = output_ids or []
    return Slot(
        rid="r",
        sampling=SamplingParams(**{"seed": 5, **fields}),
        prompt_ids=[1, 2, 3],
        output_ids=output_ids,
        output_counts=Counter(output_ids),
        return_hidden_states=False,
        **{"logprob": None, "return_entropy": False, **options},
    )


@pytest.fixture(scope="module")
def native_draw(tiny_model: Callable[[str], Path]) -> Draw:
    """The C++ draw; it belongs to a decoder."""
    config = engine_config(tiny_model("llama"), backend="native")
    return make_runner(config, dp=0, tp=0, group=None)._backend.draw  # type: ignore[attr-defined]


@pytest.fixture(scope="module", params=["torch", "C++"])
def sample(request: pytest.FixtureRequest, native_draw: Draw) -> Callable[..., list[SampledRow]]:
    """Samples one row of logits for each slot."""
    sampler = Sampler(EOS, native_draw if request.param == "C++" else None)

    def run(logits: np.ndarray, *slots: Slot) -> list[SampledRow]:
        results = [SampledRow(slot=i) for i in range(len(slots))]
        rows = torch.tensor(np.tile(logits, (len(slots), 1)), dtype=torch.float32)
        sampler.sample(rows, list(slots), results)
        return results

    return run


def some_logits(seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(0, 2, VOCABULARY).astype(np.float32)


def log_softmax(values: np.ndarray) -> np.ndarray:
    wide = values.astype(np.float64)
    return wide - np.log(np.exp(wide - wide.max()).sum()) - wide.max()


def kept_by_filters(logits: np.ndarray, sampling: SamplingParams) -> list[int]:
    """Ids that survive temperature, top-k, top-p and min-p, most probable first."""
    order = np.argsort(-logits, kind="stable")
    order = order[: sampling.top_k] if sampling.top_k > 0 else order
    weights = np.exp(log_softmax(logits[order] / sampling.temperature))
    before = np.cumsum(weights) - weights
    keep = before < sampling.top_p
    order, weights = order[keep], weights[keep]
    return [int(i) for i in order[weights >= sampling.min_p * weights[0]]]


def test_greedy_takes_the_best_whatever_the_filters_say(sample: Sample) -> None:
    logits = some_logits()
    rows = sample(
        logits,
        slot_of(temperature=0.0, top_p=0.1),
        slot_of(temperature=0.9, top_k=1),
        slot_of(temperature=0.0, seed=None),
    )
    assert {row.token_id for row in rows} == {int(logits.argmax())}


@given(
    seed=st.integers(0, 2**64 - 1),
    top_k=st.sampled_from([-1, 2, 7, 49, 1000]),
    top_p=st.sampled_from([1.0, 0.9, 0.5, 0.01]),
    min_p=st.sampled_from([0.0, 0.05, 0.5]),
    temperature=st.sampled_from([0.3, 1.0, 3.0]),
)
@settings(max_examples=150, deadline=None)
def test_a_drawn_token_survives_every_filter(
    sample: Sample, seed: int, top_k: int, top_p: float, min_p: float, temperature: float
) -> None:
    logits = some_logits(seed % 1000)
    slot = slot_of(seed=seed, top_k=top_k, top_p=top_p, min_p=min_p, temperature=temperature)
    (row,) = sample(logits, slot)
    assert row.token_id in kept_by_filters(logits, slot.sampling)


@pytest.mark.parametrize(
    "filters",
    [{}, {"top_k": 5}, {"top_p": 0.8}, {"min_p": 0.1}, {"top_k": 9, "top_p": 0.9, "min_p": 0.02}],
)
def test_draws_follow_the_filtered_distribution(sample: Sample, filters: dict[str, float]) -> None:
    logits = some_logits(3)
    count = 4000
    slots = [slot_of(seed=seed, temperature=0.8, **filters) for seed in range(count)]
    drawn = Counter(row.token_id for row in sample(logits, *slots))
    kept = kept_by_filters(logits, slots[0].sampling)
    weights = np.exp(log_softmax(logits[kept] / 0.8))
    for token_id, weight in zip(kept, weights / weights.sum(), strict=True):
        deviation = (weight * (1 - weight) / count) ** 0.5
        assert abs(drawn[token_id] / count - weight) < 5 * deviation + 1e-9


def test_a_large_vocabulary_is_cut_where_a_small_one_would_be(sample: Sample) -> None:
    logits = np.random.default_rng(1).normal(0, 1, 5000).astype(np.float32)
    for seed, fields in enumerate(({"top_p": 0.99}, {"top_k": 3000, "top_p": 0.97})):
        slot = slot_of(seed=seed, **fields)
        (row,) = sample(logits, slot)
        assert row.token_id in kept_by_filters(logits, slot.sampling)


def test_a_row_does_not_depend_on_its_batch(sample: Sample) -> None:
    logits = some_logits(4)
    fields = [{"seed": seed, "temperature": 0.9, "top_p": 0.95} for seed in range(8)]
    alone = [sample(logits, slot_of(**one))[0].token_id for one in fields]
    assert [row.token_id for row in sample(logits, *(slot_of(**one) for one in fields))] == alone
    assert len(set(alone)) > 1


def test_noise_depends_on_seed_and_position_alone() -> None:
    values = {uniform(seed, position) for seed in range(-50, 50) for position in range(100)}
    assert len(values) == 10_000
    assert all(0 <= value < 1 for value in values)
    assert abs(np.mean(list(values)) - 0.5) < 0.01
    assert uniform(2**64 + 3, 1) == uniform(3, 1)


def test_penalties_and_bias(sample: Sample) -> None:
    logits = some_logits(6)
    slot = slot_of(
        output_ids=[4, 4, 5],
        temperature=0.0,
        repetition_penalty=1.5,
        frequency_penalty=0.25,
        presence_penalty=0.5,
        logit_bias={5: 3.0, 11: -1.0},
        logprob=LogprobParams(top_num=VOCABULARY),
    )
    expected = logits.astype(np.float64)
    for i in (1, 2, 3, 4, 5):
        expected[i] = expected[i] / 1.5 if expected[i] > 0 else expected[i] * 1.5
    expected[4] -= 0.25 * 2 + 0.5
    expected[5] += 3.0 - (0.25 + 0.5)
    expected[11] -= 1.0
    (row,) = sample(logits, slot)
    assert row.token_id == int(expected.argmax())
    assert row.top is not None
    truth = log_softmax(expected)
    np.testing.assert_allclose(row.top[1], truth[row.top[0]], atol=1e-5)
    assert row.top[0][0] == row.token_id


def test_end_tokens_wait_for_min_new_tokens(sample: Sample) -> None:
    logits = some_logits()
    logits[[7, 9, 12]] = 50.0, 49.0, 48.0
    fields: dict[str, Any] = {"temperature": 0.0, "min_new_tokens": 2, "stop_token_ids": (12,)}
    early, late = slot_of([1], **fields), slot_of([1, 1], **fields)
    ignoring = slot_of([1], ignore_eos=True, **fields)
    rows = sample(logits, early, late, ignoring)
    assert rows[0].token_id not in (7, 9, 12)
    assert [rows[1].token_id, rows[2].token_id] == [7, 7]


def test_logprobs_are_processed_or_raw_as_asked(sample: Sample) -> None:
    logits = some_logits(8)
    want = LogprobParams(top_num=4, token_ids=(3, 1))
    raw = LogprobParams(top_num=4, token_ids=(3, 1), raw=True)
    fields: dict[str, Any] = {"temperature": 0.5, "logit_bias": {3: 2.0}, "top_k": 3}
    processed, untouched = sample(
        logits, slot_of(logprob=want, **fields), slot_of(logprob=raw, **fields)
    )
    biased = logits.copy()
    biased[3] += 2.0
    for row, truth in ((processed, log_softmax(biased / 0.5)), (untouched, log_softmax(logits))):
        assert row.token_id is not None and row.logprob is not None
        assert row.logprob == pytest.approx(truth[row.token_id], abs=1e-5)
        assert row.top is not None and row.token_logprobs is not None
        assert row.top[0] == [int(i) for i in np.argsort(-truth)[:4]]
        assert row.token_logprobs[0] == [3, 1]
        assert row.token_logprobs[1] == pytest.approx(truth[[3, 1]], abs=1e-5)


def test_entropy_is_in_nats_and_survives_masked_tokens(sample: Sample) -> None:
    flat = np.zeros(VOCABULARY, np.float32)
    (row,) = sample(flat, slot_of(return_entropy=True))
    assert row.entropy == pytest.approx(np.log(VOCABULARY), abs=1e-5)
    (row,) = sample(flat, slot_of(return_entropy=True, min_new_tokens=1))
    assert row.entropy == pytest.approx(np.log(VOCABULARY - 2), abs=1e-5)
    assert row.logprob is None


def test_ids_outside_the_vocabulary_do_no_harm(sample: Sample) -> None:
    strange = (-1, VOCABULARY, 10**9)
    (row,) = sample(
        some_logits(),
        slot_of(
            temperature=0.0,
            stop_token_ids=strange,
            min_new_tokens=3,
            logit_bias=dict.fromkeys((*strange, 4), 1e3),
            logprob=LogprobParams(token_ids=(*strange, 5), top_num=10**6),
        ),
    )
    assert row.token_id == 4
    assert row.token_logprobs is not None and row.token_logprobs[0] == [5]
    assert row.top is not None and len(row.top[0]) == VOCABULARY


def test_what_was_not_asked_for_is_absent(sample: Sample) -> None:
    logits = some_logits()
    plain, asked = sample(logits, slot_of(), slot_of(logprob=LogprobParams(), return_entropy=True))
    assert (plain.logprob, plain.top, plain.token_logprobs, plain.entropy) == (None,) * 4
    assert asked.logprob is not None and asked.entropy is not None
    assert (asked.top, asked.token_logprobs) == (None, None)


@given(st.integers(0, 2**31), st.sampled_from([17, 1000, 5000]), st.sampled_from([0.3, 1.0, 9.0]))
@settings(max_examples=100, deadline=None)
def test_both_forms_of_the_draw_agree(
    native_draw: Draw, seed: int, vocabulary: int, temperature: float
) -> None:
    source = np.random.default_rng(seed)
    logits = torch.tensor(source.normal(0, 3, (1, vocabulary)), dtype=torch.float32)
    request = DrawRequest(
        temperature=temperature,
        top_k=int(source.choice([-1, 5, 900])),
        top_p=float(source.choice([1.0, 0.9, 0.2])),
        min_p=float(source.choice([0.0, 0.02])),
        point=float(source.random()),
        describe=True,
    )
    (mine,), (truth,) = native_draw(logits, [request]), draw_rows(logits, [request])
    assert mine.token_id == truth.token_id
    for name in ("logprob", "entropy", "logsumexp"):
        assert getattr(mine, name) == pytest.approx(getattr(truth, name), abs=2e-5, rel=2e-5)


def test_the_form_for_devices_agrees() -> None:
    """Here through the kernel's reference; tests/gpu runs the kernel."""
    source = np.random.default_rng(0)
    logits = torch.tensor(source.normal(0, 3, (40, 500)), dtype=torch.float32)
    requests = [
        DrawRequest(
            temperature=0.0 if row % 4 == 0 else 0.8,
            top_p=0.8 if row % 3 == 0 else 1.0,
            forced=7 if row % 5 == 0 else None,
            point=float(source.random()),
            describe=True,
        )
        for row in range(40)
    ]
    for mine, truth in zip(
        draw_together(logits, requests), draw_rows(logits, requests), strict=True
    ):
        assert mine.token_id == truth.token_id
        for name in ("logprob", "entropy", "logsumexp"):
            assert getattr(mine, name) == pytest.approx(getattr(truth, name), abs=1e-4)
