"""The control desk: order, keys, deadlines, one answer per call. And the small operations."""

from __future__ import annotations

import pytest

from engine.messages import (
    BeginWeightUpdateReqInput,
    Call,
    ConfigureLoggingReq,
    DrainRankReqInput,
    FlushRank,
    GetEpochReqInput,
    GetRequestsReqInput,
    GetWeightsByNameReqInput,
    InitWeightsUpdateGroupReqInput,
    PauseGenerationReqInput,
    RankAnswer,
    SlowDownReqInput,
    UpdateWeightFromDiskReqInput,
    UpdateWeightVersionReqInput,
)
from engine.router.control import (
    KEEP_OUTCOMES_S,
    ControlDesk,
    FanOut,
    Outcome,
    Until,
    at_once,
    gathered,
    refusal,
)
from tests.engine.router.rig import Rig

DISK = UpdateWeightFromDiskReqInput


class Desk:
    """A desk with a hand-turned clock; ``sent`` is what it asked of which group."""

    def __init__(self, tensor_ranks: int = 1) -> None:
        self.sent: list[tuple[str, int]] = []
        self.deaf: set[int] = set()
        self.desk = ControlDesk(tensor_ranks=tensor_ranks, send=self._send)
        self.ended: list[str] = []

    def _send(self, call_id, op, dp) -> bool:
        self.sent.append((call_id, dp))
        return dp not in self.deaf

    def submit(self, operation, *, name="op", deadline=100.0, key=None, exclusive=True, now=0.0):
        outcomes: list[Outcome] = []

        def reply(outcome: Outcome) -> None:
            self.ended.append(name)
            outcomes.append(outcome)

        call = Call(id=name, deadline=deadline, key=key)
        self.desk.submit(name, call, operation, reply, exclusive=exclusive, now=now)
        return outcomes

    def answer(self, call_id: str, dp: int, tp: int = 0, success: bool = True, **fields) -> None:
        self.desk.on_answer(
            call_id, RankAnswer(dp=dp, tp=tp, success=success, **fields), fields.get("now", 0.0)
        )


def asking(groups=(0, 1), deadline=50.0, **options):
    answers = yield FanOut(FlushRank(), list(groups), deadline, **options)
    return gathered(answers)


def waiting(condition, deadline=50.0):
    held = yield Until(condition, deadline)
    return Outcome(message=str(held))


def test_exclusive_operations_run_one_at_a_time_in_their_order():
    desk, gates = Desk(), dict.fromkeys("abc", False)
    for name in "abc":
        desk.submit(waiting(lambda name=name: gates[name]), name=name)
    gates["c"] = gates["b"] = True
    desk.desk.tick(1.0)
    assert desk.ended == []
    gates["a"] = True
    desk.desk.tick(2.0)
    assert desk.ended == ["a", "b", "c"]


def test_a_read_does_not_wait_for_an_open_exclusive_operation():
    desk = Desk()
    desk.submit(waiting(lambda: False))
    assert desk.submit(at_once(Outcome), exclusive=False)


def test_a_thousand_operations_that_end_at_once_do_not_nest():
    desk, gate = Desk(), [False]
    desk.submit(waiting(lambda: gate[0]))
    outcomes = [desk.submit(at_once(Outcome)) for _ in range(3_000)]
    gate[0] = True
    desk.desk.tick(1.0)
    assert all(outcomes)


def test_a_fan_out_ends_with_the_answer_of_every_rank_in_rank_order():
    desk = Desk(tensor_ranks=2)
    outcomes = desk.submit(asking())
    (call, _), _ = desk.sent
    for dp, tp in ((1, 1), (0, 1), (1, 0)):
        desk.answer(call, dp, tp)
    assert not outcomes
    desk.answer(call, 0, 0)
    assert [(a.dp, a.tp) for a in outcomes[0].ranks] == [(0, 0), (0, 1), (1, 0), (1, 1)]


def test_answers_that_nobody_waits_for_are_dropped_and_counted():
    desk = Desk()
    outcomes = desk.submit(asking())
    call = desk.sent[0][0]
    desk.answer("c99", 0)
    desk.answer(call, 7)
    desk.answer(call, 0)
    desk.answer(call, 0)
    assert desk.desk.late_answers == 3 and not outcomes
    desk.answer(call, 1)
    assert outcomes[0].success
    desk.answer(call, 1)
    assert desk.desk.late_answers == 4


def test_a_dead_a_deaf_and_a_silent_rank_are_refusals_that_say_why():
    """C11, C18: no call waits for ever."""
    for how, why in (("deaf", "takes no messages"), ("dead", "died"), ("silent", "no answer")):
        desk = Desk()
        desk.deaf = {1} if how == "deaf" else set()
        outcomes = desk.submit(asking())
        desk.answer(desk.sent[0][0], 0)
        if how == "dead":
            desk.desk.on_group_down(1, "died (signal 9)", 1.0)
        desk.desk.tick(51.0)
        assert not outcomes[0].success and why in outcomes[0].message


def test_the_first_refusal_ends_a_fan_out_that_fails_fast():
    desk = Desk()
    outcomes = desk.submit(asking(fail_fast=True))
    desk.answer(desk.sent[0][0], 1, success=False, message="no room")
    assert outcomes[0].message == "rank dp1 tp0: no room"


def test_an_operation_that_goes_on_past_its_deadline_is_answered_504_once():
    desk, gate = Desk(), [False]
    outcomes = desk.submit(waiting(lambda: gate[0], deadline=1e9), key="k", deadline=10.0)
    desk.desk.tick(9.0)
    assert not outcomes
    desk.desk.tick(10.0)
    gate[0] = True
    desk.desk.tick(11.0)
    assert [o.status_code for o in outcomes] == [504] and outcomes[0].result == {"job": "k"}
    assert desk.desk.outcome_of("k").outcome.message == "True"


def test_an_operation_whose_turn_comes_too_late_is_not_started():
    desk, started = Desk(), []
    desk.submit(waiting(lambda: False, deadline=1e9), name="long", deadline=1e9)
    late = desk.submit(at_once(lambda: started.append(1)), key="k", deadline=10.0)
    desk.desk.tick(11.0)
    assert late[0].status_code == 504 and "behind long; nothing was done" in late[0].message
    assert not started and desk.desk.outcome_of("k") is None


def test_a_key_runs_once_and_answers_every_caller_alike():
    desk, runs, gate = Desk(), [], [False]

    def counted():
        runs.append(1)
        outcome = yield from waiting(lambda: gate[0])
        return outcome

    first, second = desk.submit(counted(), key="k"), desk.submit(counted(), key="k")
    gate[0] = True
    desk.desk.tick(1.0)
    third = desk.submit(counted(), key="k", now=2.0)
    assert first == second == third and len(runs) == 1
    desk.desk.tick(KEEP_OUTCOMES_S)
    assert desk.desk.outcome_of("k")
    desk.desk.tick(KEEP_OUTCOMES_S + 2.0)
    assert desk.desk.outcome_of("k") is None


def test_an_operation_that_breaks_is_answered_and_the_next_one_runs():
    desk = Desk()

    def broken():
        yield Until(lambda: True, 1.0)
        raise RuntimeError("bug")

    def refuses():
        raise refusal(409, "conflict", "no")
        yield

    assert desk.submit(broken())[0].err_type == "internal_error"
    assert desk.submit(refuses())[0].status_code == 409
    assert desk.submit(at_once(Outcome))[0].success


# --------------------------------------------------------------------------- with ranks


@pytest.fixture
def rig(tmp_path) -> Rig:
    return Rig(tmp_path)


def test_a_second_update_is_refused_with_the_open_one_s_id(rig):
    session = rig.call(BeginWeightUpdateReqInput).result["session_id"]
    second = rig.call(DISK, model_path=rig.checkpoint(1))
    assert (second.status_code, second.result) == (409, {"session_id": session})


def test_an_update_that_waits_for_its_turn_is_open_too(rig):
    rig.ranks[0, 0].stopped = True
    rig.send(PauseGenerationReqInput)
    first = rig.send(DISK, model_path=rig.checkpoint(1), key="first")
    second = rig.send(DISK, model_path=rig.checkpoint(2), key="second")
    assert (second[0].status_code, second[0].result) == (409, {"job": "first"})
    rig.ranks[0, 0].stopped = False
    assert rig.finished(first).success
    assert rig.call(DISK, model_path=rig.checkpoint(2), key="second").success


def test_a_repeated_key_does_not_update_twice(rig):
    for _ in range(2):
        outcome = rig.call(DISK, model_path=rig.checkpoint(1), key="once")
        assert outcome.result["epoch"] == 2
    rig.serves(1, epoch=2)


def test_a_relabel_touches_nothing_but_the_label(rig):
    """E23, C20."""
    rig.generate("a")
    rig.turn(3)
    outcome = rig.call(UpdateWeightVersionReqInput, new_version="v3")
    assert outcome.success and outcome.result == {"new_version": "v3", "epoch": 1}
    assert rig.ledger.epochs[1].weight_version == "v3" and rig.ledger.next_epoch == 2
    assert rig.ledger.relabels == [(rig.clock, 1, "v3")]
    rig.drain()
    assert rig.answer("a").finish.type == "length" and rig.answer("a").epochs == [(40, 1)]
    rig.generate("b")
    rig.turn(3)
    rig.call(UpdateWeightVersionReqInput, new_version="v4", abort_all_requests=True)
    rig.turn()
    assert rig.answer("b").finish.type == "abort"


def test_a_relabel_of_a_mixed_engine_is_refused(rig):
    rig.call(DISK, model_path=rig.checkpoint(1), target=[0])
    outcome = rig.call(UpdateWeightVersionReqInput, new_version="v3")
    assert (outcome.status_code, outcome.err_type) == (409, "mixed")


def test_epochs_tell_what_they_were(rig):
    rig.call(DISK, model_path=rig.checkpoint(1), token_step=5)
    rig.call(UpdateWeightVersionReqInput, new_version="again")
    found = rig.call(GetEpochReqInput, epoch=2).result
    assert found["epochs"][0]["token_step"] == 5
    assert found["relabels"] == [[rig.clock, 2, "again"]]
    assert [e["epoch"] for e in rig.call(GetEpochReqInput, epoch=None).result["epochs"]] == [1, 2]
    assert rig.call(GetEpochReqInput, epoch=9).status_code == 404


def test_the_table_of_requests_joins_what_router_and_ranks_know(rig):
    rig.generate("a", dp=1)
    rig.turn(4)
    (row,) = rig.call(GetRequestsReqInput).result["requests"]
    assert (row["rid"], row["rank"], row["phase"]) == ("a", 1, "decode")
    assert row["output_tokens"] > 0 and row["epochs"][0][1] == 1


def test_the_last_rank_that_takes_requests_cannot_be_drained(rig):
    assert rig.call(DrainRankReqInput, dp=0).success
    assert rig.call(DrainRankReqInput, dp=1).status_code == 409
    assert rig.call(DrainRankReqInput, dp=5).status_code == 404
    assert rig.call(DrainRankReqInput, dp=0, drain=False).success
    assert rig.state.dispatch_groups() == [0, 1]


def test_weights_are_read_by_name_from_every_rank(rig):
    outcome = rig.call(GetWeightsByNameReqInput, name="even.tokens", truncate_size=2)
    assert [answer.result["values"] for answer in outcome.ranks] == [[10.0, 12.0]] * 2
    outcome = rig.call(GetWeightsByNameReqInput, name="no.such")
    assert not outcome.success and "no parameter no.such" in outcome.message


def test_small_settings_reach_every_rank_and_bad_ones_are_refused(rig):
    assert rig.call(SlowDownReqInput, forward_sleep_time=0.01).success
    assert rig.ranks[1, 0].control._sleep_s == 0.01
    assert rig.call(SlowDownReqInput, forward_sleep_time=3600.0).status_code == 400
    assert rig.call(SlowDownReqInput).success
    assert rig.call(ConfigureLoggingReq, level="warning").success


def test_a_group_without_room_for_every_rank_is_refused_before_anybody_waits(rig):
    outcome = rig.call(
        InitWeightsUpdateGroupReqInput, master_address="127.0.0.1", master_port=1,
        rank_offset=1, world_size=2,
    )  # fmt: skip
    assert outcome.status_code == 400 and "no room for 2 engine ranks" in outcome.message
