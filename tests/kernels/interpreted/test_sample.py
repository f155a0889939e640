"""sample against its reference and against the definition of its choice."""

from __future__ import annotations

import pytest
import torch

from kernels.sample import CHUNK, sample, sample_reference
from tests.kernels.inputs import DTYPES, assert_close, middle_of_share, normal


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("vocabulary", [1, 77, CHUNK, 2 * CHUNK + 1])
def test_tokens_and_statistics_agree(vocabulary: int, dtype: torch.dtype):
    logits = normal(4, vocabulary, dtype=dtype) * 4
    temperature = torch.tensor([0.0, 1.0, 0.25, 3.0])
    best = logits.argmax(dim=1)
    uniform = middle_of_share(logits, best, temperature)
    actual, expected = (f(logits, temperature, uniform) for f in (sample, sample_reference))
    assert actual.token_id.tolist() == expected.token_id.tolist() == best.tolist()
    for name in ("logprob", "maximum", "logsumexp", "entropy"):
        assert_close(getattr(actual, name), getattr(expected, name), what=name)


def test_every_token_is_drawn_by_the_middle_of_its_share():
    logits = torch.zeros(3, 2 * CHUNK + 5)
    tokens = torch.tensor([0, CHUNK, 2 * CHUNK + 4])
    sampled = sample(logits, torch.ones(3), middle_of_share(logits, tokens, torch.ones(3)))
    assert sampled.token_id.tolist() == tokens.tolist()


def test_greedy_takes_the_lowest_index_of_equal_logits():
    logits = torch.zeros(2, 2 * CHUNK)
    logits[0, [5, 70, CHUNK + 1]] = 3.0
    logits[1, [CHUNK + 9, CHUNK + 1]] = 3.0
    sampled = sample(logits, torch.zeros(2), torch.full((2,), 0.99))
    assert sampled.token_id.tolist() == [5, CHUNK + 1]


def test_a_masked_token_is_never_drawn_and_does_not_hurt_the_statistics():
    logits = torch.full((4, 2 * CHUNK + 3), -torch.inf)
    allowed = torch.tensor([7, CHUNK + 2])
    logits[:, allowed] = torch.tensor([1.0, 1.0])
    uniform = torch.tensor([0.0, 0.49, 0.5, 1.0 - 2.0**-24])
    sampled = sample(logits, torch.ones(4), uniform)
    assert sampled.token_id.tolist() == [7, 7, CHUNK + 2, CHUNK + 2]
    assert_close(sampled.entropy, torch.full((4,), 2.0).log())
    assert_close(sampled.logprob, -torch.full((4,), 2.0).log())


def test_rows_of_a_wider_buffer_are_read_in_place():
    logits = normal(2, 90, dtype=torch.float32)[:, :77]
    arguments = (torch.ones(2), torch.tensor([0.3, 0.6]))
    assert torch.equal(
        sample(logits, *arguments).token_id, sample_reference(logits, *arguments).token_id
    )
