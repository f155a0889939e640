"""Staging on one rank: buckets, refusals, drops, spools."""

from __future__ import annotations

import threading

import pytest
import torch
from safetensors.torch import save_file

from engine.messages import PrepareWeights, WeightSource
from engine.weights.checkpoint import TensorSpec, WeightError, describe
from engine.weights.groups import Groups
from engine.weights.update import Stager


class Holder:
    """Two parameters ``a`` and ``b`` of four floats, and ``spare`` that nobody needs."""

    required = frozenset(("a", "b"))

    def __init__(self) -> None:
        self.live: dict[str, bytes] = {}
        self.gate = threading.Event()
        self.gate.set()

    def check(self, spec: TensorSpec) -> None:
        if spec.name not in ("a", "b", "spare"):
            raise WeightError(f"the model has no parameter {spec.name}")
        if spec.shape != (4,):
            raise WeightError(f"{spec.name} has shape {spec.shape}", err_type="shape_mismatch")

    def begin(self) -> Staging:
        return Staging(self)

    def commit(self, staging) -> None:
        self.live |= staging.tensors

    def read(self, name: str, count: int) -> list[float]:
        raise NotImplementedError


class Staging:
    def __init__(self, holder: Holder) -> None:
        self._holder = holder
        self.tensors: dict[str, bytes] = {}
        self.sealed = False

    def add(self, tensor) -> None:
        self._holder.gate.wait()
        self.tensors[tensor.spec.name] = bytes(tensor.data)

    def seal(self) -> None:
        self.sealed = True


@pytest.fixture
def holder() -> Holder:
    return Holder()


@pytest.fixture
def stager(holder) -> Stager:
    return Stager(holder, Groups("cpu"), spools=True, dp=0)


@pytest.fixture
def save(tmp_path):
    def write(name: str, **values: float) -> str:
        path = tmp_path / f"{name}.safetensors"
        save_file({key: torch.full((4,), value) for key, value in values.items()}, path)
        return str(path)

    return write


def disk(path: str, staging_id: str = "s", complete: bool = False, **fields) -> PrepareWeights:
    source = WeightSource(kind="disk", path=path, **fields)
    return PrepareWeights(staging_id=staging_id, source=source, complete=complete)


def test_nothing_is_live_before_the_commit_and_all_of_it_after(stager, holder, save):
    told = stager.prepare(disk(save("x", a=1.0)))
    assert (told["tensors"], told["missing"], told["bytes"]) == (1, 1, 16)
    told = stager.prepare(disk(save("y", b=2.0)))
    assert told["missing"] == 0 and not holder.live
    assert not stager.is_sealed("s")
    sealed = stager.seal("s")
    assert sealed["checksum"] == told["checksum"] == describe(save("z", a=1.0, b=2.0))["checksum"]
    assert stager.is_sealed("s") and stager.is_complete("s")
    assert stager.commit("s") is True
    assert holder.live.keys() == {"a", "b"} and not stager.is_sealed("s")


def test_a_later_bucket_wins_and_counts_once(stager, holder, save):
    stager.prepare(disk(save("x", a=1.0, b=1.0)))
    told = stager.prepare(disk(save("y", a=2.0)))
    assert told["checksum"] == describe(save("z", a=2.0, b=1.0))["checksum"]
    stager.seal("s")
    stager.commit("s")
    assert holder.live["a"] == torch.full((4,), 2.0).numpy().tobytes()


def test_a_commit_of_a_part_says_that_it_was_one(stager, save):
    stager.prepare(disk(save("x", a=1.0)))
    stager.seal("s")
    assert stager.commit("s") is False


def test_a_part_where_the_whole_is_asked_for_names_what_is_missing(stager, save):
    with pytest.raises(WeightError, match=r"1 of 2 parameters are missing \(b\)") as refusal:
        stager.prepare(disk(save("x", a=1.0), complete=True))
    assert refusal.value.err_type == "partial_update_needs_session"


@pytest.mark.parametrize(
    ("fields", "match"),
    [
        ({"load_format": "dummy"}, "load_format 'dummy'"),
        ({"path": "/nowhere"}, "no weights at /nowhere"),
    ],
)
def test_a_refused_bucket_leaves_nothing_of_its_staging(stager, save, fields, match):
    stager.prepare(disk(save("x", a=1.0)))
    with pytest.raises(WeightError, match=match):
        stager.prepare(disk(**{"path": save("y", b=1.0), **fields}))
    with pytest.raises(WeightError, match="holds no such weights"):
        stager.seal("s")


def test_names_and_shapes_are_checked_before_a_byte_is_read(stager, holder, tmp_path):
    holder.gate.clear()  # a read would wait for ever
    save_file({"a": torch.zeros(4), "zz": torch.zeros(4)}, tmp_path / "x")
    with pytest.raises(WeightError, match="no parameter zz"):
        stager.prepare(disk(str(tmp_path / "x")))


def test_sealed_weights_take_no_more(stager, save):
    stager.prepare(disk(save("x", a=1.0)))
    stager.seal("s")
    with pytest.raises(WeightError, match="sealed"):
        stager.prepare(disk(save("y", b=1.0)))


def test_a_drop_stops_a_prepare_at_its_next_tensor(stager, holder, save):
    holder.gate.clear()
    found: list[str] = []

    def prepare() -> None:
        with pytest.raises(WeightError) as refusal:
            stager.prepare(disk(save("x", a=1.0, b=1.0)))
        found.append(refusal.value.err_type)

    thread = threading.Thread(target=prepare)
    thread.start()
    while "s" not in stager._staged:
        pass
    stager.drop("s")
    stager.drop("s")
    holder.gate.set()
    thread.join(5)
    assert found == ["dropped"] and not stager._staged


def test_the_coordinator_spools_what_it_takes_and_the_others_do_not(holder, save, tmp_path):
    spool = tmp_path / "spool" / "x.safetensors"
    path = save("x", a=1.0, spare=3.0)
    for spools, dp in ((False, 0), (True, 1)):
        other = Stager(holder, Groups("cpu"), spools=spools, dp=dp)
        other.prepare(disk(path, spool_path=str(spool)))
        assert not spool.exists()
    stager = Stager(holder, Groups("cpu"), spools=True, dp=0)
    told = stager.prepare(disk(path, spool_path=str(spool)))
    assert describe(str(spool))["checksum"] == told["checksum"]


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"names": ("a", "b")}, "equal length"),
        ({"names": (), "dtypes": (), "shapes": ()}, "at least one"),
        ({"names": ("a", "a"), "dtypes": ("float32",) * 2, "shapes": ((4,), (4,))}, "each once"),
        ({"dtypes": ("float7",)}, "unknown dtype float7"),
        ({}, "no group"),
    ],
)
def test_a_distributed_bucket_must_describe_itself(stager, changes, match):
    fields = {"names": ("a",), "dtypes": ("torch.float32",), "shapes": ((4,),)} | changes
    source = WeightSource(kind="distributed", group_name="g", **fields)
    with pytest.raises(WeightError, match=match):
        stager.prepare(PrepareWeights(staging_id="s", source=source))


def test_weights_larger_than_the_memory_are_refused(stager, monkeypatch, save):
    class Memory:
        available = 3

    monkeypatch.setattr("psutil.virtual_memory", Memory)
    with pytest.raises(WeightError, match="needs 16 bytes of memory, 3 are") as refusal:
        stager.prepare(disk(save("x", a=1.0)))
    assert refusal.value.status_code == 507
