"""What the consumers share: the signed-in socket, its commands, and its end.

Sockets use no channel layer: they hang on nothing but their worker, so the death of the broker
touches none of them. Hints reach them through ``services/sockets.py``.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any, ClassVar

import msgspec
from channels.generic.websocket import AsyncWebsocketConsumer

from console import auth
from console.access import Access
from console.api.errors import error_body, internal_error
from console.services.sockets import CLOSE_SIGNED_OUT
from console.worker import this_worker
from engine.errors import BadRequest, QuarterdeckError

log = logging.getLogger(__name__)


def error_frame(error: QuarterdeckError, stream: str | None = None) -> bytes:
    return msgspec.json.encode({"type": "error", "stream": stream, **error_body(error)})


class SignedInSocket(AsyncWebsocketConsumer):
    """A socket of one principal whose rights are read again before each command."""

    channel_layer_alias = ""
    access: ClassVar[Access]
    frame_types: ClassVar[Any]  # the tagged union of what a client may send

    def __init__(self) -> None:
        super().__init__()
        self.principal = auth.ANONYMOUS
        self._forget: Callable[[], None] = lambda: None
        self._tasks: set[asyncio.Task[None]] = set()

    async def connect(self) -> None:
        self.principal = self.scope["principal"]  # type: ignore[typeddict-item]
        await self.accept()
        self._forget = this_worker().sockets.add(self.principal, self._sign_out_soon)
        await self.opened()

    async def receive(self, text_data: str | None = None, bytes_data: bytes | None = None) -> None:
        """One command. A refusal is answered with an error frame; the socket stays."""
        stream: str | None = None
        try:
            frame = self._decode(text_data or bytes_data or b"")
            stream = getattr(frame, "stream", None)
            self.principal = await self._principal_now()
            await self.command(frame)
        except auth.Unauthenticated:
            await self.close_for_good()
        except QuarterdeckError as error:
            await self.send_frame(error_frame(error, stream))
        except Exception:  # noqa: BLE001 - one bad command must not end the socket
            await self.send_frame(error_frame(internal_error("a websocket command"), stream))

    def _decode(self, content: str | bytes) -> Any:
        try:
            return msgspec.json.decode(content, type=self.frame_types)
        except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
            raise BadRequest(str(error)) from None

    async def _principal_now(self) -> auth.Principal:
        principal = await auth.check_again(self.principal)
        principal.require(self.access.permission or "")
        return principal

    async def disconnect(self, code: int) -> None:
        self._forget()
        await self.closed()
        for task in self._tasks:
            task.cancel()

    def spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Work that goes on while the socket hears its next frame."""
        task = asyncio.create_task(_until_gone(work))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def send_frame(self, frame: bytes) -> None:
        await self.send(text_data=frame.decode())

    def _sign_out_soon(self) -> None:
        self.spawn(self.close_for_good())

    async def close_for_good(self) -> None:
        """The account may not go on: what it runs ends now, without grace."""
        await self.signed_out()
        await self.close(code=CLOSE_SIGNED_OUT)

    # ------------------------------------------------------------------ for subclasses

    async def opened(self) -> None:
        """The socket is accepted."""

    async def command(self, frame: Any) -> None:
        """One decoded frame of ``frame_types``."""
        raise NotImplementedError

    async def signed_out(self) -> None:
        """Before the socket closes because its account ended."""

    async def closed(self) -> None:
        """The socket is gone."""


async def _until_gone(work: Coroutine[Any, Any, None]) -> None:
    """A send to a client that has just gone raises OSError: nobody is left to do the work for."""
    try:
        await work
    except OSError as error:
        log.debug("a socket went away: %s", error)
