from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from engine.bench.stream_load import TEXT, Window, take_frame

PAYLOADS = st.lists(st.binary(max_size=300) | st.sampled_from([b"x" * 126, b"y" * 70_000]))


def frame(payload: bytes) -> bytes:
    """As a server sends it (RFC 6455, 5.2)."""
    size = len(payload)
    if size < 126:
        return bytes((0x80 | TEXT, size)) + payload
    if size < 2**16:
        return bytes((0x80 | TEXT, 126)) + size.to_bytes(2, "big") + payload
    return bytes((0x80 | TEXT, 127)) + size.to_bytes(8, "big") + payload


@given(PAYLOADS, st.integers(1, 5_000))
def test_frames_come_out_whole_however_the_bytes_were_cut(payloads, piece):
    sent = b"".join(map(frame, payloads))
    buffer, found = bytearray(), []
    for start in range(0, len(sent), piece):
        buffer += sent[start : start + piece]
        while (one := take_frame(buffer)) is not None:
            found.append(one)
    assert found == [(TEXT, payload) for payload in payloads]
    assert not buffer


def test_tokens_that_came_joined_are_older_than_the_newest():
    window = Window(step_s=100.0)
    window.add(3, made_at=0.0)
    newest, middle, oldest = window.ages
    assert (middle - newest, oldest - middle) == (100.0, 100.0)
