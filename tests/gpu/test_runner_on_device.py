"""The runner on a CUDA device: every family answers as on the CPU, decode steps are replayed."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine.messages import SamplingParams
from engine.model.runner import make_runner
from tests.engine.model import tiny
from tests.engine.model.conftest import engine_config
from tests.engine.model.driver import Driver

pytestmark = pytest.mark.gpu
GREEDY = SamplingParams(temperature=0.0, max_new_tokens=24)
PROMPTS = [[5], [9, 8, 7], list(range(20, 60)), list(range(100, 131))]


@pytest.mark.parametrize("backend", ["native", "hf"])
@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_greedy_ids_in_fp32_are_those_of_the_cpu(tmp_path: Path, family: str, backend: str):
    directory = tiny.make_model(tmp_path, family)
    answers = []
    for device in ("cpu", "cuda"):
        config = engine_config(directory, backend=backend, device=device)
        runner = make_runner(config, dp=0, tp=0, group=None)
        answers.append(Driver(runner, chunk=16).generate(PROMPTS, GREEDY))
        runner.close()
    assert answers[0] == answers[1]
