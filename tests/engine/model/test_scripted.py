"""The scripted model: what transport and load tests may rely on."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from engine.config import EngineConfig
from engine.messages import LogprobParams, SamplingParams
from engine.model.runner import ModelRunner, make_runner
from tests.engine.model import tiny
from tests.engine.model.driver import Driver, Job

LONG = SamplingParams(max_new_tokens=200, seed=1)


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return tiny.make_scripted_dir(tmp_path / "model")


@pytest.fixture
def tokenizer(directory: Path) -> Tokenizer:
    return Tokenizer.from_file(str(directory / "tokenizer.json"))


def runner_of(directory: Path, tp: int = 0, **settings: object) -> ModelRunner:
    config = EngineConfig(
        home=str(directory), model_path=str(directory), backend="scripted", **settings
    )  # type: ignore[arg-type]
    return make_runner(config, dp=0, tp=tp, group=None)


def answer(directory: Path, ids: list[int], sampling: SamplingParams = LONG) -> list[int]:
    return Driver(runner_of(directory)).generate([ids], sampling)[0]


def test_an_answer_is_words_until_the_length_limit(directory: Path, tokenizer: Tokenizer) -> None:
    output = answer(directory, tokenizer.encode("tell me").ids)
    text = tokenizer.decode(output)
    assert len(output) == 200
    assert text.isascii() and all(word.isalpha() for word in text.split())


def test_the_same_prompt_says_the_same_after_a_retraction(
    directory: Path, tokenizer: Tokenizer
) -> None:
    ids = tokenizer.encode("tell me").ids
    driver = Driver(runner_of(directory), chunk=3)
    job = driver.begin(Job(prompt_ids=ids, sampling=LONG))
    for _ in range(20):
        driver.step()
    driver.retract(job)
    driver.finish()
    assert job.output_ids == answer(directory, ids)
    assert answer(directory, ids) != answer(directory, tokenizer.encode("tell us").ids)


def test_directives_choose_the_text_and_the_end(directory: Path, tokenizer: Tokenizer) -> None:
    said = answer(directory, tokenizer.encode("please [[say hello you]] now").ids)
    assert tokenizer.decode(said) == "hello you"
    assert said[-1] == tiny.EOS_ID
    assert len(answer(directory, tokenizer.encode("[[eos 5]]").ids)) == 6
    echo = tokenizer.encode("again [[echo]]").ids
    assert answer(directory, echo) == [*echo, tiny.EOS_ID]


def test_ignore_eos_and_min_new_tokens_hold_the_end_back(
    directory: Path, tokenizer: Tokenizer
) -> None:
    ids = tokenizer.encode("[[eos 2]]").ids
    ignoring = SamplingParams(max_new_tokens=9, ignore_eos=True, seed=1)
    assert tiny.EOS_ID not in answer(directory, ids, ignoring)
    longer = answer(directory, ids, SamplingParams(max_new_tokens=9, min_new_tokens=5, seed=1))
    assert longer.index(tiny.EOS_ID) == 5


def test_a_step_takes_the_time_that_was_asked_for(directory: Path, tokenizer: Tokenizer) -> None:
    driver = Driver(runner_of(directory, scripted_step_s=0.01))
    driver.begin(Job(prompt_ids=tokenizer.encode("x").ids, sampling=LONG))
    began = time.perf_counter()
    driver.step()
    assert time.perf_counter() - began >= 0.01
    driver.begin(Job(prompt_ids=tokenizer.encode("[[sleep 0.03]]").ids, sampling=LONG))
    began = time.perf_counter()
    driver.step()
    assert time.perf_counter() - began >= 0.03


def test_a_script_can_fail_at_a_position(directory: Path, tokenizer: Tokenizer) -> None:
    driver = Driver(runner_of(directory))
    driver.begin(Job(prompt_ids=tokenizer.encode("[[fail 3]]").ids, sampling=LONG))
    with pytest.raises(RuntimeError, match="output position 3"):
        driver.finish()


def test_every_optional_field_is_as_long_as_it_should_be(
    directory: Path, tokenizer: Tokenizer
) -> None:
    ids = tokenizer.encode("some words of a prompt").ids
    options = {
        "logprob": LogprobParams(start_len=2, top_num=3, token_ids=(5, 6)),
        "return_entropy": True,
        "return_hidden_states": True,
    }
    driver = Driver(runner_of(directory), chunk=4)
    job = driver.begin(
        Job(
            prompt_ids=ids,
            sampling=SamplingParams(max_new_tokens=4, seed=1),
            options=options,
        )
    )
    driver.finish()
    inputs = [row.input_logprobs for row in job.results if row.input_logprobs is not None]
    assert [i for part in inputs for i in part.ids] == ids[2:]
    assert [v for part in inputs for v in part.values][0] is None
    assert sum(len(part.top.ids) for part in inputs if part.top) == len(ids) - 2
    sampled = [row for row in job.results if row.token_id is not None]
    assert len(sampled) == 4
    assert all(row.entropy is not None and row.logprob is not None for row in sampled)
    assert all(row.top and len(row.top[0]) == 3 for row in sampled)
    assert all(row.token_logprobs and row.token_logprobs[0] == [5, 6] for row in sampled)
    computed = len(ids) + 3
    assert sum(len(row.hidden or b"") for row in job.results) == computed * 4 * 4


def test_followers_sample_nothing(directory: Path, tokenizer: Tokenizer) -> None:
    driver = Driver(runner_of(directory, tp=1))
    job = driver.begin(Job(prompt_ids=tokenizer.encode("x").ids, sampling=LONG))
    driver.step()
    assert job.results[0].token_id is None


def test_the_scripted_backend_needs_no_torch() -> None:
    import subprocess

    code = "import sys, engine.model.scripted; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
