"""A trainer in a torch.distributed group with every rank: joins, buckets, death."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time

import pytest
import torch

from engine import messages as m
from engine.weights.sender import broadcast, described
from engine.weights.transfer import join_group, leave_group
from tests.e2e.engines import EngineTree, answer, ask, eventually, running_engine
from tests.e2e.swaps import Swaps, weighted_config
from tests.engine.weights.checkpoints import favourites
from tests.engine.weights.test_transfer import free_port

pytestmark = pytest.mark.e2e

INIT, SEND = m.InitWeightsUpdateGroupReqInput, m.UpdateWeightsFromDistributedReqInput


def bucket(index: int, name: str) -> list[tuple[str, torch.Tensor]]:
    half = sorted(favourites(index))[0 if name == "even.tokens" else 1 :: 2]
    return [(name, torch.tensor(half))]


def whole(index: int) -> list[tuple[str, torch.Tensor]]:
    return [*bucket(index, "even.tokens"), *bucket(index, "odd.tokens")]


class Trainer:
    """Rank 0 of a group with all ranks of the engine, in this process."""

    def __init__(self, tree: EngineTree) -> None:
        self.tree, self.client = tree, tree.clients[0]
        self.world_size = 1 + tree.config.dp * tree.config.tp

    async def join(self) -> m.ControlReply:
        port = free_port()
        self.group, reply = await asyncio.gather(
            asyncio.to_thread(
                join_group, address="127.0.0.1", port=port, rank=0, name="g", backend="gloo",
                world_size=self.world_size, timeout_s=40.0,
            ),
            self.init(port),
        )  # fmt: skip
        return reply

    async def init(self, port: int, deadline_s: float = 60.0) -> m.ControlReply:
        return await self.client.call(
            INIT, deadline_s=deadline_s, master_address="127.0.0.1", master_port=port,
            rank_offset=1, world_size=self.world_size, group_name="g",
        )  # fmt: skip

    async def send(self, tensors, **fields) -> m.ControlReply:
        call = asyncio.create_task(
            self.client.call(SEND, deadline_s=30.0, group_name="g", **described(tensors), **fields)
        )
        sent = asyncio.to_thread(broadcast, self.group, tensors, call.done)
        await asyncio.gather(sent, call, return_exceptions=True)  # refused: the ranks have left
        return call.result()

    def leave(self) -> None:
        leave_group(self.group)


async def serves(client, index: int, epoch: int) -> bool:
    row = await answer(client, ask("x", sampling={"max_new_tokens": 8}))
    return row.epochs == [(8, epoch)] and set(row.output_ids) <= favourites(index)


async def test_fifty_buckets_of_a_paused_trainer_are_one_epoch_that_outlives_a_restart(tmp_path):
    """slime: pause, flush, buckets that do not flush, continue."""
    async with running_engine(weighted_config(tmp_path, dp=2, tp=2)) as tree:
        client, trainer = tree.clients[0], Trainer(tree)
        assert (await trainer.join()).success
        assert (await client.call(m.PauseGenerationReqInput, deadline_s=10.0)).success
        assert (await client.call(m.FlushCacheReqInput, deadline_s=10.0)).success
        for number in range(50):
            name = ("even.tokens", "odd.tokens")[number % 2]
            reply = await trainer.send(
                bucket(1, name), flush_cache=False, weight_version="17", token_step=17
            )
            assert reply.success and reply.message == "staged", reply.message
            assert (await client.fleet()).engine.epoch == 1
        reply = await client.call(m.ContinueGenerationReqInput, deadline_s=20.0)
        assert reply.success and reply.result["epoch"] == 2, reply.message
        assert await serves(client, 1, epoch=2)
        engine = (await client.fleet()).engine
        assert (engine.epoch, engine.weight_version, engine.token_step) == (2, "17", 17)
        trainer.leave()
        assert len(list((tmp_path / "spool").iterdir())) == 50
        tree.kill("router")
        await asyncio.sleep(0.5)
        await eventually(lambda: client.joined, 60)
        await eventually(lambda: client.snapshot and client.snapshot.engine.epoch == 2, 60)
        assert await serves(client, 1, epoch=2)


async def test_a_whole_model_in_one_call_swaps_under_load_and_a_part_is_refused(tmp_path):
    async with running_engine(weighted_config(tmp_path, dp=2)) as tree:
        client, trainer, swaps = tree.clients[0], Trainer(tree), Swaps(tree)
        assert (await trainer.join()).success
        async with swaps.streams(8):
            for index in (1, 0, 1):
                reply = await trainer.send(whole(index), in_flight="in_place")
                assert reply.success, reply.message
                swaps.index_of[reply.result["epoch"]] = index
        assert not swaps.wrong and not swaps.lost
        assert (await client.fleet()).engine.epoch == 4
        reply = await trainer.send(bucket(0, "even.tokens"))
        assert reply.err_type == "partial_update_needs_session"
        assert await serves(client, 1, epoch=4)
        trainer.leave()


async def test_waiting_for_a_trainer_holds_nobody_up(tmp_path):
    async with running_engine(weighted_config(tmp_path, dp=2)) as tree:
        client, swaps = tree.clients[0], Swaps(tree)
        gaps = []

        async def watch() -> None:
            seen = client.counters["rows"]
            at = time.monotonic()
            while True:
                await asyncio.sleep(0.01)
                if client.counters["rows"] != seen:
                    gaps.append(time.monotonic() - at)
                    seen, at = client.counters["rows"], time.monotonic()

        async with swaps.streams(8):
            watching = asyncio.create_task(watch())
            reply = await Trainer(tree).init(free_port(), deadline_s=6.0)
            watching.cancel()
        assert not reply.success and "did not come together" in reply.message
        assert not swaps.wrong and not swaps.lost
        assert max(gaps) < 1.0


KILLED = """
import sys, time
from engine.weights.sender import broadcast
from engine.weights.transfer import join_group
from tests.e2e.test_weights_distributed import bucket
group = join_group(address="127.0.0.1", port=int(sys.argv[1]), rank=0, name="g", backend="gloo",
                   world_size=int(sys.argv[2]), timeout_s=40.0)
broadcast(group, bucket(1, "even.tokens"))
print("sent", flush=True)
time.sleep(100)
"""


async def test_a_killed_trainer_leaves_the_old_epoch_serving(tmp_path):
    async with running_engine(weighted_config(tmp_path, dp=2)) as tree:
        client, trainer, port = tree.clients[0], Trainer(tree), free_port()
        process = subprocess.Popen(
            [sys.executable, "-c", KILLED, str(port), str(trainer.world_size)],
            stdout=subprocess.PIPE,
        )
        assert (await trainer.init(port)).success
        begun = await client.call(m.BeginWeightUpdateReqInput, deadline_s=10.0)
        session = begun.result["session_id"]
        first = bucket(1, "even.tokens")
        reply = await client.call(
            SEND, deadline_s=30.0, group_name="g", session_id=session, **described(first)
        )
        assert reply.success, reply.message
        second = described(bucket(1, "odd.tokens"))
        call = asyncio.create_task(
            client.call(SEND, deadline_s=60.0, group_name="g", session_id=session, **second)
        )
        await asyncio.sleep(0.5)
        assert not call.done()
        process.kill()
        process.wait()
        process.stdout.close()
        reply = await asyncio.wait_for(call, 10)
        assert not reply.success and "broadcast failed" in reply.message
        snapshot = await client.fleet()
        assert (snapshot.engine.state, snapshot.engine.epoch) == ("running", 1)
        assert snapshot.session is None
        assert await serves(client, 0, epoch=1)
        assert (await trainer.join()).success  # the name is free again
        assert (await trainer.send(whole(2))).success
        assert await serves(client, 2, epoch=2)
        trainer.leave()


async def test_a_session_whose_trainer_says_nothing_more_is_dropped_in_its_idle_time(tmp_path):
    async with running_engine(weighted_config(tmp_path, session_idle_s=1.0)) as tree:
        client, trainer = tree.clients[0], Trainer(tree)
        await trainer.join()
        begun = await client.call(m.BeginWeightUpdateReqInput, deadline_s=10.0)
        session = begun.result["session_id"]
        assert (await trainer.send(bucket(1, "even.tokens"), session_id=session)).success
        trainer.leave()

        async def is_dropped() -> bool:
            return (await client.fleet()).session is None

        await eventually(is_dropped, 5)
        assert await serves(client, 0, epoch=1)
        reply = await client.call(m.EndWeightUpdateReqInput, deadline_s=5.0, session_id=session)
        assert (reply.status_code, reply.err_type) == (404, "no_such_session")
