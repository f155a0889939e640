"""Programs of the engine that answer a page at once: comparisons and views of files.

Path: services/profiles.py, dumps.py -> here -> ``python -m engine...`` under a memory limit.
"""

from __future__ import annotations

import asyncio
import os
import sys
from typing import Any

import msgspec
from django.conf import settings

from engine.errors import DeadlineExceeded, NotFound, QuarterdeckError
from engine.process_guard import PARENT_PID

PROGRAM_S = 60.0
PROGRAM_BYTES = 2 * 2**30


async def run_program(module: str, *arguments: str, good: tuple[int, ...] = (0,)) -> dict[str, Any]:
    """JSON that a program of the engine prints on stdout.

    ``good`` are its exit codes with a result. Raises ``DeadlineExceeded``, or ``NotFound`` or
    ``QuarterdeckError`` with the program's own last sentence.
    """
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "console.guarded", "--memory", str(PROGRAM_BYTES), module,
        sys.executable, "-m", module, *arguments,
        cwd=settings.BASE_DIR, env={**os.environ, PARENT_PID: str(os.getpid())},
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    try:
        async with asyncio.timeout(PROGRAM_S):
            out, said = await process.communicate()
    except TimeoutError:
        raise DeadlineExceeded(f"{module} took longer than {PROGRAM_S:g} s") from None
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    if process.returncode not in good or not out:
        sentence = (said.decode(errors="replace").strip().splitlines() or ["it said nothing"])[-1]
        raise NotFound(sentence) if sentence.startswith("no view") else QuarterdeckError(sentence)
    decoded: dict[str, Any] = msgspec.json.decode(out)
    return decoded
