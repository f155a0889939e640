"""The router with its sockets, turned by hand: admission, aborts, messages it cannot know."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from engine import messages as m
from engine.config import EngineConfig, Limits
from engine.router.dispatch import detokenizer_of
from engine.router.process import Router
from engine.wire import PullSocket, PushSocket
from tests.engine.model.tiny import make_scripted_dir


class Desk:
    """A router, and everything around it by its socket: two workers, a rank, the detokenizers."""

    def __init__(self, home: Path, detokenizers: int = 2, **limits: int) -> None:
        self.config = EngineConfig(
            home=str(home), model_path=str(make_scripted_dir(home / "models" / "scripted")),
            backend="scripted", run_dir=str(home), generation=1, detokenizers=detokenizers,
            limits=Limits(**limits),
        )  # fmt: skip
        self.router = Router(self.config)
        self.requests = PushSocket(self.config.router_address)
        self.reports = PushSocket(self.config.router_reply_address)
        self.workers = [PullSocket(self.inbox(number)) for number in (1, 2)]
        self.rank = PullSocket(self.config.scheduler_address(0, 1))
        self.detokenizers = [
            PullSocket(self.config.detokenizer_address(index)) for index in range(detokenizers)
        ]
        self.open = [self.requests, self.reports, *self.workers, self.rank, *self.detokenizers]
        for number in (1, 2):
            self.report(m.Lease(inbox=self.inbox(number), kind="web", worker_id=str(number),
                                generation=1, pid=number))  # fmt: skip
        self.report(m.ProcessUp(role="rank", index=0, address=self.rank.address, generation=1,
                                pid=9, info={"epoch": 1}))  # fmt: skip
        self.report(m.RankLoad(dp=0, tp=0, pid=9, generation=1, state="running", epoch=1,
                               at=time.time()))  # fmt: skip
        for number in (1, 2):
            self.heard(number, m.FleetSnapshot)

    def close(self) -> None:
        sockets = self.router.sockets
        for inbox in list(sockets.outbox._sockets):
            sockets.outbox.forget(inbox)
        sockets.disconnect_rank(0)
        for socket in (*self.open, *sockets._detokenizers, sockets.requests, sockets.reports):
            socket.close()

    def inbox(self, number: int) -> str:
        return f"ipc://{self.config.run_dir}/in-{number}"

    def report(self, message) -> None:
        """On the control lane, up to the router's having handled it."""
        assert self.reports.send(message)
        self._handle(self.router.sockets.reports)

    def request(self, kind: type, worker: int, **fields) -> None:
        """On the bulk lane, up to the router's having handled it."""
        assert self.requests.send(m.stamped(self.inbox(worker), kind, **fields))
        self._handle(self.router.sockets.requests)

    def _handle(self, socket: PullSocket) -> None:
        assert socket.wait(5)
        for message in socket.drain():
            self.router._handle(message)

    def heard(self, worker: int, kind: type):
        """The next message of this kind at a worker's inbox."""
        return self._next(self.workers[worker - 1], kind)

    def at_rank(self, kind: type):
        return self._next(self.rank, kind)

    def _next(self, socket: PullSocket, kind: type):
        until = time.monotonic() + 5
        while time.monotonic() < until:
            socket.wait(0.5)
            message = socket.receive()
            if isinstance(message, kind):
                return message
        raise AssertionError(f"no {kind.__name__}")

    def reserve(self, rid: str, worker: int = 1) -> m.ReserveReply:
        self.request(m.Reserve, worker, parent=rid, rids=[rid])
        return self.heard(worker, m.ReserveReply)

    def submit(self, rid: str, worker: int = 1, **fields) -> None:
        sampling = m.SamplingParams(max_new_tokens=5)
        self.request(
            m.TokenizedGenerateReqInput, worker, rid=rid, input_ids=[1, 2, 3],
            sampling=sampling, **fields,
        )  # fmt: skip

    def call(self, kind: type, worker: int = 1, **fields) -> m.ControlReply:
        call = m.Call(id=f"{kind.__name__} {time.monotonic()}", deadline=time.time() + 30)
        self.report(m.stamped(self.inbox(worker), kind, call=call, **fields))
        reply = self.heard(worker, m.ControlReply)
        assert reply.call_id == call.id
        return reply

    @property
    def counters(self) -> dict[str, int]:
        return self.call(m.GetFleetReqInput).result["counters"]

    def nothing_at_rank(self) -> bool:
        """No request or end; what it says of a pause is not meant."""
        self.rank.wait(0.05)
        return not [x for x in self.rank.drain() if not isinstance(x, m.RankCall)]


@pytest.fixture
def desk(tmp_path) -> Iterator[Desk]:
    made = Desk(tmp_path)
    yield made
    made.close()


ASKED = {"logprob": m.LogprobParams(start_len=0, top_num=2), "return_entropy": True,
         "return_hidden_states": True}  # fmt: skip


def is_an_answer_without_tokens(row: m.StrRow) -> None:
    """Like one that a rank aborted before its first token: every family is there, and empty."""
    none = m.TopLogprobs(ids=[], values=[])
    assert (row.finish.type, row.finish.status_code, row.finish.err_type) == ("abort", None, None)
    assert (row.text, row.output_ids, row.entropy) == ("", [], [])
    assert row.output_logprobs == m.OutputLogprobs(values=[], top=none)
    assert row.input_logprobs == m.InputLogprobs(ids=[], values=[], top=none)
    assert row.hidden == m.Hidden(width=0, data=b"")
    assert row.provenance.prompt_tokens == 3


def test_an_abort_of_a_request_that_is_still_tokenized_is_final(desk):
    """E15, E18: it was answered, so the request never runs; its end is a normal aborted answer."""
    assert desk.reserve("r").status_code == 0
    assert desk.call(m.AbortReq, worker=2, rid="r").result["found"] == ["r"]
    desk.submit("r", **ASKED)
    (row,) = desk.heard(1, m.BatchStrOutput).rows
    is_an_answer_without_tokens(row)
    assert desk.nothing_at_rank()
    assert desk.counters["live_requests"] == 0
    assert desk.reserve("r").status_code == 0, "the rid is free again"


def test_an_abort_of_a_request_that_a_pause_holds_is_final(desk):
    """E15, E18: it does not run later, when the pause ends."""
    desk.router.hold()
    desk.reserve("held")
    desk.submit("held", **ASKED)
    assert desk.call(m.AbortReq, worker=2, rid="held").result["found"] == ["held"]
    (row,) = desk.heard(1, m.BatchStrOutput).rows
    is_an_answer_without_tokens(row)
    desk.router.release_held()
    assert desk.nothing_at_rank()
    assert desk.call(m.AbortReq, rid="held").result["found"] == []
    assert desk.counters["live_requests"] == 0


def test_an_abort_of_a_request_in_a_rank_goes_there_behind_it(desk):
    """E14: from a worker that never saw the request."""
    desk.reserve("r1")
    desk.submit("r1")
    assert desk.at_rank(m.TokenizedGenerateReqInput).rid == "r1"
    assert desk.call(m.AbortReq, worker=2, rid="r1").result["found"] == ["r1"]
    assert desk.at_rank(m.EndRequests).rids == ["r1"]


def test_an_abort_without_a_rid_ends_nothing(desk):
    """E14."""
    desk.reserve("r1")
    refused = desk.call(m.AbortReq, rid="")
    assert (refused.success, refused.status_code) == (False, 400)
    desk.submit("r1")
    assert desk.at_rank(m.TokenizedGenerateReqInput).rid == "r1"


def test_every_message_of_a_request_goes_to_one_detokenizer(desk):
    """E8: also the end that the router makes when a rank dies goes where the tokens went."""
    rids = [f"r{number}" for number in range(8)]
    for rid in rids:
        desk.reserve(rid)
        desk.submit(rid)
    desk.report(m.ProcessDown(role="rank", index=0, tp=0, reason="signal 9"))
    ended: dict[str, int] = {}
    while len(ended) < len(rids):
        for index, socket in enumerate(desk.detokenizers):
            socket.wait(0.1)
            ended |= {row.rid: index for batch in socket.drain() for row in batch.rows}
    assert ended == {rid: detokenizer_of(rid, 2) for rid in rids}
    assert set(ended.values()) == {0, 1}


@pytest.mark.parametrize("lane", ["requests", "reports"])
def test_a_message_that_the_router_cannot_know_is_counted_and_ends_nothing(desk, lane):
    """C19: neither a message for somebody else nor rubbish."""
    socket = desk.requests if lane == "requests" else desk.reports
    socket.send_frame(b"\x80\x04rubbish")
    socket.send(m.BatchTokenIDOutput(rows=[]))
    for _ in range(2):
        desk._handle(getattr(desk.router.sockets, lane))
        if desk.router.counters.get("unknown_messages"):
            break
    counters = desk.counters
    assert (counters["malformed"], counters["unknown_messages"]) == (1, 1)
    desk.reserve("r")
    desk.submit("r")
    assert desk.at_rank(m.TokenizedGenerateReqInput).rid == "r"


def test_a_control_call_that_the_router_does_not_know_is_refused(desk, monkeypatch):
    """C19: as if a newer worker asked an older engine."""
    monkeypatch.setattr(desk.router.operations, "knows", lambda message: False)
    refused = desk.call(m.FlushCacheReqInput)
    assert (refused.status_code, refused.err_type) == (501, "not_supported")
    assert "FlushCacheReqInput" in refused.message
    assert desk.reserve("r").status_code == 0


def test_a_refusal_comes_before_any_work_and_to_each_worker(tmp_path):
    """E1: twelve at once for a queue of one; ten are refused in the same moment."""
    desk = Desk(tmp_path, max_running=1, max_waiting=1)
    replies = [desk.reserve(f"r{number}", worker=1 + number % 2) for number in range(12)]
    assert [reply.status_code for reply in replies] == [0, 0] + [503] * 10
    assert {reply.retry_after_s for reply in replies[2:]} == {1}
    desk.close()
