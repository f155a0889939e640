"""Real engines for tests: every process is real, the scripted model does only the arithmetic."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import AsyncIterator
from pathlib import Path

import psutil

from engine import messages as m
from engine.client import EngineClient, GenerateReqInput
from engine.config import EngineConfig, Limits
from engine.launch import engine_process, wait_until_serving
from engine.runfile import run_file_path
from tests.engine.model.tiny import make_scripted_dir


def scripted_config(home: Path, **changes) -> EngineConfig:
    """A small scripted engine with its home under ``home``."""
    limits = {"max_running": 64, "kv_tokens": 65_536, "max_step_tokens": 512, "chunk_tokens": 128}
    limits |= changes.pop("limits", {})
    return EngineConfig(
        home=str(home),
        model_path=str(make_scripted_dir(home / "models" / "scripted")),
        backend="scripted",
        threads=1,
        limits=Limits(**limits),
        **changes,
    )


@contextlib.asynccontextmanager
async def running_engine(
    config: EngineConfig, *, state: str = "running"
) -> AsyncIterator[EngineTree]:
    """Yields when the engine is in ``state``."""
    with engine_process(config) as launcher:
        tree = EngineTree(config, launcher.pid)
        try:
            await tree.connect("1")
            await wait_until_serving(tree.clients[0], 60, state)
            yield tree
        finally:
            for client in tree.clients:
                await client.close()


class EngineTree:
    """A running engine, its clients and its processes by role."""

    def __init__(self, config: EngineConfig, launcher_pid: int) -> None:
        self.config = config
        self.launcher = psutil.Process(launcher_pid)
        self.clients: list[EngineClient] = []

    async def connect(self, worker_id: str, kind: str = "web") -> EngineClient:
        client = await EngineClient.connect(
            run_file_path(Path(self.config.home)), kind=kind, worker_id=worker_id, timeout_s=60
        )
        self.clients.append(client)
        return client

    def process(self, title: str) -> psutil.Process:
        """The child whose title is ``quarterdeck: <title>``."""
        for child in self.launcher.children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                if child.cmdline()[:1] == [f"quarterdeck: {title}"]:
                    return child
        raise LookupError(f"no process {title!r}")

    def kill(self, title: str) -> int:
        process = self.process(title)
        os.kill(process.pid, signal.SIGKILL)
        return process.pid


def ask(text: str, **changes) -> GenerateReqInput:
    sampling = {"temperature": 0.0, "max_new_tokens": 64} | changes.pop("sampling", {})
    return GenerateReqInput(text=text, sampling=m.SamplingParams(**sampling), **changes)


async def answer(client: EngineClient, request: GenerateReqInput) -> m.StrRow:
    """The whole answer as one merged row."""
    whole: m.StrRow | None = None
    async for row in client.generate(request):
        whole = row if whole is None else m.merge(whole, row)
    assert whole is not None
    return whole


async def eventually(condition, timeout_s: float, what: str = "") -> float:
    """Seconds until ``condition()`` (may be async) held; AssertionError after ``timeout_s``."""
    began = time.monotonic()
    while time.monotonic() - began < timeout_s:
        value = condition()
        if asyncio.iscoroutine(value):
            value = await value
        if value:
            return time.monotonic() - began
        await asyncio.sleep(0.02)
    raise AssertionError(f"not within {timeout_s} s: {what or condition}")
