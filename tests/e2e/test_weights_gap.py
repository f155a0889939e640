"""How long a swap of a real model's weights holds its streams up (DESIGN 12: 250 ms on CPU)."""

from __future__ import annotations

import asyncio
import json
import os
import statistics
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine import messages as m
from engine.client import EngineClient, GenerateReqInput
from engine.config import EngineConfig, Limits
from tests.e2e.engines import running_engine

pytestmark = [pytest.mark.e2e, pytest.mark.soak, pytest.mark.model]

MODEL = Path(os.environ.get("QUARTERDECK_HOME") or "var") / "models" / "SmolLM2-135M-Instruct"
STREAMS, TOKENS, SWAPS = 16, 80, 2
WORST_S = 0.25  # beyond the longest step without a swap


async def gaps_of(client: EngineClient, number: int) -> list[float]:
    """Seconds between the tokens of one stream, by the clock of the rank."""
    sampling = m.SamplingParams(temperature=0.0, max_new_tokens=TOKENS, ignore_eos=True)
    made: list[float] = []
    request = GenerateReqInput(text=f"Tell me a story, number {number}.", sampling=sampling)
    async for row in client.generate(request):
        made += [row.made_at] * bool(row.output_ids)
    assert row.finish.type == "length"
    return [after - before for before, after in zip(made[1:], made[2:], strict=False)]


def nearly(model: Path, path: Path) -> str:
    """The same weights, one value changed, so that the swap is real and the text stays text."""
    tensors = load_file(model / "model.safetensors")
    name = "model.norm.weight"
    tensors[name] = tensors[name] * torch.tensor(1.001, dtype=tensors[name].dtype)
    path.mkdir()
    save_file(tensors, path / "model.safetensors")
    return str(path)


async def test_an_in_place_swap_is_hardly_felt(tmp_path, capsys):
    config = EngineConfig(
        home=str(tmp_path), model_path=str(MODEL.resolve()),
        limits=Limits(max_running=STREAMS, kv_tokens=8192),
    )  # fmt: skip
    paths = [str(MODEL.resolve()), nearly(MODEL, tmp_path / "changed")]
    async with running_engine(config) as tree:
        client = tree.clients[0]
        calm = await asyncio.gather(*(gaps_of(client, i) for i in range(STREAMS)))
        running = [asyncio.create_task(gaps_of(client, i)) for i in range(STREAMS)]
        await asyncio.sleep(1.0)
        replies = []
        for number in range(SWAPS):
            replies.append(
                await client.call(
                    m.UpdateWeightFromDiskReqInput,
                    deadline_s=60.0,
                    in_flight="in_place",
                    model_path=paths[(number + 1) % 2],
                )  # fmt: skip
            )
            assert replies[-1].success, replies[-1].message
        assert not any(task.done() for task in running), "the streams ended before the swaps"
        swapped = await asyncio.gather(*running)
    flat_calm, flat_swapped = sum(calm, []), sum(swapped, [])
    told = {
        "step_ms": round(1e3 * statistics.median(flat_calm), 1),
        "longest_gap_ms_calm": round(1e3 * max(flat_calm), 1),
        "longest_gap_ms_swapping": round(1e3 * max(flat_swapped), 1),
        "copy_ms": [round(1e3 * r.ranks[0].result["seconds"], 1) for r in replies],
    }
    with capsys.disabled():
        print("\n" + json.dumps(told))
    assert max(flat_swapped) - max(flat_calm) <= WORST_S, told
