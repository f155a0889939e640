"""Leases and the table of live rids."""

from __future__ import annotations

from engine.messages import Lease, Reserve
from engine.router.registry import LEASE_S, RESERVATION_S, Registry


def lease(inbox="in-1", worker_id="1", generation=1, pid=10, lag_s=0.0) -> Lease:
    return Lease(
        inbox=inbox, kind="web", worker_id=worker_id, generation=generation, pid=pid, lag_s=lag_s
    )


def reserve(registry: Registry, rids: list[str], parent: str = "p", inbox: str = "in-1") -> None:
    registry.reserve(Reserve(http_worker_ipc=inbox, parent=parent, rids=rids), now=0.0)


def test_a_rid_is_taken_from_its_reservation_to_its_removal():
    registry = Registry()
    reserve(registry, ["a"])
    assert registry.taken(["a", "b"]) == ["a"]
    registry.remove("a")
    assert registry.taken(["a"]) == []


def test_a_rid_that_occurs_twice_in_one_batch_is_taken():
    assert Registry().taken(["a", "a"]) == ["a", "a"]


def test_an_abort_by_rid_is_exact():
    """E15: job_1 does not mean job_10."""
    registry = Registry()
    reserve(registry, ["job_1"], parent="job_1")
    reserve(registry, ["job_10"], parent="job_10")
    assert [entry.rid for entry in registry.named("job_1")] == ["job_1"]
    assert [entry.rid for entry in registry.named("job_1", prefix=True)] == ["job_1", "job_10"]


def test_a_parent_means_all_its_children():
    registry = Registry()
    reserve(registry, ["p-0", "p-1"])
    assert [entry.rid for entry in registry.named("p")] == ["p-0", "p-1"]
    registry.remove("p-0")
    registry.remove("p-1")
    assert registry.named("p") == [] and not registry.children


def test_a_dropped_lease_gives_up_exactly_its_own_requests():
    registry = Registry()
    registry.renew(lease(), now=0.0)
    reserve(registry, ["a"], parent="a", inbox="in-1")
    reserve(registry, ["b"], parent="b", inbox="in-2")
    assert [entry.rid for entry in registry.drop_lease("in-1")] == ["a"]
    assert list(registry.entries) == ["b"] and not registry.leases


def test_a_lease_lapses_after_ten_seconds_of_silence():
    registry = Registry()
    registry.renew(lease(), now=100.0)
    assert registry.lapsed(100.0 + LEASE_S) == []
    assert registry.lapsed(100.1 + LEASE_S) == ["in-1"]


def test_a_worker_that_joins_again_gives_up_its_older_inbox():
    registry = Registry()
    registry.renew(lease("in-1", generation=1), now=0.0)
    newer = lease("in-2", generation=2)
    assert registry.superseded(newer) == ["in-1"]
    registry.renew(newer, now=1.0)
    assert registry.superseded(lease("in-1", generation=1)) == []


def test_a_worker_whose_loop_lags_is_shown_as_lagging():
    registry = Registry()
    registry.renew(lease(lag_s=1.5), now=0.0)
    assert [view.state for view in registry.worker_views()] == ["lagging"]


def test_a_reservation_that_nobody_submits_goes_stale():
    registry = Registry()
    reserve(registry, ["a"])
    assert registry.stale_reservations(RESERVATION_S - 1) == []
    assert [entry.rid for entry in registry.stale_reservations(RESERVATION_S + 1)] == ["a"]
