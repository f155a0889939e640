"""Weights that came as bytes: checked and written under ``QUARTERDECK_HOME/spool``, for the engine.

A file appears whole. Its owner is whoever wrote it until the engine has taken the call that names
it; from then on the engine deletes it when no epoch needs it any more. So only a file that was
written here and not handed on yet may be named (``hand_on``), and each of them once.
"""

from __future__ import annotations

import asyncio
import base64
import errno
import os
import uuid
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path

from django.conf import settings

from console.services import disk
from engine.errors import BadRequest

SCOPE_KEY = "quarterdeck.spooled"  # in the ASGI scope: a body that was spooled as it came in
HEAD_BYTES = 16
SENDER = (
    "pickled tensors are never read; send safetensors bytes, for example with push_tensors of "
    "engine/weights/sender.py"
)


FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}

_written: set[str] = set()  # paths that wait for their call


@dataclass(frozen=True, slots=True)
class Spooled:
    path: str
    size: int

    def discard(self) -> None:
        """No call took it."""
        _written.discard(self.path)
        Path(self.path).unlink(missing_ok=True)


def hand_on(path: str) -> bool:
    """Whether ``path`` was written here and no call has named it yet; from now on one has."""
    known = path in _written
    _written.discard(path)
    return known


def check_head(head: bytes) -> None:
    """Refuses what is no safetensors by its first bytes: the header's length, then its JSON."""
    if head[:1] == b"\x80" or head[:2] == b"PK":  # a pickle, or torch.save's zip of pickles
        raise BadRequest(SENDER, err_type="pickle_refused")
    if len(head) < 9 or head[8:9] != b"{":
        raise BadRequest(f"the body is no safetensors file; {SENDER}", err_type="bad_weights")


def from_base64(texts: list[str] | str) -> bytes:
    """The one content of ``serialized_named_tensors``."""
    distinct = {texts} if isinstance(texts, str) else set(texts)
    if len(distinct) != 1:
        raise BadRequest(
            "serialized_named_tensors must hold one safetensors content, or the same for each "
            "rank: every rank cuts its own part out of whole tensors"
        )
    try:
        return base64.b64decode(distinct.pop(), validate=True)
    except ValueError as error:  # binascii.Error is one; a letter beyond ASCII another
        raise BadRequest(f"serialized_named_tensors is not base64: {error}") from None


async def write(content: bytes) -> Spooled:
    async def once() -> AsyncGenerator[bytes, None]:
        yield content

    return await write_stream(once(), len(content))


async def write_stream(chunks: AsyncGenerator[bytes, None], size: int) -> Spooled:
    """``size``: how many bytes are announced; room is made for them first.

    Raises ``BadRequest``, and ``disk.NoSpace`` before the first byte is written.
    """
    await asyncio.to_thread(disk.make_room, size)
    directory = settings.QUARTERDECK_HOME / "spool"
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    path = directory / f"{uuid.uuid4().hex}.safetensors"
    draft = path.with_suffix(".part")
    try:
        async with aclosing(chunks):
            written = await _copy(chunks, draft)
        if written != size:
            raise BadRequest(f"the body has {written} bytes, {size} were announced")
        os.replace(draft, path)
    except OSError as error:
        if error.errno not in FULL:
            raise
        raise disk.NoSpace(f"the body was not written: {error.strerror}") from error
    finally:
        draft.unlink(missing_ok=True)
    _written.add(str(path))
    return Spooled(str(path), written)


async def _copy(chunks: AsyncGenerator[bytes, None], draft: Path) -> int:
    head = b""
    written = 0
    with open(draft, "wb") as file:
        async for chunk in chunks:
            if len(head) < HEAD_BYTES:
                head += chunk[: HEAD_BYTES - len(head)]
                if len(head) >= HEAD_BYTES:
                    check_head(head)
            await asyncio.to_thread(file.write, chunk)
            written += len(chunk)
        check_head(head)
        await asyncio.to_thread(_sync, file.fileno())
    return written


def _sync(descriptor: int) -> None:
    os.fsync(descriptor)
