"""What a rank does before its first request leaves no trace that a request could see."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from engine.config import Limits
from engine.messages import SamplingParams
from engine.model.runner import make_runner, warm_up
from tests.engine.model.conftest import engine_config
from tests.engine.model.driver import Driver


@pytest.mark.parametrize("backend", ["hf", "native"])
@pytest.mark.parametrize("kv_tokens", [16, 4096])
def test_answers_after_a_warm_up_are_those_without(
    tiny_model: Callable[[str], Path], backend: str, kv_tokens: int
) -> None:
    limits = Limits(kv_tokens=kv_tokens, block_tokens=8)
    config = engine_config(tiny_model("llama"), backend=backend, limits=limits)
    plain, warm = (make_runner(config, dp=0, tp=0, group=None) for _ in range(2))
    warm_up(warm)
    sampling = SamplingParams(temperature=0.0, max_new_tokens=8)
    prompts = [[5, 6, 7]]
    assert Driver(warm).generate(prompts, sampling) == Driver(plain).generate(prompts, sampling)
