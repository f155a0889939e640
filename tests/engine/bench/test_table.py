from __future__ import annotations

import msgspec
import pytest

from engine.bench.table import Document, absolute, compare, render

SPEEDS = {"fast": [100.0, 120.0, 110.0], "slow": [10.0, 11.0, 12.0], "absent": None}


def decode_row(**changes):
    options = {
        "ours": [150.0, 165.0, 180.0],
        "peers": SPEEDS,
        "rivals": ("fast", "slow", "absent"),
        "target": 1.5,
        "better": "more",
    } | changes
    return compare("decode", "tokens/s", **options)


def test_the_ratio_is_of_medians_and_to_the_best_rival():
    row = decode_row()
    assert (row.ours, row.spread, row.ratio, row.met) == (165.0, 30.0, 1.5, True)


def test_a_peer_that_is_no_rival_is_shown_and_does_not_count():
    row = decode_row(rivals=("slow",))
    assert row.ratio == 15.0
    assert row.peers == {"fast": 110.0, "slow": 11.0, "absent": None}


def test_a_time_is_better_when_it_is_less():
    row = compare(
        "merge",
        "s",
        ours=[2.0],
        peers={"theirs": [12.0], "others": [8.0]},
        rivals=("theirs", "others"),
        target=6.0,
        better="less",
    )
    assert (row.ratio, row.met) == (4.0, False)


@pytest.mark.parametrize("missing", [{"ours": []}, {"peers": {"fast": None}, "rivals": ("fast",)}])
def test_what_could_not_be_measured_is_neither_met_nor_missed(missing):
    row = decode_row(**missing)
    assert row.ratio is None and row.met is None


def test_a_bound_is_judged_without_a_peer():
    def age(value, target, better):
        return absolute("age", "ms", ours=value, target=target, better=better).met

    assert age([200.0], 250.0, "less") is True
    assert age([200.0], 250.0, "more") is False
    assert age([], 250.0, "less") is None


def test_the_json_has_the_keys_that_scripts_rely_on():
    document = Document(machine={}, versions={}, commit="c", rows=[decode_row()])
    content = msgspec.to_builtins(document)
    assert {"machine", "versions", "commit", "rows"} <= content.keys()
    wanted = {"name", "unit", "ours", "spread", "peers", "ratio", "target", "met"}
    assert wanted <= content["rows"][0].keys()
    assert content["rows"][0]["samples"]["fast"] == SPEEDS["fast"]


def test_the_table_names_every_peer_and_why_one_is_missing():
    rows = [decode_row(), absolute("age", "ms", ours=[20.0], target=250.0, better="less")]
    document = Document(
        machine={}, versions={}, commit="c", rows=rows, missing={"absent": "no wheel"}
    )
    head, decode, age, missing = render(document).splitlines()
    assert "fast 110, slow 11, absent -" in decode and "1.50 x" in decode and "yes" in decode
    assert head.index("target") == age.index("250")
    assert missing == "not measured: absent: no wheel"
