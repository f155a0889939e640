"""Tensor parallel: real gloo ranks compute what one rank computes."""

from __future__ import annotations

import itertools
import json
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from engine.config import EngineConfig
from engine.errors import ConfigError
from engine.messages import LogprobParams
from engine.model.layout import Shard, layout
from engine.model.loader import ModelDirectory, open_directory
from engine.model.runner import make_runner
from engine.model.spec import cover
from engine.scheduler.plan import StepPlan
from tests.engine.model import tiny
from tests.engine.model.conftest import engine_config
from tests.engine.model.driver import Driver, Job

ATOL = 2e-4  # fp32; sums over ranks run in another order


def record(config: EngineConfig) -> tuple[list[StepPlan], list[list[tuple[Any, Any]]]]:
    """Plans of a mixed, chunked batch on one rank, and what that rank answered."""
    driver = Driver(make_runner(config, dp=0, tp=0, group=None), chunk=7)
    source = random.Random(3)
    plans, answers = [], []
    for length in (1, 9, 30):
        prompt = [source.randrange(3, tiny.VOCAB_SIZE) for _ in range(length)]
        job = driver.begin(Job(prompt_ids=prompt, options={"logprob": LogprobParams()}))
        for _ in range(4):
            plans.append(driver.step())
            answers.append([(row.token_id, row.logprob) for row in driver.answer.rows])
        assert job.results
    return plans, answers


def run_ranks(
    tmp_path: Path, configs: dict[str, EngineConfig], size: int, *, idle_s: float = 0.0
) -> list[list[list[tuple[Any, Any]]]]:
    """Results of rank 0 for each config, as ``tp_rank`` prints them."""
    paths = []
    for name, config in configs.items():
        grouped = msgspec.structs.replace(config, tp=size, run_dir=str(tmp_path))
        paths.append(tmp_path / f"{name}.json")
        paths[-1].write_bytes(grouped.to_json())
    command = [sys.executable, "-m", "tests.engine.model.tp_rank", str(tmp_path / "plans")]
    ranks = [
        subprocess.Popen(
            [*command, str(rank), str(idle_s), *map(str, paths)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(size)
    ]
    outputs = [rank.communicate(timeout=120) for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0] * size, outputs
    return [json.loads(line) for line in outputs[0][0].splitlines()]


def assert_alike(mine: list[list[Any]], truth: list[list[Any]]) -> None:
    for rows, expected in zip(mine, truth, strict=True):
        assert [token for token, _ in rows] == [token for token, _ in expected]
        for (_, logprob), (_, value) in zip(rows, expected, strict=True):
            assert logprob == (None if value is None else pytest.approx(value, abs=ATOL))


def test_two_ranks_answer_like_one_for_every_family(
    tiny_model: Callable[[str], Path], tmp_path: Path
) -> None:
    configs, truths = {}, []
    for family, backend in itertools.product(tiny.FAMILIES, ("native", "eager")):
        name = f"{family}-{backend}"
        configs[name] = engine_config(tiny_model(family), backend=backend)
        plans, truth = record(configs[name])
        (tmp_path / f"plans-{name}").write_bytes(msgspec.json.encode(plans))
        truths.append(truth)
    for mine, truth in zip(run_ranks(tmp_path, configs, 2), truths, strict=True):
        assert_alike(mine, truth)


def test_a_group_that_was_idle_beyond_its_timeout_still_answers(
    tiny_model: Callable[[str], Path], tmp_path: Path
) -> None:
    config = engine_config(tiny_model("llama"), collective_timeout_s=2.0)
    plans, truth = record(config)
    (tmp_path / "plans-llama").write_bytes(msgspec.json.encode(plans))
    (mine,) = run_ranks(tmp_path, {"llama": config}, 2, idle_s=3.0)
    assert_alike(mine, truth)


@pytest.mark.model
def test_three_ranks_serve_the_embedded_model(embedded_model: Path, tmp_path: Path) -> None:
    config = engine_config(embedded_model)
    plans, truth = record(config)
    (tmp_path / "plans-smol").write_bytes(msgspec.json.encode(plans))
    (mine,) = run_ranks(tmp_path, {"smol": config}, 3)
    assert_alike(mine, truth)


def test_heads_that_do_not_divide_are_refused_with_the_valid_sizes(tmp_path: Path) -> None:
    smol = {"num_attention_heads": 9, "num_key_value_heads": 3, "hidden_size": 144}
    directory = tiny.make_model(tmp_path, "llama", intermediate_size=96, **smol)
    spec = cover(open_directory(directory))
    assert spec is not None
    with pytest.raises(ConfigError, match="tp 2 does not divide .* valid sizes: 1, 3"):
        Shard.of(spec, 0, 2)


def test_the_ranks_of_a_group_hold_every_weight_once(tiny_model: Callable[[str], Path]) -> None:
    spec = cover(open_directory(tiny_model("qwen2")))
    assert spec is not None
    shards = [layout(spec, Shard.of(spec, rank, 2)) for rank in range(2)]
    for name in ("layers.0.qkv", "layers.1.down", "layers.0.gate", "head", "layers.0.qkv_bias"):
        for first, second in zip(shards[0][name], shards[1][name], strict=True):
            cut = first.rows or first.columns
            other = second.rows or second.columns
            assert cut is not None and other is not None
            assert cut[0] == 0 and cut[1] == other[0]
            assert other[1] == first.shape[0 if first.rows else 1]


def test_more_ranks_than_kv_heads_share_them() -> None:
    parts = []
    for rank in range(4):
        config = {"num_attention_heads": 4, "num_key_value_heads": 2}
        spec = cover_of(config)
        parts.append(layout(spec, Shard.of(spec, rank, 4))["layers.0.qkv"][1].rows)
    assert parts == [(0, 16), (0, 16), (16, 32), (16, 32)]


def cover_of(overrides: dict[str, Any]) -> Any:
    config = tiny.family_config("llama", **overrides).to_dict()
    config["architectures"] = ["LlamaForCausalLM"]
    return cover(ModelDirectory(Path(), config, config, ()))
