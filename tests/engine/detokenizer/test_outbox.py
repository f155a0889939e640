"""Rows on their way to workers: one that takes nothing delays nobody else, and not for ever."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from engine.detokenizer.outbox import EVICT_S, FRAME_BYTES, REQUEST_BYTES, WORKER_BYTES, Outbox
from engine.messages import Finish, StrRow, merge_all
from engine.wire import MESSAGES

LENGTH = Finish(type="length")


class Workers:
    """Inboxes that take ``room[inbox]`` more frames (any number where it is not set)."""

    def __init__(self, **room):
        self.room = {f"ipc://{name}": count for name, count in room.items()}
        self.frames: list[tuple[str, list[StrRow]]] = []
        self.sizes: list[int] = []

    def send(self, inbox, frame):
        if self.room.get(inbox, 1) <= 0:
            return False
        if inbox in self.room:
            self.room[inbox] -= 1
        self.frames.append((inbox, MESSAGES.decode(frame).rows))
        self.sizes.append(len(frame))
        return True

    def rows(self, name):
        return [row for inbox, rows in self.frames if inbox == f"ipc://{name}" for row in rows]


def row(rid, text="", *, to="w1", finish=None):
    return StrRow(rid=rid, http_worker_ipc=f"ipc://{to}", text=text, finish=finish)


def test_one_frame_per_worker_and_delivery():
    workers = Workers()
    Outbox(workers.send).deliver([row("a"), row("b", to="w2"), row("c")], 0.0)
    assert [(inbox, [r.rid for r in rows]) for inbox, rows in workers.frames] == [
        ("ipc://w1", ["a", "c"]),
        ("ipc://w2", ["b"]),
    ]


def test_a_worker_that_takes_nothing_delays_only_itself():
    workers = Workers(w1=0)
    outbox = Outbox(workers.send)
    outbox.deliver([row("a", "1"), row("b", "1", to="w2")], 0.0)
    outbox.deliver([row("a", "2"), row("b", "2", to="w2")], 0.0)
    assert [r.text for r in workers.rows("w2")] == ["1", "2"]
    assert workers.rows("w1") == [] and outbox.blocked


def test_rows_that_waited_come_merged_per_request_and_in_order():
    workers = Workers(w1=0)
    outbox = Outbox(workers.send)
    for number in range(5):
        outbox.deliver([row("a", str(number)), row("b", chr(97 + number))], 0.0)
    workers.room["ipc://w1"] = 9
    assert outbox.retry(1.0) == [] and not outbox.blocked
    assert [(r.rid, r.text) for r in workers.rows("w1")] == [
        ("a", "0"),
        ("b", "a"),
        ("a", "1234"),
        ("b", "bcde"),
    ]


def test_a_rid_that_is_used_again_while_its_end_waits_is_not_merged_into_it():
    workers = Workers(w1=0)
    outbox = Outbox(workers.send)
    outbox.deliver([row("x")], 0.0)
    outbox.deliver([row("a", "1"), row("a", "2", finish=LENGTH), row("a", "3")], 0.0)
    workers.room["ipc://w1"] = 9
    outbox.retry(0.0)
    assert [(r.text, r.finish) for r in workers.rows("w1")[1:]] == [("12", LENGTH), ("3", None)]


def test_frames_of_waiting_rows_are_bounded():
    workers = Workers(w1=0)
    outbox = Outbox(workers.send)
    outbox.deliver([row("x")], 0.0)
    for number in range(100):
        outbox.deliver([row(str(number), "x" * 20_000)], 0.0)
    workers.room["ipc://w1"] = 999
    outbox.retry(0.0)
    assert max(workers.sizes) < FRAME_BYTES + 21_000
    assert len(workers.rows("w1")) == 101


def test_a_request_that_grows_too_large_ends_with_slow_consumer_once():
    workers = Workers(w1=0)
    outbox = Outbox(workers.send)
    outbox.deliver([row("x")], 0.0)
    outbox.deliver([row("a", "y" * (REQUEST_BYTES // 2)), row("b", "ok")], 0.0)
    outbox.deliver([row("a", "z" * REQUEST_BYTES), row("a", "late"), row("b", "!")], 0.0)
    (ended,) = outbox.take_slow()
    assert (ended.rid, ended.finish.type, ended.finish.err_type) == ("a", "abort", "slow_consumer")
    assert outbox.take_slow() == []
    workers.room["ipc://w1"] = 99
    outbox.retry(0.0)
    got = {rid: [r for r in workers.rows("w1") if r.rid == rid] for rid in "ab"}
    assert [r.text[:3] for r in got["a"]] == ["yyy"]
    assert got["a"][0].finish == ended.finish
    assert merge_all(got["b"]).text == "ok!"
    assert outbox.counters["slow_consumers"] == 1
    assert outbox.counters["undeliverable_rows"] == 1


def test_an_end_that_does_not_fit_still_comes_and_needs_no_report():
    workers = Workers(w1=0)
    outbox = Outbox(workers.send)
    outbox.deliver([row("x")], 0.0)
    outbox.deliver([row("a", "z" * 2 * REQUEST_BYTES, finish=LENGTH)], 0.0)
    assert outbox.take_slow() == []
    workers.room["ipc://w1"] = 99
    outbox.retry(0.0)
    (end,) = (r for r in workers.rows("w1") if r.rid == "a")
    assert end.finish.err_type == "slow_consumer"


def test_what_waits_for_one_worker_is_bounded():
    workers = Workers(w1=0)
    outbox = Outbox(workers.send)
    outbox.deliver([row("x")], 0.0)
    for number in range(40):
        outbox.deliver([row(str(number), "x" * (REQUEST_BYTES // 2))], 0.0)
    assert len(outbox.take_slow()) == 40 - 2 * WORKER_BYTES // REQUEST_BYTES + 1
    workers.room["ipc://w1"] = 999
    outbox.retry(0.0)
    assert sum(workers.sizes) < WORKER_BYTES + 40 * 200
    assert len(workers.rows("w1")) == 41


def test_a_worker_that_takes_nothing_for_long_is_given_up_and_a_slow_one_is_not():
    workers = Workers(w1=0, w2=0)
    outbox = Outbox(workers.send)
    outbox.deliver([row("a"), row("b", to="w2")], 0.0)
    outbox.deliver([row("a"), row("b", to="w2")], 1.0)
    assert outbox.retry(EVICT_S - 1) == []
    workers.room["ipc://w2"] = 1
    assert outbox.retry(EVICT_S) == ["ipc://w1"]
    assert outbox.retry(2 * EVICT_S - 0.1) == []
    assert outbox.retry(2 * EVICT_S) == ["ipc://w2"]
    assert not outbox.blocked and outbox.counters["evicted_inboxes"] == 2


def test_rows_for_an_inbox_that_is_gone_are_dropped_and_counted():
    workers = Workers()
    outbox = Outbox(workers.send)
    outbox.forget("ipc://w1")
    outbox.deliver([row("a"), row("b", to="w2")], 0.0)
    assert workers.rows("w1") == [] and len(workers.rows("w2")) == 1
    assert outbox.counters["undeliverable_rows"] == 1


@settings(max_examples=200, deadline=None)
@given(
    steps=st.lists(
        st.tuples(
            st.lists(st.tuples(st.sampled_from("abc"), st.sampled_from(["w1", "w2"])), max_size=4),
            st.integers(0, 3),
        ),
        max_size=12,
    )
)
def test_slow_workers_lose_and_invent_nothing(steps):
    workers = Workers(w1=0, w2=0)
    outbox = Outbox(workers.send)
    sent: dict[tuple[str, str], str] = {}
    for number, (news, room) in enumerate(steps):
        rows = []
        for rid, to in news:
            sent[rid, to] = sent.get((rid, to), "") + f"{number} "
            rows.append(row(rid, f"{number} ", to=to))
        workers.room["ipc://w1"] += room
        outbox.deliver(rows, 0.0)
        outbox.retry(0.0)
    workers.room.clear()
    outbox.retry(0.0)
    got: dict[tuple[str, str], str] = {}
    for to in ("w1", "w2"):
        for r in workers.rows(to):
            got[r.rid, to] = got.get((r.rid, to), "") + r.text
    assert got == sent
