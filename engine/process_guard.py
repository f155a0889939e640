"""What every child process does first: die with its parent, carry a name, say when it is ready."""

from __future__ import annotations

import ctypes
import json
import logging
import os
import signal
import sys
from typing import Any

import setproctitle

READY_FD = "QUARTERDECK_READY_FD"
PARENT_PID = "QUARTERDECK_PARENT_PID"
_PR_SET_PDEATHSIG = 1


def die_with_parent(title: str) -> None:
    """SIGKILL reaches this process when its parent dies, however the parent dies (Linux).

    The parent may have died before the call: its pid is in the environment, and a process that
    finds another parent leaves at once.
    """
    setproctitle.setproctitle(f"quarterdeck: {title}")
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    expected = os.environ.get(PARENT_PID)
    if expected and os.getppid() != int(expected):
        raise SystemExit(f"{title}: the parent process {expected} is gone")


def report_ready(info: dict[str, Any]) -> None:
    """One JSON line to the parent's pipe, which is then closed; nothing without a pipe."""
    descriptor = os.environ.pop(READY_FD, "")
    if descriptor:
        with os.fdopen(int(descriptor), "w") as pipe:
            pipe.write(json.dumps(info) + "\n")


def set_up_logging(name: str) -> None:
    """Log lines on stderr, named by process; the parent's terminal shows them all."""
    logging.basicConfig(
        level=logging.INFO,
        format=f"%(asctime)s {name} %(levelname)s %(name)s: %(message)s",
        datefmt="%H:%M:%S",
    )


class StopFlag:
    """SIGTERM and SIGINT are recorded; the process's loop acts on them."""

    def __init__(self) -> None:
        self.requested = False
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._record)

    def _record(self, number: int, frame: object) -> None:
        self.requested = True
