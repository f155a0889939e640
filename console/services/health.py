"""What ``manage.py doctor`` looks at: each check says what it found and what to do about it."""

from __future__ import annotations

import importlib.metadata
import os
import shutil
import socket
import sys
import tomllib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import psutil
import redis
from django.conf import settings
from django.db import connection
from django.db.migrations.executor import MigrationExecutor
from django.db.utils import Error as DatabaseError

from engine.runfile import read_run_file

ENOUGH_DISK_BYTES = 5 * 2**30
ENOUGH_MEMORY_BYTES = 2 * 2**30
BROWSERS = ("chromium", "chromium-browser", "google-chrome")


@dataclass(frozen=True, slots=True)
class Finding:
    """``advice`` is what to do; "" when there is nothing to do."""

    tone: Literal["ok", "warn", "bad"]
    what: str
    advice: str = ""


def examine() -> Iterator[Finding]:
    for check in CHECKS:
        yield from check()


def check_python() -> Iterator[Finding]:
    yield Finding("ok", f"Python {'.'.join(map(str, sys.version_info[:3]))}")


def check_packages() -> Iterator[Finding]:
    """The pins of pyproject.toml against what is installed."""
    project = tomllib.loads((settings.BASE_DIR / "pyproject.toml").read_text())["project"]
    wrong = []
    for requirement in project["dependencies"]:
        name, _, wanted = requirement.partition(";")[0].strip().partition("==")
        try:
            found = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found = "missing"
        if found.partition("+")[0] != wanted:
            wrong.append(f"{name} {found} (wanted {wanted})")
    if wrong:
        advice = "run 'make install', or .venv/bin/pip install -e ."
        yield Finding("bad", f"packages differ: {', '.join(wrong)}", advice)
    else:
        yield Finding("ok", f"{len(project['dependencies'])} packages as pinned")


def check_home() -> Iterator[Finding]:
    home = settings.QUARTERDECK_HOME
    if not os.access(home, os.W_OK):
        yield Finding("bad", f"{home} is not writable", "set QUARTERDECK_HOME to another directory")
        return
    free = shutil.disk_usage(home).free
    tone: Literal["ok", "warn"] = "ok" if free > ENOUGH_DISK_BYTES else "warn"
    advice = "" if tone == "ok" else "free some space: models, traces and dumps go here"
    yield Finding(tone, f"home {home}, {free / 2**30:.0f} GiB free", advice)


def check_memory() -> Iterator[Finding]:
    free = psutil.virtual_memory().available
    cores = os.cpu_count() or 1
    tone: Literal["ok", "warn"] = "ok" if free > ENOUGH_MEMORY_BYTES else "warn"
    advice = "" if tone == "ok" else "set QUARTERDECK_DP and QUARTERDECK_WORKERS to 1"
    yield Finding(tone, f"{free / 2**30:.1f} GiB of memory free, {cores} cores", advice)


def check_model() -> Iterator[Finding]:
    path = Path(settings.QUARTERDECK_ENGINE.model_path)
    missing = [name for name in ("config.json", "tokenizer.json") if not (path / name).is_file()]
    if not path.is_dir():
        advice = "run 'manage.py model pull', or set QUARTERDECK_MODEL to a Hugging Face directory"
        yield Finding("bad", f"no model in {path}", advice)
    elif missing:
        advice = "it must be a Hugging Face model directory"
        yield Finding("bad", f"{path} has no {' and no '.join(missing)}", advice)
    else:
        yield Finding("ok", f"model {path}")


def check_database() -> Iterator[Finding]:
    try:
        executor = MigrationExecutor(connection)
        plan = executor.migration_plan(executor.loader.graph.leaf_nodes())
    except DatabaseError as error:
        yield Finding("bad", f"database: {error}", "check DATABASE_URL")
        return
    if plan:
        advice = "run 'manage.py migrate' ('manage.py serve' does it by itself)"
        yield Finding("warn", f"{len(plan)} migrations are not applied", advice)
    else:
        yield Finding("ok", f"database {connection.vendor}, migrated")


def check_broker() -> Iterator[Finding]:
    client = redis.Redis.from_url(settings.REDIS_URL, socket_timeout=2.0)
    try:
        client.ping()
        yield Finding("ok", f"valkey answers on {settings.REDIS_URL}")
    except (redis.exceptions.RedisError, OSError) as error:
        if settings.QUARTERDECK_OWN_VALKEY:
            yield Finding("ok", "valkey is not running; 'manage.py serve' starts its own")
        else:
            yield Finding("bad", f"valkey: {error}", "check REDIS_URL")
    finally:
        client.close()


def check_engine_and_port() -> Iterator[Finding]:
    run = read_run_file(settings.QUARTERDECK_RUN_FILE)
    if run is not None and psutil.pid_exists(run.pid):
        yield Finding("ok", f"engine {run.state} (pid {run.pid}) {run.reason}".rstrip())
        return
    yield Finding("ok", "no engine is running")
    host, port = settings.QUARTERDECK_HOST, settings.QUARTERDECK_PORT
    with socket.socket() as probe:
        probe.settimeout(1.0)
        taken = probe.connect_ex((host, port)) == 0
    if taken:
        yield Finding("bad", f"{host}:{port} is taken", "set QUARTERDECK_PORT to a free port")
    else:
        yield Finding("ok", f"{host}:{port} is free")


def check_browser() -> Iterator[Finding]:
    found = next(filter(None, map(shutil.which, BROWSERS)), None)
    if found:
        yield Finding("ok", f"browser tests use {found}")
    else:
        advice = "for the browser tests alone: apt-get install chromium"
        yield Finding("warn", "no Chromium", advice)


CHECKS: tuple[Callable[[], Iterator[Finding]], ...] = (
    check_python,
    check_packages,
    check_home,
    check_memory,
    check_model,
    check_database,
    check_broker,
    check_engine_and_port,
    check_browser,
)
