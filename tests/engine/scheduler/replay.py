"""A runner without a model: replays plans into a KV space of plain cells and checks each of them.

Stands where model/runner.py stands. A token is a pure function of the whole context, read back
through the block table, so a wrong table, a reused block or a shared block that was written over
gives a wrong token; what a request must get can be computed without any scheduler (``alone``).
"""

from __future__ import annotations

import struct
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import msgspec

from engine.config import Limits
from engine.errors import BadRequest
from engine.messages import (
    Finish,
    InputLogprobs,
    LogprobParams,
    SamplingParams,
    TokenIDRow,
    TokenizedGenerateReqInput,
    TopLogprobs,
    merge,
)
from engine.scheduler.core import SchedulerCore
from engine.scheduler.plan import ModelInfo, PlanRow, SampledRow, SlotBegin, StepPlan, StepResult

EOS = 0
HIDDEN = struct.Struct("<ff")


def model_info(*, num_blocks: int = 32, block_size: int = 4, **changes: object) -> ModelInfo:
    fields: dict[str, object] = {
        "model_path": "fake",
        "architecture": "fake",
        "backend": "scripted",
        "dtype": "fp32",
        "weight_form": "plain",
        "vocab_size": 50,
        "max_context": 64,
        "eos_token_ids": (EOS,),
        "num_blocks": num_blocks,
        "block_size": block_size,
        "parameter_bytes": 0,
    }
    return ModelInfo(**{**fields, **changes})  # type: ignore[arg-type]


def request(rid: str, prompt: Sequence[int], **changes: object) -> TokenizedGenerateReqInput:
    """``changes`` are fields of the request or of its sampling parameters."""
    names = SamplingParams.__struct_fields__
    sampling = {name: changes.pop(name) for name in names if name in changes}
    return TokenizedGenerateReqInput(
        **{
            "http_worker_ipc": f"ipc://inbox-{rid}",
            "rid": rid,
            "input_ids": list(prompt),
            "sampling": SamplingParams(**{"seed": 7, "max_new_tokens": 4, **sampling}),
            **changes,
        }
    )


# ----------------------------------------------------------- the model: functions of the context


def next_token(seed: int, context: Sequence[int]) -> int:
    return hash((seed, *context)) % 50


def logprob(token_id: int, position: int) -> float:
    return -(token_id + position / 100)


def top(count: int, position: int) -> tuple[list[int], list[float]]:
    return list(range(count)), [logprob(token_id, position) for token_id in range(count)]


def chosen(token_ids: Sequence[int], position: int) -> tuple[list[int], list[float]]:
    return list(token_ids), [logprob(token_id, position) for token_id in token_ids]


def entropy(position: int) -> float:
    return position / 10


def input_logprobs(asked: LogprobParams, prompt: list[int], start: int, end: int) -> InputLogprobs:
    """What the forward of positions ``start .. end`` tells: of the tokens after each of them."""
    positions = [p + 1 for p in range(start, end) if asked.start_len <= p < len(prompt) - 1]
    if start <= asked.start_len < end:
        positions.insert(0, asked.start_len)
    rows = [(prompt[p], None if p == asked.start_len else logprob(prompt[p], p)) for p in positions]
    found = InputLogprobs(ids=[ids for ids, _ in rows], values=[value for _, value in rows])
    if asked.top_num:
        pairs = [top(asked.top_num, p) for p in positions]
        found.top = TopLogprobs(ids=[i for i, _ in pairs], values=[v for _, v in pairs])
    if asked.token_ids is not None:
        pairs = [chosen(asked.token_ids, p) for p in positions]
        found.token_ids = TopLogprobs(ids=[i for i, _ in pairs], values=[v for _, v in pairs])
    return found


class TextStops:
    """Stands where detokenizer/stops.py stands, over a text of one letter per token."""

    def __init__(self, stop: tuple[str, ...]) -> None:
        if "(" in stop:
            raise BadRequest("'(' does not compile")
        self._stop = stop
        self._text = ""

    def push(self, token_id: int) -> str | None:
        self._text += chr(ord("A") + token_id % 5)
        if "slow" in self._stop and len(self._text) == 3:
            raise BadRequest("'slow' took too long", err_type="stop_regex_too_slow")
        return next((stop for stop in self._stop if self._text.endswith(stop)), None)


def stops_for(sampling: SamplingParams) -> TextStops | None:
    return TextStops(sampling.stop) if sampling.stop else None


def alone(
    asked: TokenizedGenerateReqInput, info: ModelInfo, limits: Limits
) -> tuple[list[int], Finish]:
    """Output ids and finish of a request that nobody disturbs, computed without a scheduler."""
    sampling = asked.sampling
    context = list(asked.input_ids)
    longest = min(limits.max_context or info.max_context, info.num_blocks * info.block_size)
    stops = stops_for(sampling)
    output: list[int] = []
    while len(output) < sampling.max_new_tokens and len(context) < longest:
        token_id = next_token(sampling.seed or 0, context)
        context.append(token_id)
        output.append(token_id)
        enough = len(output) >= sampling.min_new_tokens
        eos = token_id in info.eos_token_ids and not sampling.ignore_eos
        if enough and (eos or token_id in sampling.stop_token_ids):
            return output, Finish(type="stop", matched=token_id)
        matched = stops.push(token_id) if stops else None
        if enough and matched:
            return output, Finish(type="stop", matched=matched)
    return output, Finish(type="length")


# ----------------------------------------------------------- the runner


@dataclass(frozen=True)
class Cell:
    """KV of one position: whose weights wrote which token behind which context."""

    context: tuple[int, ...]
    epoch: int
    extra_key: str | None


@dataclass
class Tenant:
    begin: SlotBegin
    context: list[int]
    table: list[int] = field(default_factory=list)
    computed: int = 0
    fresh: bool = True


class ReplayRunner:
    """Runs plans; AssertionError for a plan that a real runner could not run safely."""

    def __init__(self, info: ModelInfo, requests: dict[str, TokenizedGenerateReqInput]) -> None:
        self.info = info
        self.requests = requests
        self.epoch = 0
        self.step = 0
        self.tenants: dict[int, Tenant] = {}
        self.cells: dict[tuple[int, int], Cell] = {}

    def forward(self, step: StepPlan) -> StepResult:
        assert step.step == self.step + 1
        self.step = step.step
        for slot in step.ends:
            del self.tenants[slot]
        for begin in step.begins:
            assert begin.slot not in self.tenants, "two tenants in one slot"
            self.tenants[begin.slot] = Tenant(begin, begin.prompt_ids + begin.history_ids)
        slots = [row.slot for row in step.rows]
        assert len(set(slots)) == len(slots), "one slot twice in a step"
        for row in step.rows:
            self._place(self.tenants[row.slot], row)
        return StepResult(epoch=self.epoch, rows=[self._run(row) for row in step.rows])

    def _place(self, tenant: Tenant, row: PlanRow) -> None:
        """Extend the table; what a new tenant takes over must be there before this step."""
        tenant.table += row.new_blocks
        assert len(set(tenant.table)) == len(tenant.table)
        assert all(0 <= block < self.info.num_blocks for block in tenant.table)
        if tenant.fresh:
            tenant.fresh = False
            tenant.computed = row.start
            assert row.start % self.info.block_size == 0
            self._check_reuse(tenant)
        assert row.start == tenant.computed, "a gap in the positions"
        end = row.start + len(row.token_ids)
        assert row.token_ids == tenant.context[row.start : end] != []
        assert end <= len(tenant.table) * self.info.block_size, "no block to write to"

    def _check_reuse(self, tenant: Tenant) -> None:
        asked = self.requests[tenant.begin.rid]
        epochs = {cell.epoch for cell in self.read(tenant)}
        if asked.kv_reuse == "isolate" or (asked.kv_reuse == "group" and asked.extra_key is None):
            assert epochs <= {self.epoch}, "KV of other weights"
        assert {cell.extra_key for cell in self.read(tenant)} <= {asked.extra_key}

    def read(self, tenant: Tenant) -> list[Cell]:
        """The cells of all computed positions; each must hold the tenant's own context."""
        cells = [
            self.cells[tenant.table[p // self.info.block_size], p % self.info.block_size]
            for p in range(tenant.computed)
        ]
        for position, cell in enumerate(cells):
            assert cell.context == tuple(tenant.context[: position + 1]), "KV of another context"
        return cells

    def _run(self, row: PlanRow) -> SampledRow:
        tenant = self.tenants[row.slot]
        asked = self.requests[tenant.begin.rid]
        end = row.start + len(row.token_ids)
        for position in range(row.start, end):
            block = tenant.table[position // self.info.block_size]
            sharers = [other for other in self.tenants.values() if block in other.table]
            assert sharers == [tenant], "a shared block is written"
            cell = Cell(tuple(tenant.context[: position + 1]), self.epoch, asked.extra_key)
            self.cells[block, position % self.info.block_size] = cell
        tenant.computed = end
        sampled = self._observe(tenant, row.slot, row.start, end)
        if row.sample:
            assert end == len(tenant.context)
            self._sample(tenant, sampled, end)
        return sampled

    def _observe(self, tenant: Tenant, slot: int, start: int, end: int) -> SampledRow:
        begin = tenant.begin
        sampled = SampledRow(slot=slot)
        if begin.logprob is not None and begin.logprob.start_len >= 0:
            sampled.input_logprobs = input_logprobs(begin.logprob, begin.prompt_ids, start, end)
        if begin.return_hidden_states:
            pairs = [HIDDEN.pack(p, tenant.context[p]) for p in range(start, end)]
            sampled.hidden, sampled.hidden_width = b"".join(pairs), 2
        return sampled

    def _sample(self, tenant: Tenant, sampled: SampledRow, position: int) -> None:
        seed = tenant.begin.sampling.seed
        assert seed is not None
        token_id = next_token(seed, self.read(tenant)[-1].context)
        tenant.context.append(token_id)
        sampled.token_id = token_id
        if (asked := tenant.begin.logprob) is not None:
            sampled.logprob = logprob(token_id, position)
            sampled.top = top(asked.top_num, position)
            sampled.token_logprobs = chosen(asked.token_ids or (), position)
        sampled.entropy = entropy(position)


def calls_of(work: Callable[[], object]) -> int:
    """How many Python and C functions ``work`` calls: its cost without a clock."""
    calls = 0

    def count(frame: object, event: str, argument: object) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    sys.setprofile(count)
    try:
        work()
    finally:
        sys.setprofile(None)
    return calls


# ----------------------------------------------------------- core and runner together


class Rig:
    """A core with a replay runner, driven by hand; keeps every row by rid and every ended rid."""

    def __init__(self, limits: Limits | None = None, info: ModelInfo | None = None) -> None:
        self.limits = limits or Limits(max_running=8)
        self.info = info or model_info()
        self.requests: dict[str, TokenizedGenerateReqInput] = {}
        self.core = SchedulerCore(self.limits, self.info, dp=3, stop_checker=stops_for)
        self.runner = ReplayRunner(self.info, self.requests)
        self.rows: dict[str, list[TokenIDRow]] = {}
        self.ended: list[str] = []
        self.now = 100.0

    def accept(self, asked: TokenizedGenerateReqInput) -> None:
        self.requests[asked.rid] = asked
        self.core.accept(asked, self.now)
        self.collect()

    def step(self, between: Callable[[], object] | None = None) -> StepPlan | None:
        """Plan, forward, ``between`` (the result is not known to the core yet), commit."""
        self.now += 1.0
        plan = self.core.plan(self.now)
        if plan is not None:
            result = self.runner.forward(plan)
            if between is not None:
                between()
                self.collect()
            self.core.commit(plan, result, self.now)
            self.collect()
        return plan

    def set_epoch(self, epoch: int) -> None:
        self.core.set_epoch(epoch)
        self.runner.epoch = epoch

    def abort(self, *rids: str, **changes: object) -> list[str]:
        found = self.core.abort(rids, "because", now=self.now, **changes)  # type: ignore[arg-type]
        self.collect()
        return found

    def collect(self) -> None:
        for row in self.core.take_rows():
            self.rows.setdefault(row.rid, []).append(row)
        self.ended += self.core.take_ended()
        self.core.check_integrity()

    def drain(self, steps: int = 2000) -> list[StepPlan]:
        """Step until nothing is live; each step makes progress or this fails."""
        plans = []
        while not self.core.idle:
            assert len(plans) < steps, "no end in sight"
            plan = self.step()
            assert plan is not None
            plans.append(plan)
        return plans

    def run(self, *asked: TokenizedGenerateReqInput) -> list[TokenIDRow]:
        """Accept and drain; the whole answer of each as one row."""
        for one in asked:
            self.accept(one)
        self.drain()
        return [self.answer(one.rid) for one in asked]

    def answer(self, rid: str) -> TokenIDRow:
        first, *later = (
            msgspec.convert(msgspec.to_builtins(r), TokenIDRow) for r in self.rows[rid]
        )
        for row in later:
            first = merge(first, row)
        return first

    def cached(self, rid: str) -> int:
        """Prompt tokens of the request that were not computed again."""
        provenance = self.answer(rid).provenance
        assert provenance is not None
        return provenance.cached_tokens
