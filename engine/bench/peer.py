"""A peer's driver as a child process: started once, asked once per round, frozen in between.

Path: decode.py, fan_out.py -> here -> peers/*.py under the peer's own interpreter.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

LOAD_S = 600.0  # vLLM compiles its model on the first start
ANSWER_S = 300.0
QUIT_S = 5.0


class PeerFailed(Exception):
    """The driver ended or fell silent; the message ends with what it said last."""


class Peer:
    """``start``, any number of ``ask``, ``stop``. Between answers its process group is stopped, so
    that threads which wait in a loop take nothing from the others."""

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        log: Path,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.name = name
        self.versions: dict[str, str] = {}
        self._command = command
        self._log = log
        self._environment = environment or {}
        self._process: asyncio.subprocess.Process | None = None

    async def start(self) -> None:
        """Returns when the model is loaded. Raises PeerFailed."""
        with open(self._log, "w") as log:
            self._process = await asyncio.create_subprocess_exec(
                *self._command,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=log,
                env={**os.environ, **self._environment},
                process_group=0,
            )
        self.versions = (await self._answer(LOAD_S))["versions"]

    async def ask(self, **request: Any) -> dict[str, Any]:
        """One request line, one answer line. Raises PeerFailed."""
        assert self._process and self._process.stdin
        self._signal(signal.SIGCONT)
        try:
            self._process.stdin.write(json.dumps(request).encode() + b"\n")
            await self._process.stdin.drain()
        except ConnectionError:
            raise self._failed("ended") from None
        return await self._answer(ANSWER_S)

    async def stop(self) -> None:
        """The end of its input ends a driver; what does not end is killed, with its children."""
        if self._process is None:
            return
        assert self._process.stdin
        self._signal(signal.SIGCONT)
        self._process.stdin.close()
        try:
            await asyncio.wait_for(self._process.wait(), QUIT_S)
        except TimeoutError:
            self._signal(signal.SIGKILL)
            await self._process.wait()
        self._signal(signal.SIGKILL)
        self._process = None

    async def _answer(self, timeout_s: float) -> dict[str, Any]:
        assert self._process and self._process.stdout
        try:
            line = await asyncio.wait_for(self._process.stdout.readline(), timeout_s)
        except TimeoutError:
            raise self._failed(f"said nothing for {timeout_s:g} s") from None
        if not line:
            await self.stop()  # its last words come while it ends
            raise self._failed("ended")
        self._signal(signal.SIGSTOP)
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _failed(self, what: str) -> PeerFailed:
        lines = self._log.read_text(errors="replace").strip().splitlines()
        return PeerFailed(f"{what}: {lines[-1].strip()[:200] if lines else 'it said nothing'}")

    def _signal(self, number: int) -> None:
        """To the whole group: some peers have children of their own."""
        assert self._process
        try:
            os.killpg(self._process.pid, number)
        except ProcessLookupError:
            return  # it has ended
