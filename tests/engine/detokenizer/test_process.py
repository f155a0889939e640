"""The detokenizer process: its sockets, its ends, its life."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from types import SimpleNamespace

import msgspec
import pytest

from engine.config import EngineConfig
from engine.detokenizer import outbox
from engine.detokenizer.process import DetokenizerProcess
from engine.messages import (
    BatchStrOutput,
    BatchTokenIDOutput,
    Call,
    DecodeParams,
    Finish,
    GetFleetReqInput,
    InboxGone,
    RowsUndelivered,
    TokenIDRow,
    merge_all,
    stamped,
)
from engine.process_guard import PARENT_PID, READY_FD
from engine.wire import PullSocket, PushSocket
from tests.engine.samples import write_model_dir

LENGTH = Finish(type="length")
ABORT = Finish(type="abort", err_type="engine_restarting", message="a rank died")


class Engine:
    """A detokenizer's surroundings: a rank's socket, the router's, and workers' inboxes."""

    def __init__(self, directory):
        self.directory = directory
        self.config = EngineConfig(
            home=str(directory),
            model_path=str(write_model_dir(directory / "model")),
            run_dir=str(directory),
            generation=1,
        )
        self.router = PullSocket(self.config.router_reply_address)
        self.rank = PushSocket(self.config.detokenizer_address(0))
        self.inboxes = {}

    def inbox(self, name, **options):
        self.inboxes[name] = PullSocket(self.address(name), **options)
        return self.inboxes[name]

    def address(self, name):
        return f"ipc://{self.directory}/{name}"

    def row(self, rid, ids=(), *, to="w1", **fields):
        return TokenIDRow(rid=rid, http_worker_ipc=self.address(to), output_ids=list(ids), **fields)

    def send(self, *rows):
        assert self.rank.send(BatchTokenIDOutput(rows=list(rows)))

    def close(self):
        for socket in (self.router, self.rank, *self.inboxes.values()):
            socket.close()


@pytest.fixture
def engine(tmp_path):
    made = Engine(tmp_path)
    yield made
    made.close()


@pytest.fixture
def process(engine):
    made = DetokenizerProcess(engine.config, 0, SimpleNamespace(requested=False))
    made.startup()
    yield made
    made.shutdown()


@pytest.fixture
def tokenizer(tokenizer_of):
    return tokenizer_of("byte_level")


@pytest.fixture
def hello(tokenizer):
    return tokenizer.encode("Hello 世界", add_special_tokens=False)


def first(stop=()):
    return DecodeParams(prompt_tail=[], stop=stop)


def turn_until(process, condition, timeout_s=20.0):
    """Turns the process's loop until ``condition()`` is true; what it was."""
    deadline = time.monotonic() + timeout_s
    while not (found := condition()):
        assert time.monotonic() < deadline, "it did not happen"
        process.turn(time.monotonic())
        time.sleep(0.002)
    return found


def rows_of(messages):
    return [row for message in messages for row in message.rows]


def test_rows_come_to_their_workers_as_text_in_one_message_each(engine, process, hello):
    one, two = engine.inbox("w1"), engine.inbox("w2")
    engine.send(
        engine.row("a", hello, decode=first(), finish=LENGTH),
        engine.row("b", hello, to="w2", decode=first(), finish=LENGTH),
        engine.row("c", hello[:2], decode=first(), finish=LENGTH),
    )
    (at_one,) = turn_until(process, one.drain)
    (at_two,) = turn_until(process, two.drain)
    assert isinstance(at_one, BatchStrOutput)
    assert [(r.rid, r.text, r.finish) for r in at_one.rows][0] == ("a", "Hello 世界", LENGTH)
    assert [r.rid for r in at_one.rows] == ["a", "c"]
    assert [(r.rid, r.text) for r in at_two.rows] == [("b", "Hello 世界")]
    assert process.counters["live"] == 0


def test_an_end_by_the_router_comes_behind_the_text_that_was_held_back(engine, process, hello):
    inbox = engine.inbox("w1")
    engine.send(engine.row("a", hello, decode=first(stop=("界!",))))
    engine.send(engine.row("a", finish=ABORT))
    rows = turn_until(process, lambda: rows_of(inbox.drain()))
    assert merge_all(rows).text == "Hello 世界"
    assert rows[-1].finish == ABORT


def test_a_row_that_breaks_ends_its_request_and_no_other(engine, process, tokenizer, hello):
    """A regex that explodes, and an id that no vocabulary can have."""
    inbox = engine.inbox("w1")
    slow = DecodeParams(prompt_tail=[], stop_regex=("(a|aa)+$",))
    many = tokenizer.encode("a" * 60 + "b", add_special_tokens=False)
    engine.send(
        engine.row("slow", many, decode=slow),
        engine.row("bug", [-1], decode=first()),
        engine.row("good", hello, decode=first(), finish=LENGTH),
    )
    rows = {r.rid: r for r in turn_until(process, lambda: rows_of(inbox.drain()))}
    assert rows["slow"].finish.err_type == "stop_regex_too_slow"
    assert rows["bug"].finish.err_type == "internal_error"
    assert rows["good"].text == "Hello 世界"
    (report,) = turn_until(process, engine.router.drain)
    assert report == RowsUndelivered(inbox=engine.address("w1"), rids=["slow", "bug"], evict=False)
    assert process.counters["live"] == 0
    assert process.counters["internal_errors"] == 1
    engine.send(engine.row("bug", hello))
    turn_until(process, lambda: process.counters["unknown_rows"] == 1)


def test_rubbish_and_messages_for_others_are_counted(engine, process, hello):
    """C19."""
    inbox = engine.inbox("w1")
    engine.rank.send_frame(b"\x80rubbish")
    engine.rank.send(stamped("ipc:///w", GetFleetReqInput, call=Call(id="c", deadline=1.0)))
    engine.send(engine.row("a", hello, decode=first(), finish=LENGTH))
    assert turn_until(process, lambda: rows_of(inbox.drain()))
    assert (process.counters["malformed"], process.counters["unexpected"]) == (1, 1)


def test_an_inbox_that_is_gone_takes_its_socket_and_requests_along(engine, process, hello):
    inbox = engine.inbox("w1")
    engine.send(engine.row("a", hello, decode=first()))
    turn_until(process, inbox.drain)
    assert (process.counters["live"], process.counters["sockets"]) == (1, 1)
    engine.rank.send(InboxGone(inbox=engine.address("w1")))
    engine.send(engine.row("a", hello))
    turn_until(process, lambda: process.counters["unknown_rows"] == 1)
    assert (process.counters["live"], process.counters["sockets"]) == (0, 0)


def test_a_worker_that_reads_nothing_is_evicted_reported_and_delays_nobody(
    engine, process, tokenizer, hello, monkeypatch
):
    monkeypatch.setattr(outbox, "EVICT_S", 0.3)
    engine.inbox("w1", hwm=1)
    quick = engine.inbox("w2")
    text = tokenizer.encode("word " * 4_000, add_special_tokens=False)
    engine.send(engine.row("slow", decode=first()), engine.row("quick", to="w2", decode=first()))
    deadline = time.monotonic() + 60  # the queues in between are full after some 300 frames
    while process.counters["evicted_inboxes"] == 0:
        assert time.monotonic() < deadline
        engine.send(engine.row("slow", text), engine.row("quick", hello, to="w2"))
        process.turn(time.monotonic())
    reports = []
    while not any(report.evict for report in reports):
        reports += turn_until(process, engine.router.drain)
    assert reports[-1].inbox == engine.address("w1")
    assert {rid for report in reports for rid in report.rids} == {"slow"}
    assert len(rows_of(quick.drain())) > 3
    engine.send(engine.row("quick", hello, to="w2", finish=LENGTH))
    assert turn_until(process, lambda: [r for r in rows_of(quick.drain()) if r.finish])
    assert process.counters["live"] == 0


# --------------------------------------------------------------------------- as a process


def start(engine, index=0):
    """The detokenizer as the launcher starts it; returns once it is ready."""
    config_file = engine.directory / "config.json"
    config_file.write_bytes(engine.config.to_json())
    reader, writer = os.pipe()
    child = subprocess.Popen(
        [sys.executable, "-m", "engine.detokenizer.process", str(config_file), str(index)],
        env={**os.environ, READY_FD: str(writer), PARENT_PID: str(os.getpid())},
        pass_fds=(writer,),
        stderr=subprocess.DEVNULL,
    )
    os.close(writer)
    with os.fdopen(reader, "rb") as pipe:
        info = msgspec.json.decode(pipe.readline())
    assert info == {"index": index, "address": engine.config.detokenizer_address(index)}
    return child


def received(inbox, timeout_s=10.0):
    return rows_of(inbox.drain() if inbox.wait(timeout_s) else [])


def test_a_killed_detokenizer_is_replaced_on_the_same_path_and_sigterm_sends_what_is_left(
    engine, tokenizer
):
    ids = tokenizer.encode("Hello", add_special_tokens=False)
    inbox = engine.inbox("w1")
    child = start(engine)
    try:
        engine.send(engine.row("a", ids, decode=first(), finish=LENGTH))
        assert [r.text for r in received(inbox)] == ["Hello"]
        child.kill()
        child.wait(10)
        child = start(engine)
        engine.send(engine.row("b", ids, decode=first()))
        assert [r.text for r in received(inbox)] == ["Hello"]
        engine.send(*(engine.row(f"c{i}", ids, decode=first(), finish=LENGTH) for i in range(50)))
        child.send_signal(signal.SIGTERM)
        assert child.wait(10) == 0
        assert len(received(inbox)) == 50
    finally:
        child.kill()
        child.wait()


def test_the_process_imports_neither_torch_nor_transformers():
    script = (
        "import sys, engine.detokenizer.process;"
        "print([n for n in ('torch', 'transformers', 'django') if n in sys.modules])"
    )
    found = subprocess.run([sys.executable, "-c", script], capture_output=True, check=True)
    assert found.stdout.strip() == b"[]"
