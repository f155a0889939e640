"""What the numbers of a run belong to: machine, versions, commit.

Path: __main__.py -> here -> the head of the JSON.
"""

from __future__ import annotations

import os
import platform
import subprocess
from importlib.metadata import version
from pathlib import Path
from typing import Any

import psutil

from engine.config import CHECKOUT

# vector and matrix units that the peers' and our kernels choose by
UNITS = ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "amx_bf16", "amx_int8", "asimd", "bf16")
OURS = ("torch", "transformers", "tokenizers", "pyzmq", "msgspec")


def describe_machine() -> dict[str, Any]:
    """``load`` is that of the last minute before the run: well above 0 means a noisy run."""
    return {
        "cpu": _cpu_field("model name") or platform.processor() or platform.machine(),
        "units": [unit for unit in UNITS if unit in _cpu_field("flags").split()],
        "cores": os.cpu_count(),
        "memory_gb": round(psutil.virtual_memory().total / 1e9, 1),
        "system": f"{platform.system()} {platform.release()}",
        "load": round(os.getloadavg()[0], 2),
    }


def our_versions() -> dict[str, str]:
    return {"python": platform.python_version()} | {name: version(name) for name in OURS}


def commit() -> str:
    """Hash of HEAD, with ``-dirty`` for changes beside it; "unknown" outside a checkout."""
    describe = ["git", "describe", "--always", "--abbrev=40", "--dirty", "--exclude=*"]
    done = subprocess.run(describe, cwd=CHECKOUT, capture_output=True, text=True, check=False)
    return done.stdout.strip() or "unknown"


def _cpu_field(name: str) -> str:
    path = Path("/proc/cpuinfo")
    for line in path.read_text().splitlines() if path.exists() else ():
        key, _, value = line.partition(":")
        if key.strip() == name:
            return value.strip()
    return ""
