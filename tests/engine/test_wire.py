"""Bytes from anywhere: a valid message or ``Malformed``, never anything else; and the sockets."""

from __future__ import annotations

import os
import pickle
import random
import time

import msgspec
import pytest
import zmq

from engine import messages as m
from engine.router.process import Outbox
from engine.wire import (
    INBOX_FRAMES,
    MESSAGES,
    VERSION,
    Malformed,
    PullSocket,
    PushSocket,
    SocketMapping,
)
from tests.engine.examples import example

MUTATED_FRAMES = 100_000


@pytest.fixture
def address(tmp_path):
    return f"ipc://{tmp_path}/s"


def row(rid="r", text="x"):
    return m.StrRow(rid=rid, http_worker_ipc="ipc:///w", text=text)


# --------------------------------------------------------------------------- frames


def mutated(frame: bytes, other: bytes, chance: random.Random) -> bytes:
    """``frame`` cut, stretched, with other bytes in it, or grafted onto another message."""
    data = bytearray(frame)
    for _ in range(chance.randrange(1, 4)):
        at = chance.randrange(len(data) + 1)
        match chance.randrange(6):
            case 0:
                del data[at:]
            case 1:
                data[at : at + 1] = bytes((chance.randrange(256),))
            case 2:
                data[at:at] = chance.randbytes(chance.randrange(1, 5))
            case 3:
                del data[at : at + chance.randrange(1, 9)]
            case 4:
                data[at:] = other[chance.randrange(len(other)) :]
            case 5:
                data[at:at] = bytes((0x91, 0x81, 0xDC)) * chance.randrange(1, 40)
    return bytes(data)


def test_mutated_frames_of_every_type_decode_or_are_malformed():
    chance = random.Random(20)
    frames = [MESSAGES.encode(example(kind, chance)) for kind in m.ALL for _ in range(20)]
    malformed = valid = 0
    for _ in range(MUTATED_FRAMES):
        frame = mutated(chance.choice(frames), chance.choice(frames), chance)
        try:
            message = MESSAGES.decode(frame)
        except Malformed:
            malformed += 1
        else:
            assert type(message) in m.ALL
            valid += 1
    assert malformed > MUTATED_FRAMES / 2 and valid > 100


@pytest.mark.parametrize(
    "frame",
    [
        b"",
        bytes((VERSION,)),
        bytes((VERSION + 1,)) + MESSAGES.encode(row())[1:],
        bytes((VERSION,)) + b"\x91" * 100_000,
        bytes((VERSION,)) + msgspec.msgpack.encode({"type": "NoSuchMessage"}),
        bytes((VERSION,)) + b"\xdd\xff\xff\xff\xff",
        MESSAGES.encode(row())[:-1],
        MESSAGES.encode(row(text="é")).replace("é".encode(), b"\xff\xff"),
        pickle.dumps(row()),
    ],
)
def test_frames_that_are_no_message(frame):
    with pytest.raises(Malformed):
        MESSAGES.decode(frame)


# --------------------------------------------------------------------------- sockets


class Touch:
    """Unpickling it makes a file."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


def received(socket, count=1, timeout_s=5.0):
    found, deadline = [], time.monotonic() + timeout_s
    while len(found) < count and time.monotonic() < deadline:
        socket.wait(0.1)
        found += socket.drain()
    return found


def test_a_pickle_runs_no_code_and_is_counted(address, tmp_path):
    """E49."""
    inbox = PullSocket(address)
    stranger = zmq.Context.instance().socket(zmq.PUSH)
    stranger.connect(address)
    payload = pickle.dumps(Touch(tmp_path / "pwned"))
    for frame in (payload, bytes((VERSION,)) + payload):
        stranger.send(frame)
    stranger.send(MESSAGES.encode(row()))
    assert received(inbox) == [row()]
    assert inbox.malformed == 2
    assert not (tmp_path / "pwned").exists()
    stranger.close(linger=0)
    inbox.close()


@pytest.mark.parametrize("address", ["tcp://127.0.0.1:0", "tcp://*:5555", "inproc://x"])
@pytest.mark.parametrize("kind", [PullSocket, PushSocket])
def test_only_ipc_addresses_are_taken(kind, address):
    """E49: nothing listens on a network."""
    with pytest.raises(ValueError, match="only ipc"):
        kind(address)


def test_a_path_too_long_for_a_unix_socket_is_refused_with_its_name():
    with pytest.raises(ValueError, match="too long"):
        PullSocket("ipc:///" + "x" * 120)


def test_a_socket_binds_over_the_path_of_a_dead_one(address):
    left_behind = PullSocket(address)
    again = PullSocket(address)
    sender = PushSocket(address)
    assert sender.send(row())
    assert received(again) == [row()]
    for socket in (sender, again, left_behind):
        socket.close()


# --------------------------------------------------------------------------- socket mapping


def test_each_inbox_gets_its_own_messages_in_order_over_a_socket_made_when_needed(tmp_path):
    mapping = SocketMapping()
    addresses = [f"ipc://{tmp_path}/{i}" for i in range(3)]
    inboxes = [PullSocket(address) for address in addresses]
    assert len(mapping) == 0
    for number in range(30):
        assert mapping.send(addresses[number % 3], row(text=str(number)))
    assert len(mapping) == 3
    for i, inbox in enumerate(inboxes):
        assert [r.text for r in received(inbox, 10)] == [str(n) for n in range(i, 30, 3)]
        inbox.close()
    mapping.close()


def test_a_full_inbox_is_told_and_the_others_go_on(tmp_path):
    """C18: a send that did not go out is never called a success."""
    mapping = SocketMapping(hwm=4)
    full, free = f"ipc://{tmp_path}/full", f"ipc://{tmp_path}/free"
    inbox = PullSocket(free)
    sent = 0
    while mapping.send(full, row()):
        sent += 1
        assert sent <= 4
    assert mapping.send(free, row())
    assert received(inbox) == [row()]
    inbox.close()
    mapping.close(linger_s=0)


def test_an_evicted_inbox_loses_its_socket_and_what_was_queued(tmp_path):
    mapping = SocketMapping(hwm=2)
    address = f"ipc://{tmp_path}/w"
    while mapping.send(address, row("old")):
        pass
    mapping.evict(address)
    mapping.evict("ipc:///never/seen")
    assert len(mapping) == 0
    inbox = PullSocket(address)
    assert mapping.send(address, row("new"))
    assert received(inbox) == [row("new")]
    inbox.close()
    mapping.close()


@pytest.mark.parametrize("inbox", ["", "tcp://10.0.0.1:1", "ipc:///" + "x" * 200, "nonsense"])
def test_an_inbox_that_no_socket_can_reach_takes_nothing_and_is_named_once(inbox, caplog):
    mapping = SocketMapping()
    for _ in range(100):
        assert mapping.send(inbox, row()) is False
    assert len(mapping) == 0
    assert caplog.text.count("cannot reach inbox") == 1


@pytest.mark.parametrize("inbox", ["", "/etc/passwd", "tcp://127.0.0.1:1", "ipc://"])
def test_the_router_drops_an_answer_for_what_is_no_address(inbox):
    """A request that names such an inbox ended the router while it was refused."""
    outbox = Outbox()
    message = m.Rejoin(inbox=inbox, reason="x")
    outbox.send(inbox, message)
    outbox.send_if_free(inbox, message)
    outbox.retry()
    assert outbox.dropped == 1


def test_a_worker_that_stops_reading_is_seen_after_few_frames(address):
    """Short queues at both ends: the sender learns of it while little is in flight."""
    inbox = PullSocket(address, hwm=INBOX_FRAMES)
    mapping = SocketMapping()
    frame = MESSAGES.encode(row(text="x" * 4_096))
    sent = 0
    full_since = None
    while full_since is None or time.monotonic() - full_since < 0.1:
        if mapping.send_frame(address, frame):
            sent, full_since = sent + 1, None
        elif full_since is None:
            full_since = time.monotonic()
        else:
            time.sleep(0.01)
        assert sent < 6 * INBOX_FRAMES
    mapping.close(linger_s=0)
    inbox.close()
