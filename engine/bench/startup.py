"""Seconds until something answers: the engine beside its peers, and the whole of ``serve``.

Path: __main__.py -> here -> engine.launch.engine, peer.py, serving.py.
"""

from __future__ import annotations

import asyncio
import shutil
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec

from engine import launch
from engine.bench.peer import Peer, PeerFailed
from engine.bench.serving import NotServing, environment_of, served
from engine.bench.table import Row, absolute, compare
from engine.config import EngineConfig

SERVE_TARGET_S = 20.0


async def startup_rows(
    config: EngineConfig, peers: Sequence[Peer], work: Path, rounds: int, missing: dict[str, str]
) -> list[Row]:
    """Each start is of the second kind: what a first one converts or compiles is there."""
    ours: list[float] = []
    theirs: dict[str, list[float]] = {peer.name: [] for peer in peers}
    await _engine_start(config, work)
    for peer in peers:  # once: vLLM compiles for a minute each time
        await _peer_start(peer, theirs[peer.name], missing)
    for _ in range(rounds):
        ours.append(await _engine_start(config, work))
    engine = compare(
        "start, engine ready to answer",
        "s",
        ours=ours,
        peers=theirs,
        rivals=list(theirs),
        target=None,
        better="less",
    )
    return [engine, await _serve_row(config, work, rounds, missing)]


async def _engine_start(config: EngineConfig, work: Path) -> float:
    shutil.rmtree(work / "start", ignore_errors=True)
    began = time.perf_counter()
    async with launch.engine(msgspec.structs.replace(config, home=str(work / "start"))):
        return time.perf_counter() - began


async def _peer_start(peer: Peer, found: list[float], missing: dict[str, str]) -> None:
    began = time.perf_counter()
    try:
        await peer.start()
        found.append(time.perf_counter() - began)
    except PeerFailed as error:
        missing[peer.name] = f"start: {error}"
    finally:
        await peer.stop()


async def _serve_row(config: EngineConfig, work: Path, rounds: int, missing: dict[str, str]) -> Row:
    found: list[float] = []
    try:
        for _ in range(rounds + 1):  # the first one makes the database
            found.append(await asyncio.to_thread(_serve_start, config, work / "serve"))
    except NotServing as error:
        missing["start, serve"] = str(error)
    return absolute(
        "start, serve ready, second time",
        "s",
        ours=found[1:],
        target=SERVE_TARGET_S,
        better="less",
    )


def _serve_start(config: EngineConfig, home: Path) -> float:
    began = time.perf_counter()
    with served(home, environment_of(home, config.model_path)):
        return time.perf_counter() - began
