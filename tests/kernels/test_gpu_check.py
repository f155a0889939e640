"""Without a GPU the GPU check and ``pytest -m gpu`` say so; nothing of it is skipped silently."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.gpu.conftest import pytest_ignore_collect

ROOT = Path(__file__).parents[2]
without_device = {"CUDA_VISIBLE_DEVICES": "", "PYTHON": sys.executable}


def run(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command,
        cwd=ROOT,
        env=os.environ | without_device,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_the_check_fails_with_a_sentence():
    done = run("tests/gpu/check", "--no-speed")
    assert done.returncode == 2
    assert done.stdout == ""
    assert f"needs a CUDA device; torch {torch.__version__} sees none" in done.stderr


def test_pytest_does_not_collect_the_gpu_tests_unasked(pytestconfig: pytest.Config):
    assert pytest_ignore_collect(pytestconfig)


def test_asked_for_the_gpu_tests_pytest_fails():
    done = run(sys.executable, "-m", "pytest", "tests/gpu", "-m", "gpu", "-q")
    assert done.returncode == 1, done.stdout + done.stderr
    assert "needs a CUDA device" in done.stdout
