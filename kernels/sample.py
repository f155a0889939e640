"""Sampling, its logprob and the entropy of its distribution in one pass over the logits.

Path: engine/model/sampler.py, after penalties and biases, for rows without top-k, top-p or min-p.
The logits are read once: chunks of the vocabulary leave their statistics, a second kernel puts
them together and re-reads only the chunk that holds the sampled token.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from kernels.dispatch import LAUNCH_OPTIONS, use_triton

CHUNK = 4096  # logits of one program of the first kernel
FACTS = 4  # per chunk: largest logit, its index, sum of weights, sum of weight * exponent
MAX_VOCABULARY = 2**24  # an index is kept as fp32


class Sampled(NamedTuple):
    """Per row, [rows] each. Logprobs and statistics are those of softmax(logits / temperature).

    A greedy row (temperature 0) has the statistics of temperature 1. ``maximum`` and ``logsumexp``
    are of the scaled logits, so a token's logprob is logit / temperature - logsumexp; ``entropy``
    is in nats.
    """

    token_id: torch.Tensor  # int64
    logprob: torch.Tensor  # fp32, as all below
    maximum: torch.Tensor
    logsumexp: torch.Tensor
    entropy: torch.Tensor


def sample_reference(
    logits: torch.Tensor, temperature: torch.Tensor, uniform: torch.Tensor
) -> Sampled:
    """Inverts the distribution function in index order, in fp32; greedy takes the lowest index."""
    greedy = temperature == 0
    scaled = logits.float() / torch.where(greedy, 1.0, temperature)[:, None]
    logsumexp = scaled.logsumexp(dim=1)
    logprobs = scaled - logsumexp[:, None]
    weights = logprobs.exp()
    summed = weights.cumsum(dim=1)
    reached = (summed > uniform[:, None] * summed[:, -1:]) & (weights > 0)
    # argmax of a mask is its first true entry; nothing reached: the last token that has weight
    last = weights.shape[1] - 1 - (weights > 0).flip(1).int().argmax(dim=1)
    drawn = torch.where(reached.any(dim=1), reached.int().argmax(dim=1), last)
    token_id = torch.where(greedy, logits.argmax(dim=1), drawn)
    return Sampled(
        token_id=token_id,
        logprob=logprobs.gather(1, token_id[:, None])[:, 0],
        maximum=scaled.amax(dim=1),
        logsumexp=logsumexp,
        entropy=-torch.where(weights > 0, weights * logprobs, 0.0).sum(dim=1),
    )


@triton.jit
def _chunk_facts_kernel(
    logit_ptr,
    temperature_ptr,
    fact_ptr,
    row_stride,
    VOCABULARY: tl.constexpr,
    CHUNK: tl.constexpr,
    FACTS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    at = chunk * CHUNK + tl.arange(0, CHUNK)
    logit = tl.load(logit_ptr + row * row_stride + at, mask=at < VOCABULARY, other=-float("inf"))
    logit = logit.to(tl.float32)
    temperature = tl.load(temperature_ptr + row)
    temperature = tl.where(temperature == 0.0, 1.0, temperature)
    top = tl.max(logit, axis=0)
    best = chunk * CHUNK + tl.argmax(logit, axis=0, tie_break_left=True)
    # a chunk of -inf alone: no largest logit to subtract, all weights are 0
    exponent = (logit - tl.where(top == -float("inf"), 0.0, top)) / temperature
    weight = tl.exp(exponent)
    moment = weight * tl.where(weight > 0.0, exponent, 0.0)
    fact_ptr += (row * tl.num_programs(1) + chunk) * FACTS
    tl.store(fact_ptr, top)
    tl.store(fact_ptr + 1, best.to(tl.float32))
    tl.store(fact_ptr + 2, tl.sum(weight, axis=0))
    tl.store(fact_ptr + 3, tl.sum(moment, axis=0))


@triton.jit
def _first_reached(weight, target, at, NOWHERE: tl.constexpr):
    """The lowest ``at`` whose running sum exceeds ``target``, else the last that has weight."""
    summed = tl.cumsum(weight, axis=0)
    reached = tl.min(tl.where((summed > target) & (weight > 0.0), at, NOWHERE), axis=0)
    last = tl.max(tl.where(weight > 0.0, at, 0), axis=0)
    return tl.where(reached == NOWHERE, last, reached)


@triton.jit
def _choose_kernel(
    logit_ptr,
    temperature_ptr,
    uniform_ptr,
    fact_ptr,
    token_ptr,
    logprob_ptr,
    maximum_ptr,
    logsumexp_ptr,
    entropy_ptr,
    row_stride,
    chunks,
    VOCABULARY: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_CHUNKS: tl.constexpr,
    FACTS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    temperature = tl.load(temperature_ptr + row)
    greedy = temperature == 0.0
    temperature = tl.where(greedy, 1.0, temperature)
    chunk = tl.arange(0, BLOCK_CHUNKS)
    here = chunk < chunks
    fact_ptr += (row * chunks + chunk) * FACTS
    top = tl.load(fact_ptr, mask=here, other=-float("inf"))
    best = tl.load(fact_ptr + 1, mask=here, other=0.0).to(tl.int32)
    weight = tl.load(fact_ptr + 2, mask=here, other=0.0)
    moment = tl.load(fact_ptr + 3, mask=here, other=0.0)

    largest = tl.max(top, axis=0)
    # a row of NaN has no largest logit: its token is wrong, but inside the vocabulary
    argmax = tl.min(tl.where(here & (top == largest), best, VOCABULARY - 1), axis=0)
    exponent = tl.where(weight > 0.0, (top - largest) / temperature, 0.0)
    decay = tl.exp(exponent)
    moment = (moment + weight * exponent) * decay
    weight = weight * decay
    weight_sum = tl.sum(weight, axis=0)
    log_sum = tl.log(weight_sum)
    maximum = largest / temperature
    tl.store(maximum_ptr + row, maximum)
    tl.store(logsumexp_ptr + row, maximum + log_sum)
    tl.store(entropy_ptr + row, log_sum - tl.sum(moment, axis=0) / weight_sum)

    target = tl.load(uniform_ptr + row) * weight_sum
    chosen = _first_reached(weight, target, chunk, BLOCK_CHUNKS)
    target -= tl.sum(tl.where(chunk < chosen, weight, 0.0), axis=0)
    at = chosen * CHUNK + tl.arange(0, CHUNK)
    logit_ptr += row * row_stride
    logit = tl.load(logit_ptr + at, mask=at < VOCABULARY, other=-float("inf")).to(tl.float32)
    drawn = _first_reached(tl.exp((logit - largest) / temperature), target, at, VOCABULARY)
    token = tl.where(greedy, argmax, drawn)
    tl.store(token_ptr + row, token.to(tl.int64))
    picked = tl.load(logit_ptr + token).to(tl.float32)
    tl.store(logprob_ptr + row, (picked - largest) / temperature - log_sum)


def sample(logits: torch.Tensor, temperature: torch.Tensor, uniform: torch.Tensor) -> Sampled:
    """Draws one token per row of logits [rows, vocabulary].

    ``temperature`` is [rows] fp32, 0 for greedy; ``uniform`` is [rows] fp32 in [0, 1). Logits of
    -inf are never drawn; a row needs one finite logit. Reads rows * vocabulary elements once, plus
    one chunk of 4,096 per row; bound by memory bandwidth. ValueError if the shapes do not fit.
    """
    _check(logits, temperature, uniform)
    if not use_triton(logits):
        return sample_reference(logits, temperature, uniform)
    rows, vocabulary = logits.shape
    chunks = triton.cdiv(vocabulary, CHUNK)
    empty = torch.empty((4, rows), dtype=torch.float32, device=logits.device)
    token_id = torch.empty(rows, dtype=torch.int64, device=logits.device)
    sampled = Sampled(token_id, *empty.unbind(0))
    if rows == 0:
        return sampled
    facts = torch.empty((rows, chunks, FACTS), dtype=torch.float32, device=logits.device)
    _chunk_facts_kernel[(rows, chunks)](
        logits,
        temperature,
        facts,
        logits.stride(0),
        VOCABULARY=vocabulary,
        CHUNK=CHUNK,
        FACTS=FACTS,
        num_warps=8,
        **LAUNCH_OPTIONS,
    )
    _choose_kernel[(rows,)](
        logits,
        temperature,
        uniform,
        facts,
        *sampled,
        logits.stride(0),
        chunks,
        VOCABULARY=vocabulary,
        CHUNK=CHUNK,
        BLOCK_CHUNKS=triton.next_power_of_2(chunks),
        FACTS=FACTS,
        num_warps=8,
        **LAUNCH_OPTIONS,
    )
    return sampled


def _check(logits: torch.Tensor, temperature: torch.Tensor, uniform: torch.Tensor) -> None:
    if logits.dim() != 2 or logits.shape[1] == 0 or logits.stride(1) != 1:
        raise ValueError(
            f"logits must be [rows, vocabulary] with a dense last axis, got {tuple(logits.shape)} "
            f"with strides {logits.stride()}"
        )
    if logits.shape[1] > MAX_VOCABULARY:
        raise ValueError(f"at most {MAX_VOCABULARY} logits a row fit, got {logits.shape[1]}")
    for name, tensor in (("temperature", temperature), ("uniform", uniform)):
        if tensor.shape != logits.shape[:1] or tensor.dtype != torch.float32:
            raise ValueError(
                f"{name} must be {logits.shape[0]} fp32 values, got {tuple(tensor.shape)} "
                f"{tensor.dtype}"
            )
