from __future__ import annotations

import hashlib
import math

import numpy as np
import pytest
import safetensors.torch
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.artifacts import Rank
from engine.dumps.statistics import bytes_of, describe, kept_copy
from engine.dumps.store import (
    DumpFile,
    DumpManifest,
    Record,
    Statistics,
    StoreError,
    TensorFile,
    find_dump,
    read_dump,
    to_numpy,
    write_dump,
    write_manifest,
    write_tensors,
)
from engine.errors import NotFound

odd_floats = st.floats(width=32, allow_nan=True, allow_infinity=True)


def record(key: str, statistics: Statistics) -> Record:
    return Record(
        name=key,
        kind="output",
        rid="r",
        step=1,
        epoch=1,
        start=0,
        stop=1,
        shard_dim=None,
        statistics=statistics,
        key=key,
        file="t.safetensors",
    )


@given(st.lists(odd_floats, max_size=40))
def test_statistics_equal_those_of_numpy_over_the_finite_values(values):
    tensor = torch.tensor(values, dtype=torch.float32)
    found = describe(tensor)
    array = np.array(values, dtype=np.float32)
    good = array[np.isfinite(array)].astype(np.float64)
    assert (found.nan, found.inf) == (np.isnan(array).sum(), np.isinf(array).sum())
    assert sum(found.histogram) == len(good)
    if not len(good):
        assert (found.min, found.max, found.mean, found.std) == (None,) * 4
        return
    assert (found.min, found.max) == (good.min(), good.max())
    scale = np.abs(good).max()
    assert found.mean == pytest.approx(good.mean(), abs=1e-6 * scale)
    assert found.std == pytest.approx(good.std(), rel=1e-5, abs=1e-6 * scale)
    assert found.l2 == pytest.approx(np.linalg.norm(good), rel=1e-6)


@given(st.lists(st.floats(-1000, 1000, width=32), min_size=1, max_size=60))
def test_the_histogram_counts_what_numpy_counts(values):
    tensor = torch.tensor(values, dtype=torch.float64)
    found = describe(tensor)
    if found.min == found.max:
        assert found.histogram[0] == len(values)
        return
    edges = np.histogram(tensor.numpy(), bins=64, range=(found.min, found.max))[0]
    assert np.abs(np.cumsum(found.histogram) - np.cumsum(edges)).max() <= 1  # a value on an edge


def test_values_near_the_end_of_the_range_have_a_histogram_too():
    found = describe(torch.tensor([-3.4e38, 0.0, 3.4e38]))
    assert (found.histogram[0], found.histogram[32], found.histogram[63]) == (1, 1, 1)


@pytest.mark.parametrize(
    "dtype",
    [
        torch.float64,
        torch.float32,
        torch.float16,
        torch.bfloat16,
        torch.int64,
        torch.int8,
        torch.uint8,
        torch.bool,
    ],
)
def test_what_is_written_reads_back_here_and_with_the_safetensors_library(tmp_path, dtype):
    path = tmp_path / "t.safetensors"
    tensors = {
        "odd": (torch.arange(15).reshape(3, 5) - 7).to(dtype),
        "scalar": torch.tensor(3).to(dtype),
        "empty": torch.zeros(0, 4).to(dtype),
    }
    described = {key: describe(tensor) for key, tensor in tensors.items()}
    write_tensors(
        path,
        {key: (described[key].dtype, list(t.shape), bytes_of(t)) for key, t in tensors.items()},
    )
    theirs = safetensors.torch.load_file(path)
    ours = TensorFile(path)
    for key, tensor in tensors.items():
        assert torch.equal(theirs[key], tensor) and theirs[key].dtype == dtype
        read = ours.read(record(key, described[key]))
        assert np.array_equal(read, tensor.to(torch.float64).numpy())
        assert read.shape == tuple(tensor.shape)


@settings(deadline=None)
@given(st.lists(odd_floats, min_size=1, max_size=20))
def test_bfloat16_is_widened_without_loss(values):
    tensor = torch.tensor(values).to(torch.bfloat16)
    data = np.frombuffer(bytes_of(tensor), dtype=np.uint8)
    wide = to_numpy(data, "BF16", [len(values)])
    assert np.array_equal(wide, tensor.float().numpy(), equal_nan=True)


def test_a_copy_is_the_tensors_own_even_when_it_is_a_view():
    base = torch.arange(12.0).reshape(3, 4)
    copy = kept_copy(base[:, 1:3])
    base.zero_()
    assert copy.is_contiguous() and copy.sum() == 33.0
    assert kept_copy(torch.tensor([1 + 2j])).dtype == torch.float32


@pytest.mark.parametrize(
    ("damage", "sentence"),
    [
        (lambda data: data[:4], "no safetensors header"),
        (lambda data: b"\xff" * 8 + data[8:], "no safetensors header"),
        (lambda data: data[:12] + b"}" + data[13:], "cannot be read"),
        (lambda data: data[:-1], "damaged"),
        (lambda data: data[:-1] + b"\x01", "damaged"),
    ],
)
def test_a_damaged_file_is_refused_with_a_sentence(tmp_path, damage, sentence):
    path = tmp_path / "t.safetensors"
    tensor = torch.zeros(4)
    write_tensors(path, {"k": ("F32", [4], bytes_of(tensor))})
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(StoreError, match=sentence):
        TensorFile(path).read(record("k", describe(tensor)))


def test_a_dump_knows_its_ranks_and_is_not_mixed_with_one_whose_id_begins_alike(tmp_path):
    ranks = [Rank(tp=0), Rank(tp=1)]
    for dump_id in ("d", "d-dp0-tp0", "d2"):
        write_dump(tmp_path, DumpFile(dump_id=dump_id, ranks=ranks))
        write_manifest(tmp_path, DumpManifest(dump_id=dump_id, rank=ranks[0], form="toy"))
    dump = read_dump(tmp_path, "d")
    assert [manifest.dump_id for manifest in dump.manifests] == ["d"]
    assert (dump.state, dump.missing) == ("capturing", ["dp0-tp1"])
    with pytest.raises(NotFound, match="holds 3 dumps"):
        find_dump(tmp_path)
    assert find_dump(tmp_path / "d2").dump_id == "d2"
    with pytest.raises(NotFound, match="there is no dump d3"):
        find_dump(tmp_path / "d3")


def test_the_hash_is_that_of_the_bytes():
    tensor = torch.tensor([1.0, math.pi])
    assert describe(tensor).sha256 == hashlib.sha256(tensor.numpy().tobytes()).hexdigest()
