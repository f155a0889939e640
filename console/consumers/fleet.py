"""``/ws/fleet/``: the live picture, whole at first and after a gap, then what changed."""

from __future__ import annotations

import asyncio
from typing import assert_never

import msgspec

from console.access import requires
from console.consumers.socket import SignedInSocket
from console.worker import this_worker

HIDDEN_S = 10.0  # between two frames to a hidden tab


class Snapshot(msgspec.Struct, frozen=True, tag="snapshot"):
    """Asks for the whole picture: the client saw a gap."""


class Rate(msgspec.Struct, frozen=True, tag="rate"):
    """The tab was hidden, or shown again."""

    hidden: bool


@requires("view_fleet")
class FleetConsumer(SignedInSocket):
    frame_types = Snapshot | Rate

    def __init__(self) -> None:
        super().__init__()
        self._seen = 0  # 0: send the whole picture next
        self._hidden = False
        self._shown = asyncio.Event()

    async def opened(self) -> None:
        self.spawn(self._pump())

    async def command(self, frame: Snapshot | Rate) -> None:
        match frame:
            case Snapshot():
                self._seen = 0
                await self._send_picture()
            case Rate():
                self._hidden = frame.hidden
                if not frame.hidden:
                    self._shown.set()
            case _:
                assert_never(frame)

    async def _pump(self) -> None:
        feed = this_worker().feed
        while True:
            await self._send_picture()
            if self._hidden:
                await self._wait_hidden()
            await feed.after(self._seen)

    async def _wait_hidden(self) -> None:
        self._shown.clear()
        try:
            async with asyncio.timeout(HIDDEN_S):
                await self._shown.wait()
        except TimeoutError:
            return

    async def _send_picture(self) -> None:
        """A delta where it fits; a socket that fell behind gets the whole picture."""
        feed = this_worker().feed
        frame = feed.delta if feed.seq == self._seen + 1 and self._seen else feed.snapshot
        self._seen = feed.seq
        await self.send_frame(frame)
