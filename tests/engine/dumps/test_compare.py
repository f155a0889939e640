from __future__ import annotations

import json
import subprocess
import sys

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.artifacts import Rank
from engine.dumps.compare import compare
from engine.dumps.store import DumpFile, read_dump, write_dump
from engine.dumps.view import heat_map, view
from engine.errors import NotFound
from tests.engine.dumps.toy import ToyModel, ToyRank, dump_of

PREFILL = [[("a", 0, 5), ("b", 0, 3)]]
ALL_KINDS = ["input", "output", "weight", "logits"]


def one_rank(tmp_path, dump_id, batches=PREFILL, *, model=None, **raw):
    return dump_of(tmp_path, dump_id, [ToyRank(model or ToyModel())], batches, **raw)


def test_the_same_run_twice_is_equal_bit_for_bit(tmp_path):
    found = compare(one_rank(tmp_path, "x"), one_rank(tmp_path, "y"))
    assert found.first_divergence is None
    assert all(pair.equal and pair.cosine == 1.0 for pair in found.pairs)
    assert found.label == f"no divergence in {len(found.pairs)} tensors"
    assert found.problems == [] and found.only_in_a == [] == found.only_in_b


def test_a_changed_weight_is_the_first_divergence_and_earlier_layers_are_equal(tmp_path):
    changed = ToyModel()
    changed.ups[2] = changed.ups[2] * 1.5
    found = compare(
        one_rank(tmp_path, "x", kinds=ALL_KINDS),
        one_rank(tmp_path, "y", kinds=ALL_KINDS, model=changed),
    )
    first = found.first_divergence
    assert (first.name, first.kind) == ("model.layers.2.up", "weight")
    before = found.pairs[: found.pairs.index(first)]
    assert before and all(pair.equal for pair in before)
    assert "first divergence at model.layers.2.up weight" in found.label


def test_bf16_against_fp32_names_the_first_point_beyond_the_tolerance_of_bf16(tmp_path):
    exact = one_rank(tmp_path, "x")
    rounded = one_rank(tmp_path, "y", model=ToyModel(dtype=torch.bfloat16))
    found = compare(exact, rounded)
    assert {pair.tolerance for pair in found.pairs} == {1.6e-2}
    assert all(0 < pair.relative_l2 < 0.1 for pair in found.pairs)
    strict = compare(exact, rounded, tolerance=1e-9)
    assert strict.first_divergence == next(pair for pair in strict.pairs)
    assert strict.first_divergence.dtypes == ("F32", "BF16")


def test_slices_of_two_ranks_are_joined_before_they_are_compared_with_one(tmp_path):
    whole = one_rank(tmp_path, "x", kinds=ALL_KINDS)
    ranks = [ToyRank(ToyModel(tp=2, rank=number)) for number in range(2)]
    write_dump(tmp_path, DumpFile(dump_id="y", ranks=[Rank(tp=0), Rank(tp=1)]))
    sliced = dump_of(tmp_path, "y", ranks, PREFILL, kinds=ALL_KINDS)
    for found in (compare(whole, sliced), compare(sliced, whole)):
        assert found.first_divergence is None and found.problems == []
        assert len(found.pairs) == len(whole.manifests[0].records)
        assert {pair.relative_l2 for pair in found.pairs} == {0.0}


def test_a_missing_rank_is_named_and_its_slices_are_not_compared(tmp_path):
    whole = one_rank(tmp_path, "x")
    write_dump(tmp_path, DumpFile(dump_id="y", ranks=[Rank(tp=0), Rank(tp=1)]))
    half = dump_of(tmp_path, "y", [ToyRank(ToyModel(tp=2, rank=0))], PREFILL)
    found = compare(whole, half)
    assert found.problems == ["y lacks dp0-tp1"]
    notes = {pair.note for pair in found.pairs if pair.name.endswith(".up")}
    assert notes == {"1 of 2 slices are there"}
    assert all(pair.equal for pair in found.pairs if pair.name.endswith(".down"))


def test_ranks_that_should_agree_and_do_not_are_reported(tmp_path):
    odd = ToyModel(tp=2, rank=1)
    odd.downs[1] = odd.downs[1] + 1
    dump_of(tmp_path, "y", [ToyRank(ToyModel(tp=2, rank=0)), ToyRank(odd)], PREFILL)
    (problem,) = compare(read_dump(tmp_path, "y"), read_dump(tmp_path, "y")).problems[:1]
    assert problem.endswith("differ first at model.layers.1.down output in step 1")


@settings(deadline=None, max_examples=15)
@given(st.lists(st.integers(1, 4), min_size=1, max_size=4), st.integers(1, 4))
def test_chunks_and_neighbours_do_not_matter_rows_are_matched_by_position(
    tmp_path_factory, chunks, neighbours
):
    tmp_path = tmp_path_factory.mktemp("chunks")
    total = sum(chunks)
    at, batches = 0, []
    for size in chunks:
        others = [(f"other{number}", at, 2) for number in range(neighbours)]
        batches.append([*others, ("a", at, size)])
        at += size
    chunked = one_rank(tmp_path, "x", batches, rids=["a"])
    alone = one_rank(tmp_path, "y", [[("a", 0, total)]])
    found = compare(alone, chunked)
    assert found.first_divergence is None
    rows = sum(pair.stop - pair.start for pair in found.pairs if pair.name == "lm_head")
    assert rows == total


def test_requests_with_other_ids_are_matched_in_order_of_appearance(tmp_path):
    found = compare(
        one_rank(tmp_path, "x", [[("a", 0, 2)]]), one_rank(tmp_path, "y", [[("b", 0, 2)]])
    )
    assert found.rids == {"a": "b"}
    assert found.first_divergence.name == "model.layers.0.up"  # other inputs


def test_a_row_that_was_computed_twice_is_matched_visit_by_visit(tmp_path):
    batches = [[("a", 0, 2)], [("a", 0, 2)]]
    changed = ToyRank(ToyModel())
    changed.arm(tmp_path, "y", max_steps=2)
    changed.step(batches[0])
    changed.model.head = changed.model.head * 2
    changed.step(batches[1])
    changed.manifest()
    found = compare(one_rank(tmp_path, "x", batches), read_dump(tmp_path, "y"))
    assert [(p.name, p.step) for p in found.pairs if p.diverges] == [("lm_head", 2)]


def test_bytes_that_were_not_kept_are_said_so_unless_their_digests_agree(tmp_path):
    small = {"modules": ["lm_head"], "max_bytes": 1}
    changed = ToyModel()
    changed.head = changed.head + 1
    x = one_rank(tmp_path, "x", **small)
    assert compare(x, one_rank(tmp_path, "y", **small)).pairs[0].equal
    (a, _) = compare(x, one_rank(tmp_path, "z", model=changed, **small)).pairs
    assert "were not kept" in a.note and not a.diverges


def test_a_nan_on_one_side_diverges_whatever_the_distance(tmp_path):
    broken = ToyModel()
    broken.head[5] = torch.nan
    found = compare(one_rank(tmp_path, "x"), one_rank(tmp_path, "y", model=broken))
    assert found.first_divergence.name == "lm_head"
    assert found.first_divergence.note == "5 values are NaN or infinite on one side only"
    same = compare(read_dump(tmp_path, "y"), one_rank(tmp_path, "z", model=broken))
    assert same.first_divergence is None


def test_points_that_only_one_dump_has_are_listed(tmp_path):
    found = compare(one_rank(tmp_path, "x"), one_rank(tmp_path, "y", modules=["lm_head"]))
    assert "model.layers.0.up output" in found.only_in_a
    assert found.only_in_b == []


def run_cli(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "engine.dumps.compare", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


def test_the_command_ends_with_0_equal_1_divergent_2_not_compared(tmp_path):
    changed = ToyModel()
    changed.head = changed.head * 2
    one_rank(tmp_path, "x")
    one_rank(tmp_path, "y")
    one_rank(tmp_path, "z", model=changed)
    same = run_cli(str(tmp_path / "x"), str(tmp_path / "y"))
    assert same.returncode == 0 and json.loads(same.stdout)["first_divergence"] is None
    other = run_cli(str(tmp_path / "x"), str(tmp_path / "z"))
    assert other.returncode == 1
    assert json.loads(other.stdout)["first_divergence"]["name"] == "lm_head"
    assert run_cli(str(tmp_path / "x"), str(tmp_path / "z"), "--tolerance", "3").returncode == 0
    nothing = run_cli(str(tmp_path / "x"), str(tmp_path / "w"))
    assert nothing.returncode == 2 and "there is no dump w" in nothing.stderr


def test_a_look_at_one_tensor_folds_it_into_a_map_that_fits_a_page(tmp_path):
    dump = one_rank(tmp_path, "x", [[("a", 0, 100)]])
    record = dump.manifests[0].records[-1]
    seen = view(dump, "dp0-tp0", record.key)
    assert (seen.folded, seen.block) == ((100, 32), (2, 1))
    assert (len(seen.heat), len(seen.heat[0]), len(seen.values)) == (50, 32, 256)
    with pytest.raises(NotFound):
        view(dump, "dp0-tp0", "none")
    key = f"dp0-tp0:{record.key}"
    command = [sys.executable, "-m", "engine.dumps.view", str(tmp_path / "x"), key]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    assert json.loads(done.stdout)["record"]["name"] == "lm_head"


@given(st.integers(1, 9), st.integers(1, 9), st.integers(1, 4), st.integers(1, 4))
def test_a_heat_map_is_the_mean_of_each_block(rows, columns, tall, wide):
    values = np.arange(rows * columns, dtype=np.float64).reshape(rows, columns)
    values[0, 0] = np.nan
    found = heat_map(values, (tall, wide))
    for i in range(found.shape[0]):
        for j in range(found.shape[1]):
            block = values[i * tall : (i + 1) * tall, j * wide : (j + 1) * wide]
            expected = np.nanmean(block) if np.isfinite(block).any() else np.nan
            assert found[i, j] == pytest.approx(expected, nan_ok=True)
