"""Who sits in which slot: the state that plans build up, kept alike on every rank of a group.

Path: plan.py -> runner.py -> here -> inputs.py (tensors) and sampler.py. Pure Python, no torch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from engine.messages import LogprobParams, SamplingParams
from engine.scheduler.plan import PlanRow, SlotBegin


@dataclass(slots=True, kw_only=True)
class Slot:
    """One tenant. ``output_ids`` are the tokens made so far as far as the plans have shown them."""

    rid: str
    sampling: SamplingParams
    prompt_ids: list[int]
    output_ids: list[int]
    logprob: LogprobParams | None
    return_entropy: bool
    return_hidden_states: bool
    blocks: list[int] = field(default_factory=list)
    output_counts: Counter[int] = field(default_factory=Counter)

    @property
    def greedy(self) -> bool:
        return self.sampling.temperature == 0.0 or self.sampling.top_k == 1

    @property
    def penalised(self) -> bool:
        sampling = self.sampling
        return bool(
            sampling.repetition_penalty != 1.0
            or sampling.frequency_penalty
            or sampling.presence_penalty
        )

    def input_logprob_range(self, start: int, count: int) -> range:
        """Positions among ``start..start+count`` whose logits say a prompt token's logprob.

        The logits of position p are those of token p + 1. Tokens from ``start_len`` on are
        reported; the one at ``start_len`` itself has no value, so p begins there.
        """
        if self.logprob is None or self.logprob.start_len < 0:
            return range(0)
        first = max(start, self.logprob.start_len)
        return range(first, max(first, min(start + count, len(self.prompt_ids) - 1)))

    def reports_prompt(self, start: int, count: int) -> bool:
        """Whether tokens ``start..start+count`` hold one whose input logprob was asked for."""
        if self.logprob is None or self.logprob.start_len < 0:
            return False
        return start + count > self.logprob.start_len and start < len(self.prompt_ids)

    def see(self, row: PlanRow) -> None:
        """Takes the blocks and the output tokens that a row shows for the first time."""
        self.blocks.extend(row.new_blocks)
        known = len(self.prompt_ids) + len(self.output_ids)
        self._append(row.token_ids[max(0, known - row.start) :])

    def _append(self, token_ids: Iterable[int]) -> None:
        before = len(self.output_ids)
        self.output_ids.extend(token_ids)
        self.output_counts.update(self.output_ids[before:])


class SlotTable:
    """Slots by number. Misuse is a bug of the scheduler and raises KeyError or ValueError."""

    def __init__(self) -> None:
        self._slots: dict[int, Slot] = {}

    def __getitem__(self, number: int) -> Slot:
        return self._slots[number]

    def __len__(self) -> int:
        return len(self._slots)

    def end(self, number: int) -> None:
        del self._slots[number]

    def begin(self, begin: SlotBegin) -> None:
        if begin.slot in self._slots:
            raise ValueError(f"slot {begin.slot} is taken by {self._slots[begin.slot].rid}")
        slot = Slot(
            rid=begin.rid,
            sampling=begin.sampling,
            prompt_ids=begin.prompt_ids,
            output_ids=list(begin.history_ids),
            logprob=begin.logprob,
            return_entropy=begin.return_entropy,
            return_hidden_states=begin.return_hidden_states,
        )
        slot.output_counts.update(slot.output_ids)
        if not slot.greedy and slot.sampling.seed is None:
            raise ValueError(f"slot {begin.slot} ({begin.rid}) samples without a seed")
        self._slots[begin.slot] = slot
