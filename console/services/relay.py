"""One hop to another worker: a chat sent *through worker k*, and the resume of a stream of k.

Path: consumers/chat.py of the worker that took the socket -> here -> k's unix socket ->
consumers/chat.py of k. Frames pass unread but for their index; back-pressure, stop and close pass
through; when k dies the stream ends here with ``worker_lost``.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from typing import Any

import msgspec
from websockets.asyncio.client import ClientConnection, unix_connect
from websockets.exceptions import ConnectionClosed, InvalidHandshake

from console import auth
from engine.errors import QuarterdeckError

OPEN_TIMEOUT_S = 5.0
PATH = "ws://relay/ws/chat/"


class WorkerLost(QuarterdeckError):
    status_code = 502
    err_type = "worker_lost"


class _Head(msgspec.Struct):
    """The part of a frame that the relay reads."""

    type: str
    index: int = -1


@dataclass(slots=True)
class RelayAttachment:
    """A socket's hold on a stream of another worker."""

    stream_id: str
    worker: str
    socket: ClientConnection
    next_index: int = 0
    ended: bool = field(default=False)

    async def frames(self) -> AsyncGenerator[bytes, None]:
        try:
            while not self.ended:
                yield self._seen(await self.socket.recv(decode=False))
        except ConnectionClosed:
            yield self._lost()

    def _seen(self, frame: bytes) -> bytes:
        head = msgspec.json.decode(frame, type=_Head)
        self.next_index = max(self.next_index, head.index + 1)
        self.ended = head.type in ("end", "error")
        return frame

    def _lost(self) -> bytes:
        """The end frame that the dead worker could not send; what it made is not known here."""
        self.ended = True
        finish = {
            "type": "abort",
            "matched": None,
            "message": f"worker {self.worker} went away",
            "status_code": WorkerLost.status_code,
            "err_type": WorkerLost.err_type,
        }
        return msgspec.json.encode(
            {
                "type": "end",
                "stream": self.stream_id,
                "index": self.next_index,
                "finish": finish,
                "usage": None,
                "worker": self.worker,
                "rank": None,
                "ttft_ms": None,
                "tokens_per_s": None,
                "text_length": None,
                "slot_freed": False,
            }
        )

    async def stop(self) -> None:
        await self._tell({"type": "stop", "stream": self.stream_id})

    async def detach(self) -> None:
        """Closing the hop is the detach: the other worker starts the grace."""
        await self.socket.close()

    async def _tell(self, frame: dict[str, Any]) -> None:
        try:
            await self.socket.send(msgspec.json.encode(frame).decode())
        except ConnectionClosed:
            return  # ``frames`` tells the reader


async def _connect(path: str, principal: auth.Principal, *, via: str) -> ClientConnection:
    return await unix_connect(
        path,
        uri=PATH,
        additional_headers={auth.RELAY_HEADER: auth.sign_relay(principal, via=via)},
        compression=None,
        open_timeout=OPEN_TIMEOUT_S,
        max_size=None,  # what waited for a slow reader comes as one frame
        max_queue=4,
        ping_interval=None,
    )


async def start(
    frame: dict[str, Any], *, worker: str, path: str, principal: auth.Principal, via: str
) -> RelayAttachment:
    """Sends a ``start`` frame to the worker behind ``path``; raises ``WorkerLost``."""
    try:
        socket = await _connect(path, principal, via=via)
        await socket.send(msgspec.json.encode(frame).decode())
    except (OSError, InvalidHandshake, ConnectionClosed) as error:
        raise WorkerLost(f"worker {worker} cannot be reached: {error}") from error
    return RelayAttachment(stream_id=frame["stream"], worker=worker, socket=socket)


async def resume(
    stream_id: str, next_index: int, *, worker: str, path: str, principal: auth.Principal, via: str
) -> RelayAttachment | None:
    """Asks the worker behind ``path`` whether it holds the stream; None when it does not.

    ``local`` asks for an answer at once, ``resumed`` or an error, and no search among peers.
    """
    try:
        socket = await _connect(path, principal, via=via)
        frame = {"type": "resume", "stream": stream_id, "next": next_index, "local": True}
        await socket.send(msgspec.json.encode(frame).decode())
        answer = msgspec.json.decode(await socket.recv(decode=False), type=_Head)
    except (OSError, InvalidHandshake, ConnectionClosed):
        return None
    if answer.type != "resumed":
        await socket.close()
        return None
    return RelayAttachment(stream_id=stream_id, worker=worker, socket=socket, next_index=next_index)
