"""Pause and continue, and the updates that trainers send while paused."""

from __future__ import annotations

import pytest

from engine.messages import (
    BeginWeightUpdateReqInput,
    ContinueGenerationReqInput,
    FlushCacheReqInput,
    PauseGenerationReqInput,
    ReleaseMemoryOccupationReqInput,
    ResumeMemoryOccupationReqInput,
    UpdateWeightFromDiskReqInput,
    UpdateWeightsFromTensorReqInput,
)
from tests.engine.router.rig import Rig
from tests.engine.weights.checkpoints import favourites

PAUSE, CONTINUE = PauseGenerationReqInput, ContinueGenerationReqInput
DISK, TENSOR = UpdateWeightFromDiskReqInput, UpdateWeightsFromTensorReqInput
RELEASE, RESUME = ReleaseMemoryOccupationReqInput, ResumeMemoryOccupationReqInput


@pytest.fixture
def rig(tmp_path) -> Rig:
    return Rig(tmp_path)


def made(rig: Rig) -> int:
    return sum(len(row.output_ids) for rank in rig.ranks.values() for row in rank.rows)


def test_no_rank_makes_a_token_between_pause_and_continue(rig):
    """E11."""
    for dp in (0, 1):
        rig.generate(f"r{dp}", dp=dp)
    rig.turn(3)
    assert rig.call(PAUSE, mode="in_place").success
    before = made(rig)
    rig.generate("held")
    assert rig.call(PAUSE, mode="in_place").success
    rig.turn(20)
    assert made(rig) == before
    assert rig.call(CONTINUE).success
    rig.drain()
    assert all(len(rig.answer(rid).output_ids) == 40 for rid in ("r0", "r1", "held"))


def test_pause_and_continue_at_once_both_return_in_their_order(rig):
    """E12."""
    paused, resumed = rig.send(PAUSE), rig.send(CONTINUE)
    assert rig.finished(resumed).success and paused[0].success
    rig.serves(0, epoch=1)
    resumed, paused = rig.send(CONTINUE), rig.send(PAUSE)
    assert rig.finished(paused).success and resumed[0].message == "not paused"
    assert rig.state.control == "paused"


def test_a_second_pause_applies_its_mode(rig):
    rig.generate("a")
    rig.turn(3)
    rig.call(PAUSE, mode="in_place")
    assert rig.ranks[0, 0].core.load().running == 1
    rig.call(PAUSE, mode="abort")
    assert rig.ranks[0, 0].core.load().running == 0
    rig.turn()
    assert rig.answer("a").finish.type == "abort"


def test_a_pause_outlives_a_restart_and_its_lease_too(rig):
    """C32."""
    rig.call(PAUSE, lease_s=100.0)
    rig.restart()
    assert rig.state.control == "paused" and rig.holding
    assert rig.ledger.pause.until == rig.clock + 100.0


def test_the_end_of_a_pause_s_lease_drops_what_was_half_sent(rig):
    rig.call(PAUSE, lease_s=100.0)
    rig.call(TENSOR, path=rig.bucket(1, "even.tokens"), flush_cache=False)
    assert rig.session.implicit
    rig.finished(rig.start_operation(rig.operations.end_pause()))
    rig.serves(0, epoch=1)


@pytest.mark.parametrize("flush_cache", [False, None], ids=["slime", "areal"])
def test_pause_flush_many_buckets_continue_is_one_epoch(rig, flush_cache):
    rig.generate("a")
    rig.turn(3)
    assert rig.call(PAUSE).success
    assert rig.call(FlushCacheReqInput).success
    for index in range(25):
        for name in ("even.tokens", "odd.tokens"):
            outcome = rig.call(
                TENSOR, path=rig.bucket(index % 3, name), flush_cache=flush_cache,
                weight_version=str(index), token_step=index,
            )  # fmt: skip
            assert outcome.success and outcome.message == "staged"
            assert rig.epochs() == {1}
    outcome = rig.call(CONTINUE)
    assert outcome.success
    assert (outcome.result["epoch"], outcome.result["token_step"]) == (2, 24)
    assert outcome.result["weight_version"] == "24"
    rig.serves(24 % 3, epoch=2)
    assert rig.ledger.next_epoch == 3


def test_a_bucket_that_flushes_commits_at_once_while_paused(rig):
    rig.call(PAUSE)
    rig.call(TENSOR, path=rig.bucket(1, "even.tokens"), flush_cache=False)
    outcome = rig.call(TENSOR, path=rig.bucket(1, "odd.tokens"), flush_cache=True)
    assert outcome.result["epoch"] == 2
    assert rig.call(CONTINUE).success
    rig.serves(1, epoch=2)


def test_a_bucket_that_fails_spoils_the_update_of_the_pause_and_continue_says_so(rig):
    """Half of an update never becomes an epoch."""
    rig.call(PAUSE)
    assert rig.call(TENSOR, path=rig.bucket(1, "even.tokens"), flush_cache=False).success
    bad = rig.call(TENSOR, path="/nowhere", flush_cache=False)
    assert not bad.success
    after = rig.call(TENSOR, path=rig.bucket(1, "odd.tokens"), flush_cache=False)
    assert (after.status_code, after.err_type) == (409, "session_failed")
    outcome = rig.call(CONTINUE)
    assert (outcome.success, outcome.err_type) == (False, "session_failed")
    assert "there are no weights at /nowhere" in outcome.message
    rig.serves(0, epoch=1)
    assert rig.call(DISK, model_path=rig.checkpoint(1)).result["epoch"] == 2


def test_an_update_of_a_pause_that_nobody_goes_on_with_is_dropped(rig):
    rig.call(PAUSE)
    rig.call(TENSOR, path=rig.bucket(1, "even.tokens"), flush_cache=False)
    rig.clock += rig.config.session_idle_s + 1
    rig.operations.updates.drop_idle()
    late = rig.call(TENSOR, path=rig.bucket(1, "odd.tokens"), flush_cache=False)
    assert late.err_type == "session_failed"
    outcome = rig.call(CONTINUE)
    assert not outcome.success and "nobody touched it for 60 s" in outcome.message
    rig.serves(0, epoch=1)


def test_a_session_outlives_nobody_for_longer_than_its_idle_time(rig):
    session = rig.call(BeginWeightUpdateReqInput).result["session_id"]
    rig.call(TENSOR, path=rig.bucket(1, "even.tokens"), session_id=session)
    rig.clock += rig.config.session_idle_s - 1
    rig.operations.updates.drop_idle()
    assert rig.session is not None
    rig.clock += 2
    rig.operations.updates.drop_idle()
    rig.serves(0, epoch=1)
    late = rig.call(TENSOR, path=rig.bucket(1, "odd.tokens"), session_id=session)
    assert (late.status_code, late.err_type) == (404, "no_such_session")


def test_a_group_that_starts_into_a_pause_is_not_left_behind_by_continue(rig):
    rig.call(PAUSE, mode="in_place")
    rig.kill_group(1)
    resumed = rig.send(CONTINUE)
    assert rig.ledger.pause is None  # so a group that comes up now starts running
    rig.start_group(1)
    assert rig.finished(resumed).success
    rig.serves(0, epoch=1)


def test_memory_goes_only_while_paused_and_comes_back_before_continue(rig):
    """C22."""
    assert rig.call(RELEASE).status_code == 409
    rig.generate("a")
    rig.turn(3)
    rig.call(PAUSE, mode="in_place")
    refused = rig.call(RELEASE, tags=["kv_cache"])
    assert refused.status_code == 409 and "hold" in refused.message
    assert not rig.state.released
    rig.call(PAUSE, mode="retract")
    for _ in range(2):
        assert rig.call(RELEASE).success
    refused = rig.call(CONTINUE)
    assert refused.status_code == 409 and rig.state.control == "paused"
    assert rig.call(RESUME, tags=["kv_cache"]).success
    assert rig.call(CONTINUE).status_code == 409
    for _ in range(2):
        assert rig.call(RESUME, tags=["weights"]).success
    assert rig.call(CONTINUE).success
    rig.drain()
    assert set(rig.answer("a").output_ids) <= favourites(0)


def test_memory_of_an_unknown_kind_is_refused(rig):
    rig.call(PAUSE)
    assert rig.call(RELEASE, tags=["soul"]).status_code == 400
    assert rig.call(CONTINUE).success


def test_released_weights_take_no_update_and_come_back_with_those_of_their_epoch(rig):
    rig.call(DISK, model_path=rig.checkpoint(1))
    rig.call(PAUSE)
    rig.call(RELEASE, tags=["weights"])
    for rank in rig.ranks.values():  # what a real release leaves
        rank.runner.weights.live = {"even.tokens": [0], "odd.tokens": [0]}
    assert rig.call(DISK, model_path=rig.checkpoint(2)).status_code == 409
    assert rig.call(RESUME, tags=["weights"]).success
    assert rig.call(CONTINUE).success
    rig.serves(1, epoch=2)


def test_weights_whose_files_are_gone_stay_absent_until_a_whole_update(rig):
    path = rig.checkpoint(1)
    rig.call(DISK, model_path=path)
    rig.call(PAUSE)
    rig.call(RELEASE, tags=["weights"])
    open(path, "w").close()
    assert not rig.call(RESUME, tags=["weights"]).success
    assert rig.call(CONTINUE).status_code == 409
    rig.checkpoint(1)
    assert rig.call(RESUME, tags=["weights"]).success
    assert rig.call(CONTINUE).success
    rig.serves(1, epoch=2)


def test_the_end_of_the_lease_wakes_an_engine_that_sleeps(rig):
    rig.call(PAUSE)
    rig.call(RELEASE)
    rig.finished(rig.start_operation(rig.operations.end_pause()))
    assert not rig.state.released
    rig.serves(0, epoch=1)


def test_a_flush_waits_for_idleness_and_says_busy_when_it_does_not_come(rig):
    rig.generate("a", tokens=30)
    rig.turn(2)
    flushed = rig.send(FlushCacheReqInput, timeout_s=10.0)
    assert rig.finished(flushed).success and not rig.entries
    rig.generate("b", tokens=1000)
    rig.turn(2)
    flushed = rig.send(FlushCacheReqInput, timeout_s=10.0)
    rig.clock += 11
    outcome = rig.finished(flushed)
    assert (outcome.status_code, outcome.err_type) == (400, "busy")
    assert rig.entries
