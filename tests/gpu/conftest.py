"""These tests are collected by ``pytest -m gpu`` alone, and there they fail without a device."""

from __future__ import annotations

import pytest
import torch


def pytest_ignore_collect(config: pytest.Config) -> bool | None:
    return None if config.getoption("markexpr") == "gpu" else True


@pytest.fixture(scope="session", autouse=True)
def cuda_device() -> None:
    if not torch.cuda.is_available():
        pytest.fail(f"-m gpu needs a CUDA device; torch {torch.__version__} sees none")
