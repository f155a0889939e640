"""A whole Quarterdeck as a child: supervisor, valkey, scripted engine, web workers, Celery."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import psutil
from websockets.sync.client import ClientConnection, connect
from websockets.typing import Origin

from engine.model.native_build import load_library
from tests.engine.model.tiny import make_scripted_dir
from tests.native import share_native

ROOT = Path(__file__).resolve().parent.parent.parent
PASSWORD = "correct horse"


class Tree:
    """``url`` and ``key`` to talk to it; its processes to look at and to kill."""

    def __init__(self, home: Path, environment: dict[str, str], process: subprocess.Popen) -> None:
        self.home = home
        self.environment = environment
        self.process = process
        self.url = ""
        self.key = ""

    def manage(self, *arguments: str) -> str:
        return self.manage_process(*arguments).stdout

    def manage_process(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "manage.py", *arguments],
            cwd=ROOT,
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
        )

    def new_key(self, *scopes: str, options: tuple[str, ...] = ()) -> str:
        flags = [part for scope in scopes for part in ("--scope", scope)]
        return self.manage("apikey", "create", "test", *flags, *options).strip()

    @property
    def log(self) -> str:
        return (self.home / "serve.log").read_text()

    @property
    def ws_url(self) -> str:
        return self.url.replace("http", "ws", 1)

    @property
    def headers(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self.key}"}

    def client(self, **options) -> httpx.Client:
        """A fresh connection, so that any worker may take it."""
        options = {"verify": False, "timeout": 30} | options  # no TLS here: quick to make
        return httpx.Client(base_url=self.url, headers=self.headers, **options)

    def get(self, path: str) -> httpx.Response:
        with self.client() as client:
            return client.get(path)

    def post(self, path: str, body: object) -> httpx.Response:
        with self.client() as client:
            return client.post(path, json=body)

    @contextlib.contextmanager
    def stream(self, path: str, body: object) -> Iterator[httpx.Response]:
        with self.client() as client, client.stream("POST", path, json=body) as response:
            yield response

    @contextlib.contextmanager
    def browser(self, username: str = "admin", password: str = PASSWORD) -> Iterator[httpx.Client]:
        """Signed in with the form, as a person would."""
        with httpx.Client(base_url=self.url, verify=False, timeout=30) as client:
            client.get("/")
            token = client.cookies["quarterdeck_csrf"]
            form = {"username": username, "password": password, "csrfmiddlewaretoken": token}
            assert client.post("/", data=form).status_code == 302
            client.headers["X-CSRFToken"] = client.cookies["quarterdeck_csrf"]
            yield client

    def socket(self, path: str, browser: httpx.Client | None = None) -> ClientConnection:
        """A websocket on a fresh connection, of the key or of a signed-in browser."""
        if browser is None:
            return connect(self.ws_url + path, additional_headers=self.headers)
        cookies = "; ".join(f"{name}={value}" for name, value in browser.cookies.items())
        return connect(
            self.ws_url + path, additional_headers={"Cookie": cookies}, origin=Origin(self.url)
        )

    def fleet(self) -> dict:
        return self.get("/api/fleet").json()

    def running(self) -> int:
        """Requests that hold a slot or wait for one, by the ranks' own count."""
        return sum(rank["running"] + rank["waiting"] for rank in self.fleet()["ranks"])

    # ------------------------------------------------------------------ processes

    def processes(self) -> list[psutil.Process]:
        supervisor = psutil.Process(self.process.pid)
        return [supervisor, *supervisor.children(recursive=True)]

    def child(self, title: str) -> psutil.Process:
        """The direct child whose command line holds ``title``."""
        for process in psutil.Process(self.process.pid).children():
            with contextlib.suppress(psutil.NoSuchProcess):
                if title in " ".join(process.cmdline()):
                    return process
        raise LookupError(title)

    def kill(self, title: str) -> int:
        process = self.child(title)
        os.kill(process.pid, signal.SIGKILL)
        return process.pid

    def is_ready(self) -> bool:
        with contextlib.suppress(httpx.HTTPError):
            return self.get("/ready").status_code == 200
        return False


def environment_of(home: Path, **changes: str) -> dict[str, str]:
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("QUARTERDECK_", "DJANGO_"))}
    for name in ("DATABASE_URL", "REDIS_URL"):
        kept.pop(name, None)
    return kept | {
        "QUARTERDECK_HOME": str(home),
        "QUARTERDECK_PORT": "0",
        "QUARTERDECK_WORKERS": "2",
        "QUARTERDECK_DP": "2",
        "QUARTERDECK_BACKEND": "scripted",
        "QUARTERDECK_SCRIPTED_STEP_S": "0.01",
        "QUARTERDECK_MODEL": str(home / "models" / "scripted"),
        "QUARTERDECK_ADMIN_PASSWORD": PASSWORD,
        "QUARTERDECK_RESUME_GRACE_S": "2",
        "OMP_NUM_THREADS": "1",
        "PYTHONWARNINGS": "error::RuntimeWarning",
        **changes,
    }


@contextlib.contextmanager
def running_tree(home: Path, *, wait: bool = True, **changes: str) -> Iterator[Tree]:
    """Started, ready, with a key of both scopes; ended by SIGTERM, or by SIGKILL if it must."""
    make_scripted_dir(home / "models" / "scripted")
    share_native(home)
    environment = environment_of(home, **changes)
    with open(home / "serve.log", "w") as log:
        process = subprocess.Popen(
            [sys.executable, "manage.py", "serve"],
            cwd=ROOT,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    tree = Tree(home, environment, process)
    try:
        if wait:
            eventually(lambda: "is ready" in tree.log or process.poll() is not None, 90, tree)
            assert process.poll() is None, tree.log
            tree.url = json.loads((home / "serve.json").read_text())["url"].rstrip("/")
            tree.key = tree.new_key("inference", "control")
        yield tree
    finally:
        if process.poll() is None:
            process.terminate()
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def real_model(home: Path, *, family: str = "llama") -> dict[str, str]:
    """Changes of the environment for a tree that serves a tiny random model on the native
    backend."""
    from tests.engine.model.conftest import HOME
    from tests.engine.model.tiny import make_model

    load_library(HOME)  # built once per machine
    (home / "native").symlink_to(HOME / "native")
    model = make_model(home / "models" / family, family)
    return {"QUARTERDECK_BACKEND": "native", "QUARTERDECK_MODEL": str(model),
            "QUARTERDECK_THREADS": "1", "QUARTERDECK_DTYPE": "fp32",
            "QUARTERDECK_KV_TOKENS": "8192"}  # fmt: skip


def eventually(condition: Callable[[], object], timeout_s: float, what: object = "") -> float:
    """Seconds until ``condition()`` held; AssertionError after ``timeout_s``."""
    began = time.monotonic()
    while time.monotonic() - began < timeout_s:
        if condition():
            return time.monotonic() - began
        time.sleep(0.05)
    shown = what.log[-4000:] if isinstance(what, Tree) else what
    raise AssertionError(f"not within {timeout_s} s: {shown}")
