from __future__ import annotations

import time

import pytest
import torch
from safetensors.torch import load_file

from engine.artifacts import Rank
from engine.dumps import capture as capture_module
from engine.dumps.store import TensorStore, read_dump
from engine.errors import BadRequest, Conflict
from tests.engine.dumps.toy import LAYERS, ToyModel, ToyRank, dump_of, token_rows

EIGHT = [(f"r{number}", 3, 1) for number in range(8)]


@pytest.fixture
def toy():
    rank = ToyRank(ToyModel())
    yield rank
    rank.capture.close()


def test_a_dump_of_one_request_among_eight_holds_its_rows_only(toy, tmp_path):
    dump = dump_of(tmp_path, "d", [toy], [EIGHT], rids=["r5"], kinds=["input", "output"])
    (manifest,) = dump.manifests
    assert {record.rid for record in manifest.records} == {"r5"}
    first = manifest.records[0]
    assert (first.name, first.kind, first.start, first.stop) == ("model.layers.0.up", "input", 3, 4)
    store = TensorStore(tmp_path)
    assert torch.equal(torch.tensor(store.read(first)), token_rows("r5", 3, 1))
    alone = ToyRank(ToyModel())
    other = dump_of(tmp_path, "alone", [alone], [[("r5", 3, 1)]], kinds=["input", "output"])
    for ours, expected in zip(manifest.records, other.manifests[0].records, strict=True):
        assert torch.allclose(
            torch.tensor(store.read(ours)), torch.tensor(store.read(expected)), atol=1e-6
        )


def test_records_are_in_execution_order_and_say_where_they_come_from(toy, tmp_path):
    toy.epoch = 4
    dump = dump_of(tmp_path, "d", [toy], [[("a", 0, 3)], [("a", 3, 1)]])
    records = dump.manifests[0].records
    names = [f"model.layers.{n}.{part}" for n in range(LAYERS) for part in ("up", "down")]
    assert [record.name for record in records] == [*names, "lm_head"] * 2
    assert [(r.step, r.epoch, r.start, r.stop) for r in records[-2:]] == [(2, 4, 3, 4)] * 2
    assert records[0].statistics.shape == [3, 16]
    assert records[0].shard_dim == 1
    assert dump.state == "ready" and dump.manifests[0].form == "toy fp32"
    assert set(load_file(tmp_path / dump.files[0])) == {record.key for record in records}


def test_the_unarmed_forward_never_meets_the_tap(toy, tmp_path):
    toy.step(EIGHT)
    assert (toy.tapped, toy.capture.armed) == (0, False)
    toy.arm(tmp_path, rids=["r9"])
    toy.step(EIGHT)
    assert toy.tapped == 0  # armed, but no request of this step is wanted
    toy.step([("r9", 0, 1)])
    toy.step([("r9", 1, 1)])
    assert toy.tapped == 1  # one step was asked for


def test_weights_are_caught_once_for_each_epoch(toy, tmp_path):
    toy.arm(tmp_path, kinds=["weights"], layers="0", max_steps=3)
    for epoch in (1, 1, 2):
        toy.epoch = epoch
        toy.step(EIGHT)
    records = toy.manifest().records
    assert [(record.rid, record.epoch) for record in records] == [("", 1), ("", 2)]


def test_old_tensors_give_way_in_the_ring_and_their_statistics_stay(toy, tmp_path):
    toy.arm(tmp_path, modules=["*.down"], max_steps=4, max_bytes=300)  # one tensor has 32 bytes
    for number in range(4):
        toy.step([("a", number, 1)])
    manifest = toy.manifest()
    kept = [record for record in manifest.records if record.file]
    assert len(manifest.records) == 4 * LAYERS
    assert kept == manifest.records[-9:]
    assert manifest.evicted == 4 * LAYERS - 9
    assert manifest.records[0].statistics.count == 8


def test_what_is_kept_is_written_when_somebody_asks_and_the_dump_goes_on(toy, tmp_path):
    toy.arm(tmp_path, max_steps=2)
    toy.step([("a", 0, 1)])
    toy.capture.materialise()
    deadline = time.monotonic() + 10
    while not list(tmp_path.glob("*.records.json")) and time.monotonic() < deadline:
        time.sleep(0.01)
    early = read_dump(tmp_path, "d")
    assert early.state == "capturing" and len(early.files) == 1
    toy.step([("a", 1, 1)])
    toy.manifest()
    late = read_dump(tmp_path, "d")
    assert late.state == "ready" and len(late.files) == 2
    assert all(record.file for record in late.manifests[0].records)


@pytest.mark.parametrize(
    ("end", "reason"),
    [
        (lambda toy: toy.capture.stop("enough"), "enough"),
        (lambda toy: toy.capture.requests_ended(["x", "a"]), "the requests ended"),
        (lambda toy: (time.sleep(0.06), toy.capture.tick()), "reached 0.05 seconds"),
        (lambda toy: (time.sleep(0.06), toy.step([("a", 9, 1)])), "reached 0.05 seconds"),
        (lambda toy: [toy.step([("a", n, 1)]) for n in range(3)], "caught 2 steps"),
    ],
)
def test_every_dump_ends_and_says_why(toy, tmp_path, end, reason):
    toy.arm(tmp_path, rids=["a"], max_steps=2, max_seconds=0.05 if "0.05" in reason else 60)
    end(toy)
    assert not toy.capture.armed
    manifest = toy.manifest()
    assert manifest.complete and manifest.reason == reason


def test_a_dump_that_catches_too_many_tensors_ends(toy, tmp_path, monkeypatch):
    monkeypatch.setattr(capture_module, "MAX_RECORDS", 10)
    toy.arm(tmp_path, max_steps=100)
    toy.step(EIGHT)
    assert toy.manifest().reason == "reached 10 tensors"


def test_a_second_dump_is_refused_until_the_first_was_taken(toy, tmp_path):
    toy.arm(tmp_path)
    with pytest.raises(Conflict, match="dump d is still running"):
        toy.arm(tmp_path, "e")
    toy.step(EIGHT)
    toy.manifest()
    toy.arm(tmp_path, "e")
    for control in (toy.capture.stop, lambda reason: None):
        control("over")
    toy.manifest()
    with pytest.raises(Conflict):
        toy.capture.materialise()


def test_a_glob_that_matches_nothing_is_refused_and_nothing_is_armed(toy, tmp_path):
    with pytest.raises(BadRequest, match="no dump point matches"):
        toy.arm(tmp_path, modules=["*.attention"])
    assert not toy.capture.armed
    toy.arm(tmp_path)


def test_a_directory_that_cannot_be_written_is_an_error_of_the_dump_and_not_of_the_step(toy):
    missing = "/proc/quarterdeck-has-no-such-directory"
    toy.capture.arm(capture_module.DumpSpec(dump_id="d", directory=missing))
    logits = toy.step(EIGHT)
    assert logits.shape == (8, 32)
    manifest = toy.manifest()
    assert "cannot write" in manifest.error and "No such file" in manifest.error


def test_a_rank_that_was_not_asked_runs_along_and_writes_nothing(tmp_path):
    ranks = [ToyRank(ToyModel(tp=2, rank=number)) for number in range(2)]
    for rank in ranks:
        rank.arm(tmp_path, ranks=["dp0-tp1"])
        rank.step(EIGHT)
        rank.manifest()
    assert [rank.tapped for rank in ranks] == [1, 1]
    dump = read_dump(tmp_path, "d")
    assert [manifest.rank for manifest in dump.manifests] == [Rank(dp=0, tp=1)]


def test_a_forward_that_fails_under_the_tap_fails_as_before(toy, tmp_path):
    toy.arm(tmp_path)
    with pytest.raises(ZeroDivisionError), toy.capture.step(1, epoch=1):
        _ = 1 / 0
    assert toy.capture.armed
    toy.step(EIGHT)
    assert toy.manifest().complete
