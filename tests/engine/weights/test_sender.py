"""The trainer's end over HTTP: one session, one epoch, nothing after a failure."""

from __future__ import annotations

import json
import subprocess
import sys

import httpx
import pytest
import torch
from safetensors.torch import load, save_file

from engine.weights.checkpoint import WeightError, describe
from engine.weights.sender import Engine, WeightGroup, buckets, push_tensors
from tests.engine.weights.test_transfer import free_port

TENSORS = [(f"t{i}", torch.full((4,), float(i))) for i in range(5)]


class Server:
    """The engine's HTTP edge: notes what it was sent, refuses what it is told to."""

    def __init__(self, refuse: str = "") -> None:
        self.calls: list[tuple[str, dict]] = []
        self.tensors: dict[str, torch.Tensor] = {}
        self.refuse = refuse
        self.engine = Engine("http://engine", "key", transport=httpx.MockTransport(self._answer))

    def _answer(self, request: httpx.Request) -> httpx.Response:
        assert request.headers["authorization"] == "Bearer key"
        route = request.url.path
        if route == "/update_weights_from_tensor":
            self.tensors |= load(request.content)
            fields = dict(request.url.params)
        else:
            fields = json.loads(request.content)
        self.calls.append((route, fields))
        if route == self.refuse:
            return httpx.Response(400, json={"error": {"message": "no such parameter"}})
        return httpx.Response(200, json={"success": True, "session_id": "s1", "epoch": 2})

    @property
    def routes(self) -> list[str]:
        return [route for route, _ in self.calls]


def test_a_push_is_one_session_that_ends_with_the_checksum_of_all_it_sent(tmp_path):
    server = Server()
    answer = push_tensors(server.engine, TENSORS, bucket_bytes=32, token_step=7)
    assert answer["epoch"] == 2
    assert server.calls[0] == ("/begin_weight_update", {"token_step": 7})
    assert server.routes[1:4] == ["/update_weights_from_tensor"] * 3
    assert all(fields == {"session_id": "s1"} for _, fields in server.calls[1:4])
    save_file(dict(TENSORS), tmp_path / "x")
    checksum = describe(str(tmp_path / "x"))["checksum"]
    assert server.calls[4] == ("/end_weight_update", {"session_id": "s1", "checksum": checksum})
    assert server.tensors.keys() == dict(TENSORS).keys()
    server.engine.close()


def test_a_refused_bucket_drops_the_session_and_raises_the_engine_s_sentence():
    server = Server(refuse="/update_weights_from_tensor")
    with pytest.raises(WeightError, match="no such parameter"):
        push_tensors(server.engine, TENSORS)
    assert server.calls[-1] == ("/end_weight_update", {"session_id": "s1", "drop": True})
    server.engine.close()


def test_a_trainer_s_own_failure_drops_the_session():
    def broken():
        yield TENSORS[0]
        raise RuntimeError("the trainer's bug")

    server = Server()
    with pytest.raises(RuntimeError, match="bug"):
        push_tensors(server.engine, broken())
    assert server.calls[-1][1] == {"session_id": "s1", "drop": True}
    server.engine.close()


def test_buckets_keep_the_order_and_the_bound():
    sizes = [[name for name, _ in bucket] for bucket in buckets(TENSORS, 40)]
    assert sizes == [["t0", "t1"], ["t2", "t3"], ["t4"]]
    assert [len(bucket) for bucket in buckets(TENSORS, 1)] == [1] * 5
    assert list(buckets([], 40)) == []


RANK = """
import json, sys
from engine.messages import JoinGroup
from engine.weights.checkpoint import TensorSpec
from engine.weights.groups import Groups
groups = Groups("cpu")
groups.join(JoinGroup(master_address="127.0.0.1", master_port=int(sys.argv[1]), rank_offset=1,
                      world_size=2, group_name="w", backend="gloo", timeout_s=30.0), rank=1)
specs = [TensorSpec(f"t{i}", "F32", (4,)) for i in range(int(sys.argv[2]))]
found = [tensor.tensor[0].item() for tensor in groups.receive("w", specs, lambda: False)]
print(json.dumps(found), flush=True)
"""


def rank_process(port: int, tensors: int) -> subprocess.Popen:
    command = [sys.executable, "-c", RANK, str(port), str(tensors)]
    return subprocess.Popen(command, stdout=subprocess.PIPE)


def test_a_group_pushes_by_broadcast_in_the_order_that_it_announces():
    server, port = Server(), free_port()
    rank = rank_process(port, tensors=5)
    group = WeightGroup(
        server.engine, engine_ranks=1, address="127.0.0.1", port=port, name="w", timeout_s=30.0
    )
    joined = dict(server.calls[0][1])
    assert (joined["rank_offset"], joined["world_size"], joined["master_port"]) == (1, 2, port)
    assert group.push(TENSORS, bucket_bytes=32, weight_version="v1")["epoch"] == 2
    out, _ = rank.communicate(timeout=30)
    assert json.loads(out) == [0.0, 1.0, 2.0, 3.0, 4.0]
    sent = [f for r, f in server.calls if r == "/update_weights_from_distributed"]
    assert [name for fields in sent for name in fields["names"]] == [n for n, _ in TENSORS]
    assert all(fields["session_id"] == "s1" and fields["group_name"] == "w" for fields in sent)
    group.close()
    assert server.routes[-1] == "/destroy_weights_update_group"
    server.engine.close()


def test_a_refused_broadcast_raises_the_engine_s_sentence_and_does_not_hang():
    server, port = Server(refuse="/update_weights_from_distributed"), free_port()
    rank = rank_process(port, tensors=0)  # it leaves without taking anything
    group = WeightGroup(
        server.engine, engine_ranks=1, address="127.0.0.1", port=port, name="w", timeout_s=30.0
    )
    with pytest.raises(WeightError, match="no such parameter"):
        group.push(TENSORS)
    rank.communicate(timeout=30)
    assert server.calls[-1] == ("/end_weight_update", {"session_id": "s1", "drop": True})
    group.close()
    server.engine.close()
