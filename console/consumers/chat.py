"""``/ws/chat/``: frames of one browser to streams of this worker or, through it, of another.

Thin on purpose: ``services/chat.py`` starts and finds streams, ``services/streams.py`` makes their
frames.
"""

from __future__ import annotations

from contextlib import aclosing
from typing import assert_never

import msgspec

from console.access import requires
from console.consumers.socket import SignedInSocket, error_frame
from console.fields import Count
from console.services import chat
from console.services.question import Question, StreamId
from console.worker import this_worker
from engine.errors import BadRequest, NotFound, QuarterdeckError

STREAMS_PER_SOCKET = 32


class Start(Question, frozen=True, tag="start"):
    """A question."""


class Stop(msgspec.Struct, frozen=True, tag="stop"):
    stream: StreamId


class Resume(msgspec.Struct, frozen=True, tag="resume"):
    """``local``: asked by another worker's relay; answered at once, without a search."""

    stream: StreamId
    next: Count = 0
    local: bool = False


@requires("use_inference")
class ChatConsumer(SignedInSocket):
    frame_types = Start | Stop | Resume

    def __init__(self) -> None:
        super().__init__()
        self._attached: dict[str, chat.Attachment] = {}

    async def command(self, frame: Start | Stop | Resume) -> None:
        match frame:
            case Start():
                await self._start(frame)
            case Resume():
                await self._resume(frame)
            case Stop():
                if frame.stream not in self._attached:
                    raise NotFound(f"this socket has no stream {frame.stream!r}")
                await self._attached[frame.stream].stop()
            case _:
                assert_never(frame)

    async def _start(self, frame: Start) -> None:
        if len(self._attached) >= STREAMS_PER_SOCKET:
            raise BadRequest(f"one socket holds at most {STREAMS_PER_SOCKET} streams at a time")
        self._follow(frame.stream, await chat.start(self.principal, frame))

    async def _resume(self, frame: Resume) -> None:
        attachment = await chat.resume(
            self.principal, stream_id=frame.stream, next_index=frame.next, local=frame.local
        )
        if frame.local:
            await self.send_frame(msgspec.json.encode({"type": "resumed", "stream": frame.stream}))
        self._follow(frame.stream, attachment)

    def _follow(self, stream: str, attachment: chat.Attachment) -> None:
        self._attached[stream] = attachment
        pumps = this_worker().pumps
        pump = self.spawn(self._pump(stream, attachment))
        pumps.add(pump)
        pump.add_done_callback(pumps.discard)

    async def _pump(self, stream: str, attachment: chat.Attachment) -> None:
        """Frames to the browser at the browser's pace."""
        try:
            async with aclosing(attachment.frames()) as frames:
                async for frame in frames:
                    await self.send_frame(frame)
        except QuarterdeckError as error:
            await self.send_frame(error_frame(error, stream))
        finally:
            if self._attached.get(stream) is attachment:
                del self._attached[stream]
            await attachment.detach()

    async def signed_out(self) -> None:
        for attachment in list(self._attached.values()):
            await attachment.stop()

    async def closed(self) -> None:
        for attachment in list(self._attached.values()):
            await attachment.detach()
