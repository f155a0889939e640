"""How long a capture holds a real model's tokens up (at most 8 median steps for 8 steps)."""

from __future__ import annotations

import asyncio
import json
import statistics
import time

import pytest

from engine import messages as m
from engine.client import EngineClient, GenerateReqInput
from engine.config import EngineConfig, Limits
from engine.profiling.merge import merge
from engine.profiling.summary import summarize
from tests.e2e.engines import running_engine
from tests.e2e.recordings import start_profile, wait_for
from tests.engine.model.conftest import EMBEDDED
from tests.native import share_native

pytestmark = [pytest.mark.e2e, pytest.mark.soak, pytest.mark.model]

STREAMS, CAPTURES, STEPS = 8, 3, 8
CALM_S = 3.0
MOST_STEPS = 8.0


async def tokens_of(client: EngineClient, number: int, stop: asyncio.Event) -> list[list[float]]:
    """When each token of endless answers was made, by the clock of the rank."""
    sampling = m.SamplingParams(temperature=0.0, max_new_tokens=300, ignore_eos=True)
    answers = []
    while not stop.is_set():
        request = GenerateReqInput(text=f"Tell me story number {number}.", sampling=sampling)
        rows = [row async for row in client.generate(request) if row.output_ids]
        answers.append([row.made_at for row in rows])
    return answers


def gaps(answers: list[list[float]], begin: float, end: float) -> list[float]:
    """Seconds between tokens of one answer, of those that overlap ``begin..end``."""
    return [
        after - before
        for made in answers
        for before, after in zip(made, made[1:], strict=False)
        if before < end and after > begin
    ]


@pytest.mark.parametrize(("backend", "dp"), [("native", 1), ("native", 2), ("hf", 1)])
async def test_no_token_waits_longer_than_eight_steps_for_a_capture(tmp_path, capsys, backend, dp):
    share_native(tmp_path)
    config = EngineConfig(
        home=str(tmp_path), model_path=str(EMBEDDED.resolve()), backend=backend, dp=dp, threads=1,
        limits=Limits(max_running=STREAMS, kv_tokens=8192),
    )  # fmt: skip
    stop = asyncio.Event()
    spans, told = [], []
    async with running_engine(config) as tree:
        client = tree.clients[0]
        tasks = [asyncio.create_task(tokens_of(client, i, stop)) for i in range(STREAMS)]
        await asyncio.sleep(1)
        calm = [time.time(), 0.0]
        await asyncio.sleep(CALM_S)
        calm[1] = time.time()
        for number in range(CAPTURES):
            begin = time.time()
            await start_profile(tree, f"p{number}", tmp_path / "profiles", num_steps=STEPS)
            assert (await wait_for(tree, "profile", f"p{number}")).success
            spans.append((begin, time.time()))
        stop.set()
        answers = [made for found in await asyncio.gather(*tasks) for made in found]
    step = statistics.median(gaps(answers, *calm))
    for number, span in enumerate(spans):
        merge(tmp_path / "profiles", f"p{number}")
        summary = summarize(tmp_path / "profiles", f"p{number}")
        told.append({
            "gap_ms": round(1e3 * max(gaps(answers, *span)), 1),
            "gap_it_says_ms": round((summary.largest_gap_us or 0.0) / 1e3, 1),
            "events": sum(rank.events for rank in summary.ranks),
            "segments": sum(rank.segments for rank in summary.ranks),
        })  # fmt: skip
    with capsys.disabled():
        calmest = round(1e3 * max(gaps(answers, *calm)), 1)
        print(f"\n{backend} dp {dp}: step {1e3 * step:.1f} ms, longest without {calmest} ms")
        print("\n".join(json.dumps(one) for one in told))
    assert max(one["gap_ms"] for one in told) <= MOST_STEPS * 1e3 * step
