"""Logits to tokens: penalties, filters, seeded draws, logprobs and entropy, row by row.

Path: runner.py -> here -> plan.SampledRow. Definitions, in the order in which they apply to the
fp32 logits of a row:

1. repetition penalty (prompt and output), frequency and presence penalties (output), logit bias;
2. stop ids are masked while the output is shorter than ``min_new_tokens``;
3. division by the temperature (greedy rows: 1). The log-softmax of this is the *processed*
   distribution; logprobs and entropy are of it, or of the untouched logits with ``raw``;
4. top-k, then top-p over what top-k kept (its mass counted as 1), then min-p;
5. the draw: inverse CDF at ``uniform(seed, output position)``, in the order of token ids when
   nothing was filtered, else from the most to the least probable.

A row's result depends on its own logits and slot alone, never on the batch, so a retracted row that
comes back makes the same tokens again.
"""

from __future__ import annotations

import torch

from engine.model.noise import uniform
from engine.model.slots import Slot
from engine.scheduler.plan import SampledRow

_FEW = 512  # candidates looked at before top-p falls back to sorting the whole vocabulary


class Sampler:
    """Samples the rows of a step. ``eos_token_ids`` are what ``min_new_tokens`` holds back."""

    def __init__(self, eos_token_ids: tuple[int, ...]) -> None:
        self._eos_token_ids = eos_token_ids

    def sample(self, logits: torch.Tensor, slots: list[Slot], results: list[SampledRow]) -> None:
        """Fills ``results``; row i of ``logits`` (fp32 [rows, vocab], overwritten) is slot i's."""
        raw = {i: logits[i].clone() for i, slot in enumerate(slots) if _wants_raw(slot)}
        for row, slot in zip(logits, slots, strict=True):
            self._adjust(row, slot)
        drawn = [i for i, slot in enumerate(slots) if not slot.greedy]
        tokens: list[int] = logits.argmax(-1).tolist()
        for i in drawn:
            tokens[i] = _draw(logits[i], slots[i])
        for i, (slot, result) in enumerate(zip(slots, results, strict=True)):
            result.token_id = tokens[i]
            if slot.logprob is not None or slot.return_entropy:
                describe(raw.get(i, logits[i]), slot, result)

    def _adjust(self, row: torch.Tensor, slot: Slot) -> None:
        """Steps 1 to 3 on one row, in place."""
        sampling = slot.sampling
        if slot.penalised:
            _penalise(row, slot)
        if sampling.logit_bias:
            ids = torch.tensor(list(sampling.logit_bias), device=row.device)
            row[ids] += torch.tensor(list(sampling.logit_bias.values()), device=row.device)
        if len(slot.output_ids) < sampling.min_new_tokens:
            held_back = set(sampling.stop_token_ids)
            held_back.update(() if sampling.ignore_eos else self._eos_token_ids)
            row[torch.tensor(sorted(held_back), dtype=torch.int64, device=row.device)] = -torch.inf
        if not slot.greedy and sampling.temperature != 1.0:
            row /= sampling.temperature


def _wants_raw(slot: Slot) -> bool:
    return slot.logprob is not None and slot.logprob.raw


def _penalise(row: torch.Tensor, slot: Slot) -> None:
    sampling = slot.sampling
    if sampling.repetition_penalty != 1.0:
        seen = torch.tensor(sorted({*slot.prompt_ids, *slot.output_counts}), device=row.device)
        values = row[seen]
        factor = sampling.repetition_penalty
        row[seen] = torch.where(values > 0, values / factor, values * factor)
    if slot.output_counts and (sampling.frequency_penalty or sampling.presence_penalty):
        made = torch.tensor(list(slot.output_counts), device=row.device)
        counts = torch.tensor(list(slot.output_counts.values()), device=row.device)
        row[made] -= sampling.frequency_penalty * counts + sampling.presence_penalty


def _draw(row: torch.Tensor, slot: Slot) -> int:
    """Steps 4 and 5: one token out of the processed logits [vocab]."""
    sampling = slot.sampling
    assert sampling.seed is not None
    point = uniform(sampling.seed, len(slot.output_ids))
    probabilities = row.softmax(-1)
    if sampling.top_k <= 0 and sampling.top_p >= 1.0 and sampling.min_p <= 0.0:
        return _invert(probabilities, point)
    values, ids = _candidates(probabilities, sampling.top_k, sampling.top_p, sampling.min_p)
    return int(ids[_invert(values, point)])


def _candidates(
    probabilities: torch.Tensor, top_k: int, top_p: float, min_p: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Probabilities and ids that survive the filters, most probable first; never empty."""
    vocabulary = probabilities.shape[0]
    limit = min(top_k, vocabulary) if top_k > 0 else vocabulary
    values, ids = probabilities.topk(limit if top_k > 0 else min(limit, _FEW))
    if len(ids) < limit and not _covers(values, top_p, min_p):
        values, ids = probabilities.topk(limit)
    if top_p < 1.0:
        mass = values.double().cumsum(-1)
        whole = mass[-1] if top_k > 0 else 1.0
        keep = max(1, int((mass - values < top_p * whole).sum()))
        values, ids = values[:keep], ids[:keep]
    if min_p > 0.0:
        keep = max(1, int((values >= min_p * values[0]).sum()))
        values, ids = values[:keep], ids[:keep]
    return values, ids


def _covers(values: torch.Tensor, top_p: float, min_p: float) -> bool:
    """Whether the filters cut inside ``values``, whatever lies beyond them."""
    return bool(values[-1] < min_p * values[0]) or float(values.double().sum()) > top_p


def _invert(weights: torch.Tensor, point: float) -> int:
    """The index at which the running sum of ``weights`` passes ``point`` of its total."""
    mass = weights.double().cumsum(-1)
    target = (mass[-1] * point).unsqueeze(0)
    index = int(torch.searchsorted(mass, target, right=True))
    return min(index, int(weights.nonzero()[-1]))


def describe(row: torch.Tensor, slot: Slot, result: SampledRow) -> None:
    """Logprob, candidates and entropy of ``result.token_id`` under the logits ``row`` [vocab]."""
    logprobs = row.log_softmax(-1)
    if slot.return_entropy:
        probabilities = logprobs.exp()
        result.entropy = float(-torch.special.xlogy(probabilities, probabilities).sum())
    wanted = slot.logprob
    if wanted is None:
        return
    assert result.token_id is not None
    result.logprob = float(logprobs[result.token_id])
    result.top = best(logprobs, wanted.top_num) if wanted.top_num else None
    if wanted.token_ids is not None:
        result.token_logprobs = chosen(logprobs, wanted.token_ids)


def best(logprobs: torch.Tensor, count: int) -> tuple[list[int], list[float]]:
    """The ``count`` most probable ids and their logprobs, best first."""
    values, ids = logprobs.topk(min(count, logprobs.shape[-1]))
    return ids.tolist(), values.tolist()


def chosen(logprobs: torch.Tensor, token_ids: tuple[int, ...]) -> tuple[list[int], list[float]]:
    """The given ids and their logprobs, in the given order."""
    values: list[float] = logprobs[list(token_ids)].tolist()
    return list(token_ids), values
