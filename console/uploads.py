"""Large bodies: to disk as they come in for the one route that takes gigabytes, else refused.

Wraps the HTTP application, because Django collects a body before it knows who sends it. Only who
may control the engine may fill the disk: the key is checked here first, and again by the route's
own access.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from typing import Any

import msgspec
from django.conf import settings

from console.api.errors import error_body
from console.services import keys, spool
from engine.errors import BadRequest, QuarterdeckError

Scope = dict[str, Any]
Receive = Callable[[], Awaitable[Mapping[str, Any]]]
Send = Callable[[Mapping[str, Any]], Awaitable[None]]
Application = Callable[[Scope, Receive, Send], Awaitable[None]]

PATHS = frozenset({"/update_weights_from_tensor"})
JSON = "application/json"


class SpooledUploads:
    """Puts ``spool.Spooled``, or the refusal, into the scope; the view finds an empty body."""

    def __init__(self, application: Application) -> None:
        self._application = application

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = {name.decode("latin-1"): value.decode("latin-1")
                   for name, value in scope["headers"]}  # fmt: skip
        if scope["path"] not in PATHS or not await _may_upload(headers):
            await self._application(scope, receive, send)
            return
        body = _Body(receive)
        try:
            size = int(headers.get("content-length", "0"))
            content: Any = await spool.write_stream(body.chunks(), size)
        except QuarterdeckError as error:
            content = error
        await self._application({**scope, spool.SCOPE_KEY: content}, body.after, send)


async def _may_upload(headers: dict[str, str]) -> bool:
    """A body of bytes with a key that may control; all else is for Django to refuse or read."""
    scheme, _, token = headers.get("authorization", "").partition(" ")
    if headers.get("content-type", "").startswith(JSON) or scheme.lower() != "bearer":
        return False
    if not headers.get("content-length", "").isdecimal():
        return False
    try:
        principal = await keys.authenticate(token.strip())
    except QuarterdeckError:
        return False
    return principal.may("control_engine")


class BoundedBodies:
    """Refuses a body beyond what any other route takes (``DATA_UPLOAD_MAX_MEMORY_SIZE``)."""

    def __init__(self, application: Application) -> None:
        self._application = application

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        most = settings.DATA_UPLOAD_MAX_MEMORY_SIZE
        taken = 0

        async def bounded() -> Mapping[str, Any]:
            nonlocal taken
            message = await receive()
            taken += len(message.get("body", b""))
            if taken <= most:
                return message
            await _refuse(send, f"the body is larger than {most} bytes")
            return {"type": "http.disconnect"}

        await self._application(scope, bounded, send)


async def _refuse(send: Send, sentence: str) -> None:
    """413, and the end of the connection: the rest of the body is not read."""
    error = BadRequest(sentence, status_code=413, err_type="body_too_large")
    headers = [(b"content-type", b"application/json"), (b"connection", b"close")]
    await send({"type": "http.response.start", "status": 413, "headers": headers})
    await send({"type": "http.response.body", "body": msgspec.json.encode(error_body(error))})


class _Body:
    """The request's body once, then its end."""

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self._ended = False  # the body is off the wire
        self._told = False  # the application knows its end

    async def chunks(self) -> AsyncGenerator[bytes, None]:
        while not self._ended:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                self._ended = True
                return
            self._ended = not message.get("more_body", False)
            yield message.get("body", b"")

    async def after(self) -> Mapping[str, Any]:
        """What the application receives: an empty body, then the client's disconnect."""
        if not self._ended:  # the refusal came before the body's end: take the rest off the wire
            async for _ in self.chunks():
                pass
        if self._told:
            return await self._receive()
        self._told = True
        return {"type": "http.request", "body": b"", "more_body": False}
