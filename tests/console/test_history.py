"""Fifteen minutes of the fleet in the memory of a worker: samples, percentiles, gaps, bounds."""

from __future__ import annotations

import time

import msgspec
import pytest

from console.services.feed import FleetFeed, unreachable
from console.services.history import KEPT_S, MAX_SAMPLES, FleetHistory
from engine.latency import EDGES_S, Delays, percentile
from engine.messages import EngineView, FleetSnapshot, Histogram, RankView

ENGINE = EngineView(
    state="running", epoch=1, weight_version="v1", token_step=7, model="m", generation=1
)


def counted(*delays_s: float) -> Histogram:
    delays = Delays()
    for delay_s in delays_s:
        delays.add(delay_s)
    return Histogram(counts=delays.counts, sum_s=delays.sum_s)


def rank(dp: int = 0, pid: int = 1, itl: Histogram | None = None, **changes: object) -> RankView:
    whole = RankView(
        dp=dp, tp=0, pid=pid, state="running", epoch=1, weight_version="v1", token_step=7,
        running=1, waiting=0, kv_used=5, kv_total=10, tokens_per_s=30.0, step_s=0.02, rss_bytes=0,
        seen_at=1.0, ttft=counted(), itl=itl or counted(),
    )  # fmt: skip
    return msgspec.structs.replace(whole, **changes)


def picture(at: float, *ranks: RankView) -> FleetSnapshot:
    return FleetSnapshot(seq=1, at=at, engine=ENGINE, workers=[], ranks=list(ranks))


def test_a_sample_has_the_numbers_of_each_group_and_their_sums():
    follower = rank(dp=1, tp=1)
    sample = FleetHistory().put(picture(100.0, rank(), rank(dp=1, epoch=2), follower))
    assert sample == {
        "speed": 60.0, "running": 2, "waiting": 0,
        "speed.dp0": 30.0, "kv.dp0": 50.0, "epoch.dp0": 1,
        "speed.dp1": 30.0, "kv.dp1": 50.0, "epoch.dp1": 2,
        "step.p50": 20.0, "step.p99": 20.0,
        "ttft.p50": None, "ttft.p95": None, "itl.p50": None, "itl.p95": None,
    }  # fmt: skip


def test_delays_are_those_of_the_last_seconds_over_all_ranks():
    history = FleetHistory()
    history.put(picture(0.0, rank(itl=counted(*[9.0] * 50)), rank(dp=1, pid=2)))
    sample = history.put(
        picture(1.0, rank(itl=counted(*[9.0] * 50, 0.01)), rank(dp=1, pid=2, itl=counted(0.01)))
    )
    assert 8 < (sample["itl.p95"] or 0) < 13  # what was counted before is not counted again
    assert history.put(picture(40.0, rank(itl=counted(*[9.0] * 50))))["itl.p95"] is None


def test_a_rank_that_restarts_counts_from_its_own_beginning():
    history = FleetHistory()
    history.put(picture(0.0, rank(pid=1, itl=counted(*[1.0] * 50))))
    history.put(picture(1.0, rank(pid=2, itl=counted())))
    sample = history.put(picture(2.0, rank(pid=2, itl=counted(0.02, 0.02))))
    assert (sample["itl.p95"] or 0) == pytest.approx(20, rel=0.26)


def test_silence_is_a_gap_and_a_rank_that_loads_says_nothing():
    history = FleetHistory()
    now = time.time()
    history.put(picture(now - 1, rank()))
    history.put(unreachable("no heartbeat"))
    history.put(picture(now + 1, rank(seen_at=0.0, epoch=0)))
    columns = history.as_columns()["columns"]
    assert columns["speed"] == [30.0, None, 30.0]
    assert columns["epoch.dp0"] == [1, None, None]


def test_the_memory_is_bounded_in_time_and_in_number():
    history = FleetHistory()
    for at in range(KEPT_S + 100):
        history.put(picture(float(at), rank()))
    assert len(history.as_columns()["times"]) == KEPT_S + 1
    for _ in range(2 * MAX_SAMPLES):
        history.put(picture(KEPT_S + 99.0, rank()))
    assert len(history.as_columns()["times"]) == MAX_SAMPLES


def test_sockets_get_the_newest_sample_and_no_histogram():
    feed = FleetFeed()
    feed.put(picture(100.0, rank()))
    frame = msgspec.json.decode(feed.snapshot)
    assert frame["sample"]["speed"] == 30.0
    assert "itl" not in frame["ranks"][0]


def test_the_history_is_read_by_who_may_see_the_fleet(sign_in, worker):
    worker.feed.put(picture(time.time(), rank()))
    answer = sign_in("viewer").get("/api/fleet/history").json()
    assert answer["columns"]["speed"][-1] == 30.0
    assert len(answer["times"]) == len(answer["columns"]["speed"])


@pytest.mark.parametrize("share", [0.5, 0.95, 0.99])
def test_a_percentile_is_within_one_edge_of_the_truth(share):
    truth = [0.001 * 1.01**n for n in range(1000)]
    counts = counted(*truth).counts
    assert percentile(counts, share) == pytest.approx(truth[int(1000 * share) - 1], rel=0.26)


def test_delays_outside_the_edges_are_counted_too():
    assert percentile(counted(-1.0).counts, 0.5) == pytest.approx(EDGES_S[0] / 2)
    assert percentile(counted(1e6).counts, 0.5) == EDGES_S[-1]
    assert percentile([], 0.5) is None
