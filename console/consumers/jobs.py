"""``/ws/jobs/``: jobs as they change, and control actions through the one door.

A viewer may watch; an action needs its own right, which ``services/control.py`` checks.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import asdict
from typing import Annotated, Any, assert_never

import msgspec

from console.access import requires
from console.consumers.socket import SignedInSocket, error_frame
from console.services import control, job_view
from console.worker import this_worker
from engine.errors import QuarterdeckError

Ref = Annotated[str, msgspec.Meta(max_length=64)]
FRAMES_WAITING = 1000  # jobs that changed while the client did not read


class Preview(msgspec.Struct, frozen=True, tag="preview"):
    """``ref``: the client's name for this question; it comes back with the answer."""

    action: str
    fields: dict[str, Any] = {}
    ref: Ref = ""


class Act(msgspec.Struct, frozen=True, tag="act"):
    """``key``: idempotency key."""

    action: str
    fields: dict[str, Any] = {}
    reason: Annotated[str, msgspec.Meta(max_length=500)] = ""
    key: Annotated[str, msgspec.Meta(max_length=200)] = ""
    ref: Ref = ""


@requires("view_jobs")
class JobsConsumer(SignedInSocket):
    frame_types = Preview | Act

    def __init__(self) -> None:
        super().__init__()
        self._frames: asyncio.Queue[bytes] = asyncio.Queue(FRAMES_WAITING)
        self._unsubscribe: Callable[[], None] = lambda: None

    async def opened(self) -> None:
        self._unsubscribe = this_worker().jobs.subscribe(self._put)
        self.spawn(self._pump())

    async def command(self, frame: Preview | Act) -> None:
        match frame:
            case Preview():
                seen = await control.preview(
                    self.principal, frame.action, frame.fields, base_url=""
                )
                await self._answer("preview", frame.ref, asdict(seen))
            case Act():
                doing = await control.start(
                    self.principal, frame.action, frame.fields,
                    via="websocket", reason=frame.reason, key=frame.key or None,
                )  # fmt: skip
                await self._answer("taken", frame.ref, {"job": job_view.as_json(doing.job)})
                self.spawn(self._tell_end(doing, frame.ref))
            case _:
                assert_never(frame)

    async def _tell_end(self, doing: control.Doing, ref: str) -> None:
        """The end reaches whoever acted, also when the database and its hints are away."""
        try:
            job = await doing.ended()
        except QuarterdeckError as error:
            await self.send_frame(error_frame(error))
        else:
            await self._answer("ended", ref, {"job": job_view.as_json(job), "result": job.result})

    async def _answer(self, kind: str, ref: str, content: dict[str, Any]) -> None:
        await self.send_frame(msgspec.json.encode({"type": kind, "ref": ref, **content}))

    def _put(self, frame: bytes) -> None:
        """Who reads too slowly is disconnected, and gets the newest jobs when it is back."""
        try:
            self._frames.put_nowait(frame)
        except asyncio.QueueFull:
            self._unsubscribe()
            self.spawn(self.close())

    async def _pump(self) -> None:
        await self.send_frame(await this_worker().jobs.first_frame())
        while True:
            await self.send_frame(await self._frames.get())

    async def closed(self) -> None:
        self._unsubscribe()
