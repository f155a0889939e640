"""Swaps under load: every token proves its epoch, and nothing is lost that a policy keeps."""

from __future__ import annotations

import asyncio
import time

import pytest

from engine import messages as m
from tests.e2e.engines import answer, ask, eventually, running_engine
from tests.e2e.swaps import Swaps, checkpoint, weighted_config

pytestmark = pytest.mark.e2e

DISK = m.UpdateWeightFromDiskReqInput
KEEPS = {"finish": "length", "in_place": "length", "retract": "length", "abort": "abort"}


async def swap_under_load(tree, policy: str, count: int) -> Swaps:
    swaps = Swaps(tree)
    paths = [checkpoint(tree.config, index) for index in (0, 1)]
    async with swaps.streams(16):
        for number in range(count):
            await swaps.swap((number + 1) % 2, paths[(number + 1) % 2], in_flight=policy,
                             token_step=number)  # fmt: skip
    return swaps


@pytest.mark.parametrize("policy", list(KEEPS))
async def test_forty_swaps_under_sixteen_streams_prove_every_token(tmp_path, policy):
    """C12. DP 2 x TP 2, two clients."""
    async with running_engine(weighted_config(tmp_path, dp=2, tp=2)) as tree:
        await tree.connect("2")
        swaps = await swap_under_load(tree, policy, 40)
        assert not swaps.wrong
        assert swaps.answers > 16
        assert {row.finish.type for row in swaps.lost} <= {"abort"}
        if KEEPS[policy] == "length":
            assert not swaps.lost
        if policy in ("in_place", "retract"):
            assert swaps.several > 0
        snapshot = await tree.clients[0].fleet()
        assert (snapshot.engine.state, snapshot.engine.epoch) == ("running", 41)
        for client in tree.clients:
            assert client.counters["late_rows"] == 0


@pytest.mark.soak
@pytest.mark.parametrize("policy", list(KEEPS))
async def test_two_hundred_swaps(tmp_path, policy):
    async with running_engine(weighted_config(tmp_path, dp=2, tp=2)) as tree:
        swaps = await swap_under_load(tree, policy, 200)
        assert not swaps.wrong and (KEEPS[policy] == "abort" or not swaps.lost)


async def test_every_client_says_the_new_version_once_the_call_has_returned(tmp_path):
    """E22, mixed with pauses."""
    async with running_engine(weighted_config(tmp_path, dp=2)) as tree:
        one, two = tree.clients[0], await tree.connect("2")
        paths = [checkpoint(tree.config, index) for index in (0, 1)]
        for number in range(6):
            if number % 2:
                await one.call(m.PauseGenerationReqInput, deadline_s=10.0)
            version = f"v{number}"
            reply = await one.call(
                DISK, deadline_s=30.0, model_path=paths[number % 2], weight_version=version
            )
            assert reply.success, reply.message
            for client in (one, two) * 5:
                assert (await client.fleet()).engine.weight_version == version
            if number % 2:
                await two.call(m.ContinueGenerationReqInput, deadline_s=10.0)


async def test_a_pause_holds_the_requests_of_every_client_until_continue(tmp_path):
    """E11."""
    async with running_engine(weighted_config(tmp_path, dp=2)) as tree:
        clients = [tree.clients[0], *[await tree.connect(str(i)) for i in (2, 3, 4)]]
        assert (await clients[0].call(m.PauseGenerationReqInput, deadline_s=10.0)).success
        tasks = [
            asyncio.create_task(answer(clients[i % 4], ask(f"{i} [[eos 3]]"))) for i in range(20)
        ]
        await asyncio.sleep(0.5)
        assert not any(task.done() for task in tasks)
        assert sum(client.counters["rows"] for client in clients) == 0
        assert (await clients[1].call(m.PauseGenerationReqInput, deadline_s=10.0)).success
        assert (await clients[2].call(m.ContinueGenerationReqInput, deadline_s=10.0)).success
        rows = await asyncio.wait_for(asyncio.gather(*tasks), 20)
        assert {row.finish.type for row in rows} == {"stop"}


async def test_pause_and_continue_at_once_both_return(tmp_path):
    """E12."""
    async with running_engine(weighted_config(tmp_path)) as tree:
        client = tree.clients[0]
        for _ in range(10):
            replies = await asyncio.gather(
                client.call(m.PauseGenerationReqInput, deadline_s=10.0),
                client.call(m.ContinueGenerationReqInput, deadline_s=10.0),
            )
            assert all(reply.success for reply in replies)
        assert (await client.fleet()).engine.state == "running"


async def test_rows_of_aborted_requests_are_whole(tmp_path):
    """E18: equal lengths, whether the end came before the first token or after ten."""
    config = weighted_config(tmp_path, scripted_step_s=0.02, limits={"max_running": 1})
    async with running_engine(config) as tree:
        client = tree.clients[0]
        wants = {"logprob": m.LogprobParams(top_num=2), "return_entropy": True}
        long = {"max_new_tokens": 3000}
        first = asyncio.create_task(answer(client, ask("a", sampling=long, **wants)))
        await eventually(lambda: client.counters["rows"] > 10, 10)
        second = asyncio.create_task(answer(client, ask("b", sampling=long, **wants)))
        await asyncio.sleep(0.2)
        await client.abort(abort_all=True)
        rows = await asyncio.wait_for(asyncio.gather(first, second), 5)
        assert len(rows[0].output_ids) >= 10 and rows[1].output_ids == []
        for row in rows:
            count = len(row.output_ids)
            assert row.finish.type == "abort"
            assert sum(n for n, _ in row.epochs) == count
            assert len(row.output_logprobs.values) == len(row.entropy) == count
            assert len(row.output_logprobs.top.ids) == count


async def test_an_update_that_meets_a_long_request_waits_then_says_no(tmp_path):
    """E21, E22: the engine lives, old weights and version are intact; nobody says another one."""
    async with running_engine(weighted_config(tmp_path, dp=2)) as tree:
        one, two = tree.clients[0], await tree.connect("2")
        long = asyncio.create_task(answer(two, ask("x", sampling={"max_new_tokens": 6000})))
        await eventually(lambda: two.counters["rows"] > 3, 10)
        began = time.monotonic()
        source = checkpoint(tree.config, 1)
        update = asyncio.create_task(
            one.call(DISK, deadline_s=30.0, model_path=source, weight_version="v2",
                     drain_timeout_s=1.0)
        )  # fmt: skip
        while not update.done():
            assert (await two.fleet()).engine.weight_version == "default"
        reply = await update
        assert time.monotonic() - began < 5
        assert (reply.success, reply.err_type) == (False, "drain_timeout")
        assert (await one.fleet()).engine.epoch == 1 and not long.done()
        assert (await answer(one, ask("y [[eos 3]]"))).finish.type == "stop"
        await one.abort(abort_all=True)
        await long


async def test_an_update_that_nobody_waits_for_is_known_by_its_job(tmp_path):
    async with running_engine(weighted_config(tmp_path)) as tree:
        client = tree.clients[0]
        reply = await client.call(
            DISK, deadline_s=30.0, model_path=checkpoint(tree.config, 1), is_async=True
        )
        assert reply.success and reply.result["job"]

        async def has_ended() -> bool:
            told = await client.outcome_of(reply.result["job"], deadline_s=5.0)
            return told.result["state"] == "ended" and told.result["result"]["epoch"] == 2

        await eventually(has_ended, 10)
        assert (await client.fleet()).engine.epoch == 2


async def test_a_pause_that_everybody_forgot_ends_by_itself(tmp_path):
    """C13: a pause always has a lease."""
    async with running_engine(weighted_config(tmp_path, pause_lease_s=1.0)) as tree:
        client = tree.clients[0]
        await client.call(m.PauseGenerationReqInput, deadline_s=5.0)
        await client.call(m.ReleaseMemoryOccupationReqInput, deadline_s=5.0)
        held = asyncio.create_task(answer(client, ask("x [[eos 3]]")))
        row = await asyncio.wait_for(held, 10)
        assert row.finish.type == "stop"
        snapshot = await client.fleet()
        assert snapshot.engine.state == "running"
        assert [notice.kind for notice in snapshot.notices] == ["pause_lease_expired"]


async def test_a_new_label_disturbs_nobody(tmp_path):
    """E23, C20."""
    async with running_engine(weighted_config(tmp_path, scripted_step_s=0.01)) as tree:
        client = tree.clients[0]
        running = asyncio.create_task(answer(client, ask("x", sampling={"max_new_tokens": 60})))
        await eventually(lambda: client.counters["rows"] > 3, 10)
        reply = await client.call(m.UpdateWeightVersionReqInput, deadline_s=5.0, new_version="v3")
        assert reply.success
        assert (await client.fleet()).engine.weight_version == "v3"
        row = await running
        assert row.finish.type == "length" and row.epochs == [(60, 1)]
        assert (await client.labels([1]))[1].weight_version == "v3"
