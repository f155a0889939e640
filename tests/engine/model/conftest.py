"""Tiny models on disk, made once per run, and plain transformers as the truth."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from engine.config import EngineConfig, Limits, home_from_env
from tests.engine.model import tiny

HOME = home_from_env(os.environ)  # keeps the built C++ operators from run to run
EMBEDDED = HOME / "models" / "SmolLM2-135M-Instruct"


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The directory of a tiny model by family."""
    made: dict[str, Path] = {}

    def directory(family: str) -> Path:
        if family not in made:
            made[family] = tiny.make_model(tmp_path_factory.mktemp(family), family)
        return made[family]

    return directory


@pytest.fixture(scope="session")
def embedded_model() -> Path:
    if not EMBEDDED.exists():
        pytest.fail("the embedded model is missing: run `manage.py model pull`")
    return EMBEDDED.resolve()


def engine_config(directory: Path, **settings: object) -> EngineConfig:
    """fp32, one thread, 8-token blocks."""
    fields: dict[str, object] = {
        "home": str(HOME),
        "model_path": str(directory),
        "dtype": "fp32",
        "threads": 1,
        "limits": Limits(kv_tokens=8192, block_tokens=8),
        **settings,
    }
    return EngineConfig(**fields)  # type: ignore[arg-type]


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> None:
    torch.set_num_threads(1)
