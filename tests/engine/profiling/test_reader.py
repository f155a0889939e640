from __future__ import annotations

import gzip
import io
import json
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.profiling import reader
from engine.profiling.reader import TraceError, TraceReader, open_trace

# Text that looks like the structure around it, escapes, and characters of two to four bytes.
nasty = st.text(alphabet='{}[],:"\\ \n\taé€𝄞', max_size=12) | st.sampled_from(
    ["},", '},{"ph":"X"', '"traceEvents": [', "\\", '\\"', "],", "}]}"]
)
values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | nasty,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(nasty, inner, max_size=3),
    max_leaves=8,
)
events = st.dictionaries(nasty, values, max_size=4)
layouts = st.sampled_from(
    [
        {},
        {"indent": 2},
        {"separators": (",", ":")},
        {"ensure_ascii": False},
        {"indent": 1, "separators": (" ,", " : "), "ensure_ascii": False},
    ]
)


def read_all(text: bytes, chunk: int) -> tuple[list[Any], dict]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reader, "CHUNK_BYTES", chunk)
        found = TraceReader(io.BytesIO(text), msgspec.json.Decoder(list[Any]))
        return [event for batch in found for event in batch], found.envelope


@settings(deadline=None)
@given(
    st.lists(events, max_size=8),
    st.dictionaries(nasty, values, max_size=3),
    st.dictionaries(nasty, values, max_size=3),
    layouts,
    st.integers(min_value=1, max_value=200),
)
def test_events_and_envelope_survive_any_text_layout_and_chunk_size(
    listed, before, behind, layout, chunk
):
    before.pop("traceEvents", None)
    behind = {key: value for key, value in behind.items() if key not in before}
    document = before | {"traceEvents": listed} | behind
    found, envelope = read_all(json.dumps(document, **layout).encode(), chunk)
    assert found == listed
    assert envelope == before | behind


@settings(deadline=None)
@given(st.lists(events, min_size=1, max_size=6), layouts, st.data())
def test_a_trace_that_ends_early_is_refused_wherever_it_ends(listed, layout, data):
    text = json.dumps({"a": 1, "traceEvents": listed, "b": [{}]}, **layout).encode()
    cut = data.draw(st.integers(min_value=0, max_value=len(text) - 1))
    with pytest.raises(TraceError):
        read_all(text[:cut], 64)


def test_a_key_of_that_name_inside_the_envelope_is_not_the_list_of_events():
    text = (
        b'{"x": {"traceEvents": [{"ph": "no"}]}, "s": "\\"traceEvents\\": [", '
        b'"traceEvents": [{"ph": "X"}]}'
    )
    found, envelope = read_all(text, 7)
    assert found == [{"ph": "X"}]
    assert envelope == {"x": {"traceEvents": [{"ph": "no"}]}, "s": '"traceEvents": ['}


def test_an_event_of_the_wrong_type_is_named_by_its_place_in_the_file():
    class Timed(msgspec.Struct):
        ts: float

    text = json.dumps({"traceEvents": [{"ts": 1}] * 700 + [{"ts": "late"}]}).encode()
    with pytest.raises(TraceError, match=r"event 700, field ts"):
        found = TraceReader(io.BytesIO(text), msgspec.json.Decoder(list[Timed]))
        list(found)


def test_an_event_without_an_end_stops_the_reading_before_it_fills_the_memory(monkeypatch):
    monkeypatch.setattr(reader, "MAX_EVENT_BYTES", 10_000)
    monkeypatch.setattr(reader, "CHUNK_BYTES", 1_000)
    text = b'{"traceEvents": [{"args": "' + b"x" * 1_000_000
    stream = io.BytesIO(text)
    with pytest.raises(TraceError, match="longer than 10000 bytes"):
        list(TraceReader(stream, msgspec.json.Decoder(list[Any])))
    assert stream.tell() < 20_000


@pytest.mark.parametrize(
    ("damage", "sentence"),
    [
        (lambda data: data[:-20], "cut off"),
        (lambda data: data[:60] + b"\xff\xff" + data[62:], "damaged|not JSON|breaks off"),
        (lambda data: b'{"nothing": 1}', "no list named traceEvents"),
    ],
)
def test_a_damaged_file_is_refused_with_a_sentence(tmp_path, damage, sentence):
    text = json.dumps({"traceEvents": [{"ph": "X", "n": n} for n in range(500)]}).encode()
    path = tmp_path / "t.json.gz"
    path.write_bytes(damage(gzip.compress(text)))
    with pytest.raises(TraceError, match=sentence), open_trace(path) as stream:
        list(TraceReader(stream, msgspec.json.Decoder(list[Any])))


def test_text_that_is_not_utf8_is_refused():
    with pytest.raises(TraceError, match="UTF-8"):
        found = TraceReader(
            io.BytesIO(b'{"traceEvents": [{"name": "a\xff"}]}'),
            msgspec.json.Decoder(list[dict[str, msgspec.Raw]]),
        )
        list(found)


def test_a_file_is_known_by_its_content_and_its_digest(tmp_path):
    path = tmp_path / "plain-in-spite-of-its-name.gz"
    path.write_bytes(b'{"traceEvents": []}')
    with open_trace(path) as stream:
        assert list(TraceReader(stream, msgspec.json.Decoder(list[Any]))) == []
    with pytest.raises(TraceError, match="sha256"), open_trace(path, "0" * 64):
        pass
    with pytest.raises(TraceError, match="No such file"), open_trace(tmp_path / "none"):
        pass
