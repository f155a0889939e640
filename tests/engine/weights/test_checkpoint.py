"""Safetensors on disk: reading, refusing, writing, checksums."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from engine.weights.checkpoint import (
    Checkpoint,
    NamedTensor,
    TensorSpec,
    TensorWriter,
    WeightError,
    checksum_of,
    describe,
    effective,
    main,
    problem_with,
)

TENSORS = {
    "b": torch.arange(6, dtype=torch.float32).view(2, 3),
    "a": torch.ones(4, dtype=torch.bfloat16),
    "empty": torch.zeros(0, 7),
    "scalar": torch.tensor(3.0),
}


@pytest.fixture
def path(tmp_path) -> Path:
    save_file(TENSORS, tmp_path / "model.safetensors", metadata={"format": "pt"})
    return tmp_path / "model.safetensors"


def raw(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes()


def write_header(path: Path, header: object, data: bytes = b"") -> None:
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


def test_names_shapes_dtypes_and_bytes_are_those_of_the_library(path):
    found = {tensor.spec.name: tensor for tensor in Checkpoint(path).tensors()}
    assert found.keys() == TENSORS.keys()
    for name, tensor in TENSORS.items():
        assert found[name].spec.shape == tuple(tensor.shape)
        assert bytes(found[name].data) == raw(tensor)
    assert found["a"].spec.dtype == "BF16" and found["b"].spec.dtype == "F32"


def test_a_sharded_directory_reads_as_one_set(tmp_path, path):
    shards = tmp_path / "sharded"
    shards.mkdir()
    save_file({"a": TENSORS["a"]}, shards / "one.safetensors")
    rest = {name: tensor for name, tensor in TENSORS.items() if name != "a"}
    save_file(rest, shards / "two.safetensors")
    assert describe(str(shards))["checksum"] == describe(str(path))["checksum"]
    index = {name: "one.safetensors" if name == "a" else "two.safetensors" for name in TENSORS}
    (shards / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    assert describe(str(shards))["checksum"] == describe(str(path))["checksum"]
    assert describe(str(shards))["tensors"] == 4


def test_the_checksum_is_what_the_documentation_says(path):
    import hashlib

    lines = [
        f"a BF16 4 {hashlib.sha256(raw(TENSORS['a'])).hexdigest()}\n",
        f"b F32 2x3 {hashlib.sha256(raw(TENSORS['b'])).hexdigest()}\n",
        f"empty F32 0x7 {hashlib.sha256(b'').hexdigest()}\n",
        f"scalar F32  {hashlib.sha256(raw(TENSORS['scalar'])).hexdigest()}\n",
    ]
    expected = hashlib.sha256("".join(lines).encode()).hexdigest()
    assert describe(str(path))["checksum"] == expected


def test_the_checksum_sees_each_byte_name_shape_and_dtype():
    def of(name="a", dtype="F32", shape=(2,), digest="d") -> str:
        return checksum_of({TensorSpec(name, dtype, shape): digest})

    kinds = [of(), of(name="b"), of(dtype="I32"), of(shape=(1, 2)), of(digest="e")]
    assert len(set(kinds)) == 5


def test_a_file_that_was_cut_off_anywhere_is_refused(path):
    whole = path.read_bytes()
    for size in (0, 7, 8, 40, len(whole) - 1):
        path.write_bytes(whole[:size])
        with pytest.raises(WeightError, match="cut off"):
            Checkpoint(path)


def test_a_file_that_shrinks_while_it_is_read_is_an_error_and_no_signal(tmp_path):
    path = tmp_path / "large"
    save_file({"a": torch.zeros(10), "b": torch.zeros(100_000)}, path)
    tensors = Checkpoint(path).tensors()
    next(tensors)
    with open(path, "r+b") as file:
        file.truncate(path.stat().st_size - 5)
    with pytest.raises(WeightError, match="cut off while it was read"):
        list(tensors)


@pytest.mark.parametrize(
    ("header", "match"),
    [
        ([1], "no JSON object"),
        ({"a": 3}, "damaged"),
        ({"a": {"dtype": "F33", "shape": [1], "data_offsets": [0, 4]}}, "unknown dtype F33"),
        ({"a": {"dtype": "F32", "shape": [-1], "data_offsets": [0, 4]}}, "impossible shape"),
        ({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}, "does not fit"),
        ({"a": {"dtype": "F32", "shape": [1], "data_offsets": [4, 8]}}, "does not fit"),
        ({}, "holds no tensors"),
    ],
)
def test_a_damaged_header_is_refused_by_a_sentence(tmp_path, header, match):
    path = tmp_path / "bad.safetensors"
    write_header(path, header, b"\0" * 4 if header and header != [1] else b"")
    with pytest.raises(WeightError, match=match):
        Checkpoint(path)


@given(data=st.binary(max_size=200))
def test_rubbish_is_refused_and_nothing_else_happens(tmp_path_factory, data):
    path = tmp_path_factory.mktemp("rubbish") / "x.safetensors"
    path.write_bytes(data)
    assert problem_with(str(path))


def test_what_is_no_checkpoint_is_refused(tmp_path, path):
    assert "there are no weights" in problem_with(str(tmp_path / "nowhere"))
    (tmp_path / "pickled").mkdir()
    (tmp_path / "pickled" / "pytorch_model.bin").write_bytes(b"x")
    assert "pickled weights are never read" in problem_with(str(tmp_path / "pickled"))
    assert "no regular file" in problem_with("/dev/null")
    assert problem_with(str(path)) == ""


def test_an_index_that_names_what_is_not_there_is_refused(tmp_path, path):
    index = tmp_path / "model.safetensors.index.json"
    for text, match in (
        ("{", "damaged"),
        ('{"weight_map": {"zz": "model.safetensors"}}', "has no tensor zz"),
        ('{"weight_map": {"a": "gone.safetensors"}}', "is no regular file"),
    ):
        index.write_text(text)
        assert match in problem_with(str(tmp_path)), text


def test_a_name_in_two_files_is_refused(tmp_path, path):
    two = tmp_path / "two"
    two.mkdir()
    for name in ("one", "two"):
        save_file({"a": TENSORS["a"]}, two / f"{name}.safetensors")
    assert "in two files" in problem_with(str(two))


def test_paths_of_which_later_ones_cover_earlier_ones_are_not_needed(tmp_path):
    def save(name: str, *names: str) -> str:
        save_file({n: torch.zeros(1) for n in names}, tmp_path / name)
        return str(tmp_path / name)

    base, one, two, all_again = (
        save("0", "a", "b", "c"), save("1", "a"), save("2", "b", "a"), save("3", "a", "b", "c"),
    )  # fmt: skip
    assert effective([base, one, two]) == (base, two)
    assert effective([base, two, one]) == (base, two, one)
    assert effective([base, one, all_again]) == (all_again,)


# --------------------------------------------------------------------------- writing


def test_what_is_written_the_library_reads(tmp_path, path):
    checkpoint = Checkpoint(path)
    with TensorWriter(tmp_path / "deep" / "copy", checkpoint.specs.values()) as writer:
        for tensor in checkpoint.tensors():
            writer.write(tensor)
    copy = load_file(tmp_path / "deep" / "copy")
    assert copy.keys() == TENSORS.keys()
    assert all(torch.equal(copy[name], tensor) for name, tensor in TENSORS.items())


def test_nothing_is_left_of_a_file_that_was_not_finished(tmp_path):
    spec = TensorSpec("a", "F32", (1,))
    for fails in (True, False):
        try:
            with TensorWriter(tmp_path / "x", [spec]):
                if fails:
                    raise RuntimeError
        except RuntimeError:
            pass
        assert list(tmp_path.iterdir()) == []


def test_a_full_disk_is_a_refusal_before_the_first_byte(tmp_path):
    with pytest.raises(WeightError, match="bytes free") as refusal:
        TensorWriter(tmp_path / "x", [TensorSpec("a", "F32", (2**50,))])
    assert refusal.value.status_code == 507
    assert list(tmp_path.iterdir()) == []


def test_tensors_come_in_the_order_that_the_header_promised(tmp_path):
    specs = [TensorSpec("a", "U8", (1,)), TensorSpec("b", "U8", (1,))]
    with pytest.raises(ValueError, match="next tensor"), TensorWriter(tmp_path / "x", specs) as out:
        out.write(NamedTensor(specs[1], memoryview(b"x")))


def test_it_describes_a_checkpoint_by_itself(path, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["checkpoint", str(path)])
    assert main() == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["tensors"], told["bytes"], told["dtypes"]) == (4, 36, ["BF16", "F32"])
    monkeypatch.setattr("sys.argv", ["checkpoint", "/nowhere"])
    assert main() == 1
    assert "no weights" in json.loads(capsys.readouterr().out)["error"]
