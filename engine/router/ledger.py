"""``engine/state.json``: the ledger of epochs on disk, written by the router alone.

The launcher reads it when it starts a rank, to say which weights to load. A restart of the router
reads it back, so an epoch number is never used twice.
"""

from __future__ import annotations

import logging
import os
import time
import uuid
from collections.abc import Iterable
from pathlib import Path

import msgspec

from engine.config import EngineConfig
from engine.errors import ConfigError
from engine.router.weights import Ledger
from engine.weights.checkpoint import problem_with

log = logging.getLogger(__name__)

KEEP_SPOOLS = 3  # newest epochs whose received weights stay on disk, for restarts and roll-backs
STALE_SPOOL_S = 3600.0  # a file that no epoch names and that is older was left by a dead process


def ledger_path(config: EngineConfig) -> Path:
    return Path(config.home) / "engine" / "state.json"


def load_ledger(config: EngineConfig, *, anew: bool = False) -> Ledger:
    """The ledger as it should be served from now on; a fresh one on a first start.

    ``anew``: with the model's own weights as the newest epoch.
    """
    path = ledger_path(config)
    try:
        ledger = msgspec.json.decode(path.read_bytes(), type=Ledger)
    except FileNotFoundError:
        ledger = Ledger()
    except msgspec.MsgspecError as error:
        raise ConfigError(f"{path} is damaged ({error}); move it away to start afresh") from error
    else:
        if problem := ledger.problem():
            raise ConfigError(f"{path} is damaged ({problem}); move it away to start afresh")
    if anew or ledger.model_path != config.model_path:
        ledger = ledger.for_model(config.model_path)

    def loadable(path: str) -> bool:
        return path == config.model_path or not problem_with(path)

    ledger.at_start(config.model_path, loadable, time.time())
    return ledger


def save_ledger(config: EngineConfig, ledger: Ledger) -> None:
    """Atomic and durable: the commit that follows must find it after a crash."""
    path = ledger_path(config)
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    draft = path.with_suffix(".new")
    with open(draft, "wb") as file:
        file.write(msgspec.json.encode(ledger))
        file.flush()
        os.fsync(file.fileno())
    os.replace(draft, path)


def begin_anew(config: EngineConfig) -> None:
    """The start after this serves the model's own weights, unpaused: a new epoch, old numbers stay
    spent. For the launcher, before the router runs."""
    if ledger_path(config).exists():
        save_ledger(config, load_ledger(config, anew=True))


class LedgerFile:
    """The ledger on disk, also while the disk takes nothing."""

    def __init__(self, config: EngineConfig) -> None:
        self._config = config
        self.unsaved = ""  # why the newest ledger is not on disk

    def write(self, ledger: Ledger) -> None:
        """On disk when it returns; else OSError."""
        save_ledger(self._config, ledger)
        self.unsaved = ""

    def keep(self, ledger: Ledger) -> None:
        """On disk, or else ``unsaved``: what it tells has happened, and is written when it can."""
        try:
            self.write(ledger)
        except OSError as error:
            if not self.unsaved:
                log.warning("%s is not saved: %s", ledger_path(self._config), error)
            self.unsaved = str(error)


class Spool:
    """Weights that came over a network, as files; the router alone deletes them."""

    def __init__(self, config: EngineConfig) -> None:
        self.directory = Path(config.home) / "spool"

    def new_path(self) -> str:
        return str(self.directory / f"{uuid.uuid4().hex}.safetensors")

    def discard(self, paths: Iterable[str]) -> None:
        """Deletes those that lie in the spool directory; others belong to somebody else."""
        for path in map(Path, paths):
            if path.parent == self.directory:
                path.unlink(missing_ok=True)

    def settle(self, ledger: Ledger) -> None:
        """Deletes what only epochs need that no restart or roll-back will ask for."""
        newest = sorted(ledger.epochs)[-KEEP_SPOOLS:]
        kept = {ledger.committed, *ledger.groups.values(), *newest} & ledger.epochs.keys()
        needed = {path for epoch in kept for path in ledger.epochs[epoch].paths}
        known = {path for record in ledger.epochs.values() for path in record.paths}
        here = set(map(str, self.directory.glob("*")))
        self.discard(here & (known - needed))

    def sweep(self, ledger: Ledger, now: float) -> None:
        """At a start: deletes files of updates that died with their process."""
        known = {path for record in ledger.epochs.values() for path in record.paths}
        for path in self.directory.glob("*"):
            if str(path) not in known and now - path.stat().st_mtime > STALE_SPOOL_S:
                path.unlink(missing_ok=True)
