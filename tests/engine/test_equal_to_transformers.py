"""SmolLM2 in fp32: greedy ids are plain transformers', however the scheduler computed them.

The real core drives the real runner in this process; transformers generates each prompt alone. The
fast suite takes 8 prompts, ``make soak`` 100.
"""

from __future__ import annotations

import random

import pytest
import torch

from engine import messages as m
from engine.config import EngineConfig, Limits
from engine.model.runner import ModelRunner, make_runner
from engine.scheduler.core import SchedulerCore
from tests.engine.model.conftest import EMBEDDED, HOME

pytestmark = pytest.mark.model
NEW_TOKENS = 12
BACKENDS = ("native", pytest.param("hf", marks=pytest.mark.soak))
COUNTRIES = (
    "France Japan Brazil Kenya Norway Canada India Mexico Egypt Spain "
    "Poland Chile Ghana Turkey Nepal Cuba Peru Iran Italy Greece"
)
QUESTIONS = (
    "What is the capital of {}?",
    "Write one sentence about the weather in {}.",
    "List three foods from {}:\n1.",
    "The history of {} began when",
    "def visit_{}(year):\n    ",
)
PROMPTS = [question.format(country) for country in COUNTRIES.split() for question in QUESTIONS]


@pytest.fixture(
    scope="module",
    params=[pytest.param(8, id="8"), pytest.param(100, id="100", marks=pytest.mark.soak)],
)
def truth(request) -> list[tuple[list[int], list[int]]]:
    """(prompt ids, the ids that transformers adds) of each prompt."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(EMBEDDED)
    model = AutoModelForCausalLM.from_pretrained(EMBEDDED, dtype=torch.float32)
    prompts = random.Random(5).sample(PROMPTS, request.param)
    answers = []
    for number, prompt in enumerate(prompts):
        if number % 2:
            chat = [{"role": "user", "content": prompt}]
            ids = tokenizer.apply_chat_template(chat, add_generation_prompt=True)["input_ids"]
        else:
            ids = tokenizer(prompt)["input_ids"]
        made = model.generate(
            torch.tensor([ids]), attention_mask=torch.ones(1, len(ids), dtype=torch.long),
            do_sample=False, max_new_tokens=NEW_TOKENS, min_new_tokens=NEW_TOKENS,
            temperature=None, top_p=None,
        )  # fmt: skip
        answers.append((ids, made[0, len(ids) :].tolist()))
    return answers


class Engine:
    """Core and runner in one loop."""

    def __init__(self, runner: ModelRunner, limits: Limits) -> None:
        self.runner = runner
        self.core = SchedulerCore(limits, runner.info, dp=0, stop_checker=lambda _: None)
        self._count = 0

    def answers(self, prompts: list[list[int]]) -> list[list[int]]:
        """All prompts submitted at once."""
        rids = []
        for ids in prompts:
            self._count += 1
            rids.append(f"r{self._count}")
            request = m.stamped(
                "inbox", m.TokenizedGenerateReqInput, rid=rids[-1], input_ids=ids,
                sampling=m.SamplingParams(
                    temperature=0.0, max_new_tokens=NEW_TOKENS, min_new_tokens=NEW_TOKENS
                ),
            )  # fmt: skip
            self.core.accept(request, 0.0)
        made: dict[str, list[int]] = {rid: [] for rid in rids}
        while (plan := self.core.plan(0.0)) is not None:
            self.core.commit(plan, self.runner.forward(plan), 0.0)
            for row in self.core.take_rows():
                made[row.rid] += row.output_ids
        self.core.check_integrity()
        return [made[rid] for rid in rids]


def make_engine(backend: str, **limits: int) -> Engine:
    config = EngineConfig(
        home=str(HOME), model_path=str(EMBEDDED), dtype="fp32", threads=2, backend=backend,
        limits=Limits(**{"kv_tokens": 16_384, "max_running": 128, **limits}),
    )  # fmt: skip
    return Engine(make_runner(config, dp=0, tp=0, group=None), config.limits)


@pytest.mark.parametrize("backend", BACKENDS)
def test_alone_in_a_batch_and_behind_a_cached_prefix(truth, backend):
    engine = make_engine(backend)
    prompts, expected = zip(*truth, strict=True)
    assert [engine.answers([ids])[0] for ids in prompts] == list(expected)
    engine.core.flush_cache()
    assert engine.answers(list(prompts)) == list(expected)
    before = engine.core.load().cached_tokens
    assert engine.answers(list(prompts)) == list(expected)
    assert engine.core.load().cached_tokens > before


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("chunk", [1, 7, 64])
def test_with_chunked_prefill(truth, backend, chunk):
    prompts, expected = zip(*truth, strict=True)
    engine = make_engine(backend, chunk_tokens=chunk)
    assert engine.answers(list(prompts)) == list(expected)


@pytest.mark.parametrize("backend", BACKENDS)
def test_after_retraction(truth, backend):
    prompts, expected = zip(*truth, strict=True)
    engine = make_engine(backend, kv_tokens=160, block_tokens=4)
    assert engine.answers(list(prompts)) == list(expected)
    assert engine.core.load().retractions > 0
