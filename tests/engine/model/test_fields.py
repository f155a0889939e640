"""Logprobs, entropy and hidden states: of mixed batches, of single requests, of transformers."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from engine.messages import LogprobParams, SamplingParams
from engine.model.runner import ModelRunner, make_runner
from tests.engine.model import tiny
from tests.engine.model.conftest import engine_config
from tests.engine.model.driver import Driver, Job

ATOL = 2e-4  # fp32; logits of the tiny models reach 10
BATCHES = 40


@pytest.fixture(scope="module", params=["hf", "native"])
def runner(request: pytest.FixtureRequest, tiny_model: Callable[[str], Path]) -> ModelRunner:
    config = engine_config(tiny_model("qwen3"), backend=request.param)
    return make_runner(config, dp=0, tp=0, group=None)


@pytest.fixture(scope="module")
def plain(tiny_model: Callable[[str], Path]) -> Callable[[list[int]], tuple[np.ndarray, ...]]:
    """Log-softmax of the logits [tokens, vocab] and last hidden states of transformers."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tiny_model("qwen3"), dtype=torch.float32)

    def run(ids: list[int]) -> tuple[np.ndarray, ...]:
        with torch.inference_mode():
            output = model(torch.tensor([ids]), output_hidden_states=True)
        return output.logits[0].log_softmax(-1).numpy(), output.hidden_states[-1][0].numpy()

    return run


def random_job(source: random.Random) -> Job:
    """Any mix of options; half of the jobs are greedy."""
    prompt = [source.randrange(3, tiny.VOCAB_SIZE) for _ in range(source.randint(1, 40))]
    options: dict[str, Any] = {
        "return_entropy": source.random() < 0.5,
        "return_hidden_states": source.random() < 0.3,
    }
    if source.random() < 0.7:
        options["logprob"] = LogprobParams(
            start_len=source.choice([-1, 0, source.randrange(len(prompt))]),
            top_num=source.choice([0, 0, 5]),
            token_ids=source.choice([None, (4, 8)]),
            raw=source.random() < 0.5,
        )
    sampling = SamplingParams(
        temperature=source.choice([0.0, 0.7]),
        top_p=source.choice([1.0, 0.9]),
        top_k=source.choice([-1, 20]),
        repetition_penalty=source.choice([1.0, 1.2]),
        presence_penalty=source.choice([0.0, 0.4]),
        min_new_tokens=source.choice([0, 3]),
        max_new_tokens=source.randint(1, 6),
        seed=source.randrange(2**63),
    )
    return Job(prompt_ids=prompt, sampling=sampling, options=options)


def again(job: Job) -> Job:
    return Job(prompt_ids=job.prompt_ids, sampling=job.sampling, options=job.options)


def fields(job: Job) -> dict[str, list[Any]]:
    """Everything that a job's rows said, flat."""
    sampled = [row for row in job.results if row.token_id is not None]
    inputs = [row.input_logprobs for row in job.results if row.input_logprobs is not None]
    flat = {
        "ids": job.output_ids,
        "logprobs": [row.logprob for row in sampled if row.logprob is not None],
        "entropy": [row.entropy for row in sampled if row.entropy is not None],
        "top_ids": [i for row in sampled if row.top for i in row.top[0]],
        "top": [v for row in sampled if row.top for v in row.top[1]],
        "chosen": [v for row in sampled if row.token_logprobs for v in row.token_logprobs[1]],
        "input_ids": [i for part in inputs for i in part.ids],
        "inputs": [-1.0 if v is None else v for part in inputs for v in part.values],
        "input_top": [v for part in inputs if part.top for vs in part.top.values for v in vs],
        "input_chosen": [
            v for part in inputs if part.token_ids for vs in part.token_ids.values for v in vs
        ],
    }
    hidden = b"".join(row.hidden or b"" for row in job.results)
    return {**flat, "hidden": np.frombuffer(hidden, np.float32).tolist()}


def assert_same(mine: dict[str, list[Any]], truth: dict[str, list[Any]]) -> None:
    for name, values in truth.items():
        if name.endswith("ids"):
            assert mine[name] == values, name
        else:
            np.testing.assert_allclose(mine[name], values, atol=ATOL, err_msg=name)


@pytest.mark.parametrize("seed", range(BATCHES))
def test_a_mixed_batch_gives_each_request_what_it_gets_alone(
    runner: ModelRunner, seed: int
) -> None:
    source = random.Random(seed)
    driver = Driver(runner, chunk=source.choice([3, 16, 512]))
    jobs = []
    for _ in range(source.randint(2, 6)):
        jobs.append(driver.begin(random_job(source)))
        if source.random() < 0.5:
            driver.step()
    driver.finish()
    for job in jobs:
        alone = Driver(runner)
        single = alone.begin(again(job))
        alone.finish()
        assert_same(fields(job), fields(single))


@pytest.mark.parametrize("seed", range(10))
def test_fields_are_those_of_transformers(
    runner: ModelRunner, plain: Callable[[list[int]], tuple[np.ndarray, ...]], seed: int
) -> None:
    source = random.Random(1000 + seed)
    prompt = [source.randrange(3, tiny.VOCAB_SIZE) for _ in range(20)]
    start = source.randrange(20)
    options = {
        "logprob": LogprobParams(start_len=start, top_num=3, token_ids=(9,), raw=True),
        "return_entropy": True,
        "return_hidden_states": True,
    }
    sampling = SamplingParams(temperature=1.0, seed=seed, max_new_tokens=5, ignore_eos=True)
    driver = Driver(runner, chunk=6)
    job = driver.begin(Job(prompt_ids=prompt, sampling=sampling, options=options))
    driver.finish()
    mine = fields(job)
    logprobs, hidden = plain(job.ids)
    made = logprobs[19:24]
    np.testing.assert_allclose(mine["logprobs"], made[range(5), job.output_ids], atol=ATOL)
    np.testing.assert_allclose(mine["entropy"], -(np.exp(made) * made).sum(-1), atol=ATOL)
    np.testing.assert_allclose(mine["top"], np.sort(made)[:, :-4:-1].ravel(), atol=ATOL)
    np.testing.assert_allclose(mine["chosen"], made[:, 9], atol=ATOL)
    assert mine["input_ids"] == prompt[start:]
    told = logprobs[range(start, 19), prompt[start + 1 :]]
    np.testing.assert_allclose(mine["inputs"], [-1.0, *told], atol=ATOL)
    np.testing.assert_allclose(mine["input_chosen"], logprobs[start:19, 9], atol=ATOL)
    np.testing.assert_allclose(mine["hidden"], hidden[:24].ravel(), atol=ATOL)


def test_only_the_request_that_asked_has_hidden_states(runner: ModelRunner) -> None:
    driver = Driver(runner)
    without = driver.begin(Job(prompt_ids=[5, 6, 7]))
    asked = driver.begin(Job(prompt_ids=[8, 9], options={"return_hidden_states": True}))
    driver.step()
    assert without.results[0].hidden is None
    assert asked.results[0].hidden_width == 64
    assert len(asked.results[0].hidden or b"") == 2 * 64 * 4
    driver.finish()
