"""Greedy ids in fp32 are those of plain transformers, however a prompt is computed."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from engine.messages import SamplingParams
from engine.model.runner import ModelRunner, make_runner
from tests.engine.model import tiny
from tests.engine.model.conftest import engine_config
from tests.engine.model.driver import Driver, Job

NEW_TOKENS = 24
GREEDY = SamplingParams(temperature=0.0, max_new_tokens=NEW_TOKENS)
CASES = [(family, backend) for family in tiny.FAMILIES for backend in ("hf", "native", "eager")]


def plain_generate(directory: Path, prompts: list[list[int]]) -> list[list[int]]:
    """Each prompt alone through transformers' own generate."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    outputs = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        made = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=NEW_TOKENS,
        )
        outputs.append(made[0, len(prompt) :].tolist())
    return outputs


def random_prompts(seed: int, lengths: list[int]) -> list[list[int]]:
    source = random.Random(seed)
    return [[source.randrange(3, tiny.VOCAB_SIZE) for _ in range(n)] for n in lengths]


@pytest.fixture(scope="module", params=CASES, ids=lambda case: "-".join(case))
def served(
    request: pytest.FixtureRequest, tiny_model: Callable[[str], Path]
) -> tuple[ModelRunner, list[list[int]], list[list[int]]]:
    """A runner, prompts longer and shorter than blocks and windows, and their true answers."""
    family, backend = request.param
    directory = tiny_model(family)
    runner = make_runner(engine_config(directory, backend=backend), dp=0, tp=0, group=None)
    prompts = random_prompts(7, [1, 2, 8, 23, 70, 131])
    return runner, prompts, plain_generate(directory, prompts)


def test_a_prompt_alone(served: tuple[ModelRunner, list[list[int]], list[list[int]]]) -> None:
    runner, prompts, truth = served
    assert [Driver(runner).generate([prompt], GREEDY)[0] for prompt in prompts] == truth


@pytest.mark.parametrize("chunk", [1, 7, 64])
def test_a_batch_with_chunked_prefill(
    served: tuple[ModelRunner, list[list[int]], list[list[int]]], chunk: int
) -> None:
    runner, prompts, truth = served
    assert Driver(runner, chunk=chunk).generate(prompts, GREEDY) == truth


def test_rows_that_join_while_others_decode(
    served: tuple[ModelRunner, list[list[int]], list[list[int]]],
) -> None:
    runner, prompts, truth = served
    driver = Driver(runner, chunk=16)
    jobs = []
    for prompt in prompts:
        jobs.append(driver.begin(Job(prompt_ids=prompt, sampling=GREEDY)))
        driver.step()
        driver.step()
    driver.finish()
    assert [job.output_ids for job in jobs] == truth


def test_a_prefix_that_another_row_computed(
    served: tuple[ModelRunner, list[list[int]], list[list[int]]],
) -> None:
    runner, prompts, truth = served
    driver = Driver(runner)
    first = driver.begin(Job(prompt_ids=prompts[-1], sampling=GREEDY))
    driver.step()
    shared = first.blocks[: len(prompts[-1]) // runner.info.block_size - 1]
    second = driver.begin(Job(prompt_ids=prompts[-1], sampling=GREEDY), cached_blocks=shared)
    driver.finish()
    assert second.results[0].slot != first.results[0].slot
    assert [first.output_ids, second.output_ids] == [truth[-1], truth[-1]]


def test_a_retracted_row_goes_on_as_if_nothing_happened(
    served: tuple[ModelRunner, list[list[int]], list[list[int]]],
) -> None:
    runner, prompts, truth = served
    driver = Driver(runner, chunk=7)
    jobs = [driver.begin(Job(prompt_ids=prompt, sampling=GREEDY)) for prompt in prompts[2:]]
    for retracted in (jobs[0], jobs[1]):
        for _ in range(9):
            driver.step()
        if retracted in driver.running:
            driver.retract(retracted)
    driver.finish()
    assert [job.output_ids for job in jobs] == truth[2:]


@pytest.mark.model
@pytest.mark.parametrize("backend", ["hf", "native"])
def test_the_embedded_model(embedded_model: Path, backend: str) -> None:
    runner = make_runner(engine_config(embedded_model, backend=backend), dp=0, tp=0, group=None)
    prompts = [
        [1, 4093, 198, 1780, 314, 260, 3575, 282, 4649, 47, 2, 198, 1, 520, 9531, 198],
        [504, 2298, 282, 260],
    ]
    truth = plain_generate(embedded_model, prompts)
    assert Driver(runner, chunk=7).generate(prompts, GREEDY) == truth
