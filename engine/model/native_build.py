"""Builds the C++ operators of ``csrc/`` once per machine and loads them.

Path: native.py -> here. The library lands in ``QUARTERDECK_HOME/native`` under the hash of its
sources, its compiler and this CPU, so a changed file or another machine builds its own. Without
AVX-512 or a compiler there is no library: the eager decoder runs instead, and the reason is logged.
"""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import logging
import shutil
import subprocess
import tempfile
from pathlib import Path

SOURCES = Path(__file__).parent / "csrc"
FLAGS = ("-O3", "-march=native", "-std=c++17", "-fPIC", "-shared", "-pthread")
NEEDED = frozenset({"avx512f", "avx512bw", "avx512dq", "avx512vl", "f16c"})

_log = logging.getLogger(__name__)


def load_library(home: Path, *defines: str) -> ctypes.CDLL | None:
    """The library, built if need be; None (and one warning) where it cannot be.

    ``defines`` are macros; QD_EMULATE_AMX lets the code for AMX run without it.
    """
    reason = _obstacle()
    if reason is None:
        try:
            return ctypes.CDLL(str(_build(home / "native", [f"-D{name}" for name in defines])))
        except subprocess.CalledProcessError as error:
            reason = f"the compiler failed: {(error.stderr.strip() or str(error)).splitlines()[-1]}"
    _log.warning("no C++ operators (%s): the eager decoder runs instead", reason)
    return None


def _obstacle() -> str | None:
    missing = NEEDED - cpu_flags()
    if missing:
        return f"this CPU lacks {', '.join(sorted(missing))}"
    return None if _compiler() else "no C++ compiler in PATH"


def cpu_flags() -> frozenset[str]:
    """Features of this CPU by Linux's names; empty where there is no /proc/cpuinfo."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return frozenset()
    return frozenset(
        next((line.split(":")[1] for line in lines if line.startswith("flags")), "").split()
    )


def _compiler() -> str | None:
    return shutil.which("g++") or shutil.which("clang++")


def _build(directory: Path, macros: list[str]) -> Path:
    """Several ranks start at once: one builds, the others wait for it."""
    directory.mkdir(parents=True, exist_ok=True)
    target = directory / f"quarterdeck-{_fingerprint(macros)}.so"
    with (directory / "build.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not target.exists():
            _compile(target, macros)
    return target


def _fingerprint(macros: list[str]) -> str:
    digest = hashlib.sha256(" ".join([*FLAGS, *macros]).encode())
    for path in sorted(SOURCES.iterdir()):
        digest.update(path.read_bytes())
    compiler = _compiler()
    assert compiler is not None
    version = subprocess.run([compiler, "--version"], capture_output=True, check=True)
    digest.update(version.stdout)
    digest.update(" ".join(sorted(cpu_flags())).encode())
    return digest.hexdigest()[:16]


def _compile(target: Path, macros: list[str]) -> None:
    compiler = _compiler()
    assert compiler is not None
    _log.info("building the C++ operators, once per machine: about 10 s")
    with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
        made = Path(scratch) / target.name
        subprocess.run(
            [compiler, *FLAGS, *macros, str(SOURCES / "api.cpp"), "-o", str(made)],
            capture_output=True,
            text=True,
            check=True,
        )
        made.rename(target)
