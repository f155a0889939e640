"""The engine's state as the router knows it."""

from __future__ import annotations

from engine.messages import RankLoad
from engine.router.state import FRESH_S, EngineState
from engine.router.weights import EpochRecord, Ledger


def state(dp: int = 2, tp: int = 1) -> EngineState:
    records = [EpochRecord(epoch=e, weight_version=f"v{e}", token_step=e * 10) for e in (1, 2)]
    ledger = Ledger(epochs={record.epoch: record for record in records})
    return EngineState(dp=dp, tp=tp, model="m", generation=1, ledger=ledger)


def up(engine: EngineState, dp: int, tp: int = 0, epoch: int = 1, at: float = 100.0) -> None:
    rank = engine.ranks[dp, tp]
    rank.up = True
    rank.load = RankLoad(dp=dp, tp=tp, pid=1, generation=1, state="running", epoch=epoch, at=at)


def test_an_engine_without_ranks_is_starting():
    assert state().engine_view().state == "starting"


def test_an_engine_that_lacks_a_group_is_degraded():
    engine = state()
    up(engine, 0)
    assert engine.name == "degraded" and engine.serving_groups() == [0]
    up(engine, 1)
    assert engine.name == "running"


def test_a_group_serves_only_with_all_its_ranks():
    engine = state(dp=1, tp=2)
    up(engine, 0, tp=0)
    assert engine.serving_groups() == []
    up(engine, 0, tp=1)
    assert engine.serving_groups() == [0]


def test_groups_of_different_epochs_are_mixed_and_have_no_one_version():
    engine = state()
    up(engine, 0, epoch=1)
    up(engine, 1, epoch=2)
    view = engine.engine_view()
    assert (view.state, view.epoch, view.weight_version) == ("mixed", None, None)
    up(engine, 0, epoch=2)
    view = engine.engine_view()
    assert (view.epoch, view.weight_version, view.token_step) == (2, "v2", 20)


def test_a_silent_rank_is_stale():
    engine = state(dp=1)
    up(engine, 0, at=100.0)
    assert engine.stale_ranks(100.0 + FRESH_S) == []
    assert [rank.dp for rank in engine.stale_ranks(100.1 + FRESH_S)] == [0]
    engine.group_down(0)
    assert [rank.dp for rank in engine.stale_ranks(100.0)] == [0]
