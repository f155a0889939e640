"""Load generator of the streaming row: many chats over many websockets, as cheap as Python allows.

Path: streaming.py -> ``python -m engine.bench.stream_load`` -> ``/ws/chat/`` of a running server.

It speaks just enough of RFC 6455: the server's frames are not masked and not fragmented, and ours
are masked with zeros, which changes nothing. A ``Load`` comes on standard input; the ``Report``
goes to standard output.
"""

from __future__ import annotations

import asyncio
import sys
import time
from dataclasses import dataclass, field

import msgspec

TEXT, CLOSE, PING, PONG = 1, 8, 9, 10
OPENING = 50  # handshakes, and questions without a first token, at a time
START_S, DRAIN_S = 120.0, 120.0


class Load(msgspec.Struct, frozen=True, kw_only=True):
    """``step_s`` is the time between two tokens of one chat."""

    host: str
    port: int
    key: str
    sockets: int
    new_tokens: int
    step_s: float
    window_s: float


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """Rates and ages of the window in which every chat ran; losses of the whole run."""

    sockets: int
    tokens_per_s: float
    age_p50_ms: float
    age_p99_ms: float
    lost: int
    generator_cores: float


class _Frame(msgspec.Struct):
    """The fields that count of any frame of ``/ws/chat/``."""

    type: str
    index: int = 0
    token_ids: list[int] = []
    made_at: float = 0.0


_decode = msgspec.json.Decoder(_Frame).decode


@dataclass(slots=True)
class Window:
    """Ages in seconds of the tokens that came while it was open."""

    step_s: float
    is_open: bool = False
    ages: list[float] = field(default_factory=list)

    def add(self, tokens: int, made_at: float) -> None:
        """The newest of ``tokens`` was made at ``made_at``, each one before it a step earlier."""
        newest = time.time() - made_at
        self.ages += [newest + back * self.step_s for back in range(tokens)]


class Chat(asyncio.Protocol):
    """One websocket with one question."""

    def __init__(self, name: str, load: Load, window: Window) -> None:
        loop = asyncio.get_running_loop()
        self.opened: asyncio.Future[None] = loop.create_future()
        self.first_token: asyncio.Future[None] = loop.create_future()
        self.ended: asyncio.Future[None] = loop.create_future()
        self.tokens = 0
        self.lost = 0
        self._name, self._load, self._window = name, load, window
        self._next_index = 0
        self._buffer = bytearray()
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        lines = (
            "GET /ws/chat/ HTTP/1.1",
            f"Host: {self._load.host}:{self._load.port}",
            "Upgrade: websocket",
            "Connection: Upgrade",
            "Sec-WebSocket-Version: 13",
            "Sec-WebSocket-Key: cXVhcnRlcmRlY2tiZW5jaA==",
            f"Authorization: Bearer {self._load.key}",
        )
        transport.write("\r\n".join((*lines, "", "")).encode())

    def connection_lost(self, error: Exception | None) -> None:
        lost = ConnectionError(f"{self._name} was closed after {self.tokens} tokens: {error}")
        for future in (self.opened, self.first_token, self.ended):
            if not future.done():
                future.set_exception(lost)

    def ask(self) -> None:
        params = {"max_new_tokens": self._load.new_tokens}
        start = {"type": "start", "stream": self._name, "text": self._name, "params": params}
        self._send(TEXT, msgspec.json.encode(start))

    def close(self) -> None:
        assert self._transport
        self._transport.close()

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        if not self.opened.done() and not self._take_handshake():
            return
        while (frame := take_frame(self._buffer)) is not None:
            opcode, payload = frame
            if opcode == TEXT:
                self._on_frame(_decode(payload))
            elif opcode == PING:
                self._send(PONG, payload)
            elif opcode == CLOSE:
                self.close()

    def _take_handshake(self) -> bool:
        head, found, rest = bytes(self._buffer).partition(b"\r\n\r\n")
        if not found:
            return False
        status = head.split(b"\r\n", 1)[0].decode("latin-1")
        if " 101 " not in status:
            self.opened.set_exception(ConnectionError(f"no websocket: {status}"))
            return False
        self._buffer = bytearray(rest)
        self.opened.set_result(None)
        return True

    def _on_frame(self, frame: _Frame) -> None:
        if frame.type == "error":
            self.close()
            return
        self.lost += frame.index != self._next_index
        self._next_index = frame.index + 1
        if frame.type == "delta":
            self.tokens += len(frame.token_ids)
            if self._window.is_open:
                self._window.add(len(frame.token_ids), frame.made_at)
            if not self.first_token.done():
                self.first_token.set_result(None)
        elif frame.type == "end":
            self.lost += self._load.new_tokens - self.tokens
            self.ended.set_result(None)

    def _send(self, opcode: int, payload: bytes) -> None:
        assert self._transport
        size = len(payload)
        length = bytes((0x80 | size,)) if size < 126 else b"\xfe" + size.to_bytes(2, "big")
        self._transport.write(bytes((0x80 | opcode,)) + length + bytes(4) + payload)


def take_frame(buffer: bytearray) -> tuple[int, bytes] | None:
    """The first whole frame, taken out of ``buffer``: (opcode, payload)."""
    if len(buffer) < 2:
        return None
    size, start = buffer[1], 2
    if size >= 126:
        start = 4 if size == 126 else 10
        size = int.from_bytes(buffer[2:start], "big")
    if len(buffer) < start + size:
        return None
    opcode, payload = buffer[0] & 0x0F, bytes(buffer[start : start + size])
    del buffer[: start + size]
    return opcode, payload


async def run(load: Load) -> Report:
    """Opens all sockets, starts all chats, looks at ``window_s`` of them, waits for every end."""
    window = Window(load.step_s)
    async with asyncio.timeout(START_S):
        chats = await _start(load, window)
    if any(chat.ended.done() for chat in chats):
        raise TimeoutError("the first chats ended before the last ones had begun")
    seconds, cores = await _watch(window, chats, load.window_s)
    async with asyncio.timeout(DRAIN_S):
        await asyncio.gather(*(chat.ended for chat in chats))
    for chat in chats:
        chat.close()
    ages = sorted(window.ages)
    return Report(
        sockets=load.sockets,
        tokens_per_s=len(ages) / seconds,
        age_p50_ms=1e3 * ages[len(ages) // 2],
        age_p99_ms=1e3 * ages[len(ages) * 99 // 100],
        lost=sum(chat.lost for chat in chats),
        generator_cores=cores,
    )


async def _start(load: Load, window: Window) -> list[Chat]:
    """Every chat, each with its first token; a few at a time, first all handshakes."""
    loop = asyncio.get_running_loop()
    turn = asyncio.Semaphore(OPENING)

    async def connect(name: str) -> Chat:
        async with turn:
            _, chat = await loop.create_connection(
                lambda: Chat(name, load, window), load.host, load.port
            )
            await chat.opened
        return chat

    async def ask(chat: Chat) -> None:
        async with turn:
            chat.ask()
            await chat.first_token

    chats = await asyncio.gather(*(connect(f"bench-{i}") for i in range(load.sockets)))
    await asyncio.gather(*map(ask, chats))
    return chats


async def _watch(window: Window, chats: list[Chat], window_s: float) -> tuple[float, float]:
    """Opens the window for ``window_s`` or until the first chat ends: seconds, cores used."""
    began, cpu = time.perf_counter(), time.process_time()
    window.is_open = True
    await asyncio.wait(
        [chat.ended for chat in chats], timeout=window_s, return_when=asyncio.FIRST_COMPLETED
    )
    window.is_open = False
    seconds = time.perf_counter() - began
    return seconds, (time.process_time() - cpu) / seconds


def main() -> None:
    load = msgspec.json.decode(sys.stdin.buffer.read(), type=Load)
    sys.stdout.buffer.write(msgspec.json.encode(asyncio.run(run(load))))


if __name__ == "__main__":
    main()
