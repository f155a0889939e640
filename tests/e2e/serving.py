"""A whole ``manage.py serve`` for tests: supervisor, valkey, engine, web workers, Celery, beat."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil

from engine.config import CHECKOUT
from tests.engine.model.tiny import make_scripted_dir

PASSWORD = "correct horse battery"


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Served:
    """A running tree and ways to ask and hurt it."""

    def __init__(self, process: subprocess.Popen[bytes], home: Path, port: int) -> None:
        self.process, self.home, self.port = process, home, port
        self.url = f"http://127.0.0.1:{port}"
        self.key = ""

    def client(self, **changes) -> httpx.Client:
        headers = {"Authorization": f"Bearer {self.key}"}
        return httpx.Client(base_url=self.url, headers=headers, timeout=60, **changes)

    def children(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children(recursive=True)

    def find(self, title: str) -> psutil.Process:
        """The child whose command line or title begins with or contains ``title``."""
        for child in self.children():
            with contextlib.suppress(psutil.NoSuchProcess, psutil.ZombieProcess):
                if title in " ".join(child.cmdline()):
                    return child
        raise LookupError(title)

    def kill(self, title: str) -> psutil.Process:
        victim = self.find(title)
        os.kill(victim.pid, signal.SIGKILL)
        return victim

    def ready(self) -> bool:
        try:
            return httpx.get(f"{self.url}/ready", timeout=2).status_code == 200
        except httpx.TransportError:
            return False

    def wait_ready(self, timeout_s: float) -> float:
        return wait_for(self.ready, timeout_s, "the server is not ready")


def wait_for(condition, timeout_s: float, what: str) -> float:
    """Seconds until ``condition()``; AssertionError after ``timeout_s``."""
    began = time.monotonic()
    while time.monotonic() - began < timeout_s:
        if condition():
            return time.monotonic() - began
        time.sleep(0.1)
    raise AssertionError(f"{what} (waited {timeout_s} s)")


@contextlib.contextmanager
def serving(home: Path, *, timeout_s: float = 90, **settings: str) -> Iterator[Served]:
    """``manage.py serve`` on a free port. ``settings`` are QUARTERDECK_* without the prefix; the
    default is the scripted model, two web workers and two ranks."""
    port = free_port()
    chosen = {
        "HOME": str(home),
        "PORT": str(port),
        "ADMIN_PASSWORD": PASSWORD,
        "WORKERS": "2",
        "DP": "2",
        "THREADS": "1",
        "BACKEND": "scripted",
        "KV_TOKENS": "65536",
        **settings,
    }
    if chosen["BACKEND"] == "scripted":
        chosen.setdefault("MODEL", str(make_scripted_dir(home / "models" / "scripted")))
    environment = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith("QUARTERDECK_") and name != "DJANGO_SETTINGS_MODULE"
    }
    environment |= {f"QUARTERDECK_{name}": value for name, value in chosen.items()}
    log_path = home / "serve.log"
    with open(log_path, "wb") as log:
        process = subprocess.Popen(
            [sys.executable, "manage.py", "serve"], cwd=CHECKOUT, env=environment,
            stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT,
        )  # fmt: skip
    served = Served(process, home, port)
    try:
        try:
            served.wait_ready(timeout_s)
        except AssertionError:
            raise AssertionError(log_path.read_text()[-4000:]) from None
        served.key = subprocess.run(
            [sys.executable, "manage.py", "apikey", "create", "test", "--scope", "inference",
             "--scope", "control"],
            cwd=CHECKOUT, env=environment, check=True, capture_output=True, text=True,
        ).stdout.strip()  # fmt: skip
        yield served
    finally:
        if process.poll() is None:
            process.terminate()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
