"""Messages to bytes and back, and the only place that touches ZeroMQ.

A frame is one version byte and one MessagePack map with a type tag; no pickle in any form
(docs/decisions/0002-msgpack-not-pickle.md). A frame that does not decode is counted and dropped; it
never ends a process. Each socket has one owner thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Iterable
from typing import Any, Union

import msgspec
import zmq

from engine import messages

log = logging.getLogger(__name__)

VERSION = 1
MAX_FRAME_BYTES = 256 * 2**20
INBOX_FRAMES = 128  # queued at each end of a worker's inbox; then its senders merge and wait
COMPLAIN_EVERY_S = 60.0  # a peer that sends rubbish fills a counter, not the log

_encoder = msgspec.msgpack.Encoder()


class Malformed(Exception):
    """The bytes are no message of this version."""


class Codec:
    """MessagePack of one closed union of tagged structs, behind a version byte."""

    def __init__(self, types: Iterable[type]) -> None:
        self._decoder: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(
            Union[tuple(types)]  # noqa: UP007 - built from a list
        )

    @staticmethod
    def encode(message: msgspec.Struct) -> bytes:
        buffer = bytearray((VERSION,))
        _encoder.encode_into(message, buffer, 1)
        return bytes(buffer)

    def decode(self, frame: bytes) -> Any:
        """The message in ``frame``; ``Malformed`` for anything else."""
        if not frame or frame[0] != VERSION:
            raise Malformed(f"version byte {frame[:1]!r}, expected {VERSION}")
        try:
            return self._decoder.decode(memoryview(frame)[1:])
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, TypeError) as error:
            raise Malformed(str(error)) from error


MESSAGES = Codec(messages.ALL)


def check_address(address: str) -> None:
    """Only ipc sockets, which live in the private run directory, go without encryption."""
    if not address.startswith("ipc://"):
        raise ValueError(f"{address!r}: only ipc:// endpoints are allowed without CURVE keys")
    if len(address) > len("ipc://") + 100:
        raise ValueError(f"{address!r} is too long for a unix socket (100 bytes)")


class PullSocket:
    """Binds ``address`` and receives messages; bytes that are none are counted in ``malformed``.

    Raises OSError when it cannot bind (the run directory is gone).
    """

    def __init__(self, address: str, *, hwm: int = 20_000, codec: Codec = MESSAGES) -> None:
        check_address(address)
        self.address = address
        self.malformed = 0
        self._codec = codec
        self._complained_at = float("-inf")
        self._socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.PULL)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.RCVHWM, hwm)
        self._socket.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME_BYTES)
        try:
            self._socket.bind(address)
        except zmq.ZMQError as error:
            self._socket.close()
            raise OSError(error.errno, f"cannot bind {address}: {error}") from error

    def fileno(self) -> int:
        return int(self._socket.getsockopt(zmq.FD))

    def receive(self) -> Any | None:
        """The next message, or None when there is none now."""
        while True:
            try:
                frame = self._socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                return None
            try:
                return self._codec.decode(frame)
            except Malformed as error:
                self._count_malformed(error)

    def drain(self, limit: int = 1_000) -> list[Any]:
        """All messages that are here now, at most ``limit``."""
        found: list[Any] = []
        while len(found) < limit and (message := self.receive()) is not None:
            found.append(message)
        return found

    def wait(self, timeout_s: float) -> bool:
        """True as soon as something can be received; False after ``timeout_s``."""
        return bool(self._socket.poll(max(0, int(timeout_s * 1000))))

    def close(self) -> None:
        self._socket.close()
        with contextlib.suppress(FileNotFoundError):
            _unlink(self.address)

    def _count_malformed(self, error: Malformed) -> None:
        self.malformed += 1
        if time.monotonic() - self._complained_at > COMPLAIN_EVERY_S:
            self._complained_at = time.monotonic()
            log.warning(
                "%s: dropped a malformed message (%d): %s",
                self.address,
                self.malformed,
                str(error)[:200],
            )


def _unlink(address: str) -> None:
    import os

    os.unlink(address.removeprefix("ipc://"))


class PushSocket:
    """Connects to ``address``. ``send`` never blocks: False means the queue is full.

    Raises ValueError and OSError for what is no address.
    """

    def __init__(self, address: str, *, hwm: int = 20_000) -> None:
        check_address(address)
        self.address = address
        self._socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.PUSH)
        self._socket.setsockopt(zmq.LINGER, 200)
        self._socket.setsockopt(zmq.SNDHWM, hwm)
        self._socket.setsockopt(zmq.RECONNECT_IVL, 20)
        self._socket.setsockopt(zmq.RECONNECT_IVL_MAX, 200)
        try:
            self._socket.connect(address)
        except zmq.ZMQError as error:
            self._socket.close()
            raise OSError(error.errno, f"cannot connect {address}: {error}") from error

    def send(self, message: msgspec.Struct) -> bool:
        return self.send_frame(Codec.encode(message))

    def send_frame(self, frame: bytes) -> bool:
        try:
            self._socket.send(frame, zmq.NOBLOCK)
        except zmq.Again:
            return False
        return True

    def close(self, linger_s: float = 0.2) -> None:
        self._socket.close(linger=int(linger_s * 1000))


class SocketMapping:
    """inbox -> socket, made when the first message for it comes. Owned by one thread.

    ``send`` never blocks and never raises for a bad or dead inbox: it is False, and the caller
    decides how long that may last. Queues are short, so a reader that stops reading shows soon.
    """

    def __init__(self, *, hwm: int = INBOX_FRAMES) -> None:
        self._hwm = hwm
        self._sockets: dict[str, PushSocket] = {}
        self._complained_at = float("-inf")

    def __len__(self) -> int:
        return len(self._sockets)

    def send(self, inbox: str, message: msgspec.Struct) -> bool:
        return self.send_frame(inbox, Codec.encode(message))

    def send_frame(self, inbox: str, frame: bytes) -> bool:
        socket = self._sockets.get(inbox)
        if socket is None:
            try:
                socket = PushSocket(inbox, hwm=self._hwm)
            except (ValueError, OSError) as error:
                self._complain(inbox, error)
                return False
            self._sockets[inbox] = socket
        return socket.send_frame(frame)

    def _complain(self, inbox: str, error: Exception) -> None:
        if time.monotonic() - self._complained_at > COMPLAIN_EVERY_S:
            self._complained_at = time.monotonic()
            log.warning("cannot reach inbox %.120r: %s", inbox, error)

    def evict(self, inbox: str) -> None:
        """Closes the inbox's socket and drops what it had queued."""
        socket = self._sockets.pop(inbox, None)
        if socket is not None:
            socket.close(linger_s=0)

    def close(self, linger_s: float = 0.2) -> None:
        for socket in self._sockets.values():
            socket.close(linger_s)
        self._sockets.clear()


def terminate() -> None:
    """Last call of a process that closed its sockets: returns when what they had queued is sent,
    or their linger is over. Without it the interpreter's exit drops the queues."""
    zmq.Context.instance().term()


def wait_any(sockets: Iterable[PullSocket], timeout_s: float) -> None:
    """Returns when one of ``sockets`` has something, or after ``timeout_s``."""
    poller = zmq.Poller()
    for socket in sockets:
        poller.register(socket._socket, zmq.POLLIN)
    poller.poll(max(0, int(timeout_s * 1000)))


class AsyncInbox:
    """A ``PullSocket`` in an asyncio loop: ``on_message`` is called for each message, in order.

    ZeroMQ's descriptor is edge triggered, so each wake-up drains the socket; at most
    ``BURST`` messages in one go, then the loop runs others first.
    """

    BURST = 256

    def __init__(self, address: str, on_message: Callable[[Any], None]) -> None:
        self.socket = PullSocket(address, hwm=INBOX_FRAMES)
        self._on_message = on_message
        self._loop = asyncio.get_running_loop()
        self._closed = False
        self._loop.add_reader(self.socket.fileno(), self._drain)
        self._loop.call_soon(self._drain)

    def _drain(self) -> None:
        if self._closed:
            return
        got = self.socket.drain(self.BURST)
        for message in got:
            self._on_message(message)
        if len(got) == self.BURST:
            self._loop.call_soon(self._drain)

    def close(self) -> None:
        self._closed = True
        self._loop.remove_reader(self.socket.fileno())
        self.socket.close()
