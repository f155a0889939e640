"""Who runs in a step: budgets, chunks, slots, order, and what one step costs."""

from engine.config import Limits
from engine.scheduler.plan import SampledRow, StepPlan, StepResult
from tests.engine.scheduler.replay import Rig, calls_of, model_info, request


def counts(plan: StepPlan | None) -> dict[int, int]:
    """Tokens of each slot's row."""
    assert plan is not None
    return {row.slot: len(row.token_ids) for row in plan.rows}


def prompt(length: int, first: int = 1) -> list[int]:
    return [first] + [2] * (length - 1)


def rids(plan: StepPlan | None) -> list[str]:
    assert plan is not None
    return [begin.rid for begin in plan.begins]


def test_nothing_to_do_is_no_plan():
    rig = Rig()
    assert rig.core.idle
    assert rig.core.plan(0.0) is None


def test_decode_rows_come_first_and_prefill_shares_the_rest_of_the_budget():
    rig = Rig(Limits(max_running=4, max_step_tokens=10, chunk_tokens=8))
    rig.accept(request("decoding", prompt(3), max_new_tokens=20, ignore_eos=True))
    rig.step()
    rig.accept(request("long", prompt(20, first=3)))
    rig.accept(request("later", prompt(5, first=4)))
    plan = rig.step()
    assert plan is not None
    assert [(row.slot, len(row.token_ids), row.sample) for row in plan.rows] == [
        (0, 1, True),
        (1, 8, False),
        (2, 1, False),
    ]
    assert counts(rig.step()) == {0: 1, 1: 8, 2: 1}
    assert counts(rig.step()) == {0: 1, 1: 4, 2: 3}


def test_a_request_without_budget_gets_no_slot():
    rig = Rig(Limits(max_running=4, max_step_tokens=8, chunk_tokens=8))
    rig.accept(request("a", prompt(16)))
    rig.accept(request("b", prompt(4, first=3)))
    assert rids(rig.step()) == ["a"]
    assert rig.core.load().waiting == 1


def test_more_decode_rows_than_budget_still_all_finish():
    rig = Rig(Limits(max_running=4, max_step_tokens=2))
    rig.run(*(request(str(n), prompt(4, first=n + 1)) for n in range(4)))
    assert sorted(rig.ended) == ["0", "1", "2", "3"]


def test_slots_bound_the_running_requests_and_are_reused():
    rig = Rig(Limits(max_running=2))
    for n in range(5):
        rig.accept(request(str(n), prompt(4, first=n + 1), max_new_tokens=2, ignore_eos=True))
    assert rids(rig.step()) == ["0", "1"]
    assert (rig.core.load().running, rig.core.load().waiting) == (2, 3)
    plans = rig.drain()
    assert {begin.slot for plan in plans for begin in plan.begins} == {0, 1}


def test_waiting_requests_start_by_priority_then_by_arrival():
    rig = Rig(Limits(max_running=1))
    for rid, priority in [("a", 0), ("b", 0), ("c", 2), ("d", 1), ("e", 2)]:
        rig.accept(request(rid, prompt(4), max_new_tokens=1, priority=priority))
    assert [rid for plan in rig.drain() for rid in rids(plan)] == ["c", "e", "d", "a", "b"]


def test_a_full_slot_table_is_not_preempted_by_priority():
    rig = Rig(Limits(max_running=1))
    rig.accept(request("low", prompt(4), max_new_tokens=8, ignore_eos=True))
    rig.step()
    rig.accept(request("high", prompt(4), priority=9))
    assert rids(rig.step()) == []
    rig.drain()
    assert rig.ended == ["low", "high"]
    assert rig.core.load().retractions == 0


def test_samples_of_one_prompt_compute_it_once():
    rig = Rig(info=model_info(num_blocks=64), limits=Limits(max_running=8))
    samples = [
        request(str(n), prompt(17), seed=n + 1, max_new_tokens=3, ignore_eos=True) for n in range(4)
    ]
    for one in samples:
        rig.accept(one)
    assert rids(rig.step()) == ["0"]
    plan = rig.step()
    assert rids(plan) == ["1", "2", "3"]
    assert counts(plan) == {0: 1, 1: 1, 2: 1, 3: 1}
    rig.drain()
    assert [rig.cached(one.rid) for one in samples] == [0, 16, 16, 16]


def test_waiting_for_a_prefix_keeps_nobody_else_waiting():
    rig = Rig(Limits(max_running=4, max_step_tokens=64, chunk_tokens=8))
    rig.accept(request("first", prompt(20)))
    rig.accept(request("same", prompt(20)))
    rig.accept(request("other", prompt(20, first=3)))
    assert rids(rig.step()) == ["first", "other"]
    assert rids(rig.step()) == []
    assert rids(rig.step()) == ["same"]
    rig.drain()
    assert rig.cached("same") == 16


def test_a_short_common_prefix_is_not_worth_waiting_for():
    rig = Rig()
    rig.accept(request("a", [1] * 4 + [2] * 4))
    rig.accept(request("b", [1] * 4 + [3] * 4))
    assert rids(rig.step()) == ["a", "b"]


def test_who_computes_the_common_prefix_may_be_aborted():
    rig = Rig(Limits(max_running=4, chunk_tokens=8))
    rig.accept(request("first", prompt(20)))
    rig.accept(request("same", prompt(20)))
    rig.step()
    rig.abort("first")
    assert rids(rig.step()) == ["same"]
    rig.drain()
    assert rig.cached("same") == 8


def test_the_plan_of_a_decode_step_names_only_what_changed():
    rig = Rig()
    rig.accept(request("a", prompt(4), max_new_tokens=6, ignore_eos=True))
    first, *later = rig.drain()
    assert (first.begins[0].prompt_ids, first.begins[0].history_ids) == (prompt(4), [])
    assert all(not plan.begins and len(plan.rows[0].token_ids) == 1 for plan in later)
    assert [len(plan.rows[0].new_blocks) for plan in (first, *later)] == [1, 1, 0, 0, 0, 1]


def test_a_seed_is_drawn_once_for_requests_without_one():
    rig = Rig()
    rig.accept(request("a", prompt(4), seed=None, max_new_tokens=9, ignore_eos=True))
    plan = rig.step()
    rig.core.retract_all()
    again = rig.step()
    assert plan is not None and again is not None
    assert plan.begins[0].sampling.seed == again.begins[0].sampling.seed is not None


def cost_of_a_decode_row(context: int, rows: int = 64) -> float:
    """Calls that planning and committing one decode step makes, per row."""
    info = model_info(num_blocks=64 * 80, block_size=16, max_context=5000)
    core = Rig(Limits(max_running=64, max_step_tokens=10**6, chunk_tokens=10**6), info).core
    for n in range(rows):
        prompt = [n % 40 + 1, n // 40] * (context // 2)
        core.accept(request(str(n), prompt, max_new_tokens=99), 0.0)

    def step() -> None:
        plan = core.plan(0.0)
        assert plan is not None and len(plan.rows) == rows
        core.commit(plan, StepResult(0, [SampledRow(row.slot, 5) for row in plan.rows]), 0.0)
        core.take_rows()

    for _ in range(4):
        step()
    return calls_of(step) / rows


def test_a_decode_step_costs_the_same_behind_any_context():
    short, long = cost_of_a_decode_row(16), cost_of_a_decode_row(1024)
    assert short == long
    assert long < 30
