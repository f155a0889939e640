"""The transformers backend takes new weights; then it says what a fresh start says."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.messages import SamplingParams
from engine.model.memory import Storages
from engine.model.runner import ModelRunner, make_runner
from engine.weights.checkpoint import Checkpoint, WeightError
from engine.weights.groups import Groups
from engine.weights.update import Stager
from tests.engine.model import tiny
from tests.engine.model.conftest import engine_config
from tests.engine.model.driver import Driver

GREEDY = SamplingParams(temperature=0.0, max_new_tokens=24, ignore_eos=True)
PROMPTS = [[5, 9, 20, 33], [40, 41], list(range(60, 90))]


def runner_of(directory: Path, **settings: object) -> ModelRunner:
    config = engine_config(directory, backend="hf", **settings)
    return make_runner(config, dp=0, tp=0, group=None, epoch=1)


def answers(runner: ModelRunner) -> list[list[int]]:
    return Driver(runner).generate(PROMPTS, GREEDY)


def update(runner: ModelRunner, *paths: Path) -> None:
    stager = Stager(runner.weights, Groups("cpu"), spools=False, dp=0)
    stager.stage("s", map(str, paths))
    assert stager.commit("s")


@pytest.fixture
def another(tmp_path: Path) -> Callable[[str], Path]:
    return lambda family: tiny.make_model(tmp_path / f"{family}-1", family, seed=1)


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_after_an_update_it_speaks_like_a_fresh_start_on_that_checkpoint(
    tiny_model, another, family
):
    old, new = tiny_model(family), another(family)
    runner = runner_of(old)
    before = answers(runner)
    update(runner, new)
    assert answers(runner) == answers(runner_of(new)) != before
    update(runner, new)  # E27: packing twice is packing once
    assert answers(runner) == answers(runner_of(new))
    update(runner, old)
    assert answers(runner) == before


def test_in_bf16_the_weights_are_rounded_as_at_a_start(tiny_model, another):
    runner = runner_of(tiny_model("llama"), dtype="bf16")
    new = another("llama")
    update(runner, new)
    fresh = runner_of(new, dtype="bf16")
    for name, live in runner.weights.live.items():
        assert torch.equal(live, fresh.weights.live[name])
    assert answers(runner) == answers(fresh)


def test_storages_stay_where_they_are(tiny_model, another):
    runner = runner_of(tiny_model("llama"))
    places = {name: tensor.data_ptr() for name, tensor in runner.weights.live.items()}
    update(runner, another("llama"))
    assert places == {name: tensor.data_ptr() for name, tensor in runner.weights.live.items()}


def test_a_model_does_not_read_its_file_any_more_once_it_serves(tmp_path):
    """A trainer may rewrite the file; live weights must not follow, or end in SIGBUS."""
    directory = tiny.make_model(tmp_path / "m", "llama")
    runner = runner_of(directory)
    before = answers(runner)
    file = directory / "model.safetensors"
    with open(file, "r+b") as handle:
        handle.write(b"\xff" * file.stat().st_size)
        handle.truncate(10)
    assert answers(runner) == before


def test_parameters_are_known_by_the_names_of_the_checkpoint(tiny_model):
    for family in tiny.FAMILIES:
        directory = tiny_model(family)
        weights = runner_of(directory).weights
        assert weights.required <= Checkpoint(directory).specs.keys()
        for spec in Checkpoint(directory).specs.values():
            weights.check(spec)


def test_a_copy_of_a_tied_weight_is_accepted_and_changes_nothing(tiny_model, tmp_path):
    directory = tiny_model("qwen2")
    runner = runner_of(directory)
    before = answers(runner)
    tensors = load_file(directory / "model.safetensors")
    tensors["lm_head.weight"] = torch.zeros_like(tensors["model.embed_tokens.weight"])
    save_file(tensors, tmp_path / "with-copy.safetensors")
    update(runner, tmp_path / "with-copy.safetensors")
    assert answers(runner) == before


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda t: {"no.such.weight": t}, "no parameter no.such.weight"),
        (lambda t: {"model.norm.weight": t[:3].clone()}, r"shape \[3\], the model's is \[64\]"),
        (lambda t: {"model.norm.weight": t.to(torch.int64)}, "dtype I64"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(tiny_model, tmp_path, change, match):
    runner = runner_of(tiny_model("llama"))
    tensor = load_file(tiny_model("llama") / "model.safetensors")["model.norm.weight"]
    save_file(change(tensor), tmp_path / "bad.safetensors")
    stager = Stager(runner.weights, Groups("cpu"), spools=False, dp=0)
    with pytest.raises(WeightError, match=match):
        stager.stage("s", [str(tmp_path / "bad.safetensors")])


def test_values_are_read_by_name(tiny_model):
    runner = runner_of(tiny_model("llama"))
    expected = load_file(tiny_model("llama") / "model.safetensors")["model.norm.weight"]
    assert runner.weights.read("model.norm.weight", 5) == expected[:5].tolist()
    with pytest.raises(WeightError, match="no parameter"):
        runner.weights.read("model.norm", 5)


def test_memory_goes_and_comes_back_under_the_same_tensors(tiny_model, another):
    """C22: what was released comes back at the same addresses, as zeros; after a reload it speaks
    as before."""
    directory = tiny_model("llama")
    runner = runner_of(directory)
    before = answers(runner)
    live = runner.weights.live["model.norm.weight"]
    address = live.data_ptr()
    for tag in ("weights", "kv_cache"):
        runner.release(tag)
    for tag in ("weights", "kv_cache"):
        runner.restore(tag)
    assert live.data_ptr() == address and not live.any()
    update(runner, directory)
    assert answers(runner) == before


def test_released_pages_go_back_to_the_system():
    tensor = torch.ones(64 * 2**20, dtype=torch.uint8)
    process = psutil.Process()
    before = process.memory_info().rss
    storages = Storages([tensor])
    storages.release()
    assert before - process.memory_info().rss > 60 * 2**20
    storages.restore()
    assert not tensor.any()


@pytest.mark.model
def test_every_tensor_of_the_embedded_model_is_a_parameter(embedded_model):
    runner = runner_of(embedded_model, dtype="bf16")
    assert runner.weights.required == Checkpoint(embedded_model).specs.keys()
