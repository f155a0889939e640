"""kill -9 and bad bytes in each stage of an update: one known epoch everywhere, nothing paused."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import msgspec
import pytest

from engine import messages as m
from engine.errors import QuarterdeckError
from tests.e2e.engines import EngineTree, answer, ask, eventually, running_engine
from tests.e2e.swaps import Swaps, checkpoint, weighted_config
from tests.engine.weights.checkpoints import disagreements, favourites, write_tensors

pytestmark = pytest.mark.e2e

DISK = m.UpdateWeightFromDiskReqInput
RANKS = ["rank dp0 tp0", "rank dp0 tp1", "rank dp1 tp0"]


def stop(tree: EngineTree, title: str) -> int:
    """SIGSTOP: from now on the rank is silent."""
    pid = tree.process(title).pid
    os.kill(pid, signal.SIGSTOP)
    return pid


async def says(client, **wanted) -> bool:
    try:
        engine = (await client.fleet()).engine
    except QuarterdeckError:
        return False
    return all(getattr(engine, name) == value for name, value in wanted.items())


async def serves_everywhere(tree: EngineTree, index: int, epoch: int) -> None:
    """Every dp group answers with tokens of this checkpoint under this epoch; all run."""
    client = tree.clients[0]
    await eventually(lambda: says(client, state="running", epoch=epoch), 60, f"epoch {epoch}")
    for dp in range(tree.config.dp):
        row = await answer(client, ask("x", dp_rank=dp, sampling={"max_new_tokens": 8}))
        assert row.finish.type == "length" and row.epochs == [(8, epoch)]
        assert set(row.output_ids) <= favourites(index)


async def state_is(client, state: str) -> bool:
    return await says(client, state=state)


@pytest.mark.parametrize("title", RANKS)
async def test_a_rank_killed_in_prepare_leaves_the_old_epoch_and_one_in_commit_the_new(
    tmp_path, title
):
    """C13."""
    async with running_engine(weighted_config(tmp_path, dp=2, tp=2)) as tree:
        client, config = tree.clients[0], tree.config
        pid = stop(tree, title)
        update = asyncio.create_task(
            client.call(DISK, deadline_s=60.0, model_path=checkpoint(config, 1))
        )
        await asyncio.sleep(0.3)
        assert not update.done()
        os.kill(pid, signal.SIGKILL)
        reply = await asyncio.wait_for(update, 10)
        assert not reply.success and title.replace("rank ", "") in reply.message
        await serves_everywhere(tree, 0, epoch=1)

        other = 1 - int(title[7])  # a request on the other group keeps the update draining
        long = asyncio.create_task(
            answer(client, ask("l", dp_rank=other, sampling={"max_new_tokens": 6000}))
        )
        await eventually(lambda: client.counters["rows"] > 30, 10)
        update = asyncio.create_task(
            client.call(DISK, deadline_s=60.0, model_path=checkpoint(config, 1))
        )
        await eventually(lambda: state_is(client, "updating"), 10)
        pid = stop(tree, title)
        await client.abort(abort_all=True)
        await long
        await asyncio.sleep(0.3)
        os.kill(pid, signal.SIGKILL)
        reply = await asyncio.wait_for(update, 10)
        assert reply.success and reply.result["epoch"] == 2, reply.message
        assert "follows: died" in reply.message
        await serves_everywhere(tree, 1, epoch=2)


async def test_weights_that_do_not_fit_change_nothing_under_load(tmp_path):
    """C13: refused at each stage of the preparation."""
    async with running_engine(weighted_config(tmp_path, dp=2)) as tree:
        client, swaps = tree.clients[0], Swaps(tree)
        wrong_shape = tmp_path / "shape.safetensors"
        tokens = {"even.tokens": [9], "odd.tokens": [9]}
        write_tensors(wrong_shape, tokens, shape=(1, 1))
        cut_off = Path(checkpoint(tree.config, 2))
        os.truncate(cut_off, cut_off.stat().st_size - 4)
        good = checkpoint(tree.config, 1)
        async with swaps.streams(8):
            for fields in (
                {"model_path": str(wrong_shape)},
                {"model_path": str(cut_off)},
                {"model_path": good, "checksum": "0" * 64},
                {"model_path": str(tmp_path / "nowhere")},
                {"model_path": good, "load_format": "pt"},
                {"model_path": good, "target": [5]},
            ):
                reply = await client.call(DISK, deadline_s=20.0, in_flight="in_place", **fields)
                assert not reply.success and reply.status_code < 500, fields
                assert await says(client, state="running", epoch=1)
            await swaps.swap(1, good, in_flight="in_place")
        assert not swaps.wrong and not swaps.lost
        await serves_everywhere(tree, 1, epoch=2)


async def test_whatever_dies_after_an_update_the_updated_weights_serve(tmp_path):
    """C32: a detokenizer, a rank, the router, the whole engine."""
    config = weighted_config(tmp_path, dp=2, tp=2)
    async with running_engine(config) as tree:
        client = tree.clients[0]
        source = checkpoint(config, 1)
        await Swaps(tree).swap(1, source, weight_version="v1", token_step=4, spool=True)
        os.unlink(source)  # as trainers do
        for title in ("detokenizer 0", "rank dp1 tp1", "router"):
            tree.kill(title)
            await asyncio.sleep(0.3)
            await serves_everywhere(tree, 1, epoch=2)
            engine = (await client.fleet()).engine
            assert (engine.weight_version, engine.token_step) == ("v1", 4)
        path = checkpoint(config, 2)
        assert (await client.call(DISK, deadline_s=30.0, model_path=path)).result["epoch"] == 3
    async with running_engine(config) as tree:
        await serves_everywhere(tree, 2, epoch=3)
    async with running_engine(msgspec.structs.replace(config, restore=False, dp=1, tp=1)) as tree:
        await serves_everywhere(tree, 0, epoch=4)


async def test_an_engine_whose_weights_are_gone_says_which_epoch_it_serves(tmp_path):
    config = weighted_config(tmp_path, dp=2)
    async with running_engine(config) as tree:
        for index in (1, 2):
            await Swaps(tree).swap(index, checkpoint(config, index))
    os.unlink(checkpoint(config, 2))
    gone = "weights of epoch 3 are gone, serving epoch 2"
    async with running_engine(config, state="degraded") as tree:
        client = tree.clients[0]
        await eventually(lambda: len(client.snapshot.ranks) == 2 and all(
            rank.state == "running" for rank in client.snapshot.ranks), 30)  # fmt: skip
        assert await says(client, state="degraded", epoch=2, reason=gone)
        row = await answer(client, ask("x", sampling={"max_new_tokens": 8}))
        assert not disagreements(row.output_ids, row.epochs, {2: 1})
        await Swaps(tree).swap(3, checkpoint(config, 3))
        await serves_everywhere(tree, 3, epoch=4)


async def test_weights_that_vanish_under_a_running_engine_leave_one_group_out(tmp_path):
    """The group that restarts cannot load them: it says so, the other one serves on."""
    config = weighted_config(tmp_path, dp=2)
    async with running_engine(config) as tree:
        client = tree.clients[0]
        await Swaps(tree).swap(1, checkpoint(config, 1))
        write_tensors(Path(checkpoint(config, 1)), {"even.tokens": [9], "odd.tokens": [9]})
        tree.kill("rank dp1 tp0")

        async def is_out() -> bool:
            return "dp1 cannot load epoch 2" in (await client.fleet()).engine.reason

        await eventually(is_out, 30)
        row = await answer(client, ask("x", sampling={"max_new_tokens": 8}))
        assert row.provenance.dp_rank == 0 and row.epochs == [(8, 2)]
        await Swaps(tree).swap(2, checkpoint(config, 2))
        await serves_everywhere(tree, 2, epoch=3)
