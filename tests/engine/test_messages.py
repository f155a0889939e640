"""Kinds, merge rules, addresses, and who may build a message."""

from __future__ import annotations

import ast
import random
import sys
import types
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine import messages as m
from engine.wire import MESSAGES
from tests.engine.examples import example

ROOT = Path(__file__).resolve().parent.parent.parent
MESSAGES_FILE = ROOT / "engine" / "messages.py"


@pytest.mark.parametrize("kind", m.ALL, ids=lambda kind: kind.__name__)
def test_every_type_survives_the_wire(kind):
    chance = random.Random(kind.__name__)
    for _ in range(50):
        message = example(kind, chance)
        assert MESSAGES.decode(MESSAGES.encode(message)) == message


# --------------------------------------------------------------------------- mistakes at import


def load_messages(source: str) -> None:
    """Runs ``source`` as if it were the module."""
    module = types.ModuleType("engine_messages_with_a_mistake")
    sys.modules[module.__name__] = module
    try:
        exec(compile(source, str(MESSAGES_FILE), "exec"), module.__dict__)
    finally:
        del sys.modules[module.__name__]


def with_line_after(marker: str, line: str) -> str:
    source = MESSAGES_FILE.read_text()
    assert source.count(marker) == 1
    return source.replace(marker, f"{marker}\n{line}")


def test_the_module_itself_loads():
    load_messages(MESSAGES_FILE.read_text())


@pytest.mark.parametrize(
    ("marker", "line"),
    [
        ('    text: Annotated[str, APPEND] = ""', "    news: int = 0"),
        ("    data: Annotated[bytes, APPEND]", "    news: int = 0"),
    ],
)
def test_a_field_of_a_row_without_a_merge_rule_fails_at_import(marker, line):
    """E4."""
    with pytest.raises(TypeError, match="news declares no merge rule"):
        load_messages(with_line_after(marker, line))


@pytest.mark.parametrize(
    "mistake",
    [
        "class Lost(msgspec.Struct, tag=True):\n    rid: str\n",
        "class Both(Request, Reply):\n    pass\n",
    ],
)
def test_a_message_of_no_kind_or_of_two_fails_at_import(mistake):
    marker = "ALL: tuple[type, ...] = _check()"
    source = MESSAGES_FILE.read_text()
    assert source.count(marker) == 1
    with pytest.raises(TypeError):
        load_messages(source.replace(marker, f"{mistake}\n{marker}"))


# --------------------------------------------------------------------------- merging


def test_runs_of_equal_value_join_where_rows_meet():
    row = {"rid": "r", "http_worker_ipc": "ipc://w"}
    earlier = m.StrRow(**row, output_ids=[1, 2], epochs=[(1, 3), (1, 4)])
    later = m.StrRow(**row, output_ids=[3], epochs=[(1, 4)])
    assert m.merge(earlier, later).epochs == [(1, 3), (2, 4)]


def test_an_end_without_news_keeps_the_time_of_the_newest_token():
    row = {"rid": "r", "http_worker_ipc": "ipc://w"}
    earlier = m.StrRow(**row, output_ids=[1], made_at=5.0, retractions=1)
    end = m.StrRow(**row, finish=m.Finish(type="abort"))
    merged = m.merge(earlier, end)
    assert (merged.made_at, merged.retractions, merged.finish) == (5.0, 1, end.finish)


def test_rows_of_different_types_do_not_merge():
    row = {"rid": "r", "http_worker_ipc": "ipc://w"}
    with pytest.raises(TypeError, match="StrRow, TokenIDRow"):
        m.merge(m.StrRow(**row), m.TokenIDRow(**row))


@st.composite
def answers(draw):
    """Rows of one request, one per token, that say nearly everything a row can say."""
    count = draw(st.integers(1, 6))
    made = []
    for i in range(count):
        made.append(
            m.StrRow(
                rid="r",
                http_worker_ipc="ipc://w",
                output_ids=[i],
                text=draw(st.text(max_size=3)),
                raw_bytes=draw(st.binary(max_size=3)),
                epochs=[(1, draw(st.integers(1, 2)))],
                entropy=[float(i)],
                hidden=m.Hidden(width=1, data=bytes(4)),
                output_logprobs=m.OutputLogprobs(
                    values=[-float(i)],
                    texts=[str(i)],
                    top=m.TopLogprobs(ids=[[i]], values=[[-1.0]], texts=[["x"]]),
                ),
                input_logprobs=None
                if i
                else m.InputLogprobs(ids=[9, 8], values=[None, -1.0], texts=["a", "b"]),
                kv_epochs=[(i, 1)] if i % 2 else None,
                made_at=float(i),
                finish=m.Finish(type="length") if i == count - 1 else None,
            )
        )
    return made


@settings(max_examples=100)
@given(rows=answers(), cuts=st.lists(st.integers(1, 5), max_size=3))
def test_merging_any_split_gives_the_row_of_the_whole(rows, cuts):
    borders = [0, *sorted({cut for cut in cuts if cut < len(rows)}), len(rows)]
    parts = [m.merge_all(rows[start:end]) for start, end in zip(borders, borders[1:], strict=False)]
    whole = m.merge_all(rows)
    assert m.merge_all(parts) == whole
    assert whole.output_ids == list(range(len(rows)))
    assert len(whole.output_logprobs.values) == len(whole.entropy) == len(rows)
    assert sum(count for count, _ in whole.epochs) == len(rows)
    step = rows[0]
    for row in rows[1:]:
        step = m.merge(step, row)
    assert step == whole


def test_merging_does_not_change_the_rows_that_are_merged():
    row = m.StrRow(rid="r", http_worker_ipc="ipc://w", output_ids=[1], epochs=[(1, 1)])
    before = msgspec.structs.replace(row, output_ids=[1], epochs=[(1, 1)])
    m.merge(row, row)
    assert row == before


# --------------------------------------------------------------------------- splitting


@given(owners=st.lists(st.integers(0, 3), max_size=30))
def test_grouping_by_inbox_loses_and_invents_nothing(owners):
    """E4: no row knows how many workers there are."""
    chance = random.Random(len(owners))
    rows = [
        msgspec.structs.replace(
            example(m.StrRow, chance), rid=f"r{i}", http_worker_ipc=f"ipc://w{owner}"
        )
        for i, owner in enumerate(owners)
    ]
    boxes = m.by_inbox(rows)
    assert all(row.http_worker_ipc == inbox for inbox, box in boxes.items() for row in box)
    assert sorted(row.rid for box in boxes.values() for row in box) == sorted(r.rid for r in rows)
    for inbox, box in boxes.items():
        assert box == [row for row in rows if row.http_worker_ipc == inbox]


def test_answers_go_where_the_request_came_from():
    request = m.GetFleetReqInput(http_worker_ipc="ipc://w", call=m.Call(id="c", deadline=1.0))
    reply = m.reply_to(request, m.ControlReply, call_id="c", success=True)
    assert reply.http_worker_ipc == "ipc://w"
    row = m.TokenIDRow(rid="r", http_worker_ipc="ipc://w")
    assert m.row_for(row, m.StrRow, text="x") == m.StrRow(
        rid="r", http_worker_ipc="ipc://w", text="x"
    )


# --------------------------------------------------------------------------- who builds what


def built_by_name(names: set[str]) -> list[tuple[str, int, str]]:
    """(file, line, name) of every direct call of one of ``names`` in engine and console."""
    found = []
    for path in sorted([*ROOT.glob("engine/**/*.py"), *ROOT.glob("console/**/*.py")]):
        if path == MESSAGES_FILE:
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Call):
                continue
            called = node.func
            name = called.attr if isinstance(called, ast.Attribute) else getattr(called, "id", "")
            if name in names:
                found.append((str(path.relative_to(ROOT)), node.lineno, name))
    return found


def leaf_names(kind: type) -> set[str]:
    return {leaf.__name__ for leaf in m.ALL if issubclass(leaf, kind)}


def test_a_request_is_built_only_where_its_inbox_is_stamped_on_it():
    assert built_by_name(leaf_names(m.Request)) == []


def test_replies_and_rows_are_built_only_by_the_functions_that_copy_the_address():
    assert built_by_name(leaf_names(m.Reply) | leaf_names(m.Row)) == []
