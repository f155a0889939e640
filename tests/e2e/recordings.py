"""A real tiny model over DP 2 x TP 2 for profiles and dumps, and the calls that record."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

from engine import messages as m
from engine.client import EngineClient
from engine.config import EngineConfig, Limits
from engine.dumps import points
from engine.model.native_build import load_library
from engine.profiling import spec as profiles
from tests.e2e.engines import EngineTree, answer, ask
from tests.engine.model.conftest import HOME
from tests.engine.model.tiny import make_model

CALL_S = 60


def tiny_config(home: Path, **changes) -> EngineConfig:
    """A llama of two layers in fp32 on the native backend."""
    load_library(HOME)  # built once per machine
    home.mkdir(exist_ok=True)
    (home / "native").symlink_to(HOME / "native")
    fields = {
        "backend": "native", "dtype": "fp32", "threads": 1, "dp": 2, "tp": 2,
        "limits": Limits(kv_tokens=16_384, max_running=16),
    }  # fmt: skip
    model = make_model(home / "models" / "tiny", "llama", seed=1)
    return EngineConfig(home=str(home), model_path=str(model), **fields | changes)


async def call(tree: EngineTree, kind: type, **fields) -> m.ControlReply:
    return await tree.clients[0].call(kind, deadline_s=CALL_S, actor="tester", **fields)


async def start_profile(tree: EngineTree, name: str, directory: Path, **asked) -> m.ControlReply:
    raw = {"profile_id": name, "directory": str(directory), **asked}
    return await call(tree, m.ProfileReqInput, spec=profiles.parse_spec(raw))


async def start_dump(tree: EngineTree, name: str, directory: Path, **asked) -> m.ControlReply:
    raw = {"dump_id": name, "directory": str(directory), **asked}
    return await call(tree, m.LazyDumpTensorsReqInput, spec=points.parse_spec(raw))


async def wait_for(tree: EngineTree, recording: m.RecordingKind, name: str) -> m.ControlReply:
    return await call(tree, m.WaitRecordingReqInput, recording=recording, id=name)


@contextlib.asynccontextmanager
async def load(client: EngineClient, streams: int = 4) -> AsyncIterator[None]:
    """Answers are made all the time, on both dp groups."""
    stop = asyncio.Event()

    async def loop(number: int) -> None:
        while not stop.is_set():
            sampling = {"max_new_tokens": 60, "ignore_eos": True}
            text = f"{number} and so on"
            await answer(client, ask(text, dp_rank=number % 2, sampling=sampling))

    tasks = [asyncio.create_task(loop(number)) for number in range(streams)]
    await asyncio.sleep(0.2)
    try:
        yield
    finally:
        stop.set()
        await asyncio.gather(*tasks)
