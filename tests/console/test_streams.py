"""One answer from rows to frames: order, coalescing, replay, grace, stop, and exactly one end."""

from __future__ import annotations

import asyncio
import json
from contextlib import aclosing

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from console.services import streams
from console.services.rows import merge_all
from console.services.streams import StreamHub, StreamSource
from engine.errors import Overloaded
from engine.messages import Finish, OutputLogprobs, Provenance, StrRow, TopLogprobs, merge

DONE = Finish(type="length")


def row(text: str = "", ids: list[int] | None = None, **fields) -> StrRow:
    ids = [len(text)] if ids is None else ids
    runs = [(len(ids), 1)] if ids else []
    return StrRow(rid="r", http_worker_ipc="w", text=text, output_ids=ids, epochs=runs, **fields)


class Engine:
    """Rows on demand, in place of a running engine: ``feed`` them, see whether it was aborted."""

    def __init__(self) -> None:
        self.queue: asyncio.Queue[StrRow | Exception] = asyncio.Queue()
        self.aborts = 0
        self.closed = False
        self.recorded: list[streams.Answer] = []
        self.answers_aborts = True

    def feed(self, *rows: StrRow | Exception) -> None:
        for one in rows:
            self.queue.put_nowait(one)

    async def rows(self):
        try:
            while True:
                one = await self.queue.get()
                if isinstance(one, Exception):
                    raise one
                yield one
                if one.finish is not None:
                    return
        finally:
            self.closed = True

    async def abort(self) -> None:
        self.aborts += 1
        if self.answers_aborts:
            self.feed(row(ids=[], finish=Finish(type="abort", message="aborted by the client")))

    async def begin(self):
        return {"rid": "r", "conversation": 1, "message": 2, "worker": "1", "via": "1"}

    async def record(self, answer: streams.Answer) -> None:
        self.recorded.append(answer)

    @property
    def source(self) -> StreamSource:
        return StreamSource(
            rows=self.rows(), abort=self.abort, begin=self.begin, record=self.record
        )


@pytest.fixture
def engine():
    return Engine()


@pytest.fixture
async def hub():
    made = StreamHub(worker="1", grace_s=0.2)
    yield made
    await made.close()


async def read(attachment, count: int | None = None, pause: float = 0.0) -> list[dict]:
    frames = []
    async with aclosing(attachment.frames()) as source:
        async for frame in source:
            frames.append(json.loads(frame))
            if len(frames) == count:
                break
            await asyncio.sleep(pause)
    return frames


async def test_frames_are_numbered_from_zero_and_end_exactly_once(hub, engine):
    attachment = hub.start("s", "user:1", engine.source)
    engine.feed(
        row("a", provenance=Provenance(prompt_tokens=3, cached_tokens=2, dp_rank=1, queued_s=0))
    )
    engine.feed(row("b"), row("c", finish=DONE))
    frames = await read(attachment)
    assert [f["index"] for f in frames] == list(range(len(frames)))
    assert [f["type"] for f in frames] == ["started", *["delta"] * (len(frames) - 2), "end"]
    assert "".join(f["text"] for f in frames[1:-1]) == "abc"
    end = frames[-1]
    assert end["finish"]["type"] == "length"
    assert end["usage"] == {"prompt_tokens": 3, "completion_tokens": 3, "cached_tokens": 2}
    assert (end["worker"], end["rank"], end["slot_freed"], end["text_length"]) == ("1", 1, True, 3)


async def test_a_slow_reader_gets_fewer_frames_and_every_token(hub, engine):
    """C3, E34: what waits is merged, so it stays small."""
    attachment = hub.start("s", "user:1", engine.source)
    words = [f"w{i} " for i in range(5000)]
    engine.feed(*(row(word, [i]) for i, word in enumerate(words)), row(ids=[], finish=DONE))
    frames = await read(attachment, pause=0.1)
    deltas = [f for f in frames if f["type"] == "delta"]
    assert "".join(f["text"] for f in deltas) == "".join(words)
    assert [i for f in deltas for i in f["token_ids"]] == list(range(5000))
    assert sum(count for f in deltas for count, _ in f["epochs"]) == 5000
    assert len(deltas) < 20


async def test_tokens_of_a_quick_burst_share_a_frame_after_20_ms(hub, engine):
    attachment = hub.start("s", "user:1", engine.source)
    reader = asyncio.create_task(read(attachment))
    for i in range(20):
        engine.feed(row("x", [i]))
        await asyncio.sleep(0.002)
    engine.feed(row(ids=[], finish=DONE))
    deltas = [f for f in await reader if f["type"] == "delta"]
    assert len(deltas) <= 8
    assert "".join(f["text"] for f in deltas) == "x" * 20


async def test_logprobs_entropy_and_alternatives_ride_beside_their_tokens(hub, engine):
    attachment = hub.start("s", "user:1", engine.source)
    logprobs = OutputLogprobs(values=[-0.5], top=TopLogprobs(ids=[[7, 8]], values=[[-0.5, -1.5]]))
    engine.feed(row("a", [7], output_logprobs=logprobs, entropy=[1.25], finish=DONE))
    [delta] = [f for f in await read(attachment) if f["type"] == "delta"]
    assert delta["logprobs"] == [-0.5]
    assert delta["entropy"] == [1.25]
    assert delta["top"] == [[[7, -0.5], [8, -1.5]]]


async def test_a_refusal_has_no_stream_and_is_told_once(hub, engine):
    attachment = hub.start("s", "user:1", engine.source)
    engine.feed(Overloaded("full", retry_after_s=3))
    with pytest.raises(Overloaded, match="full"):
        await read(attachment)
    [answer] = engine.recorded
    assert answer.finish.err_type == "overloaded"


async def test_a_failure_under_way_keeps_the_text_and_ends_with_the_reason(hub, engine):
    attachment = hub.start("s", "user:1", engine.source)
    failed = Finish(type="abort", status_code=500, err_type="rank_died", message="rank 0 died")
    engine.feed(row("partial "), row(ids=[], finish=failed))
    frames = await read(attachment)
    assert frames[-1]["finish"]["err_type"] == "rank_died"
    assert engine.recorded[0].text == ["partial ", ""]


async def test_a_fault_of_ours_ends_this_stream_alone(hub, engine):
    attachment = hub.start("s", "user:1", engine.source)
    engine.feed(row("a"), ValueError("a bug"))
    frames = await read(attachment)
    assert frames[-1]["type"] == "end"
    assert frames[-1]["finish"]["err_type"] == "internal_error"
    assert "a bug" not in json.dumps(frames)


async def test_a_stream_that_waits_is_shown_as_started(hub, engine, monkeypatch):
    monkeypatch.setattr(streams, "STARTED_S", 0.01)
    attachment = hub.start("s", "user:1", engine.source)
    [started] = await asyncio.wait_for(read(attachment, count=1), 2)
    assert started["type"] == "started"


async def test_stop_says_slot_freed_only_after_the_engine_confirmed(hub, engine):
    """C1: a second stop is harmless."""
    attachment = hub.start("s", "user:1", engine.source)
    engine.feed(row("a"))
    await read(attachment, count=2)
    await attachment.stop()
    await attachment.stop()  # twice is harmless
    frames = await read(attachment)
    assert engine.aborts == 1
    assert frames[-1]["finish"]["type"] == "abort"
    assert frames[-1]["slot_freed"] is True


async def test_stop_without_an_answer_of_the_engine_ends_and_says_so(hub, engine, monkeypatch):
    """C1: the slot is not called free."""
    monkeypatch.setattr(streams, "STOP_TIMEOUT_S", 0.05)
    engine.answers_aborts = False
    attachment = hub.start("s", "user:1", engine.source)
    engine.feed(row("a"))
    await read(attachment, count=2)
    await attachment.stop()
    frames = await asyncio.wait_for(read(attachment), 2)
    assert [f["type"] for f in frames].count("end") == 1
    assert frames[-1]["slot_freed"] is False
    assert engine.closed, "the rows were not closed, so the engine would go on"


async def test_a_lost_socket_resumes_where_it_was(hub, engine):
    attachment = hub.start("s", "user:1", engine.source)
    engine.feed(row("a"))
    first = await read(attachment, count=2)
    await attachment.detach()
    engine.feed(row("b"), row("c"))
    await asyncio.sleep(0.05)
    again = hub.resume("s", "user:1", 2)
    engine.feed(row("d", finish=DONE))
    rest = await read(again)
    assert [f["index"] for f in first + rest] == list(range(len(first + rest)))
    assert "".join(f.get("text", "") for f in first + rest) == "abcd"
    assert engine.aborts == 0


async def test_a_resume_replays_frames_that_were_seen_if_asked(hub, engine):
    attachment = hub.start("s", "user:1", engine.source)
    engine.feed(row("a"))
    seen = await read(attachment, count=2)
    replayed = await read(hub.resume("s", "user:1", 0), count=2)
    assert replayed == seen


async def test_nobody_resumes_anothers_stream(hub, engine):
    hub.start("s", "user:1", engine.source)
    assert hub.resume("s", "user:2", 0) is None
    assert hub.resume("unknown", "user:1", 0) is None


async def test_the_grace_ends_in_an_abort_and_the_record_keeps_the_text(hub, engine):
    """C1."""
    attachment = hub.start("s", "user:1", engine.source)
    engine.feed(row("kept"))
    await read(attachment, count=2)
    await attachment.detach()
    await asyncio.sleep(0.1)
    assert engine.aborts == 0
    await asyncio.sleep(0.3)
    assert engine.aborts == 1
    assert "".join(engine.recorded[0].text) == "kept"
    assert hub.resume("s", "user:1", 0) is None


async def test_a_newer_socket_takes_over_and_the_older_ones_leaving_starts_no_grace(hub, engine):
    older = hub.start("s", "user:1", engine.source)
    engine.feed(row("a"))
    reading = asyncio.create_task(read(older))
    await asyncio.sleep(0.05)
    newer = hub.resume("s", "user:1", 0)
    with pytest.raises(streams.Conflict, match="another socket"):
        await reading
    await older.detach()
    await asyncio.sleep(0.3)
    assert engine.aborts == 0
    engine.feed(row("b", finish=DONE))
    frames = await read(newer)
    assert frames[-1]["type"] == "end"


async def test_frames_beyond_the_replay_buffer_are_gone_and_said_to_be(hub, engine, monkeypatch):
    """C3: memory is bounded, and a gap is never silent."""
    monkeypatch.setattr(streams, "REPLAY_BYTES", 2000)
    attachment = hub.start("s", "user:1", engine.source)
    reading = asyncio.create_task(read(attachment))
    for _ in range(10):
        engine.feed(row("x" * 400))
        await asyncio.sleep(0.03)
    engine.feed(row(ids=[], finish=DONE))
    assert sum(len(f.get("text", "")) for f in await reading) == 4000
    with pytest.raises(streams.NotFound, match="gone"):
        await read(hub.resume("s", "user:1", 0))


async def test_the_same_stream_id_cannot_start_twice(hub, engine):
    hub.start("s", "user:1", engine.source)
    with pytest.raises(streams.Conflict, match="exists"):
        hub.check_free("s")


async def test_closing_the_hub_aborts_everything_at_once(engine):
    """C1: the server shuts down."""
    hub = StreamHub(worker="1", grace_s=60)
    attachment = hub.start("s", "user:1", engine.source)
    engine.feed(row("a"))
    await read(attachment, count=2)
    await hub.close()
    assert engine.aborts == 1
    assert len(hub) == 0


@settings(max_examples=20, deadline=None)
@given(st.lists(st.text(max_size=3), min_size=1, max_size=40))
def test_merging_in_pairs_equals_merging_in_order(texts):
    rows = [row(text, [i, i]) for i, text in enumerate(texts)]
    whole = rows[0]
    for later in rows[1:]:
        whole = merge(whole, later)
    assert merge_all(rows) == whole
