"""The C++ operators are built once, and where they cannot be the eager decoder serves."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from engine.model import native_build
from engine.model.native_build import load_library
from engine.model.runner import make_runner
from tests.engine.model import tiny
from tests.engine.model.conftest import HOME, engine_config
from tests.engine.model.driver import GREEDY, Driver


def test_a_second_start_finds_what_the_first_built() -> None:
    assert load_library(HOME) is not None
    built = {path: path.stat().st_mtime_ns for path in (HOME / "native").glob("*.so")}
    assert load_library(HOME) is not None
    assert built == {path: path.stat().st_mtime_ns for path in (HOME / "native").glob("*.so")}


def test_without_a_compiler_the_eager_decoder_serves_and_says_why(
    tiny_model: Callable[[str], Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setenv("PATH", "")
    config = engine_config(tiny_model("llama"), home=str(tmp_path))
    assert make_runner(config, dp=0, tp=0, group=None).info.backend == "eager"
    assert "no C++ compiler in PATH" in caplog.text


def test_a_compiler_that_fails_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    broken = tmp_path / "g++"
    broken.write_text("#!/bin/sh\n[ $1 = --version ] || { echo no luck >&2; exit 1; }\n")
    broken.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert load_library(tmp_path) is None
    assert "the compiler failed: no luck" in caplog.text


def test_a_cpu_that_lacks_features_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(native_build, "NEEDED", frozenset({"avx512f", "avx4096"}))
    assert load_library(tmp_path) is None
    assert "this CPU lacks avx4096" in caplog.text


def test_heads_that_do_not_fill_registers_run_eagerly(tmp_path: Path) -> None:
    directory = tiny.make_model(tmp_path, "llama", head_dim=8)
    answers = []
    for backend in ("native", "hf"):
        runner = make_runner(engine_config(directory, backend=backend), dp=0, tp=0, group=None)
        answers.append(Driver(runner).generate([[5, 6, 7, 8]], GREEDY))
        assert runner.info.backend == ("eager" if backend == "native" else "hf")
    assert answers[0] == answers[1]
