"""How long a swap of a real model's weights holds its streams up (DESIGN 12: 250 ms on CPU)."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import statistics
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine import messages as m
from engine.client import EngineClient, GenerateReqInput
from engine.config import EngineConfig, Limits
from tests.e2e.engines import running_engine
from tests.native import share_native

pytestmark = [pytest.mark.e2e, pytest.mark.soak, pytest.mark.model]

MODEL = Path(os.environ.get("QUARTERDECK_HOME") or "var") / "models" / "SmolLM2-135M-Instruct"
STREAMS, SWAPS = 16, 3
CALM_S = 6.0
WORST_S = 0.25  # beyond the longest gap without a swap


async def gaps_of(client: EngineClient, number: int, stop: asyncio.Event) -> list[float]:
    """Seconds between tokens of one endless stream, by the clock of the rank."""
    sampling = m.SamplingParams(temperature=0.0, max_new_tokens=200, ignore_eos=True)
    gaps: list[float] = []
    while not stop.is_set():
        request = GenerateReqInput(text=f"Tell me story number {number}.", sampling=sampling)
        made = [row.made_at async for row in client.generate(request) if row.output_ids]
        gaps += [after - before for before, after in zip(made, made[1:], strict=False)]
    return gaps


@contextlib.asynccontextmanager
async def streams(client: EngineClient, gaps: list[float]) -> AsyncIterator[None]:
    """Load while the block runs; then its gaps are in ``gaps``."""
    stop = asyncio.Event()
    tasks = [asyncio.create_task(gaps_of(client, i, stop)) for i in range(STREAMS)]
    yield
    stop.set()
    for found in await asyncio.gather(*tasks):
        gaps += found


def nearly(model: Path, path: Path) -> str:
    """The same weights, one tensor changed a little: the swap is real and the text stays text."""
    tensors = load_file(model / "model.safetensors")
    name = "model.norm.weight"
    tensors[name] = tensors[name] * torch.tensor(1.001, dtype=tensors[name].dtype)
    path.mkdir()
    save_file(tensors, path / "model.safetensors")
    return str(path)


@pytest.mark.parametrize("dp", [1, 2])
async def test_an_in_place_swap_is_hardly_felt(tmp_path, capsys, dp):
    share_native(tmp_path)
    config = EngineConfig(
        home=str(tmp_path), model_path=str(MODEL.resolve()), dp=dp,
        limits=Limits(max_running=STREAMS, kv_tokens=8192),
    )  # fmt: skip
    paths = [str(MODEL.resolve()), nearly(MODEL, tmp_path / "changed")]
    calm: list[float] = []
    swapping: list[float] = []
    replies: list[m.ControlReply] = []
    async with running_engine(config) as tree:
        client = tree.clients[0]
        async with streams(client, calm):
            await asyncio.sleep(CALM_S)
        async with streams(client, swapping):
            for number in range(1, SWAPS + 1):
                reply = await client.call(
                    m.UpdateWeightFromDiskReqInput, deadline_s=120.0, in_flight="in_place",
                    model_path=paths[number % 2],
                )  # fmt: skip
                assert reply.success, reply.message
                replies.append(reply)
    told = {
        "dp": dp,
        "step_ms": round(1e3 * statistics.median(calm), 1),
        "longest_gap_ms_calm": round(1e3 * max(calm), 1),
        "longest_gap_ms_swapping": round(1e3 * max(swapping), 1),
        "copy_ms": [round(1e3 * reply.ranks[0].result["seconds"], 1) for reply in replies],
    }
    with capsys.disabled():
        print("\n" + json.dumps(told))
    assert max(swapping) - max(calm) <= WORST_S, told
