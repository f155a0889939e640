"""Cost of one step's fan-out to the web workers: split by inbox, encode, decode; no sockets.

Path: __main__.py -> here -> engine.messages, engine.wire; peers/sglang_fanout.py for SGLang's.
"""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

from engine import messages as m
from engine.bench.peer import Peer, PeerFailed
from engine.bench.table import Row, compare
from engine.wire import MESSAGES, Codec

ROWS, INBOXES, REPEATS = 64, 4, 200
WARM_UP = 20
TARGET = 20.0
PEER = "sglang"


async def fan_out_rows(peer: Peer | None, rounds: int, missing: dict[str, str]) -> list[Row]:
    """Microseconds per row of a step of 64 requests over 4 web workers, one new token each."""
    ours: list[dict[str, float]] = []
    theirs: list[dict[str, float]] = []
    _once(WARM_UP)
    if peer:
        await _theirs(peer, WARM_UP, missing, start=True)
    for _ in range(rounds):
        ours.append(_once(REPEATS))
        if peer and PEER not in missing:
            theirs += await _theirs(peer, REPEATS, missing)
    if peer:
        await peer.stop()
    return [_row(name, field, ours, theirs) for name, field in FIELDS.items()]


async def _theirs(
    peer: Peer, repeats: int, missing: dict[str, str], *, start: bool = False
) -> list[dict[str, Any]]:
    """One sample, or none and a reason in ``missing``."""
    try:
        if start:
            await peer.start()
        return [await peer.ask(columns=_columns(), rows=ROWS, repeats=repeats)]
    except PeerFailed as error:
        missing[PEER] = f"fan-out: {error}"
        return []


FIELDS = {
    "fan-out per row, split and encode": "encode_us",
    "fan-out per row, decode": "decode_us",
}


def _row(name: str, field: str, ours: list[Any], theirs: list[Any]) -> Row:
    return compare(
        name,
        "us",
        ours=[one[field] for one in ours],
        peers={PEER: [one[field] for one in theirs]},
        rivals=(PEER,),
        target=TARGET,
        better="less",
    )


def _once(repeats: int) -> dict[str, float]:
    rows = _rows()
    encode_s = decode_s = 0.0
    for _ in range(repeats):
        began = time.perf_counter()
        boxes = m.by_inbox(rows)
        frames = [Codec.encode(m.BatchStrOutput(rows=theirs)) for theirs in boxes.values()]
        encoded = time.perf_counter()
        for frame in frames:
            MESSAGES.decode(frame)
        decode_s += time.perf_counter() - encoded
        encode_s += encoded - began
    return {
        "encode_us": 1e6 * encode_s / ROWS / repeats,
        "decode_us": 1e6 * decode_s / ROWS / repeats,
    }


def _rows() -> list[m.StrRow]:
    """What the detokenizer sends in one decode step."""
    return [
        m.row_for(
            SimpleNamespace(rid=f"{index:032x}", http_worker_ipc=_inbox(index)),
            m.StrRow,
            output_ids=[1_000 + index],
            epochs=[(1, 7)],
            text=" word",
            made_at=1_790_857_026.25,
        )
        for index in range(ROWS)
    ]


def _columns() -> dict[str, Any]:
    """The same step as SGLang's ``BatchStrOutput``; families that nobody asked for are None."""
    unasked = [
        f"{side}_{family}_logprobs_{part}"
        for side in ("input", "output")
        for family in ("token", "top", "token_ids")
        for part in ("val", "idx")
    ]
    unasked += ["output_token_entropy_val", "output_hidden_states"]
    unasked += ["placeholder_tokens_idx", "placeholder_tokens_val"]
    return dict.fromkeys(unasked) | {
        "rids": [f"{index:032x}" for index in range(ROWS)],
        "http_worker_ipcs": [_inbox(index) for index in range(ROWS)],
        "finished_reasons": [None] * ROWS,
        "output_strs": [" word"] * ROWS,
        "output_ids": [[1_000 + index] for index in range(ROWS)],
        "prompt_tokens": [100] * ROWS,
        "completion_tokens": [20] * ROWS,
        "cached_tokens": [0] * ROWS,
        "spec_verify_ct": [0] * ROWS,
        "spec_accepted_tokens": [0] * ROWS,
        "token_steps": [[7]] * ROWS,
    }


def _inbox(index: int) -> str:
    return f"ipc:///tmp/quarterdeck-0/e0123456/in-web-{index % INBOXES}-4242-1"
