"""``engine/state.json``: the ledger of epochs on disk, written by the router alone.

The launcher reads it when it starts a rank, to say which weights to load. A restart of the router
reads it back, so an epoch number is never used twice.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

import msgspec

from engine.config import EngineConfig
from engine.errors import ConfigError
from engine.router.weights import Ledger


def ledger_path(config: EngineConfig) -> Path:
    return Path(config.home) / "engine" / "state.json"


def load_ledger(config: EngineConfig) -> Ledger:
    """The ledger as it should be served from now on; a fresh one on a first start."""
    path = ledger_path(config)
    try:
        ledger = msgspec.json.decode(path.read_bytes(), type=Ledger)
    except FileNotFoundError:
        ledger = Ledger()
    except msgspec.MsgspecError as error:
        raise ConfigError(f"{path} is damaged ({error}); move it away to start afresh") from error
    if ledger.model_path != config.model_path:
        ledger = ledger.for_model(config.model_path)
    ledger.at_start(config.model_path, os.path.exists, time.time())
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
