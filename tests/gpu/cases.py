"""What the GPU check runs: each operator on inputs of a real model's size.

The small form has the same cases on a few tokens, so that the interpreter can run them too.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from kernels.attention_tile import PagedContext, Scores
from kernels.gated_activation import (
    gelu_tanh_and_mul,
    gelu_tanh_and_mul_reference,
    silu_and_mul,
    silu_and_mul_reference,
)
from kernels.paged_attention import paged_attention, paged_attention_reference
from kernels.paged_prefill import paged_prefill, paged_prefill_reference
from kernels.rms_norm import add_rms_norm, add_rms_norm_reference, rms_norm, rms_norm_reference
from kernels.rotary import cos_sin_table, rotary, rotary_reference
from kernels.sample import sample, sample_reference
from kernels.store_kv import store_kv, store_kv_reference
from tests.kernels.inputs import middle_of_share, normal, paged_context

EPS = 1e-6
Outputs = tuple[torch.Tensor, ...]


@dataclass(frozen=True)
class Case:
    """One operator on given tensors. ``run`` and ``reference`` get copies of ``tensors`` and return
    what they computed, tensors written in place included."""

    name: str
    tensors: tuple[torch.Tensor, ...]
    run: Callable[..., Outputs]
    reference: Callable[..., Outputs]
    bytes_moved: int
    flops: int = 0
    roundings: int = 1

    def copies(self) -> tuple[torch.Tensor, ...]:
        return tuple(tensor.clone() for tensor in self.tensors)


@dataclass(frozen=True)
class Place:
    """Where and how large: ``tokens`` and ``context`` bound the sizes of the cases."""

    device: str
    tokens: int
    context: int


SMALL = Place("cpu", tokens=3, context=40)


def cases(place: Place, dtype: torch.dtype) -> list[Case]:
    """Every operator once or more; tensors are made on ``place.device``."""
    return [
        *_norms(place, dtype),
        *_gated(place, dtype),
        _rotary(place, dtype),
        _store_kv(place, dtype),
        *_decodes(place, dtype),
        *_prefills(place, dtype),
        _sample(place, dtype),
    ]


def _size(*tensors: torch.Tensor) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def _norms(place: Place, dtype: torch.dtype) -> list[Case]:
    x = normal(place.tokens, 4096, dtype=dtype, device=place.device)
    residual = normal(place.tokens, 4096, dtype=dtype, seed=1, device=place.device)
    weight = normal(4096, dtype=dtype, seed=2, device=place.device)
    heads = x.view(place.tokens, 32, 128)

    def add(operator: Callable[..., torch.Tensor]) -> Callable[..., Outputs]:
        return lambda x, residual, weight: (operator(x, residual, weight, EPS), residual)

    return [
        Case(
            "rms_norm 4096",
            (x, weight),
            lambda x, weight: (rms_norm(x, weight, EPS),),
            lambda x, weight: (rms_norm_reference(x, weight, EPS),),
            bytes_moved=2 * _size(x),
        ),
        Case(
            "rms_norm 32 heads of 128",
            (heads, weight[:128]),
            lambda x, weight: (rms_norm(x, weight, EPS, weight_offset=1.0),),
            lambda x, weight: (rms_norm_reference(x, weight, EPS, 1.0),),
            bytes_moved=2 * _size(x),
        ),
        Case(
            "add_rms_norm 4096",
            (x, residual, weight),
            add(add_rms_norm),
            add(add_rms_norm_reference),
            bytes_moved=4 * _size(x),
            roundings=3,
        ),
    ]


def _gated(place: Place, dtype: torch.dtype) -> list[Case]:
    gate = normal(place.tokens, 14_336, dtype=dtype, device=place.device)
    up = normal(place.tokens, 14_336, dtype=dtype, seed=1, device=place.device)
    pairs = (
        ("silu_and_mul", silu_and_mul, silu_and_mul_reference),
        ("gelu_tanh_and_mul", gelu_tanh_and_mul, gelu_tanh_and_mul_reference),
    )
    return [
        Case(
            f"{name} 14336",
            (gate, up),
            lambda gate, up, operator=operator: (operator(gate, up),),
            lambda gate, up, reference=reference: (reference(gate, up),),
            bytes_moved=3 * _size(gate),
        )
        for name, operator, reference in pairs
    ]


def _rotary(place: Place, dtype: torch.dtype) -> Case:
    q = normal(place.tokens, 32, 128, dtype=dtype, device=place.device)
    k = normal(place.tokens, 8, 128, dtype=dtype, seed=1, device=place.device)
    steps = torch.arange(0, 128, 2, dtype=torch.float32, device=place.device) / 128
    table = cos_sin_table(10_000.0**-steps, place.context)
    positions = torch.arange(place.tokens, device=place.device) % place.context

    def turn(operator: Callable[..., None]) -> Callable[..., Outputs]:
        def run(q: torch.Tensor, k: torch.Tensor, *rest: torch.Tensor) -> Outputs:
            operator(q, k, *rest)
            return q, k

        return run

    tensors = (q, k, positions, table)
    moved = 2 * _size(q, k)
    return Case("rotary 32+8 of 128", tensors, turn(rotary), turn(rotary_reference), moved)


def _store_kv(place: Place, dtype: torch.dtype) -> Case:
    kv = [normal(place.tokens, 8, 128, dtype=dtype, seed=s, device=place.device) for s in (0, 1)]
    slots = 2 * place.tokens
    caches = [normal(slots, 8, 128, dtype=dtype, seed=s, device=place.device) for s in (2, 3)]
    order = torch.randperm(slots, generator=torch.Generator().manual_seed(0))[: place.tokens]
    order[::5] = -1

    def store(operator: Callable[..., None]) -> Callable[..., Outputs]:
        def run(*tensors: torch.Tensor) -> Outputs:
            operator(*tensors)
            return tensors[2], tensors[3]

        return run

    tensors = (*kv, *caches, order.to(place.device))
    moved = 2 * _size(*kv)
    return Case("store_kv 8 of 128", tensors, store(store_kv), store(store_kv_reference), moved)


def _decode(
    name: str,
    place: Place,
    lengths: list[int],
    heads: tuple[int, int, int],
    scores: Scores,
    dtype: torch.dtype,
) -> Case:
    q_heads, kv_heads, dim = heads
    cache = paged_context(lengths, kv_heads=kv_heads, dim=dim, dtype=dtype, device=place.device)
    q = normal(len(lengths), q_heads, dim, dtype=dtype, device=place.device)

    def attend(operator: Callable[..., torch.Tensor]) -> Callable[..., Outputs]:
        return lambda q, key, value, tables, lengths: (
            operator(q, PagedContext(key, value, tables, lengths, cache.block_size), scores),
        )

    seen = sum(min(length, scores.window or length) for length in lengths)
    return Case(
        f"paged_attention {name}",
        (q, cache.key, cache.value, cache.block_tables, cache.lengths),
        attend(paged_attention),
        attend(paged_attention_reference),
        bytes_moved=2 * seen * kv_heads * dim * q.element_size() + 2 * _size(q),
        flops=4 * seen * q_heads * dim,
    )


def _decodes(place: Place, dtype: torch.dtype) -> list[Case]:
    many = min(64, place.tokens)
    context = place.context
    ragged = [1 + (context - 1) * at // many for at in range(many - 1)] + [0]
    capped = Scores(0.0625, window=context // 2, soft_cap=50.0)
    return [
        _decode("32/8 of 128, batch", place, [context] * many, (32, 8, 128), Scores(0.09), dtype),
        _decode("32/8 of 128, ragged", place, ragged, (32, 8, 128), Scores(0.09), dtype),
        _decode("32/8 of 128, alone", place, [8 * context], (32, 8, 128), Scores(0.09), dtype),
        _decode("9/3 of 64", place, [context // 4] * many, (9, 3, 64), Scores(0.125), dtype),
        _decode("8/4 of 256, capped", place, [context] * many, (8, 4, 256), capped, dtype),
    ]


def _prefill(
    name: str,
    place: Place,
    chunks: list[int],
    lengths: list[int],
    heads: tuple[int, int, int],
    scores: Scores,
    dtype: torch.dtype,
) -> Case:
    q_heads, kv_heads, dim = heads
    cache = paged_context(lengths, kv_heads=kv_heads, dim=dim, dtype=dtype, device=place.device)
    q = normal(sum(chunks), q_heads, dim, dtype=dtype, device=place.device)
    starts = torch.tensor([0, *chunks]).cumsum(0).to(torch.int32).to(place.device)

    def paged(key: torch.Tensor, value: torch.Tensor) -> PagedContext:
        return replace(cache, key=key, value=value)

    pairs = sum(
        min(position + 1, scores.window or length)
        for chunk, length in zip(chunks, lengths, strict=True)
        for position in range(length - chunk, length)
    )
    return Case(
        f"paged_prefill {name}",
        (q, starts, cache.key, cache.value),
        lambda q, starts, key, value: (
            paged_prefill(q, starts, paged(key, value), scores, longest_chunk=max(chunks)),
        ),
        lambda q, starts, key, value: (
            paged_prefill_reference(q, starts, paged(key, value), scores),
        ),
        bytes_moved=2 * sum(lengths) * kv_heads * dim * q.element_size() + 2 * _size(q),
        flops=4 * pairs * q_heads * dim,
    )


def _prefills(place: Place, dtype: torch.dtype) -> list[Case]:
    context = place.context
    chunk = max(1, context // 2)
    mixed = [chunk] + [1] * min(32, place.tokens)
    capped = Scores(0.0625, window=chunk, soft_cap=50.0)
    full = [context] * len(mixed)
    return [
        _prefill("32/8 of 128", place, [chunk], [context], (32, 8, 128), Scores(0.09), dtype),
        _prefill("32/8 of 128, mixed", place, mixed, full, (32, 8, 128), Scores(0.09), dtype),
        _prefill("9/3 of 64", place, [chunk], [chunk], (9, 3, 64), Scores(0.125), dtype),
        _prefill("8/4 of 256, capped", place, [chunk], [context], (8, 4, 256), capped, dtype),
    ]


def _sample(place: Place, dtype: torch.dtype) -> Case:
    rows = min(64, place.tokens)
    logits = normal(rows, 128_256 if rows == 64 else 9001, dtype=dtype, device=place.device) * 4
    temperature = torch.arange(rows, dtype=torch.float32, device=place.device) % 4 * 0.5
    uniform = middle_of_share(logits, logits.argmax(dim=1), temperature)
    tensors = (logits, temperature, uniform)
    return Case("sample", tensors, sample, sample_reference, bytes_moved=_size(logits))
