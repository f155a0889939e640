"""Updates of the live weights of each backend, and memory that goes and comes back."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors.torch import save_file

from engine.messages import LogprobParams
from engine.model.loader import SINGLE, Checkpoint
from engine.model.runner import ModelRunner, make_runner
from engine.weights.groups import Groups
from engine.weights.update import Stager
from tests.engine.model.conftest import engine_config
from tests.engine.model.driver import Driver, Job


@pytest.mark.parametrize("backend", ["hf", "native", "eager"])
def test_weights_of_a_later_epoch_lie_over_the_models_own(
    tiny_model: Callable[[str], Path], tmp_path: Path, backend: str
) -> None:
    """E27: An update of some layers: what it names is new, all else as before; twice is as once."""
    source = tiny_model("llama")
    read = Checkpoint(source).read
    names = [f"model.layers.1.mlp.{part}_proj.weight" for part in ("gate", "up")]
    save_file({name: read(name) * 3.0 for name in names}, tmp_path / "update.safetensors")
    whole = tmp_path / "whole"
    shutil.copytree(source, whole)
    changed = {name: read(name) for name in Checkpoint(source).names}
    save_file(changed | {name: read(name) * 3.0 for name in names}, whole / "model.safetensors")
    assert _candidates(source, backend) != _candidates(whole, backend)
    for repeats in (1, 2):
        runner = make_runner(engine_config(source, backend=backend), dp=0, tp=0, group=None)
        stager = Stager(runner.weights, Groups("cpu"), spools=False, dp=0)
        for _ in range(repeats):
            stager.stage("update", [str(tmp_path / "update.safetensors")])
            stager.commit("update")
        assert _candidates(whole, backend, runner) == _candidates(whole, backend)


def _candidates(directory: Path, backend: str, runner: ModelRunner | None = None) -> object:
    """The best tokens after a prompt, with their exact logprobs."""
    config = engine_config(directory, backend=backend)
    job = Job(prompt_ids=[5, 6, 7], options={"logprob": LogprobParams(top_num=3)})
    driver = Driver(runner or make_runner(config, dp=0, tp=0, group=None))
    driver.begin(job)
    driver.step()
    driver.end(job)
    driver.step()
    return job.results[0].top


@pytest.mark.parametrize("backend", ["native", "eager"])
@pytest.mark.parametrize("weights", ["plain", "int4"])
@pytest.mark.parametrize(
    "name",
    [
        "model.layers.0.self_attn.k_proj.weight",
        "model.layers.1.self_attn.q_proj.bias",
        "model.layers.0.mlp.up_proj.weight",
        "model.layers.1.mlp.down_proj.weight",
        "model.layers.1.input_layernorm.weight",
        "model.embed_tokens.weight",
    ],
)
def test_one_tensor_of_a_fused_matrix_can_come_alone(
    tiny_model: Callable[[str], Path], tmp_path: Path, backend: str, weights: str, name: str
) -> None:
    """Afterwards the model is what a fresh start on the changed checkpoint is, bit for bit."""
    source = tiny_model("qwen2")
    read = Checkpoint(source).read
    changed = read(name) * 1.5
    save_file({name: changed}, tmp_path / "one.safetensors")
    whole = tmp_path / "whole"
    shutil.copytree(source, whole)
    save_file({n: read(n) for n in Checkpoint(source).names} | {name: changed}, whole / SINGLE)
    updated, fresh = (
        make_runner(engine_config(path, backend=backend, weights=weights), dp=0, tp=0, group=None)
        for path in (source, whole)
    )
    before = _candidates(source, backend, updated)
    stager = Stager(updated.weights, Groups("cpu"), spools=False, dp=0)
    stager.stage("update", [str(tmp_path / "one.safetensors")])
    stager.commit("update")
    assert _candidates(source, backend, updated) == _candidates(whole, backend, fresh) != before
    values = changed.flatten()[:40].tolist()
    tolerance = 1e-5 if weights == "plain" else 0.25
    assert updated.weights.read(name, 40) == pytest.approx(values, abs=tolerance)
    assert fresh.weights.read(name, 40) == updated.weights.read(name, 40)


@pytest.mark.parametrize("backend", ["hf", "native", "eager"])
def test_released_memory_comes_back_at_the_same_place(
    tiny_model: Callable[[str], Path], backend: str
) -> None:
    source = tiny_model("llama")
    runner = make_runner(engine_config(source, backend=backend), dp=0, tp=0, group=None)
    before = _candidates(source, backend, runner)
    stager = Stager(runner.weights, Groups("cpu"), spools=False, dp=0)
    for tag in ("weights", "kv_cache"):
        runner.release(tag)
        runner.restore(tag)
    stager.stage("again", [str(source)])
    stager.commit("again")
    assert _candidates(source, backend, runner) == before
