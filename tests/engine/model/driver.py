"""A scheduler of a few lines that drives a runner directly: chunks, shared prefixes, retraction."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from engine.dumps.capture import Tap
from engine.messages import SamplingParams
from engine.model.runner import ModelRunner
from engine.scheduler.plan import PlanRow, SampledRow, SlotBegin, StepPlan, StepResult

GREEDY = SamplingParams(temperature=0.0, max_new_tokens=32)


@dataclass(kw_only=True)
class Job:
    """One request: what it asks for, what it has, and every row that answered it."""

    prompt_ids: list[int]
    sampling: SamplingParams = GREEDY
    options: dict[str, Any] = field(default_factory=dict)
    output_ids: list[int] = field(default_factory=list)
    results: list[SampledRow] = field(default_factory=list)
    slot: int = -1
    computed: int = 0
    blocks: list[int] = field(default_factory=list)

    @property
    def ids(self) -> list[int]:
        return self.prompt_ids + self.output_ids


class Driver:
    """Keeps jobs in slots and runs steps; blocks are never given back."""

    def __init__(self, runner: ModelRunner, *, chunk: int = 512) -> None:
        self.runner = runner
        self.chunk = chunk
        self._step = 0
        self._next_slot = 0
        self._next_block = 0
        self._ends: list[int] = []
        self._begins: list[SlotBegin] = []
        self.running: list[Job] = []
        self.answer = StepResult(epoch=0)
        self.tap: Tap | None = None  # of the steps from now on

    def begin(self, job: Job, *, cached_blocks: list[int] | None = None) -> Job:
        """Starts ``job``; the tokens of ``cached_blocks`` are not computed again."""
        job.slot, self._next_slot = self._next_slot, self._next_slot + 1
        job.blocks = list(cached_blocks or ())
        job.computed = len(job.blocks) * self.runner.info.block_size
        self._begins.append(
            SlotBegin(
                slot=job.slot,
                rid=f"r{job.slot}",
                sampling=job.sampling,
                prompt_ids=job.prompt_ids,
                history_ids=list(job.output_ids),
                **job.options,
            )
        )
        self.running.append(job)
        return job

    def retract(self, job: Job) -> None:
        """Takes slot and blocks away and starts again with what was made so far."""
        self.end(job)
        self.begin(job)

    def end(self, job: Job) -> None:
        self._ends.append(job.slot)
        self.running.remove(job)

    def step(self) -> StepPlan:
        """One forward over all running jobs; jobs that are done end in the next plan."""
        rows = [self._row(job) for job in self.running]
        plan = StepPlan(step=self._step, ends=self._ends, begins=self._begins, rows=rows)
        self._step, self._ends, self._begins = self._step + 1, [], []
        self.answer = self.runner.forward(plan, self.tap)
        for job, row, result in zip(list(self.running), rows, self.answer.rows, strict=True):
            job.computed += len(row.token_ids)
            job.results.append(result)
            if result.token_id is not None:
                job.output_ids.append(result.token_id)
                if self._done(job):
                    self.end(job)
        return plan

    def finish(self) -> None:
        while self.running:
            self.step()
        self.step()  # tells the runner of the last ends

    def generate(self, prompts: list[list[int]], sampling: SamplingParams) -> list[list[int]]:
        """All prompts as one batch, to their ends."""
        jobs = [self.begin(Job(prompt_ids=prompt, sampling=sampling)) for prompt in prompts]
        self.finish()
        return [job.output_ids for job in jobs]

    def _row(self, job: Job) -> PlanRow:
        tokens = job.ids[job.computed : job.computed + self.chunk]
        end = job.computed + len(tokens)
        size = self.runner.info.block_size
        wanted = -(-end // size) - len(job.blocks)
        new = list(range(self._next_block, self._next_block + wanted))
        self._next_block += wanted
        first = not any(row.slot == job.slot for row in job.results) and job.blocks
        shown = [*job.blocks, *new] if first else new
        job.blocks.extend(new)
        return PlanRow(
            slot=job.slot,
            start=job.computed,
            token_ids=tokens,
            new_blocks=shown,
            sample=end == len(job.ids),
        )

    def _done(self, job: Job) -> bool:
        if len(job.output_ids) >= job.sampling.max_new_tokens:
            return True
        ends = self.runner.info.eos_token_ids
        return not job.sampling.ignore_eos and job.output_ids[-1] in ends
