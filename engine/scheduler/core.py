"""Scheduler core: who runs in the next step, on which KV blocks, and what each request is told.

Path: process.py feeds requests and control in, takes plans to the runner and rows to the
detokenizer. Pure: no I/O, no torch, no clock (``now`` comes in). Continuous batching with chunked
prefill after SGLang and vLLM V1: a sequence has tokens with and without KV, and a step gives each
running sequence some of the latter, so prefill, decode and recomputation are one thing.

Progress: running sequences are ordered by priority, then age. Only the last ones are retracted when
KV runs out, and one alone always fits (else it was refused), so the first one always advances.
"""

from __future__ import annotations

import random
from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal

import msgspec

from engine.config import Limits
from engine.errors import BadRequest
from engine.latency import Delays
from engine.messages import Finish, SamplingParams, TokenIDRow, TokenizedGenerateReqInput
from engine.scheduler.kv import Flushed, KVSpace, accepted_epochs
from engine.scheduler.plan import (
    ModelInfo,
    PlanRow,
    SampledRow,
    SlotBegin,
    StepPlan,
    StepResult,
)
from engine.scheduler.radix import Node
from engine.scheduler.sequence import (
    LENGTH,
    RequestView,
    Sequence,
    StopChecker,
    abort_for,
    check_request,
)

PauseMode = Literal["abort", "retract", "in_place"]

# A waiting request lets another one compute their common prefix first if that saves this much.
WORTH_WAITING_BLOCKS = 2


@dataclass(frozen=True, slots=True)
class Load:
    """Counts of one dp rank; the names are those of ``messages.RankLoad``."""

    running: int
    waiting: int
    kv_used: int  # tokens of blocks that a live request holds
    kv_total: int  # tokens
    cached_tokens: int  # prompt tokens that came from the prefix cache, since the start
    prompt_tokens: int  # of requests that were scheduled, since the start
    output_tokens: int  # since the start
    retractions: int  # since the start


class SchedulerCore:
    """All state of one dp rank's requests. Calls come from one thread, in any order but one:
    each plan is committed before the next; aborts and retractions may come in between.
    """

    def __init__(
        self,
        limits: Limits,
        info: ModelInfo,
        *,
        dp: int,
        stop_checker: Callable[[SamplingParams], StopChecker | None],
        epoch: int = 0,
        seeds: random.Random | None = None,
    ) -> None:
        self._limits = limits
        self._info = info
        self._dp = dp
        self._stop_checker = stop_checker
        self._seeds = seeds or random.Random()
        self._kv = KVSpace(info.num_blocks, info.block_size)
        self._context = min(limits.max_context or info.max_context, info.max_context)
        self._longest = min(self._context, self._kv.total_tokens)  # one alone must fit the pool
        self._epoch = epoch
        self._paused = False
        self._step = 0
        self._arrivals = 0
        self._live: dict[str, Sequence] = {}
        self._waiting: list[Sequence] = []  # both lists in the order of Sequence.order
        self._running: list[Sequence] = []
        self._free_slots = list(range(limits.max_running - 1, -1, -1))
        self._ends: list[int] = []  # slots given up since the last plan
        self._in_flight: dict[int, Sequence] | None = None  # by slot, between plan and commit
        self._rows: list[TokenIDRow] = []
        self._ended: list[str] = []
        self._cached_tokens = self._prompt_tokens = self._output_tokens = self._retractions = 0
        self.ttft = Delays()
        self.itl = Delays()

    def accept(self, request: TokenizedGenerateReqInput, now: float) -> None:
        """Queue a request, or end it at once with status 400 when it can never run.

        ValueError for a rid that is live: its stream must not get a second terminal row.
        """
        if request.rid in self._live:
            raise ValueError(f"request {request.rid} is live already")
        sampling = request.sampling
        if sampling.seed is None:
            sampling = msgspec.structs.replace(sampling, seed=self._seeds.getrandbits(63))
        sequence = Sequence(
            request=request,
            sampling=sampling,
            arrival=self._arrivals,
            received_at=request.received_at or now,
            info=self._info,
            longest=self._longest,
        )
        refused = None
        try:
            check_request(request, self._info, self._context, self._kv.total_tokens)
            sequence.stop_checker = self._stop_checker(sampling)
        except BadRequest as error:
            refused = abort_for(error)
        self._arrivals += 1
        self._live[request.rid] = sequence
        insort(self._waiting, sequence, key=_order)
        if refused is not None:
            self._send(sequence, None, refused, now)

    def abort(
        self,
        rids: Iterable[str] | None,
        reason: str,
        *,
        now: float,
        status_code: int | None = None,
        err_type: str | None = None,
        silent: bool = False,
    ) -> list[str]:
        """End these live requests (None: all) with what they have; returns the rids found.

        ``silent``: the router has answered already, so no row is sent.
        """
        wanted = list(self._live) if rids is None else dict.fromkeys(rids)
        found = [rid for rid in wanted if rid in self._live]
        finish = Finish(type="abort", message=reason, status_code=status_code, err_type=err_type)
        for rid in found:
            self._send(self._live[rid], None, finish, now, silent=silent)
        return found

    def take_rows(self) -> list[TokenIDRow]:
        """Rows since the last call, in order; each request's last row, and only it, has finish."""
        rows, self._rows = self._rows, []
        return rows

    def take_ended(self) -> list[str]:
        """Rids since the last call that hold no slot and no block any more, each once."""
        ended, self._ended = self._ended, []
        return ended

    def pause(self, mode: PauseMode, now: float) -> None:
        """Plan no step until ``resume``; new requests wait. A second pause applies its mode too.

        ``abort`` ends all live requests, ``retract`` drops their KV, ``in_place`` keeps it.
        """
        self._paused = True
        if mode == "abort":
            self.abort(None, "aborted by a pause", now=now)
        elif mode == "retract":
            self.retract_all()

    def resume(self) -> None:
        self._paused = False

    @property
    def paused(self) -> bool:
        return self._paused

    def retract_all(self) -> list[str]:
        """Drop the KV of all running requests and requeue them; returns their rids."""
        rids = self.running_rids()
        while self._running:
            self._retract(self._running[-1])
        return rids

    def set_epoch(self, epoch: int) -> None:
        """The next planned forward runs under ``epoch``: called before the plan that commits it."""
        if self._in_flight is not None:
            raise RuntimeError(f"epoch {epoch} set while a step of epoch {self._epoch} runs")
        self._epoch = epoch

    def flush_cache(self) -> Flushed:
        """Drop every cached block that no live request holds."""
        return self._kv.flush()

    @property
    def idle(self) -> bool:
        """True if ``plan`` has nothing to run: no live request, or paused."""
        return self._paused or not self._live

    def running_rids(self) -> list[str]:
        """Requests that hold a slot, first to run first."""
        return [sequence.request.rid for sequence in self._running]

    def load(self) -> Load:
        return Load(
            running=len(self._running),
            waiting=len(self._waiting),
            kv_used=self._kv.used_tokens,
            kv_total=self._kv.total_tokens,
            cached_tokens=self._cached_tokens,
            prompt_tokens=self._prompt_tokens,
            output_tokens=self._output_tokens,
            retractions=self._retractions,
        )

    def requests(self) -> list[RequestView]:
        """Every live request: running first, then waiting, each in order."""
        return [sequence.view() for sequence in (*self._running, *self._waiting)]

    def check_integrity(self) -> None:
        """AssertionError if a slot, a block or a lock is lost or counted twice."""
        self._kv.check_integrity(self._running)
        slots = [sequence.slot for sequence in self._running] + self._free_slots
        assert Counter(slots) == Counter(range(self._limits.max_running)), "slots are lost"
        assert len(self._live) == len(self._running) + len(self._waiting)
        assert all(sequence.slot is None and not sequence.table for sequence in self._waiting)

    def plan(self, now: float) -> StepPlan | None:
        """The next step; None while paused or without live requests.

        Decode rows come first; prefill chunks share what is left of the token budget.
        """
        assert self._in_flight is None, "the last plan is not committed"
        if self.idle:
            return None
        self._grow()
        begins = self._admit(now) if self._waiting else []
        step = self.bare_plan()
        step.begins = begins
        step.rows = self._plan_rows()
        assert step.rows, "live requests, but nothing to run"
        return step

    def bare_plan(self) -> StepPlan:
        """A step without rows: for commands while nothing runs. Committed like any other."""
        assert self._in_flight is None, "the last plan is not committed"
        self._step += 1
        self._in_flight = {}
        ends, self._ends = self._ends, []
        return StepPlan(step=self._step, ends=ends)

    def _grow(self) -> None:
        """A block for each sequence that decodes past its table, from the last ones if need be."""
        at = 0
        while at < len(self._running):
            sequence = self._running[at]
            at += 1
            if sequence.computed < len(sequence.table) * sequence.block_size:
                continue
            while not self._kv.available and sequence.slot is not None:
                self._retract(self._running[-1])
            if sequence.slot is not None:
                self._kv.grow(sequence)

    def _admit(self, now: float) -> list[SlotBegin]:
        """Give slots and KV to waiting requests, in order, while there is budget to run them."""
        begins: list[SlotBegin] = []
        budget = self._limits.max_step_tokens - sum(map(self._chunk, self._running))
        at = 0
        while at < len(self._waiting) and self._free_slots and budget > 0:
            sequence = self._waiting[at]
            if sequence.waits_for_prefix:
                at += 1
                continue
            if sequence.room_seen is not None and self._room <= sequence.room_seen:
                break  # nothing came free since it did not fit
            node = self._kv.match(sequence, self._epoch)
            if self._defers(sequence, node):
                continue
            if (shortage := self._kv.demand(sequence, node) - self._room) > 0:
                if self._make_room(sequence, shortage):
                    continue
                sequence.room_seen = self._room
                break
            del self._waiting[at]
            begins.append(self._begin(sequence, node, now))
            budget -= self._chunk(sequence)
        return begins

    def _defers(self, sequence: Sequence, node: Node) -> bool:
        """Let a prefilling sequence compute a long common prefix first: n samples of one prompt
        arrive together, and then compute it once."""
        worth = (node.depth + WORTH_WAITING_BLOCKS) * self._info.block_size
        accepted = accepted_epochs(sequence.request, self._epoch)
        for other in self._running:
            if other.pending <= 1 or other.namespace != sequence.namespace:
                continue
            if accepted is None or other.kv_epoch_set() <= accepted:
                common = sequence.common_prefix(other)
                if common >= worth and common > other.computed:
                    sequence.waits_for = (other, common)
                    return True
        return False

    @property
    def _room(self) -> int:
        """Blocks for a new sequence that leave one to each running one (and to it) to grow."""
        headroom = len(self._running) + 1 if self._running else 0
        return self._kv.available - headroom

    def _make_room(self, sequence: Sequence, shortage: int) -> bool:
        """Retract the last running sequence if those of lower priority can make up the shortage."""
        lower = [other for other in self._running if other.order[0] > sequence.order[0]]
        if sum(len(other.table) for other in lower) < shortage:
            return False
        self._retract(self._running[-1])
        return True

    def _begin(self, sequence: Sequence, node: Node, now: float) -> SlotBegin:
        self._kv.begin(sequence, self._free_slots.pop(), node)
        insort(self._running, sequence, key=_order)
        if sequence.scheduled_at is None:
            sequence.scheduled_at = now
            sequence.cached_tokens = sequence.computed
            self._cached_tokens += sequence.cached_tokens
            self._prompt_tokens += sequence.prompt_tokens
        return sequence.slot_begin()

    def _chunk(self, sequence: Sequence) -> int:
        return min(sequence.pending, self._limits.chunk_tokens)

    def _plan_rows(self) -> list[PlanRow]:
        rows, prefills = [], []
        budget = self._limits.max_step_tokens
        for sequence in self._running:
            if sequence.pending > 1:
                prefills.append(sequence)
            elif budget:
                rows.append(self._plan_row(sequence, 1))
                budget -= 1
        for sequence in prefills:
            if count := min(self._chunk(sequence), budget):
                rows.append(self._plan_row(sequence, count))
                budget -= count
        return rows

    def _plan_row(self, sequence: Sequence, count: int) -> PlanRow:
        assert self._in_flight is not None and sequence.slot is not None
        start, end = sequence.computed, sequence.computed + count
        row = PlanRow(slot=sequence.slot, start=start, token_ids=sequence.tokens[start:end])
        row.sample = end == len(sequence.tokens) < sequence.limit
        if sequence.sent_blocks < len(sequence.table):
            row.new_blocks = sequence.table[sequence.sent_blocks :]
            sequence.sent_blocks = len(sequence.table)
        self._in_flight[sequence.slot] = sequence
        return row

    def commit(self, step: StepPlan, result: StepResult, now: float) -> None:
        """Book what the forward of ``step`` gave. Rows of requests that ended meanwhile are void.

        ValueError when it ran under another epoch than planned: labels and cache would be wrong.
        """
        in_flight, self._in_flight = self._in_flight, None
        assert in_flight is not None and step.step == self._step, "this step is not in flight"
        if result.epoch != self._epoch:
            raise ValueError(f"step {step.step} ran at epoch {result.epoch}, not {self._epoch}")
        for row, sampled in zip(step.rows, result.rows, strict=True):
            assert row.slot == sampled.slot, "the runner changed the order of the rows"
            sequence = in_flight.get(row.slot)
            if sequence is not None:
                self._commit_row(sequence, row, sampled, now)

    def _commit_row(
        self, sequence: Sequence, row: PlanRow, sampled: SampledRow, now: float
    ) -> None:
        count = len(row.token_ids)
        sequence.gather(row.start, count, sampled)
        sequence.wrote(count, self._epoch)
        if len(sequence.block_runs) > sequence.place.depth:
            self._kv.seal(sequence)
        if row.sample:
            assert sampled.token_id is not None, "the runner sampled nothing"
            if sequence.made_at:
                self.itl.add(now - sequence.made_at)
            else:
                self.ttft.add(now - sequence.received_at)
            finish = sequence.add_token(sampled.token_id, self._epoch, now)
            self._output_tokens += 1
            self._send(sequence, sampled, finish, now)
        elif not sequence.pending:  # max_new_tokens = 0: only the prompt was asked about
            self._send(sequence, None, LENGTH, now)

    def _send(
        self,
        sequence: Sequence,
        sampled: SampledRow | None,
        finish: Finish | None,
        now: float,
        *,
        silent: bool = False,
    ) -> None:
        """Queue the request's next row; with ``finish`` it is the last, and all is given back."""
        row = sequence.row(sampled, self._epoch)
        if not sequence.opened:
            sequence.open(row, now, self._dp, self._info.weight_form)
        if finish is not None:
            row.finish = finish
            row.kv_epochs = sequence.kv_epochs()
            if sequence.slot is None:
                _remove(self._waiting, sequence)
            else:
                self._release(sequence)
            del self._live[sequence.request.rid]
            self._ended.append(sequence.request.rid)
        if not silent:
            self._rows.append(row)

    def _retract(self, sequence: Sequence) -> None:
        """Back to waiting, in front of all that are younger; tokens stay, KV goes."""
        self._release(sequence)
        insort(self._waiting, sequence, key=_order)
        sequence.retractions += 1
        self._retractions += 1

    def _release(self, sequence: Sequence) -> None:
        """Give slot and blocks back; full blocks live on in the cache."""
        assert sequence.slot is not None
        _remove(self._running, sequence)
        self._free_slots.append(sequence.slot)
        self._ends.append(sequence.slot)
        if self._in_flight is not None:
            self._in_flight.pop(sequence.slot, None)
        self._kv.release(sequence)


def _order(sequence: Sequence) -> tuple[int, int]:
    return sequence.order


def _remove(ordered: list[Sequence], sequence: Sequence) -> None:
    at = bisect_left(ordered, sequence.order, key=_order)
    assert ordered[at] is sequence
    del ordered[at]
