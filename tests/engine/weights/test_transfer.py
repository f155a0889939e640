"""Groups with a trainer: the field's rendezvous, receives that can be stopped, dead trainers."""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
import time

import pytest
import torch

from engine.messages import JoinGroup, PrepareWeights, WeightSource
from engine.weights.checkpoint import TensorSpec, WeightError, checksum_of
from engine.weights.groups import Groups
from engine.weights.sender import described, spec_of
from engine.weights.transfer import bytes_of
from engine.weights.update import Stager
from tests.engine.weights.test_update import Holder

# A trainer as a process. "theirs" is the recipe of SGLang's init_custom_process_group, which slime
# and AReaL carry too: rendezvous, prefix store, torch's helper.
TRAINER = """
import sys, time
import torch
from torch import distributed
from torch.distributed import distributed_c10d as c10d
how, port, count = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
if how == "ours":
    from engine.weights.transfer import join_group
    group = join_group(address="127.0.0.1", port=port, rank=0, world_size=2, name="g",
                       backend="gloo", timeout_s=20)
else:
    timeout = c10d.default_pg_timeout
    store, rank, size = next(c10d.rendezvous(f"tcp://127.0.0.1:{port}", 0, 2, timeout=timeout))
    store.set_timeout(timeout)
    store = c10d.PrefixStore("g", store)
    group, _ = c10d._new_process_group_helper(
        size, rank, [], c10d.Backend("gloo"), store, group_name="g", backend_options=None,
        timeout=timeout)
    c10d._world.pg_group_ranks[group] = {i: i for i in range(size)}
for i in range(count):
    distributed.broadcast(torch.full((4,), float(i)), src=0, group=group)
print("sent", flush=True)
time.sleep(60)
"""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def join_op(port: int, **changes) -> JoinGroup:
    fields = {
        "master_address": "127.0.0.1", "master_port": port, "rank_offset": 1, "world_size": 2,
        "group_name": "g", "backend": "gloo", "timeout_s": 20.0,
    }  # fmt: skip
    return JoinGroup(**{**fields, **changes})


def in_thread(work):
    result: list = []
    thread = threading.Thread(target=lambda: result.append(work()), daemon=True)
    thread.start()
    return thread, result


@pytest.fixture
def trainer():
    started: list[subprocess.Popen] = []

    def start(count: int, how: str = "theirs") -> tuple[int, subprocess.Popen]:
        port = free_port()
        process = subprocess.Popen(
            [sys.executable, "-c", TRAINER, how, str(port), str(count)], stdout=subprocess.PIPE
        )
        started.append(process)
        return port, process

    yield start
    for process in started:
        process.kill()
        process.wait()
        process.stdout.close()


@pytest.mark.parametrize("how", ["ours", "theirs"])
def test_tensors_arrive_as_they_were_broadcast(trainer, how):
    port, _ = trainer(3, how)
    groups = Groups("cpu")
    groups.join(join_op(port), rank=1)
    specs = [TensorSpec(f"t{i}", "F32", (4,)) for i in range(3)]
    found = list(groups.receive("g", specs, lambda: False))
    for i, tensor in enumerate(found):
        assert bytes(tensor.data) == bytes_of(torch.full((4,), float(i))).tobytes()
        assert torch.equal(tensor.tensor, torch.full((4,), float(i)))
    groups.leave("g")
    with pytest.raises(WeightError, match="no group 'g'"):
        groups.leave("g")


def test_a_trainer_that_never_comes_is_an_error_in_time():
    began = time.monotonic()
    with pytest.raises(WeightError, match="did not come together"):
        Groups("cpu").join(join_op(free_port(), timeout_s=1.0), rank=1)
    assert time.monotonic() - began < 5


def test_a_name_in_use_and_a_rank_outside_the_world_are_refused(trainer):
    port, _ = trainer(0)
    groups = Groups("cpu")
    groups.join(join_op(port), rank=1)
    with pytest.raises(WeightError, match="exists already"):
        groups.join(join_op(port), rank=1)
    with pytest.raises(WeightError, match="world of 2"):
        groups.join(join_op(port, group_name="h"), rank=2)
    groups.leave("g")


def test_a_trainer_that_dies_ends_the_receive(trainer):
    port, process = trainer(1)
    groups = Groups("cpu")
    groups.join(join_op(port), rank=1)
    received = groups.receive(
        "g", [TensorSpec(f"t{i}", "F32", (4,)) for i in (0, 1)], lambda: False
    )
    next(received)
    process.kill()
    with pytest.raises(WeightError, match="broadcast failed"):
        next(received)
    groups.leave("g")


def test_a_dropped_update_stops_waiting_and_leaves_the_group(trainer):
    port, _ = trainer(0)
    groups = Groups("cpu")
    groups.join(join_op(port), rank=1)
    stager = Stager(Holder(), groups, spools=True, dp=0)
    source = WeightSource(
        kind="distributed", group_name="g", names=("a",), dtypes=("torch.float32",), shapes=((4,),)
    )

    def prepare() -> str:
        with pytest.raises(WeightError) as refusal:
            stager.prepare(PrepareWeights(staging_id="s", source=source))
        return refusal.value.err_type

    thread, result = in_thread(prepare)
    time.sleep(0.1)
    assert thread.is_alive()
    stager.drop("s")
    thread.join(5)
    assert result == ["dropped"]
    with pytest.raises(WeightError, match="no group"):
        list(groups.receive("g", [], lambda: False))


def test_a_group_that_the_rank_does_not_have_is_named():
    with pytest.raises(WeightError, match="init_weights_update_group"):
        list(Groups("cpu").receive("g", [], lambda: False))


def test_a_bucket_describes_itself_in_the_words_of_the_routes():
    bucket = [("a", torch.zeros(2, 3, dtype=torch.bfloat16)), ("b", torch.zeros(()))]
    assert described(bucket) == {
        "names": ["a", "b"], "dtypes": ["bfloat16", "float32"], "shapes": [[2, 3], []],
    }  # fmt: skip
    digests = {spec_of(name, tensor): "x" for name, tensor in bucket}
    assert len(checksum_of(digests)) == 64
