"""Whole distributions of every backend and family, against plain transformers in fp32.

Tolerances are on logprobs, which reach -13 here. fp32: 1e-4, ten times what was seen (sums in
another order). bf16: not further from fp32 than transformers' own bf16, by a tenth. int4: against
the eager decoder with the same quantised weights, so only the int8 rounding of activations is left:
0.05 on average and 0.25 at the 99th percentile, half of which was seen.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from engine.config import Limits
from engine.messages import LogprobParams, SamplingParams
from engine.model import native
from engine.model.native import AUTO_TOKENS
from engine.model.native_build import load_library
from engine.model.runner import ModelRunner, make_runner
from tests.engine.model import tiny
from tests.engine.model.conftest import engine_config
from tests.engine.model.driver import Driver, Job

FP32_ATOL = 1e-4
BF16_MARGIN = 1.1
INT8_MEAN, INT8_HIGH = 0.05, 0.25
WHOLE = LogprobParams(start_len=0, top_num=tiny.VOCAB_SIZE, raw=True)
LONG = Limits(kv_tokens=16_384, block_tokens=16)


def job_of(length: int, *, seed: int, new_tokens: int = 4) -> Job:
    source = random.Random(seed)
    prompt = [source.randrange(3, tiny.VOCAB_SIZE) for _ in range(length)]
    sampling = SamplingParams(temperature=0.0, max_new_tokens=new_tokens, ignore_eos=True)
    return Job(prompt_ids=prompt, sampling=sampling, options={"logprob": WHOLE})


def distributions(job: Job) -> np.ndarray:
    """Logprobs [prompt + outputs - 1, vocab]: what each token says of the next."""
    rows = []
    for result in job.results:
        told = result.input_logprobs
        if told is not None and told.top is not None:
            rows.extend((i, v) for i, v in zip(told.top.ids, told.top.values, strict=True) if i)
        if result.top is not None:
            rows.append(result.top)
    table = np.zeros((len(rows), tiny.VOCAB_SIZE), np.float32)
    for line, (ids, values) in zip(table, rows, strict=True):
        line[ids] = values
    return table


def plain(directory: Path, job: Job) -> np.ndarray:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    with torch.inference_mode():
        logits = model(torch.tensor([job.ids[:-1]])).logits[0]
    return logits.log_softmax(-1).numpy()


def run(runner: ModelRunner, jobs: list[Job], *, chunk: int = 512, joins: bool = False) -> None:
    """All at once, or each joining while the earlier ones decode."""
    driver = Driver(runner, chunk=chunk)
    for job in jobs:
        driver.begin(job)
        if joins:
            driver.step()
    driver.finish()


@pytest.mark.parametrize("backend", ["hf", "native", "eager"])
@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_fp32_logits_are_those_of_transformers(
    tiny_model: Callable[[str], Path], family: str, backend: str
) -> None:
    directory = tiny_model(family)
    runner = make_runner(engine_config(directory, backend=backend), dp=0, tp=0, group=None)
    whole, chunked, *mixed = (job_of(n, seed=n) for n in (70, 61, 5, 40, 33))
    run(runner, [whole])
    run(runner, [chunked], chunk=7)
    run(runner, mixed, chunk=16, joins=True)
    for job in (whole, chunked, *mixed):
        np.testing.assert_allclose(distributions(job), plain(directory, job), atol=FP32_ATOL)


@pytest.mark.parametrize("family", ["mistral", "gemma3"])
@pytest.mark.parametrize("window", [24, 300])
def test_long_contexts_with_and_without_windows(tmp_path: Path, family: str, window: int) -> None:
    directory = tiny.make_model(
        tmp_path, family, sliding_window=window, max_position_embeddings=4096
    )
    config = engine_config(directory, backend="native", limits=LONG)
    runner = make_runner(config, dp=0, tp=0, group=None)
    jobs = [job_of(n, seed=n) for n in (1500, 1290, 255)]
    run(runner, jobs, chunk=400, joins=True)
    for job in jobs:
        np.testing.assert_allclose(distributions(job), plain(directory, job), atol=FP32_ATOL)


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_bf16_logits_are_as_near_as_those_of_transformers(
    tiny_model: Callable[[str], Path], family: str
) -> None:
    directory = tiny_model(family)
    errors = {}
    for backend in ("hf", "native", "eager"):
        config = engine_config(directory, backend=backend, dtype="bf16")
        job = job_of(60, seed=1, new_tokens=1)
        run(make_runner(config, dp=0, tp=0, group=None), [job], chunk=16)
        errors[backend] = np.abs(distributions(job) - plain(directory, job)).mean()
    assert max(errors["native"], errors["eager"]) < BF16_MARGIN * errors["hf"], errors


@pytest.mark.parametrize("family", ["llama", "qwen2", "gemma2"])
def test_int4_weights_in_cpp_are_those_of_the_definition(
    tiny_model: Callable[[str], Path], family: str
) -> None:
    found = []
    for backend in ("native", "eager"):
        config = engine_config(tiny_model(family), backend=backend, weights="int4")
        runner = make_runner(config, dp=0, tp=0, group=None)
        assert runner.info.weight_form == "int4"
        job = job_of(50, seed=2, new_tokens=1)
        run(runner, [job], chunk=20)
        found.append(distributions(job))
    difference = np.abs(found[0] - found[1])
    assert difference.mean() < INT8_MEAN and np.quantile(difference, 0.99) < INT8_HIGH


def test_the_code_for_amx_multiplies_as_that_for_avx512_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the instructions emulated; steps of 16 rows and more take them."""
    directory = tiny.make_model(tmp_path, "llama", intermediate_size=128)
    found = []
    for defines in ((), ("QD_EMULATE_AMX",)):
        monkeypatch.setattr(native, "load_library", lambda home, d=defines: load_library(home, *d))
        runner = make_runner(engine_config(directory, dtype="bf16"), dp=0, tp=0, group=None)
        jobs = [job_of(n, seed=n, new_tokens=1) for n in (77, 18, 3)]
        run(runner, jobs)
        found.append(np.concatenate([distributions(job) for job in jobs]))
    difference = np.abs(found[0] - found[1])
    assert 0 < difference.max() < 0.1 and difference.mean() < 0.01


def test_auto_takes_int4_for_small_steps_and_plain_for_large_ones(
    tiny_model: Callable[[str], Path],
) -> None:
    def answer(weights: str, length: int) -> np.ndarray:
        config = engine_config(tiny_model("llama"), weights=weights)
        job = job_of(length, seed=4, new_tokens=1)
        runner = make_runner(config, dp=0, tp=0, group=None)
        assert runner.info.weight_form == weights
        run(runner, [job])
        return distributions(job)

    np.testing.assert_array_equal(answer("auto", AUTO_TOKENS), answer("int4", AUTO_TOKENS))
    np.testing.assert_array_equal(answer("auto", AUTO_TOKENS + 1), answer("plain", AUTO_TOKENS + 1))


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("weights", ["plain", "int4"])
def test_a_row_is_bit_for_bit_the_same_in_every_batch(
    tiny_model: Callable[[str], Path], dtype: str, weights: str
) -> None:
    config = engine_config(
        tiny_model("qwen3"), dtype=dtype, weights=weights, deterministic=True, threads=2
    )
    runner = make_runner(config, dp=0, tp=0, group=None)
    alone = job_of(90, seed=5, new_tokens=12)
    run(runner, [alone], chunk=512)
    for seed, chunk in ((1, 1), (2, 13), (3, 64)):
        same = job_of(90, seed=5, new_tokens=12)
        others = [job_of(n, seed=seed + n) for n in (3, 17, 50, 61, 9)]
        run(runner, [*others[:3], same, *others[3:]], chunk=chunk, joins=True)
        assert same.output_ids == alone.output_ids
        np.testing.assert_array_equal(distributions(same), distributions(alone))
