"""Deaths, silences and restarts around weight updates: one known epoch, nothing paused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from engine.errors import ConfigError
from engine.messages import (
    BeginWeightUpdateReqInput,
    CommitWeights,
    ContinueGenerationReqInput,
    EndWeightUpdateReqInput,
    PauseGenerationReqInput,
    PrepareWeights,
    SealWeights,
    UpdateWeightFromDiskReqInput,
    UpdateWeightsFromTensorReqInput,
)
from engine.router.ledger import begin_anew, load_ledger, save_ledger
from tests.engine.router.rig import Rig
from tests.engine.weights.checkpoints import corrupt

DISK, TENSOR = UpdateWeightFromDiskReqInput, UpdateWeightsFromTensorReqInput
BEGIN, END = BeginWeightUpdateReqInput, EndWeightUpdateReqInput


@pytest.fixture
def rig(tmp_path) -> Rig:
    return Rig(tmp_path)


def lose(rig: Rig, kind: type, dp: int) -> None:
    """The next op of this kind never reaches group ``dp``."""

    def lost(op, group) -> bool:
        if isinstance(op, kind) and group == dp:
            rig.lose = lambda op, dp: False
            return True
        return False

    rig.lose = lost


@pytest.mark.parametrize("kind", [PrepareWeights, SealWeights])
@pytest.mark.parametrize("dp", [0, 1])
def test_a_death_before_the_commit_leaves_the_old_epoch(rig, kind, dp):
    """C13."""
    lose(rig, kind, dp)
    outcomes = rig.send(DISK, model_path=rig.checkpoint(1))
    rig.turn(100)
    rig.kill_group(dp)
    outcome = rig.finished(outcomes)
    assert not outcome.success and f"dp{dp}" in outcome.message and "died" in outcome.message
    rig.start_group(dp)
    rig.serves(0, epoch=1)
    assert rig.call(DISK, model_path=rig.checkpoint(1)).success
    rig.serves(1, epoch=2)


@pytest.mark.parametrize("dp", [0, 1])
def test_a_group_that_dies_in_commit_comes_back_on_the_new_epoch(rig, dp):
    """C13."""
    lose(rig, CommitWeights, dp)
    outcomes = rig.send(DISK, model_path=rig.checkpoint(1))
    rig.turn(100)
    rig.kill_group(dp)
    outcome = rig.finished(outcomes)
    assert outcome.success and outcome.result["epoch"] == 2
    assert f"dp{dp} tp0 follows: died" in outcome.message
    rig.start_group(dp)
    rig.serves(1, epoch=2)


def test_a_group_that_came_back_before_the_commit_ended_is_brought_to_the_new_epoch(rig):
    lose(rig, CommitWeights, 1)
    outcomes = rig.send(DISK, model_path=rig.checkpoint(1))
    rig.turn(100)
    rig.ranks[0, 0].stopped = True
    rig.kill_group(1)
    rig.start_group(1)  # on the old weights: the ledger says committing
    rig.ranks[0, 0].stopped = False
    assert rig.finished(outcomes).success
    assert [rig.state.epoch_of(dp) for dp in (0, 1)] == [2, 2]
    rig.serves(1, epoch=2)


def test_when_every_group_dies_in_commit_the_old_epoch_serves_and_the_number_is_spent(rig):
    """C13."""
    rig.lose = lambda op, dp: isinstance(op, CommitWeights)
    outcomes = rig.send(DISK, model_path=rig.checkpoint(1))
    rig.turn(100)
    rig.kill_group(0)
    rig.kill_group(1)
    outcome = rig.finished(outcomes)
    assert not outcome.success and "no group took the weights" in outcome.message
    rig.lose = lambda op, dp: False
    rig.start_group(0)
    rig.start_group(1)
    rig.serves(0, epoch=1)
    assert rig.call(DISK, model_path=rig.checkpoint(1)).result["epoch"] == 3
    rig.serves(1, epoch=3)


def test_a_silent_rank_in_prepare_ends_at_the_deadline_and_its_staging_is_dropped(rig):
    """C13."""
    rig.ranks[1, 0].stopped = True
    outcomes = rig.send(DISK, model_path=rig.checkpoint(1), deadline_s=10.0)
    rig.turn(100)
    assert not outcomes
    rig.clock += 11.0
    rig.turn(2)
    assert outcomes[0].status_code in (400, 504)
    rig.ranks[1, 0].stopped = False
    rig.turn(100)
    rig.serves(0, epoch=1)


def test_a_commit_past_the_deadline_answers_504_with_the_job_and_ends_by_itself(rig):
    lose(rig, CommitWeights, 1)
    outcomes = rig.send(DISK, model_path=rig.checkpoint(1), deadline_s=10.0, key="job-9")
    rig.turn(100)
    rig.clock += 11.0
    outcome = rig.finished(outcomes)
    assert (outcome.status_code, outcome.result) == (504, {"job": "job-9"})
    assert rig.desk.outcome_of("job-9").outcome is None
    rig.clock += 150.0
    rig.turn(100)
    assert rig.desk.outcome_of("job-9").outcome.success
    assert rig.ledger.committed == 2 and rig.state.epoch_of(1) == 1
    assert rig.resync(1).success
    rig.serves(1, epoch=2)


def test_a_rank_that_restarted_between_two_buckets_ends_the_session(rig):
    session = rig.call(BEGIN).result["session_id"]
    rig.call(TENSOR, path=rig.bucket(1, "even.tokens"), session_id=session)
    rig.kill_group(1)
    rig.start_group(1)
    outcome = rig.call(TENSOR, path=rig.bucket(1, "odd.tokens"), session_id=session)
    assert outcome.err_type == "session_failed" and "dp1 died" in outcome.message
    rig.serves(0, epoch=1)


def test_the_first_refusal_ends_the_wait_for_the_others(rig):
    rig.ranks[0, 0].stopped = True
    outcome = rig.call(DISK, model_path="/nowhere")
    assert "dp1 tp0: there are no weights at /nowhere" in outcome.message
    rig.ranks[0, 0].stopped = False
    rig.turn(100)
    rig.serves(0, epoch=1)


def test_a_group_that_is_down_refuses_an_update_at_once(rig):
    rig.kill_group(1)
    outcome = rig.call(DISK, model_path=rig.checkpoint(1))
    assert (outcome.status_code, outcome.err_type) == (503, "engine_restarting")
    assert rig.session is None


# --------------------------------------------------------------------------- a full disk


@pytest.fixture
def full_disk(rig):
    """``engine/state.json`` cannot be written."""
    engine = Path(rig.config.home) / "engine"
    engine.mkdir(exist_ok=True)
    blocker = engine / "state.new"
    blocker.mkdir()
    yield blocker


def test_an_update_on_a_full_disk_is_refused_before_any_rank_commits(rig, full_disk):
    outcome = rig.call(DISK, model_path=rig.checkpoint(1))
    assert (outcome.status_code, outcome.err_type) == (507, "no_space")
    assert rig.session is None and rig.epochs() == {1}
    assert (rig.state.control, rig.holding) == ("running", False)
    full_disk.rmdir()
    assert rig.call(DISK, model_path=rig.checkpoint(1)).success


def test_pause_and_continue_work_on_a_full_disk_and_are_written_when_it_has_room(rig, full_disk):
    assert rig.call(PauseGenerationReqInput).success
    assert rig.state.control == "paused" and rig.ledger_file.unsaved
    assert rig.call(ContinueGenerationReqInput).success
    assert (rig.state.control, rig.holding) == ("running", False)
    assert rig.call(PauseGenerationReqInput).success
    full_disk.rmdir()
    rig.save_ledger()
    assert not rig.ledger_file.unsaved and load_ledger(rig.config).pause is not None


# --------------------------------------------------------------------------- restarts


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [("epochs", {}, "no record of epoch 2"), ("next_epoch", 2, "would be used again"),
     ("groups", {"1": 9}, "no record of epoch 9"), ("committed", "x", "damaged")],
)  # fmt: skip
def test_a_damaged_ledger_stops_the_start_and_never_serves_the_start_model(rig, field, value, said):
    rig.call(DISK, model_path=rig.checkpoint(1))
    path = Path(rig.config.home) / "engine" / "state.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {field: value}))
    with pytest.raises(ConfigError, match=said):
        load_ledger(rig.config)


def test_a_restarted_engine_serves_the_last_committed_weights(rig):
    """C32."""
    rig.call(DISK, model_path=rig.checkpoint(1))
    session = rig.call(BEGIN).result["session_id"]
    for name in ("even.tokens", "odd.tokens"):
        rig.call(TENSOR, path=rig.bucket(2, name), session_id=session)
    rig.call(END, session_id=session)
    rig.restart()
    rig.serves(2, epoch=3)
    assert rig.state.name == "running"
    assert rig.call(DISK, model_path=rig.checkpoint(1)).result["epoch"] == 4


def test_a_start_that_restores_nothing_serves_the_models_own_weights_as_a_new_epoch(rig):
    """C32: the off switch."""
    begin_anew(rig.config)  # before anything was ever loaded it changes nothing
    rig.restart()
    rig.serves(0, epoch=1)
    rig.call(DISK, model_path=rig.checkpoint(1))
    rig.call(PauseGenerationReqInput)
    begin_anew(rig.config)
    rig.restart()
    rig.serves(0, epoch=3)
    assert rig.state.name == "running" and rig.state.engine_view().reason == ""
    assert rig.call(DISK, from_epoch=2).result["epoch"] == 4
    rig.serves(1, epoch=4)


def test_an_engine_that_died_while_committing_serves_the_epoch_before(rig):
    rig.lose = lambda op, dp: isinstance(op, CommitWeights)
    rig.send(DISK, model_path=rig.checkpoint(1))
    rig.turn(100)
    assert load_ledger(rig.config).next_epoch == 3
    rig.lose = lambda op, dp: False
    rig.restart()
    rig.serves(0, epoch=1)
    assert rig.call(DISK, model_path=rig.checkpoint(1)).result["epoch"] == 3


def test_lost_weights_are_named_and_an_older_epoch_serves_under_its_own_number(rig):
    rig.call(DISK, model_path=rig.checkpoint(1))
    rig.call(DISK, model_path=rig.checkpoint(2))
    Path(rig.checkpoint(2)).unlink()
    rig.restart()
    view = rig.state.engine_view()
    assert (view.state, view.epoch) == ("degraded", 2)
    assert view.reason == "weights of epoch 3 are gone, serving epoch 2"
    rig.restart()
    assert rig.state.engine_view().reason == "weights of epoch 3 are gone, serving epoch 2"
    assert rig.call(DISK, model_path=rig.checkpoint(3)).result["epoch"] == 4
    assert rig.state.name == "running"


def test_weights_that_changed_on_disk_are_not_served_under_the_old_number(rig):
    """A trainer that writes every step to one path: the file is not that of the epoch any more."""
    rig.call(DISK, model_path=rig.checkpoint(1))
    corrupt(rig.checkpoint(1))
    rig.restart()
    assert rig.epochs() == {0} and rig.state.dispatch_groups() == []
    assert rig.resync(0).success
    assert rig.resync(1).success
    view = rig.state.engine_view()
    assert (view.state, view.epoch) == ("degraded", 1)
    assert view.reason == "weights of epoch 2 are gone, serving epoch 1"
    assert rig.words() == Rig(Path(rig.config.home) / "fresh").words()


def test_one_group_that_cannot_load_its_weights_stays_out_and_says_why(rig):
    rig.call(DISK, model_path=rig.checkpoint(1))
    corrupt(rig.checkpoint(1))
    rig.kill_group(1)
    rig.start_group(1)
    assert not rig.resync(1).success
    assert rig.state.dispatch_groups() == [0]
    view = rig.state.engine_view()
    assert view.state in ("degraded", "mixed")
    assert "dp1 cannot load epoch 2" in view.reason
    assert rig.call(DISK, model_path=rig.checkpoint(2)).success
    rig.serves(2, epoch=3)
    assert rig.state.name == "running"


def test_a_part_of_a_model_does_not_go_over_weights_that_are_not_the_right_ones(rig):
    rig.call(DISK, model_path=rig.checkpoint(1))
    corrupt(rig.checkpoint(1))
    rig.kill_group(1)
    rig.start_group(1)
    session = rig.call(BEGIN).result["session_id"]
    rig.call(TENSOR, path=rig.bucket(2, "even.tokens"), session_id=session)
    outcome = rig.call(END, session_id=session)
    assert outcome.status_code == 409 and "dp ranks [1]" in outcome.message
    assert rig.session is None and rig.epochs() == {2, 0}


def test_a_pause_is_kept_over_a_restart_in_the_middle_of_an_update(rig):
    rig.call(PauseGenerationReqInput)
    rig.call(TENSOR, path=rig.bucket(1, "even.tokens"), flush_cache=False)
    rig.restart()
    assert rig.session is None and rig.state.control == "paused" and rig.epochs() == {1}


def test_another_model_is_a_new_epoch_and_old_numbers_are_not_used_again(rig, tmp_path):
    rig.call(DISK, model_path=rig.checkpoint(1))
    other = Rig(tmp_path / "other")
    ledger = load_ledger(rig.config)
    save_ledger(other.config, ledger)
    found = load_ledger(other.config)
    assert found.committed == 3 and found.epochs[3].paths == (other.config.model_path,)
    assert found.next_epoch == 4
