"""Bodies in, shapes out: what clients of OpenAI and SGLang insist on, without an engine."""

from __future__ import annotations

import asyncio
import json
import struct
from typing import get_args

import msgspec
import pytest
from django.test import RequestFactory

from console.api import control, meta, native, recordings, sse, weights
from console.api.errors import NotSupported, error_body
from console.api.expand import expand
from console.api.schemas import (
    ChatCompletionBody,
    CompletionBody,
    ConversationBody,
    DetokenizeBody,
    GenerateBody,
    TokenizeBody,
    decode,
)
from console.consumers.chat import ChatConsumer
from console.consumers.jobs import JobsConsumer
from console.fields import BadField, read_json
from console.services.catalogue import ACTIONS
from engine.errors import BadRequest, Overloaded
from engine.messages import EpochLabel, Finish, Hidden, OutputLogprobs, StrRow, TopLogprobs


def body(kind, raw: str):
    return decode(RequestFactory().post("/", raw, content_type="application/json"), kind)


def chat(content) -> ChatCompletionBody:
    sent = {"messages": [{"role": "user", "content": content}]}
    return body(ChatCompletionBody, json.dumps(sent))


def generate(raw: str):
    return expand(body(GenerateBody, raw), max_context=100)


# ---------------------------------------------------------------- validation


@pytest.mark.parametrize(
    ("kind", "raw", "param"),
    [
        (ChatCompletionBody, '{"messages": []}', "messages"),
        (ChatCompletionBody, '{"messages": [{"content": "x"}]}', "messages[0].role"),
        (ChatCompletionBody, '{"messages": [{"role": "user"}], "top_p": 0}', "top_p"),
        (
            ChatCompletionBody,
            '{"messages": [{"role": "user"}], "max_tokens": "many"}',
            "max_tokens",
        ),
        (CompletionBody, "{}", "prompt"),
        (GenerateBody, '{"text": "x", "sampling_params": {"min_p": 2}}', "sampling_params.min_p"),
    ],
)
def test_a_wrong_field_is_named(kind, raw, param):
    with pytest.raises(BadField) as refusal:
        body(kind, raw)
    assert refusal.value.param == param
    assert param in refusal.value.message


BODIES = (
    ChatCompletionBody, CompletionBody, GenerateBody, TokenizeBody, DetokenizeBody,
    ConversationBody, control.AbortBody, recordings.ChangeBody, weights.NameBody,
    *ACTIONS.values(),
    *(frame for socket in (ChatConsumer, JobsConsumer) for frame in get_args(socket.frame_types)),
)  # fmt: skip


def unbounded(kind: msgspec.inspect.Type, place: str) -> list[str]:
    """Numbers in ``kind`` that have no upper or no lower bound."""
    if isinstance(kind, msgspec.inspect.IntType | msgspec.inspect.FloatType):
        low = kind.ge is not None or kind.gt is not None
        high = kind.le is not None or kind.lt is not None
        return [] if low and high else [place]
    inside: list[tuple[msgspec.inspect.Type, str]] = []
    for name in ("types", "item_types"):
        inside += [(part, place) for part in getattr(kind, name, ())]
    for name in ("item_type", "key_type", "value_type"):
        inside += [(getattr(kind, name), place)] if hasattr(kind, name) else []
    inside += [(field.type, f"{place}.{field.name}") for field in getattr(kind, "fields", ())]
    return [found for part, where in inside for found in unbounded(part, where)]


@pytest.mark.parametrize("kind", BODIES)
def test_every_number_that_comes_from_outside_has_bounds(kind):
    """One that fits no message, column or JSON is refused by name and is no internal error."""
    assert unbounded(msgspec.inspect.type_info(kind), kind.__name__) == []


@pytest.mark.parametrize(
    ("kind", "raw"),
    [
        (GenerateBody, '{"text": "x", "sampling_params": {"sampling_seed": 99999999999999999999}}'),
        (GenerateBody, '{"text": "x", "sampling_params": {"temperature": "inf"}}'),
        (GenerateBody, '{"text": "x", "sampling_params": {"logit_bias": {"1": "nan"}}}'),
        (CompletionBody, '{"prompt": "x", "seed": "99999999999999999999"}'),
    ],
)
def test_a_number_out_of_range_is_refused(kind, raw):
    with pytest.raises(BadRequest):
        body(kind, raw)


@pytest.mark.parametrize("raw", ["[" * 5000, '{"a":' * 5000 + "1" + "}" * 5000])
def test_a_body_that_nests_too_deeply_is_refused(raw):
    with pytest.raises(BadRequest):
        body(GenerateBody, raw)
    with pytest.raises(BadRequest):
        read_json(raw.encode(), dict)


@pytest.mark.parametrize("raw", ["{", "\x00", '{"messages": [}', "nope"])
def test_what_is_not_json_is_refused_with_a_sentence(raw):
    with pytest.raises(BadRequest, match="not JSON"):
        body(ChatCompletionBody, raw)


def test_fields_that_other_servers_do_not_know_are_tolerated():
    sent = '{"messages": [{"role": "user", "content": "x", "name": "n"}], "best_of": 1, "zzz": {}}'
    assert body(ChatCompletionBody, sent).messages[0].content == "x"


def test_numbers_may_come_as_strings():
    sent = '{"text": "x", "sampling_params": {"max_new_tokens": "7", "temperature": "0"}}'
    [request] = generate(sent).requests
    assert (request.sampling.max_new_tokens, request.sampling.temperature) == (7, 0.0)


@pytest.mark.parametrize(
    "field", ['"image_data": ["x"]', '"lora_path": "a"', '"session_params": {"id": "1"}']
)
def test_what_is_not_built_is_refused_by_name_and_not_ignored(field):
    with pytest.raises(NotSupported, match=field.split('"')[1]):
        generate('{"text": "x", ' + field + "}")


def test_null_for_what_is_not_built_is_fine():
    assert generate('{"text": "x", "image_data": null, "lora_path": null}').requests


def test_text_parts_are_joined_and_images_refused():
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    sent = chat(parts)
    assert sent.messages[0].plain(0) == {"role": "user", "content": "a\nb"}
    sent = chat([{"type": "image_url", "image_url": {"url": "x"}}])
    with pytest.raises(BadField, match="image_url"):
        sent.messages[0].plain(0)


# ---------------------------------------------------------------- /generate


def test_one_prompt_is_one_request_with_the_clients_id():
    expanded = generate('{"text": "x", "rid": "mine"}')
    assert not expanded.many
    assert [r.rid for r in expanded.requests] == ["mine"]


def test_a_batch_keeps_its_order_and_its_per_request_fields():
    expanded = generate(
        '{"input_ids": [[1, 2], [3]], "rid": ["a", "b"], "return_logprob": [true, false],'
        ' "top_logprobs_num": [2, 0], "token_ids_logprob": [[5], [6]],'
        ' "sampling_params": [{"max_new_tokens": 3}, {"max_new_tokens": 4}]}'
    )
    first, second = expanded.requests
    assert expanded.many
    assert (first.input_ids, second.input_ids) == ([1, 2], [3])
    assert (first.rid, second.rid) == ("a", "b")
    assert (first.logprob.top_num, first.logprob.token_ids) == (2, (5,))
    assert second.logprob is None
    assert (first.sampling.max_new_tokens, second.sampling.max_new_tokens) == (3, 4)


def test_samples_of_a_prompt_stand_side_by_side_with_ids_and_seeds_of_their_own():
    expanded = generate(
        '{"text": ["x", "y"], "rid": "p", "sampling_params": {"n": 2, "sampling_seed": 5}}'
    )
    assert [(r.text, r.rid) for r in expanded.requests] == [
        ("x", "p-0"),
        ("x", "p-1"),
        ("y", "p-2"),
        ("y", "p-3"),
    ]
    assert expanded.parent == "p"
    assert [r.sampling.seed for r in expanded.requests] == [5, 6, 5, 6]


@pytest.mark.parametrize(
    "raw",
    [
        "{}",
        '{"text": "x", "input_ids": [1]}',
        '{"text": []}',
        '{"input_ids": []}',
        '{"input_ids": [1, [2]]}',
        '{"text": ["x", "y"], "rid": ["same", "same"]}',
        '{"text": ["x", "y"], "rid": ["one"]}',
        '{"text": ["x", "y"], "sampling_params": [{}]}',
        '{"text": ["x", "y"], "sampling_params": [{"n": 1}, {"n": 2}]}',
        '{"text": "x", "sampling_params": {"min_new_tokens": 9, "max_new_tokens": 3}}',
    ],
)
def test_a_batch_that_contradicts_itself_is_refused(raw):
    with pytest.raises(BadField):
        generate(raw)


def test_no_limit_means_what_is_left_of_the_context():
    [request] = generate('{"text": "x", "sampling_params": {"max_new_tokens": null}}').requests
    assert request.sampling.max_new_tokens == 100


# ---------------------------------------------------------------- meta_info


async def test_spans_of_a_delta_count_from_the_answers_start(monkeypatch):
    async def labels(epochs):
        return {epoch: EpochLabel(weight_version=f"v{epoch}", token_step=epoch) for epoch in epochs}

    monkeypatch.setattr(meta.fleet, "epoch_labels", labels)
    row = StrRow(rid="r", http_worker_ipc="", output_ids=[1, 2, 3], epochs=[(2, 7), (1, 8)],
                 kv_epochs=[(5, 7), (3, 8)])  # fmt: skip
    told = await meta.provenance(row, 10)
    assert told["token_steps"] == [7, 7, 8]
    assert told["weight_versions"] == [("v7", 10, 12), ("v8", 12, 13)]
    assert told["epochs"] == [(7, 10, 12), (8, 12, 13)]
    assert told["kv_token_steps"] == [(7, 0, 5), (8, 5, 8)]
    assert told["weight_version"] == "v8"


def test_logprobs_are_triples_of_value_id_and_text():
    part = OutputLogprobs(
        values=[-0.1, -0.2],
        top=TopLogprobs(ids=[[7, 8], [9]], values=[[-0.1, -3.0], [-0.2]]),
    )
    shown = meta.output_logprobs([7, 9], part, {7: "a", 8: "b", 9: "c"})
    assert shown["output_token_logprobs"] == [[-0.1, 7, "a"], [-0.2, 9, "c"]]
    assert shown["output_top_logprobs"] == [[[-0.1, 7, "a"], [-3.0, 8, "b"]], [[-0.2, 9, "c"]]]
    assert meta.output_logprobs([7, 9], part, None)["output_token_logprobs"][0] == [-0.1, 7, None]


def test_an_abort_before_the_first_token_has_empty_lists_and_no_missing_key():
    """E18, E39."""
    assert meta.output_logprobs([], None, None) == {"output_token_logprobs": []}
    aborted = Finish(type="abort", message="Abort before prefill")
    assert meta.finish_reason(aborted) == {
        "type": "abort",
        "message": "Abort before prefill",
        "status_code": None,
        "err_type": None,
    }


def test_a_delta_shows_its_own_row_and_costs_nothing_for_those_before():
    """E39: ids and logprobs of a chunk are of equal length, over 5,000 of them."""
    progress = native._Progress(cumulative=False)
    for number in range(5000):
        part = OutputLogprobs(values=[-1.0])
        news = StrRow(rid="r", http_worker_ipc="w", output_ids=[number], output_logprobs=part)
        shown = progress.take(news)
        assert shown is news
        assert len(shown.output_ids) == len(shown.output_logprobs.values) == 1
        assert (progress.before, progress.total) == (number, number + 1)


def test_a_stop_names_what_matched():
    assert meta.finish_reason(Finish(type="stop", matched=0)) == {"type": "stop", "matched": 0}
    assert meta.finish_reason(Finish(type="length")) == {"type": "length"}
    assert meta.finish_reason(None) is None


def test_hidden_states_are_one_list_per_position():
    """E18: an answer that was aborted before any was made has none."""
    row = StrRow(
        rid="r",
        http_worker_ipc="w",
        hidden=Hidden(width=2, data=struct.pack("<4f", 1, 2, 3, 4)),
    )
    assert meta.hidden_states(row) == [[1.0, 2.0], [3.0, 4.0]]
    row.hidden = Hidden(width=0, data=b"")
    assert meta.hidden_states(row) == []


def test_error_bodies_have_openais_family_on_its_routes_and_the_name_elsewhere():
    full = Overloaded("full", retry_after_s=3)
    assert error_body(full, openai=True)["error"]["type"] == "server_error"
    assert error_body(full)["error"]["type"] == "overloaded"
    assert error_body(full)["error"]["code"] == "overloaded"


# ---------------------------------------------------------------- event streams


async def text_of(response) -> list[bytes]:
    return [part async for part in response]


async def test_a_refusal_before_the_first_event_is_a_status_and_not_an_event():
    async def refused():
        raise Overloaded("full")
        yield b""

    with pytest.raises(Overloaded):
        await sse.event_stream(refused())


async def test_a_failure_under_way_is_an_event_and_then_done():
    async def failing():
        yield sse.event({"n": 1})
        raise Overloaded("rank died")

    parts = await text_of(await sse.event_stream(failing()))
    assert b'"code":"overloaded"' in parts[1]
    assert parts[2] == sse.DONE


async def test_silence_is_filled_with_heartbeats(monkeypatch):
    monkeypatch.setattr(sse, "HEARTBEAT_S", 0.02)

    async def slow():
        yield sse.event(1)
        await asyncio.sleep(0.07)
        yield sse.event(2)

    parts = await text_of(await sse.event_stream(slow()))
    assert parts.count(sse.HEARTBEAT) >= 2
    assert [part for part in parts if part != sse.HEARTBEAT] == [sse.event(1), sse.event(2)]


async def test_a_reader_that_leaves_closes_the_source():
    closed = asyncio.Event()

    async def endless():
        try:
            while True:
                yield sse.event(1)
                await asyncio.sleep(0.01)
        finally:
            closed.set()

    response = await sse.event_stream(endless())
    reading = asyncio.create_task(text_of(response))
    await asyncio.sleep(0.05)
    reading.cancel()
    await asyncio.wait({reading})
    await asyncio.wait_for(closed.wait(), 1)


async def test_proxies_are_told_not_to_buffer():
    async def one():
        yield sse.event(1)

    response = await sse.event_stream(one())
    assert response["X-Accel-Buffering"] == "no"
    assert "no-transform" in response["Cache-Control"]
    await text_of(response)
