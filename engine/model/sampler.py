"""Logits to tokens: penalties, filters, seeded draws, logprobs and entropy, row by row.

Path: torch_runner.py -> here -> plan.SampledRow. Definitions, in the order in which they apply to
the fp32 logits of a row:

1. repetition penalty (prompt and output), frequency and presence penalties (output), logit bias;
2. stop ids are masked while the output is shorter than ``min_new_tokens``;
3. division by the temperature (greedy rows: 1). The log-softmax of this is the *processed*
   distribution; logprobs and entropy are of it, or of the untouched logits with ``raw``;
4. top-k, then top-p over what top-k kept (its mass counted as 1), then min-p;
5. the draw: inverse CDF at ``uniform(seed, output position)``, in the order of token ids when
   nothing was filtered, else from the most to the least probable.

A row's result depends on its own logits and slot alone, never on the batch, so a retracted row that
comes back makes the same tokens again. Steps 3 to 5 exist twice: ``draw`` here, and the same in
C++ (csrc/sample.hpp), which a backend may offer as its own ``draw``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch

from engine.model.noise import uniform
from engine.model.slots import Slot
from engine.scheduler.plan import SampledRow
from kernels.sample import sample

_FEW = 512  # candidates looked at before top-p falls back to sorting the whole vocabulary


@dataclass(slots=True, kw_only=True)
class DrawRequest:
    """Steps 3 to 5 of one row. ``temperature`` 0 takes the best token, ``forced`` the given one."""

    temperature: float
    top_k: int = -1
    top_p: float = 1.0
    min_p: float = 0.0
    point: float = 0.0
    forced: int | None = None
    describe: bool = False  # logprob, entropy and logsumexp are wanted

    @property
    def filters(self) -> bool:
        cuts = self.top_k > 0 or self.top_p < 1.0 or self.min_p > 0.0
        return cuts and self.temperature > 0.0


@dataclass(slots=True)
class DrawResult:
    """``entropy`` in nats; ``logsumexp`` is of the logits over the temperature."""

    token_id: int
    logprob: float = 0.0
    entropy: float = 0.0
    logsumexp: float = 0.0


Draw = Callable[[torch.Tensor, list[DrawRequest]], list[DrawResult]]


class Sampler:
    """Samples the rows of a step. ``eos_token_ids`` are what ``min_new_tokens`` holds back."""

    def __init__(self, eos_token_ids: tuple[int, ...], draw: Draw | None = None) -> None:
        self._eos_token_ids = eos_token_ids
        self._draw = draw or draw_rows

    def sample(self, logits: torch.Tensor, slots: list[Slot], results: list[SampledRow]) -> None:
        """Fills ``results``; row i of ``logits`` (fp32 [rows, vocab], overwritten) is slot i's."""
        raw = {i: logits[i].clone() for i, slot in enumerate(slots) if _keeps_raw(slot)}
        for row, slot in zip(logits, slots, strict=True):
            self._adjust(row, slot)
        requests = [_request(slot) for slot in slots]
        drawn = self._draw(logits, requests)
        for i, (slot, result) in enumerate(zip(slots, results, strict=True)):
            result.token_id = drawn[i].token_id
            if i in raw:
                request = DrawRequest(temperature=0.0, forced=drawn[i].token_id, describe=True)
                _tell(raw[i], request, self._draw(raw[i][None], [request])[0], slot, result)
            elif requests[i].describe:
                _tell(logits[i], requests[i], drawn[i], slot, result)

    def _adjust(self, row: torch.Tensor, slot: Slot) -> None:
        """Steps 1 and 2 on one row, in place."""
        sampling = slot.sampling
        if slot.penalised:
            _penalise(row, slot)
        if sampling.logit_bias:
            ids = known(sampling.logit_bias, row)
            bias = [sampling.logit_bias[i] for i in ids]
            row[ids] += torch.tensor(bias, device=row.device)
        if len(slot.output_ids) < sampling.min_new_tokens:
            held_back = () if sampling.ignore_eos else self._eos_token_ids
            row[known((*sampling.stop_token_ids, *held_back), row)] = -torch.inf


def _keeps_raw(slot: Slot) -> bool:
    """Whether the untouched logits are wanted and will not be what is left of the row."""
    if slot.logprob is None or not slot.logprob.raw:
        return False
    sampling = slot.sampling
    return bool(
        slot.penalised
        or sampling.logit_bias
        or sampling.min_new_tokens > len(slot.output_ids)
        or not (slot.greedy or sampling.temperature == 1.0)
    )


def _request(slot: Slot) -> DrawRequest:
    sampling = slot.sampling
    describe = slot.logprob is not None or slot.return_entropy
    if slot.greedy:
        return DrawRequest(temperature=0.0, describe=describe)
    assert sampling.seed is not None
    return DrawRequest(
        temperature=sampling.temperature,
        top_k=sampling.top_k,
        top_p=sampling.top_p,
        min_p=sampling.min_p,
        point=uniform(sampling.seed, len(slot.output_ids)),
        describe=describe,
    )


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


def _tell(
    row: torch.Tensor, request: DrawRequest, drawn: DrawResult, slot: Slot, result: SampledRow
) -> None:
    """Entropy, logprob and candidates of a row [vocab], as its slot wants them."""
    if slot.return_entropy:
        result.entropy = drawn.entropy
    wanted = slot.logprob
    if wanted is None:
        return
    result.logprob = drawn.logprob
    scale = 1.0 / (request.temperature or 1.0)
    if wanted.top_num:
        ids, values = best(row, wanted.top_num)
        result.top = ids, [value * scale - drawn.logsumexp for value in values]
    if wanted.token_ids is not None:
        ids, values = chosen(row, wanted.token_ids)
        result.token_logprobs = ids, [value * scale - drawn.logsumexp for value in values]


def draw_rows(logits: torch.Tensor, requests: list[DrawRequest]) -> list[DrawResult]:
    """Steps 3 to 5 of fp32 logits [rows, vocab]; the reference of csrc/sample.hpp."""
    tokens: list[int] = logits.argmax(-1).tolist()
    results = []
    for row, token_id, request in zip(logits, tokens, requests, strict=True):
        if request.temperature > 0.0:
            row = row / request.temperature
            token_id = _draw(row, request) if request.forced is None else token_id
        result = DrawResult(token_id if request.forced is None else request.forced)
        if request.describe:
            _describe(row, result)
        results.append(result)
    return results


def draw_together(logits: torch.Tensor, requests: list[DrawRequest]) -> list[DrawResult]:
    """``draw_rows`` for a device: one kernel for all rows, and one more call for each that filters.

    Sums are fp32 here, so a draw whose point lies within rounding of a border may fall beyond it.
    """
    temperatures = torch.tensor([r.temperature for r in requests], device=logits.device)
    points = torch.tensor([r.point for r in requests], device=logits.device)
    found = sample(logits, temperatures, points)
    columns = (found.token_id, found.logprob, found.entropy, found.logsumexp)
    results = [
        DrawResult(int(token), logprob, entropy, logsumexp)
        for token, logprob, entropy, logsumexp in zip(*(c.tolist() for c in columns), strict=True)
    ]
    for i, request in enumerate(requests):
        if request.filters or request.forced is not None:
            results[i] = draw_rows(logits[i : i + 1], [request])[0]
    return results


def _describe(row: torch.Tensor, result: DrawResult) -> None:
    result.logsumexp = float(row.logsumexp(-1))
    logprobs = row - result.logsumexp
    result.logprob = float(logprobs[result.token_id])
    probabilities = logprobs.exp()
    result.entropy = float(-torch.special.xlogy(probabilities, probabilities).sum())


def _draw(row: torch.Tensor, request: DrawRequest) -> int:
    """Steps 4 and 5: one token out of the processed logits [vocab]."""
    probabilities = row.softmax(-1)
    if not request.filters:
        return _invert(probabilities, request.point)
    values, ids = _candidates(probabilities, request.top_k, request.top_p, request.min_p)
    return int(ids[_invert(values, request.point)])


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


def best(values: torch.Tensor, count: int) -> tuple[list[int], list[float]]:
    """The ids of the ``count`` largest of ``values`` [vocab], and these, largest first."""
    largest, ids = values.topk(min(count, values.shape[-1]))
    return ids.tolist(), largest.tolist()


def chosen(values: torch.Tensor, token_ids: tuple[int, ...]) -> tuple[list[int], list[float]]:
    """The given ids and their ``values`` [vocab], in the given order."""
    ids = known(token_ids, values)
    found: list[float] = values[ids].tolist()
    return ids, found


def known(token_ids: Iterable[int], values: torch.Tensor) -> list[int]:
    """Those ids that ``values`` [vocab] has: a request may name any number."""
    return [token_id for token_id in token_ids if 0 <= token_id < values.shape[-1]]
