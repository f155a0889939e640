"""Faults of a model directory become sentences that name what is missing."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from engine.config import Limits
from engine.errors import ConfigError
from engine.model.loader import Checkpoint, open_directory
from engine.model.runner import make_runner
from tests.engine.model import tiny
from tests.engine.model.conftest import engine_config


def test_a_directory_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no model directory at .*model pull"):
        open_directory(tmp_path / "nothing")


def test_a_directory_without_a_config(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"has no config\.json"):
        open_directory(tmp_path)


def test_a_config_that_is_not_json(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ConfigError, match="is not JSON"):
        open_directory(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ConfigError, match="holds a list"):
        open_directory(tmp_path)


def test_end_tokens_come_from_the_generation_config_first(tmp_path: Path) -> None:
    tiny.make_scripted_dir(tmp_path)
    assert open_directory(tmp_path).eos_token_ids == (tiny.EOS_ID,)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [5, 6]}))
    assert open_directory(tmp_path).eos_token_ids == (5, 6)


def test_shards_are_read_by_the_index_and_a_lost_one_is_named(tmp_path: Path) -> None:
    save_file({"a": torch.ones(2)}, tmp_path / "one.safetensors")
    save_file({"b": torch.zeros(3)}, tmp_path / "two.safetensors")
    index = {"weight_map": {"a": "one.safetensors", "b": "two.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    checkpoint = Checkpoint(tmp_path)
    assert checkpoint.names == {"a", "b"}
    assert checkpoint.read("b").tolist() == [0.0, 0.0, 0.0]
    with pytest.raises(ConfigError, match="has no tensor c"):
        checkpoint.read("c")
    (tmp_path / "two.safetensors").unlink()
    with pytest.raises(ConfigError, match=r"lacks two\.safetensors"):
        Checkpoint(tmp_path)


def test_weights_that_are_missing_or_damaged(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"neither model\.safetensors"):
        Checkpoint(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"not a tensor file")
    with pytest.raises(ConfigError, match="cannot be read"):
        Checkpoint(tmp_path)


@pytest.mark.parametrize("backend", ["hf", "native", "eager"])
def test_a_checkpoint_that_lacks_a_tensor_is_refused(
    tiny_model: Callable[[str], Path], tmp_path: Path, backend: str
) -> None:
    source = tiny_model("llama")
    checkpoint = Checkpoint(source)
    lost = "model.layers.1.mlp.up_proj.weight"
    save_file(
        {name: checkpoint.read(name) for name in checkpoint.names if name != lost},
        tmp_path / "model.safetensors",
        metadata={"format": "pt"},
    )
    (tmp_path / "config.json").write_text((source / "config.json").read_text())
    with pytest.raises(ConfigError, match=lost):
        make_runner(engine_config(tmp_path, backend=backend), dp=0, tp=0, group=None)


def test_a_context_beyond_the_positions_is_refused(tmp_path: Path) -> None:
    tiny.make_scripted_dir(tmp_path, max_context=64)
    config = engine_config(tmp_path, backend="scripted", limits=Limits(max_context=65))
    with pytest.raises(ConfigError, match="max_context is 65; .* reaches 64"):
        make_runner(config, dp=0, tp=0, group=None)
