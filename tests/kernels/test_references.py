"""The references against oracles that are not ours: torch, transformers, and closed forms."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import Gemma3TextConfig, LlamaConfig
from transformers.activations import ACT2FN
from transformers.masking_utils import causal_mask_function, sliding_window_causal_mask_function
from transformers.models.gemma2.modeling_gemma2 import eager_attention_forward
from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm
from transformers.models.llama.modeling_llama import (
    LlamaRMSNorm,
    LlamaRotaryEmbedding,
    apply_rotary_pos_emb,
)

from kernels.attention_tile import Scores, attend_reference, gather_context
from kernels.gated_activation import gelu_tanh_and_mul_reference, silu_and_mul_reference
from kernels.paged_attention import paged_attention_reference
from kernels.paged_prefill import paged_prefill_reference
from kernels.rms_norm import add_rms_norm_reference, rms_norm_reference
from kernels.rotary import cos_sin_table, rotary_reference
from kernels.sample import sample_reference
from kernels.store_kv import store_kv_reference
from tests.kernels.inputs import DTYPES, assert_close, normal, paged_context

EPS = 1e-6


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rms_norm_is_that_of_llama(dtype: torch.dtype):
    oracle = LlamaRMSNorm(576, eps=EPS)
    oracle.weight.data = normal(576, dtype=dtype, seed=1)
    x = normal(5, 576, dtype=dtype)
    # transformers rounds twice: before and after the weight
    with torch.no_grad():
        assert_close(rms_norm_reference(x, oracle.weight, EPS), oracle(x), roundings=2)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_with_an_offset_of_one_rms_norm_is_that_of_gemma(dtype: torch.dtype):
    oracle = Gemma3RMSNorm(64, eps=EPS)
    oracle.weight.data = normal(64, dtype=dtype, seed=1)
    x = normal(5, 3, 64, dtype=dtype)
    with torch.no_grad():
        assert_close(rms_norm_reference(x, oracle.weight, EPS, 1.0), oracle(x))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_add_rms_norm_is_an_addition_and_a_norm_in_the_models_dtype(dtype: torch.dtype):
    x, residual = normal(5, 48, dtype=dtype), normal(5, 48, dtype=dtype, seed=1)
    weight = normal(48, dtype=dtype, seed=2)
    total = residual + x
    out = add_rms_norm_reference(x, residual, weight, EPS)
    assert torch.equal(residual, total)
    assert_close(out, F.rms_norm(total.float(), (48,), weight.float(), EPS).to(dtype))


@pytest.mark.parametrize("rotary_dim", [64, 16])
def test_rotary_is_that_of_llama_and_leaves_the_rest_of_a_partial_head(rotary_dim: int):
    config = LlamaConfig(head_dim=rotary_dim, max_position_embeddings=128)
    oracle = LlamaRotaryEmbedding(config)
    positions = torch.tensor([0, 5, 127, 64])
    q, k = normal(4, 9, 64, dtype=torch.float32), normal(4, 3, 64, dtype=torch.float32, seed=1)
    cos, sin = oracle(q, positions[None])
    wanted_q, wanted_k = q.clone(), k.clone()
    turned = apply_rotary_pos_emb(
        q[None, ..., :rotary_dim], k[None, ..., :rotary_dim], cos, sin, unsqueeze_dim=2
    )
    wanted_q[..., :rotary_dim], wanted_k[..., :rotary_dim] = turned[0][0], turned[1][0]
    rotary_reference(q, k, positions, cos_sin_table(oracle.inv_freq, 128))
    assert_close(q, wanted_q)
    assert_close(k, wanted_k)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_gated_activations_are_those_of_transformers(dtype: torch.dtype):
    gate, up = normal(3, 40, dtype=dtype) * 3, normal(3, 40, dtype=dtype, seed=1)
    silu = (ACT2FN["silu"](gate.float()) * up.float()).to(dtype)
    gelu = (ACT2FN["gelu_pytorch_tanh"](gate.float()) * up.float()).to(dtype)
    assert_close(silu_and_mul_reference(gate, up), silu)
    assert_close(gelu_tanh_and_mul_reference(gate, up), gelu)


@given(
    slots=st.lists(st.integers(-1, 15), min_size=1, max_size=16).filter(
        lambda slots: len({s for s in slots if s >= 0}) == sum(s >= 0 for s in slots)
    )
)
@settings(max_examples=30, deadline=None)
def test_store_kv_changes_the_named_slots_alone(slots: list[int]):
    key, value = (normal(len(slots), 2, 4, dtype=torch.float32, seed=seed) for seed in (0, 1))
    caches = [torch.zeros(16, 2, 4), torch.zeros(16, 2, 4)]
    store_kv_reference(key, value, *caches, torch.tensor(slots))
    for slot in range(16):
        for cache, source in zip(caches, (key, value), strict=True):
            wanted = source[slots.index(slot)] if slot in slots else torch.zeros(2, 4)
            assert torch.equal(cache[slot], wanted)


def mask_of(queries: int, context: int, window: int) -> torch.Tensor:
    """transformers' own mask of the last ``queries`` positions, [queries, context]."""
    rule = sliding_window_causal_mask_function(window) if window else causal_mask_function
    at_query = torch.arange(context - queries, context)[:, None]
    return torch.as_tensor(rule(0, 0, at_query, torch.arange(context)[None]))


@pytest.mark.parametrize("window", [0, 1, 7])
@pytest.mark.parametrize(("heads", "kv_heads"), [(9, 3), (4, 4), (5, 1)])
def test_attention_is_torchs_with_transformers_masks(heads: int, kv_heads: int, window: int):
    q = normal(6, heads, 24, dtype=torch.float32)
    key, value = (normal(20, kv_heads, 24, dtype=torch.float32, seed=seed) for seed in (1, 2))
    group = heads // kv_heads
    expected = F.scaled_dot_product_attention(
        q.transpose(0, 1),
        key.repeat_interleave(group, dim=1).transpose(0, 1),
        value.repeat_interleave(group, dim=1).transpose(0, 1),
        attn_mask=mask_of(6, 20, window),
        scale=0.3,
    ).transpose(0, 1)
    assert_close(attend_reference(q, key, value, 14, Scores(0.3, window=window)), expected)


def test_the_soft_cap_is_that_of_gemma():
    q = normal(6, 4, 16, dtype=torch.float32) * 4
    key, value = (normal(11, 2, 16, dtype=torch.float32, seed=seed) for seed in (1, 2))
    config = Gemma3TextConfig(num_attention_heads=4, num_key_value_heads=2)
    module = torch.nn.Module()
    module.num_key_value_groups, module.config = 2, config
    mask = torch.zeros(6, 11).masked_fill(~mask_of(6, 11, 0), -torch.inf)
    expected, _ = eager_attention_forward(
        module,
        q.transpose(0, 1)[None],
        key.transpose(0, 1)[None],
        value.transpose(0, 1)[None],
        mask,
        scaling=0.5,
        softcap=2.0,
    )
    out = attend_reference(q, key, value, 5, Scores(0.5, soft_cap=2.0))
    assert_close(out, expected[0])


@given(
    chunks=st.lists(st.integers(0, 9), min_size=1, max_size=4),
    cached=st.integers(0, 30),
    block_size=st.sampled_from([1, 4, 16]),
    window=st.sampled_from([0, 3]),
)
@settings(max_examples=25, deadline=None)
def test_paged_prefill_attends_to_each_sequences_own_context(
    chunks: list[int], cached: int, block_size: int, window: int
):
    lengths = [chunk + cached + at for at, chunk in enumerate(chunks)]
    cache = paged_context(
        lengths, kv_heads=2, dim=8, dtype=torch.float32, block_size=block_size, seed=cached
    )
    starts = torch.tensor([0, *chunks]).cumsum(0).to(torch.int32)
    q = normal(sum(chunks), 4, 8, dtype=torch.float32)
    scores = Scores(0.4, window=window)
    out = paged_prefill_reference(q, starts, cache, scores)
    for sequence, (chunk, length) in enumerate(zip(chunks, lengths, strict=True)):
        rows = slice(int(starts[sequence]), int(starts[sequence + 1]))
        key, value = gather_context(cache, sequence, length)
        assert not key.isnan().any()
        assert torch.equal(out[rows], attend_reference(q[rows], key, value, length - chunk, scores))


def test_decode_is_a_prefill_of_one_token_and_a_padded_sequence_gives_zeros():
    cache = paged_context([5, 0, 33], kv_heads=2, dim=8, dtype=torch.bfloat16)
    q = normal(3, 4, 8, dtype=torch.bfloat16)
    out = paged_attention_reference(q, cache, Scores(0.4))
    assert torch.equal(out[1], torch.zeros(4, 8, dtype=torch.bfloat16))
    starts = torch.tensor([0, 1, 1, 2], dtype=torch.int32)
    prefill = paged_prefill_reference(q[[0, 2]], starts, cache, Scores(0.4))
    assert torch.equal(out[[0, 2]], prefill)


@pytest.mark.parametrize("temperature", [0.0, 0.5, 1.0, 2.0])
def test_the_statistics_of_sample_are_those_of_torchs_categorical(temperature: float):
    logits = normal(6, 50, dtype=torch.float32) * 3
    sampled = sample_reference(logits, torch.full((6,), temperature), torch.linspace(0, 0.99, 6))
    oracle = torch.distributions.Categorical(logits=logits.double() / (temperature or 1.0))
    assert_close(sampled.entropy, oracle.entropy().float())
    assert_close(sampled.logprob, oracle.log_prob(sampled.token_id).float())
    scaled = logits.double() / (temperature or 1.0)
    assert_close(sampled.logsumexp, scaled.logsumexp(dim=1).float())
    assert_close(sampled.maximum, scaled.amax(dim=1).float())
    if temperature == 0.0:
        assert torch.equal(sampled.token_id, logits.argmax(dim=1))


@given(uniform=st.floats(0, 1, exclude_max=True, width=32), seed=st.integers(0, 9))
@settings(max_examples=60, deadline=None)
def test_a_drawn_token_covers_its_uniform_number(uniform: float, seed: int):
    logits = normal(1, 40, dtype=torch.float32, seed=seed) * 2
    logits[0, ::3] = -torch.inf
    token = int(sample_reference(logits, torch.ones(1), torch.tensor([uniform])).token_id)
    weights = logits[0].double().softmax(dim=0)
    upper = weights.cumsum(dim=0)[token]
    assert weights[token] > 0
    assert upper - weights[token] - 1e-6 <= uniform <= upper + 1e-6  # fp32 sums of 40 weights


def test_evenly_spread_uniform_numbers_draw_each_token_as_often_as_its_probability_says():
    logits = normal(1, 12, dtype=torch.float32).expand(4000, 12)
    uniform = (torch.arange(4000) + 0.5) / 4000
    tokens = sample_reference(logits, torch.ones(4000), uniform).token_id
    shares = torch.bincount(tokens, minlength=12) / 4000
    assert (shares - logits[0].softmax(dim=0)).abs().max() <= 1 / 4000 + 1e-6
