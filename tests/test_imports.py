"""Import directions are a test: kernels <- engine <- console, never back (DESIGN 3)."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PICKLES = {"pickle", "dill", "cloudpickle", "marshal", "shelve"}
MAY_IMPORT_TORCH = (
    "kernels/",
    "engine/model/",
    "engine/scheduler/ranks.py",
    "engine/weights/",
    "engine/profiling/capture.py",
    "engine/dumps/",
)
# drivers that run under the interpreters of the bench's peers, not under ours
PEERS = "engine/bench/peers/"
PURE = (
    "engine/scheduler/core.py",
    "engine/scheduler/sequence.py",
    "engine/scheduler/blocks.py",
    "engine/scheduler/radix.py",
    "engine/detokenizer/incremental.py",
    "engine/detokenizer/regex_size.py",
    "engine/detokenizer/stops.py",
    "engine/detokenizer/text.py",
    "engine/scheduler/memory.py",
    "engine/latency.py",
    "engine/provenance.py",
    "engine/router/registry.py",
    "engine/router/dispatch.py",
    "engine/router/state.py",
)
IO_MODULES = {
    "zmq",
    "torch",
    "os",
    "sys",
    "socket",
    "subprocess",
    "asyncio",
    "threading",
    "time",
    "pathlib",
    "logging",
    "io",
    "tempfile",
}
FRONT_PACKAGES = {"engine.dumps", "engine.profiling"}  # `from engine.dumps import points`
CONSOLE_MAY_IMPORT = {
    "engine.client",
    "engine.config",
    "engine.messages",
    "engine.launch",
    "engine.errors",
    "engine.latency",  # pure
    "engine.runfile",
    "engine.tokenizer",
    "engine.process_guard",
    "engine.provenance",
    "engine.dumps.points",  # what may be asked for; pure
    "engine.profiling.spec",  # likewise
}


def python_files(*packages: str) -> list[Path]:
    return [path for package in packages for path in sorted((ROOT / package).rglob("*.py"))]


def our_files(*packages: str) -> list[Path]:
    return [path for path in python_files(*packages) if not path.is_relative_to(ROOT / PEERS)]


def imported(path: Path) -> set[str]:
    """Full dotted names of every import in a file, wherever it stands."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module)
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def roots(path: Path) -> set[str]:
    return {name.split(".")[0] for name in imported(path)}


@pytest.mark.parametrize(
    ("package", "banned"),
    [
        ("kernels", {"engine", "console", "django", "transformers", "zmq"}),
        ("engine", {"console", "django", "channels", "celery"}),
        ("console", {"torch", "triton", "zmq", "transformers", "kernels"}),
    ],
)
def test_imports_point_one_way(package, banned):
    for path in python_files(package):
        assert not roots(path) & banned, path


def test_the_console_knows_only_the_front_of_the_engine():
    for path in python_files("console"):
        for name in imported(path):
            if name.split(".")[0] == "engine" and name not in FRONT_PACKAGES:
                assert any(
                    name == ok or name.startswith(ok + ".") or name == "engine"
                    for ok in CONSOLE_MAY_IMPORT
                ), (path, name)


def test_only_the_wire_touches_zeromq():
    users = {
        str(path.relative_to(ROOT))
        for path in our_files("engine", "console", "kernels")
        if "zmq" in roots(path)
    }
    assert users == {"engine/wire.py"}


def test_torch_stays_where_tensors_are():
    for path in our_files("engine"):
        name = str(path.relative_to(ROOT))
        if roots(path) & {"torch", "triton", "transformers", "safetensors"}:
            assert name.startswith(MAY_IMPORT_TORCH), name


@pytest.mark.parametrize("name", PURE)
def test_the_pure_core_does_no_io(name):
    assert not roots(ROOT / name) & IO_MODULES


def test_nothing_pickles():
    for path in python_files("console", "engine", "kernels"):
        assert not roots(path) & PICKLES, path
        assert "torch.load(" not in path.read_text(), path
