"""Every request has an end, also when its detokenizer dies with its last rows."""

from __future__ import annotations

import time
from collections import Counter

import pytest

from engine import messages as m
from engine.config import EngineConfig
from engine.router.registry import Registry
from engine.router.requests import DELIVERY_S, RequestDesk
from engine.router.state import EngineState
from engine.router.weights import Ledger

INBOX = "ipc:///in-1"


class Wire:
    """Sockets that keep what is sent."""

    inbox = "ipc:///router"

    def __init__(self) -> None:
        self.answers: list[m.StrRow] = []

    def to_inbox(self, inbox, message) -> None:
        if isinstance(message, m.BatchStrOutput):
            self.answers += message.rows

    def to_rank(self, dp, message) -> bool:
        return True

    def to_detokenizer(self, index, message) -> None:
        """It dies with all that it was sent."""


@pytest.fixture
def wire() -> Wire:
    return Wire()


@pytest.fixture
def desk(wire, tmp_path) -> RequestDesk:
    config = EngineConfig(home=str(tmp_path), model_path="m", backend="scripted")
    state = EngineState(dp=1, tp=1, model="m", generation=1, ledger=Ledger())
    state.ranks[0, 0].up = True
    registry = Registry()
    lease = m.Lease(inbox=INBOX, kind="web", worker_id="1", generation=1, pid=1)
    registry.renew(lease, time.time())
    return RequestDesk(config, registry, state, wire, Counter().update)


def submit(desk: RequestDesk, rid: str) -> None:
    desk.reserve(m.Reserve(http_worker_ipc=INBOX, parent=rid, rids=[rid]))
    desk.submit(
        m.TokenizedGenerateReqInput(
            http_worker_ipc=INBOX, rid=rid, input_ids=[1], sampling=m.SamplingParams()
        )
    )


def ends(wire: Wire) -> list[tuple[str, str | None]]:
    return [(row.rid, row.finish.err_type) for row in wire.answers if row.finish]


DOWN = m.ProcessDown(role="detokenizer", index=0, reason="signal 9")


def test_an_answer_that_dies_with_its_detokenizer_has_an_end(desk, wire):
    """The rank had ended it, so the router knew it no more: its client waited for ever."""
    submit(desk, "running")
    submit(desk, "ended")
    desk.ended(m.RequestEnded(rids=["ended"], dp=0))
    desk.detokenizer_down(DOWN)
    assert ends(wire) == [("running", "engine_restarting"), ("ended", "engine_restarting")]


def test_an_end_that_the_router_made_and_that_died_too_is_made_again(desk, wire):
    submit(desk, "r")
    desk.rank_down(m.ProcessDown(role="rank", index=0, reason="signal 9"))
    desk.detokenizer_down(DOWN)
    assert ends(wire) == [("r", "engine_restarting")]


def test_an_id_that_is_in_use_again_is_not_ended_for_the_one_before(desk, wire):
    submit(desk, "r")
    desk.ended(m.RequestEnded(rids=["r"], dp=0))
    submit(desk, "r")
    desk.detokenizer_down(DOWN)
    assert ends(wire) == [("r", "engine_restarting")]


def test_what_was_delivered_long_ago_is_not_told_again(desk, wire):
    submit(desk, "r")
    desk.ended(m.RequestEnded(rids=["r"], dp=0))
    desk.expire(time.time() + DELIVERY_S + 1)
    desk.detokenizer_down(DOWN)
    assert ends(wire) == []
