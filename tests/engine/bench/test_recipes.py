from __future__ import annotations

import sys
from pathlib import Path

import pytest

from engine.bench.recipes import LLAMA_CPP, TRANSFORMERS, NotMade, interpreter, wanted_requirements


def test_requirements_that_text_needs_not_are_left_out():
    given = [
        "torch==2.13.0+cpu; platform_machine == 'x86_64'",
        "torchaudio; platform_machine != 's390x'",
        "opencv-python-headless>=4.13.0",
        "torch_ops>=1",
        "numpy",
        "scipy; extra == 'bench'",
    ]
    assert wanted_requirements(given) == ["torch_ops>=1", "numpy"]


def test_transformers_runs_under_our_own_interpreter(tmp_path):
    assert interpreter(tmp_path, TRANSFORMERS) == Path(sys.executable)


def test_a_peer_that_is_not_there_says_why(tmp_path):
    with pytest.raises(NotMade, match="--make-peers"):
        interpreter(tmp_path, LLAMA_CPP)
    (tmp_path / "llama.cpp.failed").write_text("pip install failed\n")
    with pytest.raises(NotMade, match="pip install failed"):
        interpreter(tmp_path, LLAMA_CPP)
    (tmp_path / "llama.cpp.failed").unlink()
    (tmp_path / "llama.cpp.made").touch()
    assert interpreter(tmp_path, LLAMA_CPP) == tmp_path / "llama.cpp" / "bin" / "python"
