"""The lease of an engine client: a small thread that says "alive" and measures the loop's lag.

Path: here -> router/process.py. The thread owns its socket. It also watches the run file, so that
the client learns of an engine restart within ``WATCH_S`` and not by silence.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import psutil

from engine.messages import Lease, LeaseEnd
from engine.runfile import RunFile, read_run_file
from engine.wire import PushSocket

RENEW_S = 2.0
WATCH_S = 0.2


@dataclass(slots=True)
class LeaseHolder:
    """What the lease says of its client; ``streams`` is set by the event loop."""

    kind: Literal["web", "job", "command"]
    worker_id: str
    via: str
    pid: int
    since: float
    streams: int = 0


class LeaseThread:
    """Renews one lease until ``stop``; calls ``on_run_file`` in the loop when the file changes."""

    def __init__(
        self,
        *,
        address: str,
        inbox: str,
        generation: int,
        holder: LeaseHolder,
        run_file: Path,
        on_run_file: Callable[[RunFile | None], None],
    ) -> None:
        self._address, self._inbox, self._generation = address, inbox, generation
        self._holder = holder
        self._run_file, self._on_run_file = run_file, on_run_file
        self._loop = asyncio.get_running_loop()
        self._stop = threading.Event()
        self._loop_seen_at = time.monotonic()
        self._asked = False
        self._thread = threading.Thread(target=self._run, name="lease", daemon=True)
        self._thread.start()

    def stop(self, *, goodbye: bool) -> None:
        self._goodbye = goodbye
        self._stop.set()
        self._thread.join(timeout=2.0)

    def _run(self) -> None:
        socket = PushSocket(self._address)
        process = psutil.Process()
        renewed_at, file_seen = 0.0, self._file_mark()
        while not self._stop.wait(WATCH_S if renewed_at else 0):
            self._ask_loop()
            now = time.monotonic()
            if now - renewed_at >= RENEW_S:
                renewed_at = now
                socket.send(self._lease(process.memory_info().rss))
            mark = self._file_mark()
            if mark != file_seen:
                file_seen = mark
                self._in_loop(lambda: self._on_run_file(read_run_file(self._run_file)))
        if self._goodbye:
            socket.send(LeaseEnd(inbox=self._inbox, generation=self._generation))
        socket.close()

    def _lease(self, rss_bytes: int) -> Lease:
        holder = self._holder
        return Lease(
            inbox=self._inbox,
            kind=holder.kind,
            worker_id=holder.worker_id,
            generation=self._generation,
            pid=holder.pid,
            lag_s=max(0.0, time.monotonic() - self._loop_seen_at - WATCH_S),
            streams=holder.streams,
            rss_bytes=rss_bytes,
            since=holder.since,
            via=holder.via,
        )

    def _ask_loop(self) -> None:
        """One question in flight: the loop answers by moving ``_loop_seen_at``."""
        if not self._asked:
            self._asked = True
            self._in_loop(self._answer)

    def _answer(self) -> None:
        self._loop_seen_at = time.monotonic()
        self._asked = False

    def _in_loop(self, callback: Callable[[], None]) -> None:
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(callback)

    def _file_mark(self) -> tuple[int, int] | None:
        try:
            found = self._run_file.stat()
        except FileNotFoundError:
            return None
        return found.st_mtime_ns, found.st_ino
