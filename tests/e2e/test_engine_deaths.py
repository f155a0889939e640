"""kill -9 of each engine process under load: what DESIGN 1's table says."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import sys
import time
from pathlib import Path

import psutil
import pytest

from engine import messages as m
from engine.client import EngineClient
from engine.errors import EngineUnreachable, QuarterdeckError
from engine.launch import engine_process, report_client_death
from engine.router.process import HEARTBEAT_S
from engine.runfile import read_run_file, run_file_path
from tests.e2e.engines import answer, ask, eventually, running_engine, scripted_config

pytestmark = pytest.mark.e2e
LONG = {"max_new_tokens": 6000}


async def start_streams(client, count: int, **changes):
    tasks = [
        asyncio.create_task(answer(client, ask(f"s{i}", sampling=LONG, **changes)))
        for i in range(count)
    ]
    await eventually(lambda: client.counters["rows"] > 3 * count, 10)
    return tasks


async def serves(client, **changes) -> bool:
    try:
        row = await asyncio.wait_for(answer(client, ask("again [[eos 2]]", **changes)), 5)
    except (QuarterdeckError, TimeoutError):
        return False
    return row.finish.type == "stop"


CLIENT = """
import asyncio, sys
from pathlib import Path
from engine.client import EngineClient
from engine.runfile import run_file_path
from tests.e2e.engines import ask

async def main():
    run_file = run_file_path(Path(sys.argv[1]))
    client = await EngineClient.connect(run_file, kind="web", worker_id="9", timeout_s=30)
    async for row in client.generate(ask("x", sampling={"max_new_tokens": 6000})):
        print("row", flush=True)

asyncio.run(main())
"""


async def start_client(home: str) -> asyncio.subprocess.Process:
    """A client in a process of its own that reads a long answer; returns after its first row."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", CLIENT, home, stdout=asyncio.subprocess.PIPE
    )
    assert process.stdout is not None
    await process.stdout.readline()
    return process


async def test_a_dead_rank_ends_its_own_requests_and_restarts(tmp_path):
    """E7."""
    async with running_engine(scripted_config(tmp_path, dp=2, scripted_step_s=0.02)) as tree:
        client = tree.clients[0]
        doomed = await start_streams(client, 4, dp_rank=0)
        others = await start_streams(client, 4, dp_rank=1)
        tree.kill("rank dp0 tp0")
        began = time.monotonic()
        rows = await asyncio.wait_for(asyncio.gather(*doomed), 5)
        assert {(r.finish.type, r.finish.status_code, r.finish.err_type) for r in rows} == {
            ("abort", 503, "engine_restarting")
        }
        assert all(row.text for row in rows)
        assert not any(task.done() for task in others)
        assert client.snapshot.engine.state in ("running", "degraded")
        await eventually(lambda: serves(client, dp_rank=0), 30)
        assert time.monotonic() - began < 30
        assert not any(task.done() for task in others)
        await client.abort(abort_all=True)
        await asyncio.gather(*others)


async def test_a_request_that_kills_its_rank_twice_is_quarantined(tmp_path):
    """E7: the scheduler raises; the client hears of it at once."""
    async with running_engine(scripted_config(tmp_path, dp=1)) as tree:
        client = tree.clients[0]
        poison = ask("[[fail 3]] poison")
        for _ in range(2):
            row = await asyncio.wait_for(answer(client, poison), 10)
            assert row.finish.err_type == "engine_restarting"
            await eventually(lambda: serves(client), 30)
        row = await answer(client, poison)
        assert row.finish.err_type == "quarantined"
        assert await serves(client)


async def test_a_dead_detokenizer_restarts_alone(tmp_path):
    async with running_engine(scripted_config(tmp_path, scripted_step_s=0.02)) as tree:
        client = tree.clients[0]
        doomed = await start_streams(client, 4)
        rank_pid = tree.process("rank dp0 tp0").pid
        tree.kill("detokenizer 0")
        rows = await asyncio.wait_for(asyncio.gather(*doomed), 5)
        assert {row.finish.err_type for row in rows} == {"engine_restarting"}
        await eventually(lambda: serves(client), 20)
        assert tree.process("rank dp0 tp0").pid == rank_pid
        assert (await client.fleet()).counters["live_requests"] == 0


async def test_a_dead_router_ends_everything_and_the_engine_comes_back(tmp_path):
    """C11: also calls that wait for an answer, within two of its heartbeats."""
    async with running_engine(scripted_config(tmp_path, scripted_step_s=0.02)) as tree:
        client = tree.clients[0]
        doomed = await start_streams(client, 4)
        call = asyncio.create_task(client.call(m.FlushCacheReqInput, deadline_s=60, timeout_s=60.0))
        await asyncio.wait({call}, timeout=0.2)
        assert not call.done(), "it should wait for the streams"
        old = tree.kill("router")
        with pytest.raises(EngineUnreachable, match="restarting"):
            await asyncio.wait_for(call, 2 * HEARTBEAT_S)
        rows = await asyncio.wait_for(asyncio.gather(*doomed), 5)
        assert {row.finish.err_type for row in rows} == {"engine_restarting"}
        await eventually(lambda: serves(client), 60)
        assert tree.process("router").pid != old
        assert client.counters["late_rows"] == 0


async def test_nothing_is_left_after_the_launcher_is_killed(tmp_path):
    """E6: the children die with their parent."""
    async with running_engine(scripted_config(tmp_path, dp=2)) as tree:
        children = tree.launcher.children(recursive=True)
        assert len(children) >= 4
        os.kill(tree.launcher.pid, signal.SIGKILL)
        gone, alive = psutil.wait_procs(children, timeout=3)
        assert not alive


async def test_a_client_survives_the_run_file_of_a_killed_engine(tmp_path):
    """The file still says ``up``; its run directory is gone. The client joins the next engine."""
    config = scripted_config(tmp_path)
    async with running_engine(config) as tree:
        children = tree.launcher.children(recursive=True)
        run_dir = read_run_file(run_file_path(tmp_path)).config.run_dir
        os.kill(tree.launcher.pid, signal.SIGKILL)
        psutil.wait_procs(children, timeout=3)
    shutil.rmtree(run_dir, ignore_errors=True)  # another start may have swept it
    client = await EngineClient.connect(run_file_path(tmp_path), kind="web", worker_id="1")
    await asyncio.sleep(0.6)
    assert not client.joined
    with engine_process(config):
        await eventually(lambda: client.joined, 20)
        await eventually(lambda: serves(client), 20)
        await client.close()


async def test_a_client_that_dies_gives_its_slots_back(tmp_path):
    """A SIGKILLed client never says goodbye: its lease lapses and its requests end."""
    config = scripted_config(tmp_path, scripted_step_s=0.02)
    async with running_engine(config) as tree:
        client = tree.clients[0]
        process = await start_client(config.home)
        assert (await client.fleet()).counters["live_requests"] == 1
        process.kill()
        await process.wait()

        async def is_free() -> bool:
            return (await client.fleet()).counters["live_requests"] == 0

        assert await eventually(is_free, 14) < 13


async def test_a_client_whose_death_is_reported_gives_its_slots_back_at_once(tmp_path):
    config = scripted_config(tmp_path, scripted_step_s=0.02)
    async with running_engine(config) as tree:
        client = tree.clients[0]
        victim = await start_client(config.home)
        assert (await client.fleet()).counters["live_requests"] == 1
        victim.kill()
        await victim.wait()
        report_client_death(Path(config.home), victim.pid)

        async def is_free() -> bool:
            return (await client.fleet()).counters["live_requests"] == 0

        assert await eventually(is_free, 5) < 1
