"""Weight updates from the router's call to the live weights of every rank."""

from __future__ import annotations

import pytest

from engine.messages import (
    BeginWeightUpdateReqInput,
    ContinueGenerationReqInput,
    EndWeightUpdateReqInput,
    PauseGenerationReqInput,
    UpdateWeightFromDiskReqInput,
    UpdateWeightsFromTensorReqInput,
)
from tests.engine.router.rig import Rig
from tests.engine.weights.checkpoints import (
    checksum_of,
    corrupt,
    disagreements,
    favourites,
    write_tensors,
)

DISK, TENSOR = UpdateWeightFromDiskReqInput, UpdateWeightsFromTensorReqInput
BEGIN, END = BeginWeightUpdateReqInput, EndWeightUpdateReqInput


@pytest.fixture(params=[(2, 1), (2, 2)], ids=["dp2", "dp2tp2"])
def rig(request, tmp_path) -> Rig:
    dp, tp = request.param
    return Rig(tmp_path, dp=dp, tp=tp)


def proves_its_epochs(rig: Rig, rid: str, index_of: dict[int, int]) -> None:
    """Each token is a favourite of the checkpoint that its label names."""
    row = rig.answer(rid)
    assert not disagreements(row.output_ids, row.epochs, index_of)


def test_an_update_from_disk_is_one_epoch_on_every_rank(rig):
    outcome = rig.call(DISK, model_path=rig.checkpoint(1), token_step=7, weight_version="v7")
    assert outcome.success, outcome.message
    assert outcome.result["epoch"] == 2
    assert len(outcome.ranks) == rig.config.dp * rig.config.tp
    rig.serves(1, epoch=2)
    record = rig.ledger.epochs[2]
    assert (record.token_step, record.weight_version, record.actor) == (7, "v7", "tester")
    assert record.checksum == checksum_of(rig.checkpoint(1))


def test_finish_waits_for_what_runs_and_holds_what_is_new(rig):
    rig.generate("old", tokens=30)
    rig.turn(3)
    outcomes = rig.send(DISK, model_path=rig.checkpoint(1), in_flight="finish")
    rig.until_held()
    rig.generate("new")
    assert rig.finished(outcomes).success
    rig.drain()
    assert rig.answer("old").epochs == [(30, 1)]
    assert rig.answer("new").epochs == [(40, 2)]
    proves_its_epochs(rig, "old", {1: 0})
    proves_its_epochs(rig, "new", {2: 1})


def test_in_place_keeps_the_kv_and_switches_the_tokens(rig):
    rig.generate("a")
    rig.turn(5)
    outcome = rig.call(DISK, model_path=rig.checkpoint(1), in_flight="in_place")
    assert outcome.success and outcome.result["touched"] == 1
    rig.drain()
    row = rig.answer("a")
    made = {epoch: count for count, epoch in row.epochs}
    assert made.keys() == {1, 2} and sum(made.values()) == 40
    proves_its_epochs(rig, "a", {1: 0, 2: 1})
    assert row.kv_epochs == [(20 + made[1] - 1, 1), (made[2], 2)]


def test_retract_recomputes_the_kv_and_keeps_the_labels_of_tokens(rig):
    rig.generate("a")
    rig.turn(5)
    assert rig.call(DISK, model_path=rig.checkpoint(1), in_flight="retract").success
    rig.drain()
    row = rig.answer("a")
    proves_its_epochs(rig, "a", {1: 0, 2: 1})
    assert row.kv_epochs == [(59, 2)] and row.retractions == 1


def test_abort_ends_what_runs_with_what_it_has(rig):
    rig.generate("a")
    rig.turn(5)
    assert rig.call(DISK, model_path=rig.checkpoint(1), abort_all_requests=True).success
    row = rig.answer("a")
    assert row.finish.type == "abort" and 0 < len(row.output_ids) < 40
    rig.serves(1, epoch=2)


def test_a_drain_that_takes_too_long_changes_nothing_and_releases_what_was_held(rig):
    """E21: success=false with the reason, the old weights serve."""
    rig.generate("long", tokens=1000)
    rig.turn(2)
    outcomes = rig.send(DISK, model_path=rig.checkpoint(1), drain_timeout_s=5.0)
    rig.until_held()
    rig.generate("held")
    rig.clock += 6.0
    outcome = rig.finished(outcomes)
    assert (outcome.success, outcome.err_type) == (False, "drain_timeout")
    rig.serves(0, epoch=1)
    assert rig.ledger.next_epoch == 2
    rig.turn(50)
    assert rig.answer("held").epochs == [(40, 1)]


def test_a_session_of_buckets_is_one_epoch(rig):
    session = rig.call(BEGIN, token_step=3, in_flight="in_place").result["session_id"]
    for name in ("even.tokens", "odd.tokens"):
        outcome = rig.call(TENSOR, path=rig.bucket(1, name), session_id=session)
        assert outcome.success and rig.epochs() == {1}
    assert outcome.result == {"session_id": session, "staged": 2, "missing": 0}
    outcome = rig.call(END, session_id=session, checksum=checksum_of(rig.checkpoint(1)))
    assert outcome.success and outcome.result["token_step"] == 3
    rig.serves(1, epoch=2)


def test_a_part_of_a_model_outside_a_session_is_refused(rig):
    outcome = rig.call(TENSOR, path=rig.bucket(1, "even.tokens"))
    assert (outcome.status_code, outcome.err_type) == (400, "partial_update_needs_session")
    assert "odd.tokens" in outcome.message
    rig.serves(0, epoch=1)


def test_a_part_of_a_model_in_a_session_lies_over_the_epoch_before(rig):
    assert rig.call(DISK, model_path=rig.checkpoint(1)).success
    session = rig.call(BEGIN).result["session_id"]
    assert rig.call(TENSOR, path=rig.bucket(2, "even.tokens"), session_id=session).success
    assert rig.call(END, session_id=session).success
    mixture = sorted(sorted(favourites(2))[::2] + sorted(favourites(1))[1::2])
    assert rig.words() == {tuple(mixture)}
    rig.restart()
    assert rig.words() == {tuple(mixture)} and rig.epochs() == {3}


def test_a_wrong_checksum_drops_the_update_everywhere(rig):
    outcome = rig.call(DISK, model_path=rig.checkpoint(1), checksum="0" * 64)
    assert (outcome.success, outcome.err_type) == (False, "checksum_mismatch")
    rig.serves(0, epoch=1)
    session = rig.call(BEGIN).result["session_id"]
    rig.call(DISK, model_path=rig.checkpoint(1), session_id=session)
    outcome = rig.call(END, session_id=session, checksum="0" * 64)
    assert outcome.err_type == "checksum_mismatch"
    rig.serves(0, epoch=1)


@pytest.mark.parametrize(
    ("values", "changes", "err_type"),
    [
        ({"even.tokens": [9], "odd.tokens": [9], "third": [9]}, {}, "bad_weights"),
        ({"even.tokens": [9], "odd.tokens": [9]}, {"shape": (1, 1)}, "shape_mismatch"),
        ({"even.tokens": [9], "odd.tokens": [9]}, {"dtype": "F32"}, "dtype_mismatch"),
        ({"even.tokens": [9], "odd.tokens": [10**6]}, {}, "bad_weights"),
    ],
)
def test_weights_that_do_not_fit_are_refused_by_name(rig, tmp_path, values, changes, err_type):
    path = tmp_path / "bad.safetensors"
    write_tensors(path, values, **changes)
    outcome = rig.call(DISK, model_path=str(path))
    assert (outcome.success, outcome.err_type) == (False, err_type)
    assert "rank dp" in outcome.message
    rig.serves(0, epoch=1)


def test_a_truncated_file_is_refused(rig):
    path = rig.checkpoint(1)
    with open(path, "r+b") as file:
        file.truncate(file.seek(0, 2) - 4)
    outcome = rig.call(DISK, model_path=path)
    assert not outcome.success and "cut off" in outcome.message
    rig.serves(0, epoch=1)


def test_a_dry_run_verifies_and_changes_nothing(rig):
    rig.generate("a", tokens=1000)
    rig.turn(2)
    outcome = rig.call(DISK, model_path=rig.checkpoint(1), dry_run=True)
    assert outcome.success and outcome.result["running"] == 1
    assert outcome.result["by_rank"] == {"0": 1, "1": 0}
    assert outcome.result["checksum"] == checksum_of(rig.checkpoint(1))
    rig.serves(0, epoch=1)


def test_a_canary_goes_to_its_groups_alone_and_the_engine_says_mixed(rig):
    outcome = rig.call(DISK, model_path=rig.checkpoint(1), target=[1])
    assert outcome.success and {answer.dp for answer in outcome.ranks} == {1}
    assert [rig.state.epoch_of(dp) for dp in (0, 1)] == [1, 2]
    assert rig.state.name == "mixed" and rig.state.engine_view().weight_version is None
    rig.restart()
    assert [rig.state.epoch_of(dp) for dp in (0, 1)] == [1, 2]
    assert rig.call(DISK, model_path=rig.checkpoint(2)).result["epoch"] == 3
    rig.serves(2, epoch=3)


def test_a_part_of_a_model_cannot_go_to_groups_of_different_epochs(rig):
    assert rig.call(DISK, model_path=rig.checkpoint(1), target=[1]).success
    session = rig.call(BEGIN).result["session_id"]
    rig.call(TENSOR, path=rig.bucket(2, "even.tokens"), session_id=session)
    outcome = rig.call(END, session_id=session)
    assert outcome.status_code == 409 and "epochs [1, 2]" in outcome.message
    assert rig.session is None


def test_a_bad_target_is_refused(rig):
    for target in ([], [7], [0, 0]):
        assert rig.call(DISK, model_path=rig.checkpoint(1), target=target).status_code == 400
    rig.serves(0, epoch=1)


def test_a_roll_back_is_a_new_epoch_of_old_weights(rig):
    rig.call(DISK, model_path=rig.checkpoint(1), token_step=1, weight_version="one")
    rig.call(DISK, model_path=rig.checkpoint(2), token_step=2)
    outcome = rig.call(DISK, from_epoch=2)
    assert outcome.success and outcome.result["epoch"] == 4
    assert (outcome.result["weight_version"], outcome.result["token_step"]) == ("one", 1)
    rig.serves(1, epoch=4)
    assert rig.call(DISK, from_epoch=9).status_code == 404


def test_a_roll_back_to_files_that_changed_is_refused(rig):
    rig.call(DISK, model_path=rig.checkpoint(1))
    rig.call(DISK, model_path=rig.checkpoint(2))
    corrupt(rig.ledger.epochs[2].paths[0])
    outcome = rig.call(DISK, from_epoch=2)
    assert outcome.err_type == "checksum_mismatch"
    rig.serves(2, epoch=3)


def test_the_weights_of_a_session_over_the_network_can_be_rolled_back_to(rig):
    session = rig.call(BEGIN).result["session_id"]
    for name in ("even.tokens", "odd.tokens"):
        rig.call(TENSOR, path=rig.bucket(1, name), session_id=session)
    rig.call(END, session_id=session)
    rig.call(DISK, model_path=rig.checkpoint(2))
    assert rig.call(DISK, from_epoch=2).success
    rig.serves(1, epoch=4)


def test_an_update_that_keeps_the_pause_leaves_the_engine_paused(rig):
    assert rig.call(DISK, model_path=rig.checkpoint(1), keep_pause=True).success
    assert rig.state.control == "paused" and rig.epochs() == {2}
    assert all(rank.core.paused for rank in rig.ranks.values() if rank.core)
    assert rig.call(ContinueGenerationReqInput).success
    rig.serves(1, epoch=2)


def test_an_update_while_paused_follows_the_pause(rig):
    rig.generate("a")
    rig.turn(5)
    assert rig.call(PauseGenerationReqInput, mode="in_place").success
    outcome = rig.call(DISK, model_path=rig.checkpoint(1), in_flight="finish")
    assert outcome.success and outcome.result["in_flight"] == "in_place"
    assert rig.state.control == "paused"
    assert rig.call(ContinueGenerationReqInput).success
    rig.drain()
    proves_its_epochs(rig, "a", {1: 0, 2: 1})


def test_the_spool_keeps_what_a_restart_or_a_roll_back_needs_and_no_more(rig):
    """C13: the router alone deletes what it received."""
    spool = rig.spool.directory
    for index in (1, 2, 3, 4, 5, 6):
        session = rig.call(BEGIN).result["session_id"]
        for name in ("even.tokens", "odd.tokens"):
            rig.call(TENSOR, path=rig.bucket(index, name), session_id=session)
        assert rig.call(END, session_id=session).success
    assert len(list(spool.iterdir())) == 2 * 3
    outcome = rig.call(TENSOR, path=rig.bucket(7, "even.tokens"))
    assert not outcome.success and len(list(spool.iterdir())) == 2 * 3
    assert not rig.call(DISK, from_epoch=2).success
    rig.serves(6, epoch=7)


def test_a_disk_source_can_be_kept_for_when_its_writer_deletes_it(rig, tmp_path):
    path = rig.checkpoint(1)
    assert rig.call(DISK, model_path=path, spool=True).success
    assert rig.ledger.epochs[2].paths[0].startswith(str(rig.spool.directory))
    assert checksum_of(rig.ledger.epochs[2].paths[0]) == checksum_of(path)


def test_memory_of_the_staging_goes_back_to_the_device_when_asked(rig):
    trimmed = []
    for place, rank in rig.ranks.items():
        rank.runner.trim = lambda place=place: trimmed.append(place)
    rig.call(DISK, model_path=rig.checkpoint(1))
    assert not trimmed
    rig.call(DISK, model_path=rig.checkpoint(2), torch_empty_cache=True)
    assert sorted(trimmed) == sorted(rig.ranks)


def test_packing_twice_is_packing_once(rig):
    """E27."""
    for epoch in (2, 3):
        assert rig.call(DISK, model_path=rig.checkpoint(1)).success
        rig.serves(1, epoch)
