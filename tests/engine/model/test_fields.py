"""Logprobs, entropy and hidden states: of mixed batches, of single requests, of transformers."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from engine.messages import LogprobParams, SamplingParams
from engine.model.runner import ModelRunner, make_runner
from engine.model.sampler import Sampler
from engine.model.slots import Slot
from engine.scheduler.plan import SampledRow
from tests.engine.model import tiny
from tests.engine.model.conftest import engine_config
from tests.engine.model.driver import Driver, Job

ATOL = 2e-4  # fp32; logits of the tiny models reach 10
EMBEDDED_ATOL = 2e-3  # 30 layers, hidden states that reach 30
BATCHES = 100  # for each of two backends


@pytest.fixture(scope="module", params=["hf", "native"])
def runner(request: pytest.FixtureRequest, tiny_model: Callable[[str], Path]) -> ModelRunner:
    config = engine_config(tiny_model("qwen3"), backend=request.param)
    return make_runner(config, dp=0, tp=0, group=None)


Plain = Callable[[list[int]], tuple[torch.Tensor, np.ndarray]]


def plain_model(directory: Path) -> Plain:
    """Logits [tokens, vocab] and last hidden states of transformers in fp32."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)

    def run(ids: list[int]) -> tuple[torch.Tensor, np.ndarray]:
        with torch.inference_mode():
            output = model(torch.tensor([ids]), output_hidden_states=True)
        return output.logits[0], output.hidden_states[-1][0].numpy()

    return run


@pytest.fixture(scope="module")
def plain(tiny_model: Callable[[str], Path]) -> Plain:
    return plain_model(tiny_model("qwen3"))


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


def expected(job: Job, plain: Plain, eos: tuple[int, ...]) -> dict[str, list[Any]]:
    """The fields of a job from the logits of transformers and the definitions of the sampler."""
    logits, hidden = plain(job.ids)
    prompt = len(job.prompt_ids)
    truth = Job(prompt_ids=job.prompt_ids, sampling=job.sampling, options=job.options)
    options = {"logprob": None, "return_entropy": False, "return_hidden_states": False}
    for i in range(len(job.output_ids)):
        made = job.output_ids[:i]
        slot = Slot(
            rid="r",
            sampling=job.sampling,
            prompt_ids=job.prompt_ids,
            output_ids=made,
            output_counts=Counter(made),
            **{**options, **job.options},
        )
        row = SampledRow(slot=0)
        Sampler(eos).sample(logits[prompt - 1 + i : prompt + i].clone(), [slot], [row])
        truth.results.append(row)
        truth.output_ids.append(row.token_id)  # type: ignore[arg-type]
    told = fields(truth)
    told["hidden"] = hidden[: len(job.ids) - 1].ravel().tolist() if told_hidden(job) else []
    wanted = job.options.get("logprob")
    if wanted is not None and wanted.start_len >= 0:
        logprobs, first = logits.log_softmax(-1), wanted.start_len
        told["input_ids"] = job.prompt_ids[first:]
        judged = range(first, prompt - 1)
        told["inputs"] = [-1.0, *(float(logprobs[p, job.prompt_ids[p + 1]]) for p in judged)]
        told["input_top"] = [
            v for p in judged for v in logprobs[p].topk(wanted.top_num).values.tolist()
        ]
        chosen = list(wanted.token_ids or ())
        told["input_chosen"] = [v for p in judged for v in logprobs[p, chosen].tolist()]
    return told


def told_hidden(job: Job) -> bool:
    return bool(job.options.get("return_hidden_states"))


def assert_same(
    mine: dict[str, list[Any]], truth: dict[str, list[Any]], atol: float = ATOL
) -> None:
    for name, values in truth.items():
        if name in ("ids", "input_ids"):
            assert mine[name] == values, name
        elif not name.endswith("ids"):  # candidates may tie
            np.testing.assert_allclose(mine[name], values, atol=atol, err_msg=name)


def mixed_batch(runner: ModelRunner, source: random.Random, most: int) -> list[Job]:
    """Random jobs in random chunks, some joining later than others."""
    driver = Driver(runner, chunk=source.choice([3, 16, 512]))
    jobs = []
    for _ in range(source.randint(2, most)):
        jobs.append(driver.begin(random_job(source)))
        if source.random() < 0.5:
            driver.step()
    driver.finish()
    return jobs


def alone(runner: ModelRunner, job: Job) -> Job:
    driver = Driver(runner)
    single = driver.begin(again(job))
    driver.finish()
    return single


@pytest.mark.parametrize("seed", range(BATCHES))
def test_a_mixed_batch_gives_each_request_what_it_gets_alone(
    runner: ModelRunner, plain: Plain, seed: int
) -> None:
    """E38: any mix of families, in any chunks."""
    for job in mixed_batch(runner, random.Random(seed), 6):
        assert_same(fields(job), fields(alone(runner, job)))
        assert_same(fields(job), expected(job, plain, runner.info.eos_token_ids))


@pytest.mark.model
@pytest.mark.parametrize("batches", [4, pytest.param(20, marks=pytest.mark.soak)])
def test_mixed_batches_of_the_embedded_model(embedded_model: Path, batches: int) -> None:
    runner = make_runner(engine_config(embedded_model), dp=0, tp=0, group=None)
    truth, source = plain_model(embedded_model), random.Random(0)
    for _ in range(batches):
        for job in mixed_batch(runner, source, 3):
            assert_same(fields(job), fields(alone(runner, job)), EMBEDDED_ATOL)
            wanted = expected(job, truth, runner.info.eos_token_ids)
            assert_same(fields(job), wanted, EMBEDDED_ATOL)


def test_only_the_request_that_asked_has_hidden_states(runner: ModelRunner) -> None:
    """E37: in one step with one that did not."""
    driver = Driver(runner)
    without = driver.begin(Job(prompt_ids=[5, 6, 7]))
    asked = driver.begin(Job(prompt_ids=[8, 9], options={"return_hidden_states": True}))
    driver.step()
    assert without.results[0].hidden is None
    assert asked.results[0].hidden_width == 64
    assert len(asked.results[0].hidden or b"") == 2 * 64 * 4
    driver.finish()
