"""Pause, weight commits, retraction on command, and the views for the console."""

import pytest

from engine.config import Limits
from engine.messages import Finish
from engine.scheduler.plan import StepResult
from tests.engine.scheduler.replay import Rig, alone, request


def begun(rig: Rig, count: int = 2) -> Rig:
    for n in range(count):
        rig.accept(request(str(n), [n + 1] * 6, max_new_tokens=8, ignore_eos=True))
    rig.step()
    rig.step()
    return rig


def all_undisturbed(rig: Rig) -> bool:
    return all(
        (rig.answer(rid).output_ids, rig.answer(rid).finish) == alone(asked, rig.info, rig.limits)
        for rid, asked in rig.requests.items()
    )


@pytest.mark.parametrize("mode", ["retract", "in_place"])
def test_a_paused_core_plans_nothing_and_goes_on_where_it_was(mode):
    rig = begun(Rig())
    rig.core.pause(mode, rig.now)
    assert rig.core.paused and rig.core.idle
    assert rig.core.plan(0.0) is None
    rig.accept(request("late", [9] * 6))
    assert rig.core.plan(0.0) is None
    rig.core.resume()
    rig.drain()
    assert all_undisturbed(rig)


def test_a_pause_in_place_keeps_kv_and_a_retracting_one_drops_it():
    rig = begun(Rig())
    rig.core.pause("in_place", rig.now)
    assert rig.core.running_rids() == ["0", "1"]
    assert rig.core.load().kv_used == 16
    rig.core.pause("retract", rig.now)
    assert rig.core.running_rids() == []
    assert (rig.core.load().waiting, rig.core.load().kv_used) == (2, 0)
    rig.core.pause("retract", rig.now)
    assert rig.core.load().retractions == 2


def test_an_aborting_pause_ends_running_and_waiting_requests_and_holds_new_ones():
    rig = begun(Rig(Limits(max_running=1)))
    rig.core.pause("abort", rig.now)
    rig.collect()
    finish = Finish(type="abort", message="aborted by a pause")
    assert [rig.answer(rid).finish for rid in "01"] == [finish, finish]
    assert rig.ended == ["0", "1"]
    rig.accept(request("2", [3] * 6))
    assert rig.core.plan(0.0) is None
    rig.core.resume()
    rig.drain()
    assert rig.ended == ["0", "1", "2"]


def test_retracted_requests_recompute_their_kv_under_the_new_weights():
    rig = begun(Rig(), count=1)
    rig.core.retract_all()
    rig.set_epoch(1)
    rig.drain()
    answer = rig.answer("0")
    assert answer.epochs == [(2, 0), (6, 1)]
    assert answer.kv_epochs == [(13, 1)]
    assert all_undisturbed(rig)


def test_requests_that_go_on_in_place_keep_their_old_kv():
    rig = begun(Rig(), count=1)
    rig.set_epoch(1)
    rig.drain()
    answer = rig.answer("0")
    assert answer.epochs == [(2, 0), (6, 1)]
    assert answer.kv_epochs == [(7, 0), (6, 1)]


def test_a_retraction_with_a_step_in_flight_loses_that_step_and_nothing_else():
    rig = begun(Rig())
    rig.step(between=rig.core.retract_all)
    assert [len(rig.answer(rid).output_ids) for rid in "01"] == [2, 2]
    rig.drain()
    assert all_undisturbed(rig)


def test_an_epoch_cannot_change_under_a_planned_step():
    rig = Rig()
    rig.accept(request("a", [1, 2, 3]))
    assert rig.core.plan(0.0) is not None
    with pytest.raises(RuntimeError, match="epoch 1 set while a step of epoch 0 runs"):
        rig.core.set_epoch(1)


def test_a_forward_under_another_epoch_than_planned_is_not_booked():
    rig = Rig()
    rig.accept(request("a", [1, 2, 3]))
    plan = rig.core.plan(0.0)
    assert plan is not None
    rows = rig.runner.forward(plan).rows
    with pytest.raises(ValueError, match="step 1 ran at epoch 9, not 0"):
        rig.core.commit(plan, StepResult(epoch=9, rows=rows), 0.0)


def test_a_bare_plan_carries_ends_and_commands_while_nothing_runs():
    rig = begun(Rig(), count=1)
    rig.core.pause("retract", rig.now)
    rig.set_epoch(1)
    plan = rig.core.bare_plan()
    assert (plan.ends, plan.begins, plan.rows) == ([0], [], [])
    rig.core.commit(plan, rig.runner.forward(plan), rig.now)
    rig.core.resume()
    rig.drain()
    assert all_undisturbed(rig)


def test_a_plan_must_be_committed_before_the_next():
    rig = Rig()
    rig.accept(request("a", [1, 2, 3]))
    rig.core.plan(0.0)
    with pytest.raises(AssertionError, match="not committed"):
        rig.core.plan(0.0)
    with pytest.raises(AssertionError, match="not committed"):
        rig.core.bare_plan()


def test_the_table_of_requests_shows_phase_progress_and_epochs():
    rig = Rig(Limits(max_running=2, chunk_tokens=4))
    rig.accept(request("decoding", [1] * 3, max_new_tokens=9, ignore_eos=True, received_at=90.0))
    rig.step()
    rig.set_epoch(1)
    rig.accept(request("prefilling", [2] * 9, priority=-1))
    rig.accept(request("queued", [3] * 5, priority=-2))
    rig.step()
    first, second, third = rig.core.requests()
    assert (first.rid, first.phase, first.output_tokens, first.computed_tokens, first.slot) == (
        "decoding",
        "decode",
        2,
        4,
        0,
    )
    assert (first.received_at, first.epochs) == (90.0, [(1, 0), (1, 1)])
    assert (second.phase, second.computed_tokens, second.prompt_tokens) == ("prefill", 4, 9)
    assert (third.phase, third.slot, third.priority) == ("waiting", None, -2)
    assert third.received_at == 101.0


def test_the_load_counts_requests_and_tokens():
    rig = begun(Rig(Limits(max_running=1)))
    load = rig.core.load()
    assert (load.running, load.waiting) == (1, 1)
    assert (load.kv_used, load.kv_total) == (8, 128)
    assert (load.prompt_tokens, load.output_tokens) == (6, 2)
    rig.drain()
    assert rig.core.load().kv_used == 0
    assert rig.core.load().output_tokens == 16
