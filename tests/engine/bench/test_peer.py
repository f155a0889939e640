"""The real line protocol in a child process; only the model behind it is made up."""

from __future__ import annotations

import asyncio
import sys

import psutil
import pytest

from engine.bench.peer import Peer, PeerFailed
from engine.bench.recipes import DRIVERS

DRIVER = f"""
import sys
sys.path.insert(0, {str(DRIVERS)!r})
from line_protocol import serve, take_stdout, timed

replies = take_stdout()
print("a library says hello")

def generate(prompts, new_tokens):
    print("a library says something for each batch")
    if new_tokens > 64:
        sys.exit("out of memory")
    return [new_tokens] * len(prompts)

serve(timed(generate), {{"model": "1.0"}}, replies)
"""


@pytest.fixture
async def peer(tmp_path):
    (tmp_path / "driver.py").write_text(DRIVER)
    peer = Peer("made-up", [sys.executable, str(tmp_path / "driver.py")], tmp_path / "log")
    await peer.start()
    yield peer
    await peer.stop()


def process_of(peer: Peer) -> psutil.Process:
    return psutil.Process(peer._process.pid)


async def until_stopped(peer: Peer) -> None:
    """The signal is sent with the answer; the kernel delivers it a moment later."""
    async with asyncio.timeout(5):
        while process_of(peer).status() != psutil.STATUS_STOPPED:
            await asyncio.sleep(0.01)


async def test_a_driver_answers_each_batch_whatever_its_libraries_print(peer):
    assert peer.versions == {"model": "1.0"}
    for batch in (1, 3):
        answer = await peer.ask(prompts=[[1, 2]] * batch, new_tokens=8)
        assert answer["counts"] == [8] * batch
        assert answer["seconds"] >= 0


async def test_a_peer_stands_still_between_its_answers(peer):
    await until_stopped(peer)
    await peer.ask(prompts=[[1]], new_tokens=1)
    await until_stopped(peer)


async def test_a_driver_that_ends_is_reported_with_its_last_words(peer):
    with pytest.raises(PeerFailed, match="ended: out of memory"):
        await peer.ask(prompts=[[1]], new_tokens=65)


async def test_a_stopped_peer_leaves_no_process(peer):
    process = process_of(peer)
    await peer.stop()
    assert not process.is_running()


async def test_a_driver_that_cannot_load_is_reported(tmp_path):
    script = "import sys; sys.exit('no such model')"
    peer = Peer("broken", [sys.executable, "-c", script], tmp_path / "log")
    with pytest.raises(PeerFailed, match="ended: no such model"):
        await peer.start()
    await peer.stop()
