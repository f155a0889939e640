"""Any order of arrivals, steps, aborts, retractions, pauses, flushes and weight commits.

The replay runner checks every plan; each rule checks the books. At its end each request is compared
with itself running alone.
"""

from __future__ import annotations

from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from engine.config import Limits
from engine.messages import LogprobParams, TokenIDRow, TokenizedGenerateReqInput
from engine.scheduler.plan import StepPlan
from tests.engine.scheduler.replay import (
    HIDDEN,
    Rig,
    alone,
    chosen,
    entropy,
    input_logprobs,
    logprob,
    model_info,
    request,
    top,
)

BLOCK = 4
LOGPROBS = [
    None,
    None,
    LogprobParams(),
    LogprobParams(start_len=0, top_num=2),
    LogprobParams(start_len=5, token_ids=(3, 4)),
]

# Few different blocks and many whole ones, so that prefixes are shared and all lengths are met.
prompts = st.builds(
    lambda blocks, tail: [token for block in blocks for token in [block] * BLOCK] + [9] * tail,
    st.lists(st.sampled_from([1, 1, 1, 2]), max_size=5),
    st.integers(0, BLOCK),
).filter(lambda prompt: len(prompt) > 5)
samplings = st.fixed_dictionaries(
    {
        "max_new_tokens": st.sampled_from([0, 1, 3, 9, 20, 30, 40]),
        "min_new_tokens": st.sampled_from([0, 0, 6]),
        "ignore_eos": st.sampled_from([True, True, False]),
        "stop_token_ids": st.sampled_from([(), (), (), (11, 12, 13)]),
        "stop": st.sampled_from([(), (), (), ("AB", "CCC")]),
        "seed": st.integers(1, 2),
    }
)
wishes = st.fixed_dictionaries(
    {
        "priority": st.sampled_from([0, 0, 0, 1, 2]),
        "extra_key": st.sampled_from([None, None, None, "a", "b"]),
        "kv_reuse": st.sampled_from(["isolate", "isolate", "group", "share"]),
        "logprob": st.sampled_from(LOGPROBS),
        "return_entropy": st.booleans(),
        "return_hidden_states": st.sampled_from([False, False, True]),
    }
)
arrivals = st.lists(st.tuples(prompts, samplings, wishes), min_size=2, max_size=6)


def runs_of(epochs: list[int]) -> list[tuple[int, int]]:
    runs: list[tuple[int, int]] = []
    for epoch in epochs:
        if runs and runs[-1][1] == epoch:
            runs[-1] = (runs[-1][0] + 1, epoch)
        else:
            runs.append((1, epoch))
    return runs


class Schedules(RuleBasedStateMachine):
    @initialize(
        blocks=st.sampled_from([8, 10, 12, 16, 24]),
        running=st.integers(1, 6),
        budget=st.sampled_from([1, 5, 16, 40, 40]),
        chunk=st.sampled_from([1, 6, 20, 20]),
    )
    def start(self, blocks: int, running: int, budget: int, chunk: int) -> None:
        limits = Limits(max_running=running, max_step_tokens=budget, chunk_tokens=chunk)
        self.rig = Rig(limits, model_info(num_blocks=blocks, block_size=BLOCK, max_context=48))
        self.silenced: set[str] = set()

    @rule(arrivals=arrivals)
    def arrive(self, arrivals: list[tuple[list[int], dict[str, Any], dict[str, Any]]]) -> None:
        for prompt, sampling, wishes in arrivals:
            rid = f"r{len(self.rig.requests)}"
            self.rig.accept(request(rid, prompt, **sampling, **wishes))

    @rule(times=st.integers(1, 30))
    def steps(self, times: int) -> None:
        for _ in range(times):
            self.one_step(lambda: None)

    @precondition(lambda self: self.rig.core.requests())
    @rule(data=st.data(), in_flight=st.booleans(), silent=st.booleans())
    def abort(self, data: st.DataObject, in_flight: bool, silent: bool) -> None:
        rid = data.draw(st.sampled_from([view.rid for view in self.rig.core.requests()]))
        if in_flight:
            self.one_step(lambda: self.end(rid, silent))
        else:
            self.end(rid, silent)

    @rule(in_flight=st.booleans())
    def retract_all(self, in_flight: bool) -> None:
        if in_flight:
            self.one_step(self.rig.core.retract_all)
        else:
            self.rig.core.retract_all()

    @rule()
    def commit_weights(self) -> None:
        self.rig.set_epoch(self.rig.runner.epoch + 1)

    @rule(mode=st.sampled_from(["abort", "retract", "in_place"]), resumes=st.booleans())
    def pause(self, mode: str, resumes: bool) -> None:
        if mode == "abort":
            for view in self.rig.core.requests():
                self.end(view.rid)
        self.rig.core.pause(mode, self.rig.now)  # type: ignore[arg-type]
        assert self.rig.step() is None
        self.rig.collect()
        if resumes:
            self.rig.core.resume()

    @rule(in_flight=st.booleans())
    def flush(self, in_flight: bool) -> None:
        if in_flight:
            self.one_step(self.rig.core.flush_cache)
        else:
            self.rig.core.flush_cache()

    def one_step(self, between: object) -> None:
        plan = self.rig.step(between)  # type: ignore[arg-type]
        if plan is None:
            assert self.rig.core.paused or not self.rig.core.requests()
        else:
            self.check_plan(plan)

    def check_plan(self, plan: StepPlan) -> None:
        counts = [len(row.token_ids) for row in plan.rows]
        assert sum(counts) <= self.rig.limits.max_step_tokens
        assert max(counts) <= self.rig.limits.chunk_tokens
        tenants = self.rig.runner.tenants
        prefills = [
            len(row.token_ids) > 1 or not row.sample
            for row in plan.rows
            if tenants[row.slot].begin.sampling.max_new_tokens
        ]
        assert prefills == sorted(prefills), "decode rows first"

    def end(self, rid: str, silent: bool = False) -> None:
        """Abort; its KV at that moment must be what the terminal row says."""
        view = next(view for view in self.rig.core.requests() if view.rid == rid)
        held = []
        if view.slot is not None:
            held = self.rig.runner.read(self.rig.runner.tenants[view.slot])[: view.computed_tokens]
        before = len(self.rig.rows.get(rid, ()))
        assert self.rig.abort(rid, silent=silent) == [rid]
        rows = self.rig.rows.get(rid, [])[before:]
        if silent:
            self.silenced.add(rid)
            assert not rows
        else:
            assert rows[-1].kv_epochs == runs_of([cell.epoch for cell in held])

    @invariant()
    def every_stream_is_sound(self) -> None:
        if hasattr(self, "rig"):
            self.rig.core.check_integrity()

    def teardown(self) -> None:
        if not hasattr(self, "rig"):
            return
        self.rig.core.resume()
        self.rig.drain(steps=20_000)
        assert sorted(self.rig.ended) == sorted(self.rig.requests)
        for asked in self.rig.requests.values():
            if asked.rid not in self.silenced:
                check_stream(self.rig, asked)
        dropped = self.rig.core.flush_cache()
        assert dropped.kept == 0
        assert self.rig.core.load().kv_used == 0
        self.rig.core.check_integrity()


def check_stream(rig: Rig, asked: TokenizedGenerateReqInput) -> None:
    """The rows of an ended request, one by one and together."""
    rows = rig.rows[asked.rid]
    assert [row.finish is not None for row in rows] == [False] * (len(rows) - 1) + [True]
    assert [row.decode is not None for row in rows] == [True] + [False] * (len(rows) - 1)
    assert [row.provenance is not None for row in rows] == [True] + [False] * (len(rows) - 1)
    assert all(row.http_worker_ipc == asked.http_worker_ipc for row in rows)
    for row in rows:
        assert row.output_ids or row.finish is not None
        assert sum(count for count, _ in row.epochs) == len(row.output_ids)
        check_lengths(asked, row)
    whole = rig.answer(asked.rid)
    output, finish = alone(asked, rig.info, rig.limits)
    assert whole.finish is not None
    if whole.finish.type == "abort":
        assert whole.output_ids == output[: len(whole.output_ids)]
    else:
        assert (whole.output_ids, whole.finish) == (output, finish)
        positions = len(asked.input_ids) + max(len(output) - 1, 0)
        assert sum(count for count, _ in whole.kv_epochs or ()) == positions
    check_values(asked, whole)


def check_lengths(asked: TokenizedGenerateReqInput, row: TokenIDRow) -> None:
    """Only what was asked for, in lists as long as the row's tokens."""
    new = len(row.output_ids)
    assert (row.output_logprobs is not None) == (asked.logprob is not None)
    assert (row.entropy is not None) == asked.return_entropy
    assert (row.hidden is not None) == asked.return_hidden_states
    if row.entropy is not None:
        assert len(row.entropy) == new
    if asked.logprob is not None and row.output_logprobs is not None:
        found = row.output_logprobs
        assert len(found.values) == new
        assert (found.top is not None) == bool(asked.logprob.top_num)
        assert (found.token_ids is not None) == (asked.logprob.token_ids is not None)
        for family in (found.top, found.token_ids):
            assert family is None or len(family.ids) == len(family.values) == new


def check_values(asked: TokenizedGenerateReqInput, whole: TokenIDRow) -> None:
    """Every value belongs to its token, whatever was recomputed on the way."""
    prompt = len(asked.input_ids)
    at = range(prompt, prompt + len(whole.output_ids))
    complete = whole.output_ids or (whole.finish and whole.finish.type != "abort")
    if asked.return_entropy:
        assert whole.entropy == [entropy(position) for position in at]
    if asked.return_hidden_states and whole.hidden is not None:
        context = asked.input_ids + whole.output_ids
        positions = len(whole.hidden.data) // HIDDEN.size
        assert whole.hidden.data == b"".join(HIDDEN.pack(p, context[p]) for p in range(positions))
        if complete:
            assert positions >= prompt + max(len(whole.output_ids) - 1, 0)
    if asked.logprob is None:
        return
    found = whole.output_logprobs
    assert found is not None
    assert found.values == [logprob(t, p) for t, p in zip(whole.output_ids, at, strict=True)]
    if found.top is not None:
        assert found.top.values == [top(asked.logprob.top_num, p)[1] for p in at]
    if found.token_ids is not None:
        assert found.token_ids.values == [chosen(asked.logprob.token_ids or (), p)[1] for p in at]
    assert (whole.input_logprobs is not None) == (asked.logprob.start_len >= 0)
    if complete and asked.logprob.start_len >= 0:
        assert whole.input_logprobs == input_logprobs(asked.logprob, asked.input_ids, 0, prompt)


TestSchedules = Schedules.TestCase
TestSchedules.settings = settings(
    max_examples=150,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
