"""Server-sent events: async generators only, heartbeats in silence, no buffering by proxies."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any, TypeVar

import msgspec
from django.http import StreamingHttpResponse

from console.api.errors import error_body, internal_error
from engine.errors import QuarterdeckError

HEARTBEAT_S = 10.0
HEARTBEAT = b": heartbeat\n\n"
DONE = b"data: [DONE]\n\n"

T = TypeVar("T")


def event(data: Any) -> bytes:
    return b"data: " + msgspec.json.encode(data) + b"\n\n"


async def event_stream(events: AsyncGenerator[bytes, None]) -> StreamingHttpResponse:
    """Answers with ``events``.

    Waits for the first one, at most ``HEARTBEAT_S``, so that a refusal gets its own status; what
    fails later is an event with an ``error``. Closing the response closes ``events``.
    """
    first: asyncio.Task[bytes] = asyncio.ensure_future(anext(events))
    try:
        await asyncio.wait({first}, timeout=HEARTBEAT_S)
    except asyncio.CancelledError:
        await _give_up(first, events)
        raise
    if first.done():
        first.result()  # raises the refusal
    response = StreamingHttpResponse(_body(first, events), content_type="text/event-stream")
    response["Cache-Control"] = "no-cache, no-transform"
    response["X-Accel-Buffering"] = "no"
    return response


async def _body(
    first: asyncio.Task[bytes], events: AsyncGenerator[bytes, None]
) -> AsyncIterator[bytes]:
    pending = first
    try:
        while True:
            done, _ = await asyncio.wait({pending}, timeout=HEARTBEAT_S)
            if not done:
                yield HEARTBEAT
                continue
            try:
                yield pending.result()
            except StopAsyncIteration:
                return
            pending = asyncio.ensure_future(anext(events))
    except QuarterdeckError as error:
        yield event(error_body(error, openai=True))
        yield DONE
    except Exception:  # noqa: BLE001 - one bad request must not end the worker
        yield event(error_body(internal_error("an event stream"), openai=True))
        yield DONE
    finally:
        await _give_up(pending, events)


async def _give_up(pending: asyncio.Task[bytes], events: AsyncGenerator[bytes, None]) -> None:
    """The reader is gone or all is sent: the generator's clean-up aborts what still runs."""
    pending.cancel()
    await asyncio.wait({pending})
    await events.aclose()
