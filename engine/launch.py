"""Engine launcher: starts router, ranks and detokenizers, watches them, restarts what dies.

Path: console/supervisor.py (or a plain script) -> here -> every engine process.

It knows a death by waiting on the child, and tells the router at once. A dead rank takes its dp
group down with it and the group restarts; a dead detokenizer restarts alone; a dead router restarts
the whole engine under the next generation, so that no old socket is ever used again.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import fcntl
import json
import logging
import os
import selectors
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Literal

import msgspec

from engine.client import EngineClient
from engine.config import CHECKOUT, EngineConfig, from_env
from engine.errors import ConfigError
from engine.messages import ClientDown, ProcessDown, ProcessUp
from engine.process_guard import (
    PARENT_PID,
    READY_FD,
    StopFlag,
    die_with_parent,
    set_up_logging,
)
from engine.router.ledger import begin_anew, load_ledger
from engine.runfile import RunFile, read_run_file, run_file_path, write_run_file
from engine.wire import PushSocket

log = logging.getLogger(__name__)

GAVE_UP = 3  # exit code: a child would not start
FAILED_STARTS = 5
FAILED_WITHIN_S = 60.0
STABLE_S = 30.0  # a child that lived so long starts again without delay growth
STOP_GRACE_S = 3.0
Role = Literal["router", "rank", "detokenizer"]


# --------------------------------------------------------------------------- run directories


def make_run_dir() -> tuple[Path, IO[str]]:
    """A private (0700) directory for sockets, short enough for unix socket paths, and its lock.

    The lock is held for this process's life; directories whose lock nobody holds are swept.
    """
    base = Path(tempfile.gettempdir()) / f"quarterdeck-{os.getuid()}"
    base.mkdir(mode=0o700, exist_ok=True)
    if base.stat().st_uid != os.getuid() or base.stat().st_mode & 0o077:
        raise ConfigError(f"{base} must be a directory of this user with mode 0700")
    for stale in base.iterdir():
        with contextlib.suppress(FileNotFoundError), open(stale / "lock", "a") as lock:
            if _lock(lock):
                shutil.rmtree(stale, ignore_errors=True)
    run_dir = Path(tempfile.mkdtemp(prefix="e", dir=base))
    lock = open(run_dir / "lock", "a")  # noqa: SIM115 - held until the process ends
    _lock(lock)
    return run_dir, lock


def _lock(file: IO[str]) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


# --------------------------------------------------------------------------- children


@dataclass(slots=True)
class Child:
    """One process of the engine; ``starts`` counts how often this place was filled."""

    role: Role
    index: int = 0
    tp: int = 0
    starts: int = 0
    process: subprocess.Popen[bytes] | None = None
    ready_pipe: IO[bytes] | None = None
    ready: bool = False
    started_at: float = 0.0
    start_at: float | None = None  # when to start it next
    delay_s: float = 1.0
    failures: list[float] = field(default_factory=list)

    @property
    def name(self) -> str:
        if self.role == "rank":
            return f"rank dp{self.index} tp{self.tp}"
        return self.role if self.role == "router" else f"{self.role} {self.index}"


class GaveUp(Exception):
    """A child failed to start too often; the message says which and why."""


class Launcher:
    """startup, main_loop, shutdown of one engine."""

    def __init__(self, config: EngineConfig, stop: StopFlag) -> None:
        self._config = config
        self._stop = stop
        self._selector = selectors.DefaultSelector()
        self._run_file = run_file_path(Path(config.home))
        self._router = Child("router")
        self._ranks = [Child("rank", dp, tp) for dp in range(config.dp) for tp in range(config.tp)]
        self._detokenizers = [Child("detokenizer", i) for i in range(config.detokenizers)]
        self._reports: PushSocket | None = None
        self._model: dict[str, object] = {}
        self._reason = ""

    # ------------------------------------------------------------------ the three phases

    def startup(self) -> None:
        if not self._config.restore:
            begin_anew(self._config)
        self._publish("starting")
        self._start(self._router)

    def main_loop(self) -> None:
        while not self._stop.requested:
            for key, _ in self._selector.select(timeout=0.1):
                self._read_ready(key.data)
            for child in self._children():
                self._check(child)
            self._start_due()

    def shutdown(self, reason: str = "") -> None:
        """In reverse order of the flow: ranks first, the router last."""
        self._publish("failed" if reason else "stopped", reason)
        for group in (self._ranks, self._detokenizers, [self._router]):
            stop_children(group)
        if self._reports:
            self._reports.close()
        shutil.rmtree(self._config.run_dir, ignore_errors=True)

    # ------------------------------------------------------------------ starting

    def _children(self) -> list[Child]:
        return [self._router, *self._detokenizers, *self._ranks]

    def _start(self, child: Child) -> None:
        child.start_at = None
        child.starts += 1
        child.ready = False
        child.started_at = time.monotonic()
        config_file = Path(self._config.run_dir) / f"{child.name}.json".replace(" ", "-")
        config_file.write_bytes(self._config_of(child).to_json())
        module, arguments = {
            "router": ("engine.router.process", []),
            "rank": ("engine.scheduler.process", [child.index, child.tp, child.starts]),
            "detokenizer": ("engine.detokenizer.process", [child.index]),
        }[child.role]
        reader, writer = os.pipe()
        child.process = subprocess.Popen(
            [sys.executable, "-m", module, str(config_file), *map(str, arguments)],
            cwd=CHECKOUT,
            env={
                **os.environ,
                READY_FD: str(writer),
                PARENT_PID: str(os.getpid()),
                "OMP_NUM_THREADS": str(self._config.rank_threads),
                "KINETO_LOG_LEVEL": "6",  # else each profile writes into a terminal
            },
            pass_fds=(writer,),
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
        os.close(writer)
        child.ready_pipe = os.fdopen(reader, "rb")
        self._selector.register(child.ready_pipe, selectors.EVENT_READ, child)
        log.info("started %s (pid %d)", child.name, child.process.pid)

    def _config_of(self, child: Child) -> EngineConfig:
        """A rank starts on the weights that its group should serve now."""
        if child.role != "rank":
            return self._config
        ledger = load_ledger(self._config)
        epoch = ledger.epoch_of(child.index)
        return msgspec.structs.replace(
            self._config,
            epoch=epoch,
            weight_paths=ledger.epochs[epoch].paths,
            weight_checksum=ledger.checksum_of(epoch),
        )

    def _start_due(self) -> None:
        now = time.monotonic()
        for child in self._children():
            if child.start_at is not None and now >= child.start_at:
                self._start(child)

    def _read_ready(self, child: Child) -> None:
        pipe, child.ready_pipe = child.ready_pipe, None
        if pipe is None:
            return
        self._selector.unregister(pipe)
        with pipe:
            line = pipe.readline()
        if line and child.process is not None:
            child.ready = True
            self._on_ready(child, json.loads(line))

    def _on_ready(self, child: Child, info: dict[str, object]) -> None:
        if child.role == "router":
            self._reports = PushSocket(self._config.router_reply_address)
            for other in (*self._detokenizers, *self._ranks):
                self._start(other)
            if self._model:
                self._publish("up")
            return
        assert self._reports is not None and child.process is not None
        if child.role == "rank" and child.tp == 0 and not self._model:
            self._model = info
            self._publish("up")
        address = (
            self._config.scheduler_address(child.index, child.starts)
            if child.role == "rank"
            else self._config.detokenizer_address(child.index)
        )
        self._reports.send(
            ProcessUp(
                role=child.role,
                index=child.index,
                tp=child.tp,
                address=address,
                generation=child.starts,
                pid=child.process.pid,
                info=info,
            )
        )

    # ------------------------------------------------------------------ deaths

    def _check(self, child: Child) -> None:
        if child.process is None or child.process.poll() is None:
            return
        code = child.process.returncode
        reason = f"signal {-code}" if code < 0 else f"exit code {code}"
        log.error("%s ended: %s", child.name, reason)
        self._bury(child)
        self._schedule_restart(child, reason)
        if child.role == "router":
            self._restart_engine(reason)
            return
        if child.role == "rank":
            self._take_group_down(child)
        if self._reports:
            self._reports.send(
                ProcessDown(role=child.role, index=child.index, tp=child.tp, reason=reason)
            )

    def _bury(self, child: Child) -> None:
        child.process = None
        child.ready = False
        if child.ready_pipe is not None:
            self._selector.unregister(child.ready_pipe)
            child.ready_pipe.close()
            child.ready_pipe = None

    def _schedule_restart(self, child: Child, reason: str) -> None:
        now = time.monotonic()
        if now - child.started_at > STABLE_S:
            child.delay_s = 1.0
        child.failures = [at for at in child.failures if now - at < FAILED_WITHIN_S] + [now]
        if len(child.failures) >= FAILED_STARTS:
            raise GaveUp(
                f"{child.name} ended {FAILED_STARTS} times within "
                f"{FAILED_WITHIN_S:.0f} s, last with {reason}"
            )
        child.start_at = now + child.delay_s
        child.delay_s *= 2

    def _take_group_down(self, dead: Child) -> None:
        """The other ranks of the group wait in a collective for the dead one: start all anew."""
        mates = [c for c in self._ranks if c.index == dead.index and c is not dead]
        for mate in mates:
            if mate.process is not None:
                mate.process.kill()
                mate.process.wait()
            self._bury(mate)
            mate.start_at = dead.start_at
        for child in (dead, *mates):
            child.starts = max(c.starts for c in (dead, *mates))

    def _restart_engine(self, reason: str) -> None:
        """A new generation: every socket name changes, so nothing old can reach the new engine."""
        self._publish("restarting", f"the router died ({reason})")
        stop_children([*self._ranks, *self._detokenizers], grace_s=0.0)
        for child in (*self._ranks, *self._detokenizers):
            self._bury(child)
            child.start_at = None
        if self._reports:
            self._reports.close(linger_s=0)
            self._reports = None
        self._config = msgspec.structs.replace(self._config, generation=self._config.generation + 1)

    def _publish(
        self, state: Literal["starting", "up", "restarting", "stopped", "failed"], reason: str = ""
    ) -> None:
        write_run_file(
            self._run_file,
            RunFile(
                state=state,
                generation=self._config.generation,
                pid=os.getpid(),
                reason=reason,
                config=self._config,
                model=dict(self._model),
            ),
        )


def stop_children(children: list[Child], grace_s: float = STOP_GRACE_S) -> None:
    """SIGTERM to all, SIGKILL to those that are still there after ``grace_s``."""
    live = [child.process for child in children if child.process is not None]
    for process in live:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM if grace_s else signal.SIGKILL)
    deadline = time.monotonic() + grace_s
    for process in live:
        try:
            process.wait(max(0.0, deadline - time.monotonic()) if grace_s else None)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


# --------------------------------------------------------------------------- entry points


def run(config: EngineConfig) -> int:
    """The launcher process: returns its exit code."""
    die_with_parent("engine")
    set_up_logging("engine")
    stop = StopFlag()
    load_ledger(config)  # a damaged one stops the start with its sentence
    run_dir, _lock_file = make_run_dir()
    launcher = Launcher(msgspec.structs.replace(config, run_dir=str(run_dir), generation=1), stop)
    try:
        launcher.startup()
        launcher.main_loop()
    except GaveUp as error:
        log.error("giving up: %s", error)
        launcher.shutdown(str(error))
        return GAVE_UP
    launcher.shutdown()
    return 0


@contextlib.contextmanager
def engine_process(config: EngineConfig) -> Iterator[subprocess.Popen[bytes]]:
    """The engine as a child of this process, stopped at the end of the block."""
    process = subprocess.Popen(
        [sys.executable, "-m", "engine.launch", "--config", "-"],
        cwd=CHECKOUT,
        env={**os.environ, PARENT_PID: str(os.getpid())},
        stdin=subprocess.PIPE,
        start_new_session=True,
    )
    assert process.stdin is not None
    process.stdin.write(config.to_json())
    process.stdin.close()
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.wait(STOP_GRACE_S * 4)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


@contextlib.asynccontextmanager
async def engine(config: EngineConfig, *, timeout_s: float = 60.0) -> AsyncIterator[EngineClient]:
    """A full engine from a plain script, and a client of it::

    async with engine.launch.engine(config) as client:
        async for row in client.generate(request): ...
    """
    with engine_process(config):
        client = await EngineClient.connect(
            run_file_path(Path(config.home)), kind="command", worker_id=f"script-{os.getpid()}"
        )
        try:
            await wait_until_serving(client, timeout_s)
            yield client
        finally:
            await client.close()


def report_client_death(home: Path, pid: int) -> None:
    """For who waits on a client's pid: its requests end now, not when its lease lapses."""
    run = read_run_file(run_file_path(home))
    if run is not None and run.state == "up" and run.config is not None:
        socket = PushSocket(run.config.router_reply_address)
        socket.send(ClientDown(pid=pid))
        socket.close()


async def wait_until_serving(
    client: EngineClient, timeout_s: float, state: str = "running"
) -> None:
    """Returns when the engine is in ``state`` (running: every rank takes requests); raises
    TimeoutError."""
    async with asyncio.timeout(timeout_s):
        while client.snapshot is None or client.snapshot.engine.state != state:
            await asyncio.sleep(0.05)


def main() -> int:
    parser = argparse.ArgumentParser(description="Run the engine: router, ranks, detokenizers.")
    parser.add_argument("--config", help="JSON of an EngineConfig, - for standard input")
    arguments = parser.parse_args()
    try:
        if arguments.config:
            path = "/dev/stdin" if arguments.config == "-" else arguments.config
            config = EngineConfig.from_json(Path(path).read_bytes())
        else:
            config = from_env(os.environ)
        return run(config)
    except ConfigError as error:
        print(f"quarterdeck: {error.message}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
