"""Streaming capacity: a scripted engine through detokenizer, inboxes, web workers and websockets.

Path: __main__.py -> here -> serving.py and, in a process of its own, stream_load.py.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from urllib.parse import urlsplit

import msgspec

from engine.bench.serving import NotServing, environment_of, make_key, served
from engine.bench.stream_load import Load, Report
from engine.bench.table import Row, absolute
from engine.config import CHECKOUT, EngineConfig

TOKENS_PER_S = 10_000
# the scripted step does not contain planning and committing, so ask for more than the target
ASKED_PER_S = 11_000
P99_AGE_MS = 250.0
GENERATOR_CORES = 0.5  # a generator that needs more measures itself: use half the sockets
SOCKETS = (1_000, 500)
WARM_UP_S, WINDOW_S = 30.0, 15.0


class LoadFailed(Exception):
    """The load generator ended without a report."""


async def streaming_rows(config: EngineConfig, work: Path, missing: dict[str, str]) -> list[Row]:
    report = None
    try:
        for sockets in SOCKETS:
            report = await _run(config, work / f"streaming-{sockets}", sockets)
            if report.generator_cores <= GENERATOR_CORES:
                break
    except (NotServing, LoadFailed) as error:
        missing["streaming"] = str(error)
    return _rows(report)


def _rows(report: Report | None) -> list[Row]:
    note = f"{report.sockets} websockets; the load generator used " if report else ""
    note += f"{report.generator_cores:.2f} cores" if report else ""
    return [
        absolute(
            "streaming, tokens over websockets",
            "tokens/s",
            ours=[report.tokens_per_s] if report else [],
            target=TOKENS_PER_S,
            better="more",
            note=note,
        ),
        absolute(
            "streaming, age of a token at p99",
            "ms",
            ours=[report.age_p99_ms] if report else [],
            target=P99_AGE_MS,
            better="less",
            note=f"p50 {report.age_p50_ms:.1f} ms" if report else "",
        ),
        absolute(
            "streaming, tokens lost",
            "tokens",
            ours=[report.lost] if report else [],
            target=0,
            better="less",
        ),
    ]


async def _run(config: EngineConfig, home: Path, sockets: int) -> Report:
    step_s = sockets / ASKED_PER_S
    new_tokens = int((WARM_UP_S + WINDOW_S) / step_s)
    environment = environment_of(
        home,
        config.model_path,
        BACKEND="scripted",
        WORKERS="2",
        SCRIPTED_STEP_S=str(step_s),
        MAX_RUNNING=str(sockets),
        MAX_WAITING=str(2 * sockets),
        MAX_STEP_TOKENS="4096",
        KV_TOKENS=str(sockets * 2 ** (new_tokens + 128).bit_length()),
    )
    with served(home, environment) as url:
        address = urlsplit(url)
        load = Load(
            host=address.hostname or "",
            port=address.port or 80,
            key=make_key(environment),
            sockets=sockets,
            new_tokens=new_tokens,
            step_s=step_s,
            window_s=WINDOW_S,
        )
        return await _generate(load)


async def _generate(load: Load) -> Report:
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *("-m", "engine.bench.stream_load"),
        cwd=CHECKOUT,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    written, _ = await process.communicate(msgspec.json.encode(load))
    if process.returncode:
        raise LoadFailed(f"the load generator ended with {process.returncode}")
    return msgspec.json.decode(written, type=Report)
