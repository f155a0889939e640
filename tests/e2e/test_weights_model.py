"""Swaps on a real model: tokens prove their epoch, answers equal a fresh start, KV is told."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine import messages as m
from engine.client import EngineClient, GenerateReqInput
from engine.config import EngineConfig, Limits
from engine.model.runner import make_runner
from engine.provenance import label_runs
from tests.e2e.engines import answer, running_engine
from tests.e2e.swaps import FIRST_EPOCH, Swaps
from tests.engine.model import tiny
from tests.engine.model.driver import Driver

pytestmark = pytest.mark.e2e

DISK = m.UpdateWeightFromDiskReqInput
BLOCK = 16


def liked(index: int) -> set[int]:
    """Tokens that checkpoint ``index`` can choose greedily, and no other can."""
    return set(range(20 + 20 * index, 40 + 20 * index))


def make_checkpoint(path: Path, index: int) -> Path:
    """A random tiny model whose output layer knows only its liked tokens: for each row there is the
    opposite one, so the best logit is positive, and those of all other tokens are zero."""
    tiny.make_model(path, "llama", seed=index)
    tensors = load_file(path / "model.safetensors")
    head = tensors["lm_head.weight"]
    likes = sorted(liked(index))
    kept = head[likes[::2]].clone()
    head.zero_()
    head[likes[::2]] = kept
    head[likes[1::2]] = -kept
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    return path


def disagreements(token_ids, runs, index_of) -> list[tuple[int, int]]:
    labels = [epoch for count, epoch in runs for _ in range(count)]
    pairs = zip(token_ids, labels, strict=True)
    return [(token, epoch) for token, epoch in pairs if token not in liked(index_of[epoch])]


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory) -> list[Path]:
    home = tmp_path_factory.mktemp("checkpoints")
    return [make_checkpoint(home / str(index), index) for index in (0, 1)]


def model_config(home: Path, model: Path, **changes) -> EngineConfig:
    limits = Limits(max_running=16, kv_tokens=4096, block_tokens=BLOCK)
    fields = {"backend": "hf", "dtype": "fp32", "threads": 1, "limits": limits} | changes
    return EngineConfig(home=str(home), model_path=str(model), **fields)


def fresh_start(
    config: EngineConfig, checkpoint: Path, prompt: list[int], tokens: int
) -> list[int]:
    """What a process that starts on ``checkpoint`` says, without any engine around it."""
    torch.set_num_threads(1)
    start = EngineConfig(
        home=config.home, model_path=str(checkpoint), backend=config.backend, dtype="fp32",
        weights=config.weights, limits=config.limits, threads=1,
    )  # fmt: skip
    runner = make_runner(start, dp=0, tp=0, group=None)
    return Driver(runner).generate([prompt], greedy(tokens))[0]


def greedy(tokens: int) -> m.SamplingParams:
    return m.SamplingParams(temperature=0.0, max_new_tokens=tokens, ignore_eos=True)


def ask_ids(prompt: list[int], tokens: int = 24, **fields) -> GenerateReqInput:
    return GenerateReqInput(input_ids=prompt, sampling=greedy(tokens), **fields)


@pytest.mark.parametrize(
    ("backend", "tp", "count"),
    [
        ("hf", 1, 40),
        ("native", 2, 12),  # four ranks that wait for each other, on two cores
        pytest.param("native", 2, 200, marks=pytest.mark.soak),
    ],
)
async def test_swaps_of_real_weights_under_load_prove_every_token(
    tmp_path, checkpoints, backend, tp, count
):
    config = model_config(tmp_path, checkpoints[0], backend=backend, dp=2, tp=tp)
    async with running_engine(config) as tree:
        await tree.connect("2")
        for policy in ("finish", "in_place", "retract"):
            now = await tree.clients[0].fleet()
            start = (now.engine.epoch - FIRST_EPOCH) % 2
            swaps = Swaps(tree, tokens=24, judge=disagreements)
            swaps.index_of = {now.engine.epoch: start}
            async with swaps.streams(16):
                for number in range(1, count + 1):
                    index = (start + number) % 2
                    await swaps.swap(index, str(checkpoints[index]), in_flight=policy)
            assert not swaps.wrong and not swaps.lost, policy
            assert swaps.answers > 16
            assert policy == "finish" or swaps.several


@pytest.mark.parametrize(
    ("backend", "weights"), [("hf", "plain"), ("native", "plain"), ("native", "int4")]
)
async def test_after_an_update_answers_are_those_of_a_fresh_start_and_kv_is_told(
    tmp_path, checkpoints, backend, weights
):
    config = model_config(tmp_path, checkpoints[0], backend=backend, weights=weights)
    prompt = [(7 * i) % 300 for i in range(60)]
    expected = [fresh_start(config, checkpoint, prompt, 24) for checkpoint in checkpoints]
    assert expected[0] != expected[1]
    async with running_engine(config) as tree:
        client = tree.clients[0]
        assert (await answer(client, ask_ids(prompt))).output_ids == expected[0]
        warm = await answer(client, ask_ids(prompt))
        assert warm.provenance.cached_tokens == 48 and warm.output_ids == expected[0]
        reply = await client.call(
            DISK, deadline_s=30.0, model_path=str(checkpoints[1]), flush_cache=False, token_step=9
        )
        assert reply.success, reply.message

        isolated = await answer(client, ask_ids(prompt))
        assert isolated.output_ids == expected[1]
        assert isolated.provenance.cached_tokens == 0
        assert isolated.kv_epochs == [(60 + 23, 2)]

        other = [*prompt[:40], *range(100, 120)]  # shares two blocks with what was cached
        shared = await answer(client, ask_ids(other, kv_reuse="share"))
        assert shared.provenance.cached_tokens == 2 * BLOCK
        assert shared.kv_epochs == [(83, 2)]  # a pure chain of the new epoch is preferred
        old = [*prompt[:56], *range(100, 104)]
        again = await answer(client, ask_ids(old, kv_reuse="share", extra_key="tenant"))
        assert again.provenance.cached_tokens == 0  # nothing crosses namespaces
        told = label_runs(isolated.epochs, await client.labels([1, 2]), isolated.kv_epochs)
        assert told.token_steps == [9] * 24 and told.kv_token_steps == [(9, 0, 83)]
        await memory_goes_and_comes_back(client, prompt, expected[1])


async def memory_goes_and_comes_back(
    client: EngineClient, prompt: list[int], expected: list[int]
) -> None:
    """C22: asleep while paused; awake it says the same."""
    for kind in (
        m.PauseGenerationReqInput,
        m.ReleaseMemoryOccupationReqInput,
        m.ResumeMemoryOccupationReqInput,
        m.ContinueGenerationReqInput,
    ):
        reply = await client.call(kind, deadline_s=30.0)
        assert reply.success, (kind, reply.message)
    assert (await answer(client, ask_ids(prompt))).output_ids == expected


async def test_a_request_that_shares_old_keys_names_exactly_the_blocks_it_took(
    tmp_path, checkpoints
):
    config = model_config(tmp_path, checkpoints[0], backend="native")
    prompt = [(11 * i) % 300 for i in range(70)]
    async with running_engine(config) as tree:
        client = tree.clients[0]
        await answer(client, ask_ids(prompt, tokens=4))
        await client.call(
            DISK, deadline_s=30.0, model_path=str(checkpoints[1]), flush_cache=False, token_step=9
        )
        shared = await answer(client, ask_ids(prompt, tokens=10, kv_reuse="share"))
        taken = (len(prompt) - 1) // BLOCK * BLOCK
        assert shared.provenance.cached_tokens == taken == 64
        assert shared.kv_epochs == [(taken, 1), (70 + 9 - taken, 2)]
        told = label_runs(shared.epochs, await client.labels([1, 2]), shared.kv_epochs)
        assert told.kv_token_steps == [(None, 0, 64), (9, 64, 79)]
        assert set(shared.output_ids) <= liked(1)  # new weights over old keys
        flushed = await client.call(m.FlushCacheReqInput, deadline_s=5.0)
        assert flushed.success
        clean = await answer(client, ask_ids(prompt, tokens=10, kv_reuse="share"))
        assert clean.kv_epochs == [(79, 2)]
        assert clean.output_ids == fresh_start(config, checkpoints[1], prompt, 10)
