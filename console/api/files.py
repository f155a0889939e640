"""Large files in chunks, whole or one range of them; never more than one chunk in memory."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from pathlib import Path

from django.http import HttpResponse, HttpResponseBase, StreamingHttpResponse

from console.http import ApiRequest

CHUNK_BYTES = 256 * 1024
RANGE = re.compile(r"bytes=(\d{0,18})-(\d{0,18})")


async def answer(request: ApiRequest, path: Path) -> HttpResponseBase:
    """200 with all of the file, 206 with the range that was asked for, or 416."""
    size = (await asyncio.to_thread(path.stat)).st_size
    span = _span(request.headers.get("range", ""), size)
    if span is None:
        refused = HttpResponse(status=416)
        refused["Content-Range"] = f"bytes */{size}"
        return refused
    first, stop, partial = span
    head = request.method == "HEAD"
    response = StreamingHttpResponse(
        _nothing() if head else _chunks(path, first, stop),
        status=206 if partial else 200,
        content_type="application/octet-stream",
    )
    response["Content-Length"] = str(stop - first)
    response["Accept-Ranges"] = "bytes"
    response["Cache-Control"] = "no-transform"
    response["X-Accel-Buffering"] = "no"
    response["Content-Disposition"] = f'attachment; filename="{path.name}"'
    if partial:
        response["Content-Range"] = f"bytes {first}-{stop - 1}/{size}"
    return response


def _span(header: str, size: int) -> tuple[int, int, bool] | None:
    """(first, behind the last, whether it is a part) or None for a range outside of the file.

    What is no single range of bytes is answered with the whole file, as RFC 9110 allows.
    """
    match = RANGE.fullmatch(header.strip())
    if match is None or match[0] == "bytes=-":
        return 0, size, False
    if not match[1]:
        first, stop = max(0, size - int(match[2])), size
    else:
        first = int(match[1])
        stop = min(size, int(match[2]) + 1) if match[2] else size
    return (first, stop, True) if first < stop else None


async def _chunks(path: Path, first: int, stop: int) -> AsyncIterator[bytes]:
    file = await asyncio.to_thread(path.open, "rb")
    try:
        await asyncio.to_thread(file.seek, first)
        while first < stop:
            chunk = await asyncio.to_thread(file.read, min(CHUNK_BYTES, stop - first))
            if not chunk:
                return  # it shrank meanwhile
            first += len(chunk)
            yield chunk
    finally:
        file.close()


async def _nothing() -> AsyncIterator[bytes]:
    return
    yield b""
