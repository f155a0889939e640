"""The engine client against a router that says only what the test lets it say."""

from __future__ import annotations

import asyncio
import time
from contextlib import aclosing

import pytest

from engine import client as client_module
from engine import messages as m
from engine.client import EngineClient, GenerateReqInput
from engine.config import EngineConfig
from engine.errors import DeadlineExceeded, EngineUnreachable
from engine.runfile import RunFile, run_file_path, write_run_file
from engine.wire import PullSocket, PushSocket
from tests.engine.model.tiny import make_scripted_dir

TOKENS = 1000


class Router:
    """The two sockets of a router, and one to the client's inbox."""

    def __init__(self, home) -> None:
        self.config = EngineConfig(
            home=str(home), model_path=str(make_scripted_dir(home / "model")), backend="scripted",
            run_dir=str(home), generation=1,
        )  # fmt: skip
        self.run_file = run_file_path(home)
        self.lanes = {
            kind: PullSocket(address)
            for kind, address in (
                ("requests", self.config.router_address),
                ("control", self.config.router_reply_address),
            )
        }
        self.inbox: PushSocket | None = None
        self.publish("up")

    def publish(self, state) -> None:
        model = {"max_context": 4096, "vocab_size": 258}
        run = RunFile(state=state, generation=1, pid=1, config=self.config, model=model)
        write_run_file(self.run_file, run)

    async def asked(self, lane: str, kind: type):
        """The next message of this kind."""
        async with asyncio.timeout(10):
            while True:
                message = self.lanes[lane].receive()
                if isinstance(message, kind):
                    return message
                if message is None:
                    await asyncio.sleep(0.005)

    async def join(self) -> EngineClient:
        client = await EngineClient.connect(self.run_file, kind="web", worker_id="1")
        lease = await self.asked("control", m.Lease)
        self.inbox = PushSocket(lease.inbox)
        engine = m.EngineView(state="running", epoch=1, weight_version="v", token_step=None,
                              model="m", generation=1)  # fmt: skip
        self.say(m.FleetSnapshot(seq=1, at=time.time(), engine=engine, workers=[], ranks=[]))
        async with asyncio.timeout(10):
            await client._joined.wait()
        return client

    def say(self, message) -> None:
        assert self.inbox.send(message)

    def close(self) -> None:
        for socket in filter(None, (*self.lanes.values(), self.inbox)):
            socket.close()


@pytest.fixture
def router(tmp_path):
    made = Router(tmp_path)
    yield made
    made.close()


@pytest.fixture
async def client(router):
    made = await router.join()
    yield made
    await made.close()


async def test_a_call_that_nobody_answers_ends_at_its_deadline(router, client, monkeypatch):
    """C18: the send was a success, and the answer never comes; later it is dropped and counted."""
    monkeypatch.setattr(client_module, "ANSWER_GRACE_S", 0.05)
    began = time.monotonic()
    with pytest.raises(DeadlineExceeded, match="GetFleetReqInput"):
        await client.call(m.GetFleetReqInput, deadline_s=0.1)
    assert time.monotonic() - began < 2
    asked = await router.asked("control", m.GetFleetReqInput)
    router.say(m.reply_to(asked, m.ControlReply, call_id=asked.call.id, success=True))
    async with asyncio.timeout(5):
        while client.counters["late_replies"] != 1:
            await asyncio.sleep(0.005)


async def test_answers_find_their_calls_whatever_their_order(router, client):
    """E12: two calls at once, the second one answered first."""
    kinds = (m.PauseGenerationReqInput, m.ContinueGenerationReqInput)
    calls = [asyncio.create_task(client.call(kind, deadline_s=10)) for kind in kinds]
    asked = [await router.asked("control", kind) for kind in kinds]
    for message in reversed(asked):
        name = type(message).__name__
        router.say(m.reply_to(message, m.ControlReply, call_id=message.call.id, success=True,
                              message=name))  # fmt: skip
    replies = await asyncio.wait_for(asyncio.gather(*calls), 5)
    assert [reply.message for reply in replies] == [kind.__name__ for kind in kinds]


async def test_a_call_ends_at_once_when_the_engine_is_known_to_be_gone(router, client):
    """C11: not at its own deadline."""
    call = asyncio.create_task(client.call(m.FlushCacheReqInput, deadline_s=600))
    await router.asked("control", m.FlushCacheReqInput)
    router.publish("restarting")
    with pytest.raises(EngineUnreachable, match="restarting"):
        await asyncio.wait_for(call, 2)


async def test_what_comes_while_a_reader_is_away_is_one_row_and_none_is_lost(router, client):
    """E34: the union of the rows is all ids, once each."""
    request = GenerateReqInput(text="x", rid="r", sampling=m.SamplingParams())
    rows: list[m.StrRow] = []
    async with aclosing(client.generate(request)) as stream:
        first = asyncio.create_task(anext(stream))
        reserve = await router.asked("requests", m.Reserve)
        router.say(m.reply_to(reserve, m.ReserveReply, parent="r"))
        asked = await router.asked("requests", m.TokenizedGenerateReqInput)
        for number in range(TOKENS):
            finish = m.Finish(type="length") if number == TOKENS - 1 else None
            row = m.row_for(asked, m.StrRow, output_ids=[number], text=f"{number} ",
                            epochs=[(1, 1)], finish=finish)  # fmt: skip
            router.say(m.BatchStrOutput(rows=[row]))
        rows.append(await first)
        async with asyncio.timeout(10):  # the reader is away until all has come
            while client.counters["rows"] < TOKENS:
                await asyncio.sleep(0.005)
        rows += [row async for row in stream]
    assert [i for row in rows for i in row.output_ids] == list(range(TOKENS))
    assert "".join(row.text for row in rows) == "".join(f"{n} " for n in range(TOKENS))
    assert sum(count for row in rows for count, _ in row.epochs) == TOKENS
    assert len(rows) <= 2
    assert [row.finish for row in rows if row.finish] == [m.Finish(type="length")]
    assert client.counters["slow_consumers"] == client.counters["late_rows"] == 0
