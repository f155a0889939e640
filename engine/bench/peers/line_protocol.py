"""Lines of JSON between the bench and a peer's driver. Standard library only: each driver runs
under its peer's own interpreter, by path.

Path: engine/bench/peer.py -> a driver beside this file -> here.

``{"ready": true, "versions": {...}}`` once the model is loaded; then one answer per request line
until standard input ends. What libraries print on standard output goes to the log instead.
"""

import ctypes
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from typing import Any

PR_SET_PDEATHSIG = 1
Answer = Callable[..., dict[str, Any]]
Generate = Callable[[list[list[int]], int], list[int]]


def serve(answer: Answer, versions: dict[str, str], replies: int) -> None:
    """Answers requests until the bench closes the pipe. ``replies`` comes from ``take_stdout``."""
    with os.fdopen(replies, "w", buffering=1) as out:
        out.write(json.dumps({"ready": True, "versions": versions}) + "\n")
        for line in sys.stdin:
            out.write(json.dumps(answer(**json.loads(line))) + "\n")


def take_stdout() -> int:
    """A descriptor of the real standard output; from here on prints go to standard error.

    The first call of a driver: from here on it also dies with the bench, however that dies.
    """
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    replies = os.dup(1)
    os.dup2(2, 1)
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]  # a TextIOWrapper
    return replies


def timed(generate: Generate) -> Answer:
    """``generate(prompts, new_tokens)`` returns how many tokens each answer has."""

    def answer(prompts: list[list[int]], new_tokens: int) -> dict[str, Any]:
        began = time.perf_counter()
        counts = generate(prompts, new_tokens)
        return {"seconds": time.perf_counter() - began, "counts": counts}

    return answer
