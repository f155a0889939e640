"""The trainer's end over HTTP: one session, one epoch, nothing after a failure."""

from __future__ import annotations

import json

import httpx
import pytest
import torch
from safetensors.torch import load, save_file

from engine.weights.checkpoint import WeightError, describe
from engine.weights.sender import Engine, buckets, push_tensors

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
