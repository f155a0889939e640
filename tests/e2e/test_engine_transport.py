"""A real engine tree with the scripted model: admission, aborts, two clients, no lost answer."""

from __future__ import annotations

import asyncio
import pickle
import random
from collections import Counter
from contextlib import aclosing
from pathlib import Path

import psutil
import pytest

from engine import messages as m
from engine.errors import BadRequest, QuarterdeckError
from engine.launch import STOP_GRACE_S
from engine.wire import VERSION, PushSocket
from tests.e2e.engines import answer, ask, eventually, running_engine, scripted_config
from tests.engine.test_wire import Touch

pytestmark = pytest.mark.e2e


async def live_requests(client) -> int:
    return (await client.fleet()).counters["live_requests"]


async def test_two_workers_get_exactly_their_own_answers(tmp_path):
    """E4."""
    async with running_engine(scripted_config(tmp_path, dp=2, detokenizers=2)) as tree:
        one, two = tree.clients[0], await tree.connect("2")
        alone = {i: (await answer(one, ask(f"question {i} [[eos 40]]"))).text for i in range(12)}
        rows = await asyncio.gather(
            *(answer(client, ask(f"question {i} [[eos 40]]"))
              for i in range(12) for client in (one, two))
        )  # fmt: skip
        assert [row.text for row in rows] == [alone[i] for i in range(12) for _ in (one, two)]
        assert {row.finish.type for row in rows} == {"stop"}
        assert {row.provenance.dp_rank for row in rows} == {0, 1}
        assert one.counters["late_rows"] == two.counters["late_rows"] == 0
        assert await live_requests(one) == 0


async def test_rubbish_on_every_socket_runs_no_code_and_ends_no_process(tmp_path):
    """E49, C19: pickles, broken frames, and messages that belong to somebody else."""
    async with running_engine(scripted_config(tmp_path, tp=2, scripted_step_s=0.01)) as tree:
        client = tree.clients[0]
        before = {process.pid for process in tree.launcher.children(recursive=True)}
        running = asyncio.create_task(answer(client, ask("x", sampling={"max_new_tokens": 3000})))
        await eventually(lambda: client.counters["rows"] > 3, 10)
        run_dir = Path(client.inbox.removeprefix("ipc://")).parent
        addresses = [path for path in run_dir.iterdir() if path.is_socket()]
        assert len(addresses) == 6, "router, its reports, detokenizer, leader, follower, client"
        assert not [
            connection for process in (tree.launcher, *tree.launcher.children(recursive=True))
            for connection in process.net_connections("inet")
        ], "something listens on a network"  # fmt: skip
        for path in addresses:
            stranger = PushSocket(f"ipc://{path}")
            payload = pickle.dumps(Touch(tmp_path / "pwned"))
            for frame in (payload, bytes((VERSION,)) + payload, b"", b"\xff" * 1000):
                stranger.send_frame(frame)
            stranger.send(m.InboxGone(inbox="ipc:///nobody"))
            stranger.send(m.BatchStrOutput(rows=[]))
            stranger.close()

        async def counted() -> bool:
            return (await client.fleet()).counters["malformed"] >= 8

        await eventually(counted, 5)
        await client.abort(abort_all=True)
        assert (await running).finish.type == "abort"
        assert (await answer(client, ask("after [[eos 3]]"))).finish.type == "stop"
        assert {process.pid for process in tree.launcher.children(recursive=True)} == before
        assert not (tmp_path / "pwned").exists()


async def test_an_abort_works_from_any_worker_and_is_exact(tmp_path):
    """E14, E15: the abort lands on another worker; job_1 does not mean job_10."""
    config = scripted_config(tmp_path, scripted_step_s=0.01)
    async with running_engine(config) as tree:
        one, two = tree.clients[0], await tree.connect("2")
        long = {"max_new_tokens": 3000}
        first = asyncio.create_task(answer(one, ask("a", rid="job_1", sampling=long)))
        other = asyncio.create_task(answer(one, ask("b", rid="job_10", sampling=long)))
        await eventually(lambda: one.counters["rows"] > 20, 5)
        reply = await two.abort("job_1")
        assert reply.result["found"] == ["job_1"]
        row = await asyncio.wait_for(first, 2)
        assert row.finish.type == "abort" and row.text and len(row.output_ids) > 5
        assert not other.done()
        assert (await two.abort("job_1")).result["found"] == []
        refused = await two.abort("")
        assert (refused.success, refused.status_code) == (False, 400)
        assert not other.done()
        assert (await two.abort(abort_all=True)).result["found"] == ["job_10"]
        await asyncio.wait_for(other, 2)


async def test_a_second_request_with_a_live_rid_is_refused_on_any_worker(tmp_path):
    """E19: 409, and the first one goes on."""
    config = scripted_config(tmp_path, scripted_step_s=0.01)
    async with running_engine(config) as tree:
        one, two = tree.clients[0], await tree.connect("2")
        first = asyncio.create_task(answer(one, ask("a [[eos 60]]", rid="same")))
        await eventually(lambda: one.counters["rows"] > 3, 5)
        for client in (one, two):
            with pytest.raises(QuarterdeckError) as refusal:
                await answer(client, ask("b", rid="same"))
            assert refusal.value.status_code == 409
        assert (await first).finish.type == "stop"
        assert (await answer(two, ask("b [[eos 3]]", rid="same"))).finish.type == "stop"


async def test_an_overloaded_engine_refuses_at_once_and_leaves_nobody_waiting(tmp_path):
    """E1: each refused client gets 503 with a Retry-After; zero requests without an answer."""
    config = scripted_config(
        tmp_path, scripted_step_s=0.01, limits={"max_running": 1, "max_waiting": 1}
    )
    async with running_engine(config) as tree:
        one, two = tree.clients[0], await tree.connect("2")
        tasks = [
            asyncio.create_task(answer(client, ask(f"{i} [[eos 50]]")))
            for i in range(6)
            for client in (one, two)
        ]
        done = await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 30)
        refused = [r for r in done if isinstance(r, QuarterdeckError)]
        assert len(refused) == 10 and len(done) - len(refused) == 2
        assert {(r.status_code, r.retry_after_s) for r in refused} == {(503, 1)}


async def test_a_client_that_goes_away_frees_its_slot(tmp_path):
    """C1: leaving the iterator aborts the request in the engine."""
    async with running_engine(scripted_config(tmp_path, scripted_step_s=0.01)) as tree:
        client = tree.clients[0]
        async with aclosing(client.generate(ask("a", sampling={"max_new_tokens": 5000}))) as rows:
            async for _ in rows:
                break

        async def is_free() -> bool:
            snapshot = await client.fleet()
            return snapshot.counters["live_requests"] == 0

        assert await eventually(is_free, 5) < 1.0
        await eventually(lambda: not client._abandoned, 2)
        assert client.counters["late_rows"] == 0


async def test_a_thousand_random_aborts_leave_nothing_behind(tmp_path):
    """E17: start, abort at a random moment; no entry left, nobody hurt, and it ends in time."""
    chance = random.Random(7)
    ends: list[object] = []
    async with running_engine(scripted_config(tmp_path, dp=2)) as tree:
        one, two = tree.clients[0], await tree.connect("2")

        async def start_and_abort(i: int) -> None:
            client, other = chance.sample((one, two), 2)
            task = asyncio.create_task(
                answer(client, ask("x", rid=f"r{i}", sampling={"max_new_tokens": 400}))
            )
            await asyncio.sleep(chance.random() * 0.05)
            how = chance.randrange(3)
            if how == 0:
                task.cancel()
            elif how == 1:
                await other.abort(f"r{i}")
            ends.extend(await asyncio.gather(task, return_exceptions=True))

        bystander = asyncio.create_task(answer(one, ask("bystander [[eos 30]]")))
        for start in range(0, 1000, 50):
            await asyncio.gather(*(start_and_abort(i) for i in range(start, start + 50)))
        assert (await bystander).finish.type == "stop"
        rows = [end for end in ends if not isinstance(end, asyncio.CancelledError)]
        kinds = Counter((row.finish.type, row.finish.status_code) for row in rows)
        assert set(kinds) == {("abort", None), ("length", None)}, "somebody had an error"
        assert len(ends) == 1000 and min(kinds.values()) > 100

        async def nothing_left() -> bool:
            return await live_requests(one) == 0

        await eventually(nothing_left, 5)
        for client in (one, two):
            await eventually(lambda c=client: not c._abandoned and not c._streams, 2)
            assert client.counters["late_rows"] == 0
        children = tree.launcher.children(recursive=True)
        tree.launcher.terminate()
        assert not psutil.wait_procs(children, timeout=STOP_GRACE_S)[1]


async def test_children_of_one_parent_are_admitted_and_aborted_together(tmp_path):
    async with running_engine(scripted_config(tmp_path, scripted_step_s=0.01)) as tree:
        client = tree.clients[0]
        requests = [ask(f"child {i}", sampling={"max_new_tokens": 3000}) for i in range(3)]
        ends = {}

        async def read() -> None:
            async for index, row in client.generate_many(requests, parent="family"):
                if row.finish:
                    ends[index] = row.finish.type

        reading = asyncio.create_task(read())
        await eventually(lambda: client.counters["rows"] > 10, 5)
        assert len((await client.abort("family")).result["found"]) == 3
        await asyncio.wait_for(reading, 3)
        assert ends == {0: "abort", 1: "abort", 2: "abort"}


async def test_a_bad_prompt_is_refused_before_the_engine_sees_it(tmp_path):
    async with running_engine(scripted_config(tmp_path)) as tree:
        client = tree.clients[0]
        with pytest.raises(BadRequest):
            await answer(client, ask("x" * 100_000))
        with pytest.raises(QuarterdeckError, match="data_parallel_rank 7"):
            await answer(client, ask("x", dp_rank=7))
        assert await live_requests(client) == 0
