"""A whole ``manage.py serve`` as a child, for the rows that measure more than the engine.

Path: startup.py, streaming.py -> here -> manage.py serve.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from pathlib import Path

from engine.config import CHECKOUT

READY_S = 120.0
STOP_S = 20.0


class NotServing(Exception):
    """``serve`` ended or was not ready in time; the message names its log."""


def environment_of(home: Path, model_path: str, **settings: str) -> dict[str, str]:
    """Ours without any setting of the outside: another home, a free port, no foreign services."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("QUARTERDECK_", "DJANGO_"))
        and name not in ("DATABASE_URL", "REDIS_URL")
    }
    ours = {"HOME": str(home), "PORT": "0", "MODEL": model_path, **settings}
    return kept | {f"QUARTERDECK_{name}": value for name, value in ours.items()}


@contextlib.contextmanager
def served(home: Path, environment: Mapping[str, str]) -> Iterator[str]:
    """The URL of a tree that is ready. Raises NotServing."""
    address = home / "serve.json"
    home.mkdir(parents=True, exist_ok=True)
    address.unlink(missing_ok=True)
    with open(home / "serve.log", "w") as log:
        process = subprocess.Popen(
            [sys.executable, "manage.py", "serve"],
            cwd=CHECKOUT,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
        )
    try:
        yield _wait_until_ready(process, address, home / "serve.log")
    finally:
        process.terminate()
        try:
            process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def make_key(environment: Mapping[str, str]) -> str:
    """A new API key that may ask for answers."""
    create = [sys.executable, "manage.py", "apikey", "create", "bench", "--scope", "inference"]
    done = subprocess.run(
        create, cwd=CHECKOUT, env=environment, capture_output=True, text=True, check=True
    )
    return done.stdout.strip()


def _wait_until_ready(process: subprocess.Popen[bytes], address: Path, log: Path) -> str:
    deadline = time.monotonic() + READY_S
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise NotServing(f"serve ended with {process.returncode}, see {log}")
        if address.exists() and (written := address.read_text()):
            url = str(json.loads(written)["url"]).rstrip("/")
            if _answers_ready(url):
                return url
        time.sleep(0.05)
    raise NotServing(f"serve was not ready within {READY_S:g} s, see {log}")


def _answers_ready(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/ready", timeout=5) as response:
            return bool(response.status == 200)
    except (urllib.error.URLError, OSError):
        return False
