from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import threading
import time
import zlib
from pathlib import Path

import msgspec
import pytest

from engine.artifacts import Rank
from engine.errors import BadRequest, Conflict
from engine.profiling.clock import align
from engine.profiling.document import atomic_output
from engine.profiling.manifest import find
from engine.profiling.merge import merge, plan_shares, run_shares
from engine.profiling.rules import check_trace
from tests.engine.profiling.traces import (
    BASE_NS,
    ProfileDir,
    anchor,
    flow,
    named,
    read_merged,
    span,
    write_trace,
)

TWO = [Rank(dp=0, tp=0), Rank(dp=0, tp=1)]


def whole_profile(root: Path, ranks: list[Rank] = TWO, profile_id: str = "p") -> ProfileDir:
    """Every rank with one segment of one span; the second half of the ranks starts 1 ms later."""
    made = ProfileDir(root, profile_id, ranks)
    for number, rank in enumerate(ranks):
        events = [named(9, "python"), span(f"op of {rank.name}", 1000.0 + number, 5.0)]
        anchors = (anchor(BASE_NS + 1_000_000, offset_ns=-BASE_NS),)
        made.manifest(rank, [made.segment(rank, 0, events, anchors=anchors)])
    return made


def names_of(document: dict) -> list[str]:
    return [event["name"] for event in document["traceEvents"] if event["ph"] != "M"]


def test_all_ranks_end_up_in_one_document_that_keeps_the_rules(tmp_path):
    ranks = [Rank(dp=dp, tp=tp) for dp in range(2) for tp in range(2)]
    whole_profile(tmp_path, ranks)
    result = merge(tmp_path, "p")
    assert (result.label, result.partial) == ("4 of 4", False)
    assert result.merged == str(tmp_path / "merged-p.trace.json.gz")
    assert names_of(read_merged(result.merged)) == [f"op of {rank.name}" for rank in ranks]
    assert check_trace(Path(result.merged)).violations == []


def test_processes_carry_rank_labels_and_sort_by_dp_before_tp(tmp_path):
    whole_profile(tmp_path, [Rank(dp=1, tp=0), Rank(dp=0, tp=1), Rank(dp=0, tp=0)])
    document = read_merged(merge(tmp_path, "p").merged)
    metadata = [event for event in document["traceEvents"] if event["ph"] == "M"]
    index = {
        e["pid"]: e["args"]["sort_index"] for e in metadata if e["name"].endswith("sort_index")
    }
    label = {e["args"]["name"]: e["pid"] for e in metadata if e["name"] == "process_name"}
    assert sorted(label, key=lambda name: index[label[name]]) == [
        "[TP00-DP00] python 9",
        "[TP01-DP00] python 9",
        "[TP00-DP01] python 9",
    ]


def test_the_output_is_one_gzip_member_since_browsers_read_only_one(tmp_path):
    whole_profile(tmp_path)
    packed = Path(merge(tmp_path, "p").merged).read_bytes()
    inflater = zlib.decompressobj(31)
    json.loads(inflater.decompress(packed))
    assert inflater.eof and inflater.unused_data == b""


def test_a_rank_that_never_reports_makes_the_result_partial_and_is_named(tmp_path):
    """E45, C10: never plain success."""
    made = whole_profile(tmp_path)
    (tmp_path / "p-dp0-tp1.manifest.json").unlink()
    result = merge(tmp_path, made.profile_id, wait_s=0.05)
    assert (result.partial, result.missing) == (True, ["dp0-tp1"])
    assert result.label == "1 of 2, missing dp0-tp1"
    assert read_merged(result.merged)["quarterdeck"]["label"] == result.label


def test_a_rank_that_reports_late_is_waited_for(tmp_path):
    """E45, C10: who is expected is known from the start."""
    whole_profile(tmp_path)
    manifest = tmp_path / "p-dp0-tp1.manifest.json"
    hidden = manifest.rename(tmp_path / "elsewhere")

    def report_late() -> None:
        time.sleep(0.3)
        hidden.rename(manifest)

    late = threading.Thread(target=report_late)
    late.start()
    result = merge(tmp_path, "p", wait_s=20)
    late.join()
    assert result.label == "2 of 2"


def test_a_rank_that_died_while_it_captured_is_merged_as_unfinished(tmp_path):
    made = whole_profile(tmp_path)
    segment = made.segment(TWO[1], 0, [span("last words", 1.0, 1.0)])
    made.manifest(TWO[1], [segment], complete=False)
    result = merge(tmp_path, "p")
    assert result.partial and result.unfinished == ["dp0-tp1"]
    assert result.label.startswith("2 of 2, unfinished dp0-tp1")
    assert "last words" in names_of(read_merged(result.merged))


def test_a_rank_that_had_no_step_to_record_is_there_and_said_to_be_silent(tmp_path):
    made = whole_profile(tmp_path)
    made.manifest(TWO[1], [])
    result = merge(tmp_path, "p")
    assert (result.partial, result.missing) == (False, [])
    assert result.label == "2 of 2, no step recorded by dp0-tp1"
    made.manifest(TWO[0], [])
    nothing = merge(tmp_path, "p")
    assert nothing.merged is None and nothing.ranks_found == ["dp0-tp0", "dp0-tp1"]


def test_captures_whose_ids_are_prefixes_of_each_other_do_not_mix(tmp_path):
    """C10: manifests name the files, not a pattern."""
    for profile_id in ("p", "p-dp0", "p1", "p-dp0-tp0"):
        whole_profile(tmp_path, profile_id=profile_id)
    write_trace(tmp_path / "p-x-TP-0.trace.json.gz", [span("foreign", 1, 1)])
    result = merge(tmp_path, "p")
    assert result.files == ["p-dp0-tp0-s000.trace.json.gz", "p-dp0-tp1-s000.trace.json.gz"]
    assert result.label == "2 of 2"


@pytest.mark.parametrize(
    "damage", [lambda data: data[:-9], lambda data: data[:40] + b"?" + data[41:]]
)
def test_a_damaged_segment_is_named_and_the_rest_of_its_rank_is_kept(tmp_path, damage):
    made = ProfileDir(tmp_path, "p", TWO[:1])
    segments = [
        made.segment(TWO[0], number, [named(9, "python"), span(f"op {number}", number, 1.0)])
        for number in range(3)
    ]
    bad = tmp_path / segments[1].path
    bad.write_bytes(damage(bad.read_bytes()))
    made.manifest(TWO[0], segments)
    result = merge(tmp_path, "p")
    assert [problem.file for problem in result.errors] == [bad.name]
    assert "sha256" in result.errors[0].error
    assert result.partial and "1 file left out" in result.label
    assert names_of(read_merged(result.merged)) == ["op 0", "op 2"]
    assert check_trace(Path(result.merged)).ok


def test_a_segment_that_breaks_off_without_a_digest_leaves_nothing_of_itself(tmp_path):
    good = write_trace(tmp_path / "p-TP-0.trace.json.gz", [span("good", 1, 1)])
    events = [span(f"cut {number}", number, 1) for number in range(5000)]
    cut = write_trace(tmp_path / "p-TP-1.trace.json.gz", events)
    cut.write_bytes(cut.read_bytes()[:-300])
    result = merge(tmp_path, "p")
    assert [problem.file for problem in result.errors] == [cut.name]
    assert "cut off" in result.errors[0].error
    assert result.files == [good.name] and result.ranks_found == ["dp0-tp0"]
    assert names_of(read_merged(result.merged)) == ["good"]


def test_a_segment_with_another_number_of_events_than_its_manifest_says_is_refused(tmp_path):
    made = ProfileDir(tmp_path, "p", TWO[:1])
    segment = made.segment(TWO[0], 0, [span("op", 1, 1)])
    made.manifest(TWO[0], [type(segment)(**_fields(segment) | {"events": 7})])
    result = merge(tmp_path, "p")
    assert result.merged is None
    assert "it has 1 events, the manifest says 7" in result.errors[0].error
    assert result.label == "0 of 1, missing dp0-tp0, 1 file left out, clocks not aligned: dp0-tp0"


@pytest.mark.parametrize("path", ["../secret.json", "/etc/passwd", "link", "gone.json", "."])
def test_a_manifest_cannot_name_a_file_outside_its_directory(tmp_path, path):
    root = tmp_path / "root"
    root.mkdir()
    write_trace(tmp_path / "secret.json", [span("secret", 1, 1)])
    (root / "link").symlink_to(tmp_path / "secret.json")
    made = ProfileDir(root, "p", TWO[:1])
    segment = made.segment(TWO[0], 0, [span("op", 1, 1)])
    made.manifest(TWO[0], [segment, type(segment)(**_fields(segment) | {"path": path})])
    result = merge(root, "p")
    assert [problem.file for problem in result.errors] == [path]
    assert names_of(read_merged(result.merged)) == ["op"]


def _fields(segment) -> dict:
    return {name: getattr(segment, name) for name in segment.__struct_fields__}


def test_traces_of_an_sglang_server_merge_with_a_label_about_their_clocks(tmp_path):
    """C25: without anchors no order is claimed."""
    root = tmp_path / "EP-7-TP-9"  # ranks are read from the file's name, never from the folder's
    root.mkdir()
    for name in ("TP-0-DP-0-EXTEND", "TP-0-DP-0-DECODE", "TP-1-DP-0-DECODE"):
        write_trace(root / f"1700.5-{name}.trace.json.gz", [named(9, "python"), span(name, 5, 1)])
    result = merge(root, "1700.5")
    assert result.ranks_found == ["dp0-tp0", "dp0-tp1"]
    assert result.label == (
        "2 ranks, the expected ranks are not written down, clocks not aligned: dp0-tp0 dp0-tp1"
    )
    assert result.clock.uncertainty_ns is None
    document = read_merged(result.merged)
    assert len(names_of(document)) == 3
    assert "[TP01-DP00] python 9 (clock not aligned)" in json.dumps(document)


def test_flows_of_different_ranks_stay_apart_and_half_arrows_are_left_out(tmp_path):
    made = ProfileDir(tmp_path, "p", TWO)
    for rank in TWO:
        events = [flow("f", 5, 3.0), flow("s", 5, 1.0), flow("f", 5, 4.0), flow("s", 6, 1.0)]
        made.manifest(rank, [made.segment(rank, n, [named(9, ""), *events]) for n in range(2)])
    result = merge(tmp_path, "p")
    flows = [e for e in read_merged(result.merged)["traceEvents"] if e["ph"] != "M"]
    assert len({event["id"] for event in flows}) == 4  # two ranks, two profiler sessions each
    assert [event["ph"] for event in flows] == ["f", "s", "f"] * 4
    assert len(result.warnings) == 4
    assert "1 flow events without their other end dropped" in result.warnings[0]


def test_ids_of_every_kind_become_unique_and_stay_readable(tmp_path):
    made = ProfileDir(tmp_path, "p", TWO[:1])
    events = [
        span("small", 1, 1, id=7),
        span("huge", 1, 1, id=2**60),
        span("word", 1, 1, id="0xabc"),
        span("bound", 1, 1, bind_id=7, flow_out=True),
        span("split", 1, 1, id2={"local": "0x1", "global": 9}),
    ]
    segments = [made.segment(TWO[0], number, [named(9, ""), *events]) for number in range(2)]
    made.manifest(TWO[0], segments)
    first, second = _halves(read_merged(merge(tmp_path, "p").merged))
    assert [event.get("id", event.get("bind_id")) for event in first][:1] == [7]
    assert second[0]["id"] == (1 << 32) + 7 == second[3]["bind_id"]
    for name in (1, 2):
        assert first[name]["id"] != second[name]["id"]
        assert int(first[name]["id"], 16) < 2**64
    assert first[4]["id2"]["local"] == "0x1" == second[4]["id2"]["local"]
    assert first[4]["id2"]["global"] != second[4]["id2"]["global"]


def _halves(document: dict) -> tuple[list[dict], list[dict]]:
    events = [event for event in document["traceEvents"] if event["ph"] != "M"]
    return events[: len(events) // 2], events[len(events) // 2 :]


def test_words_for_pid_and_tid_become_integers_with_their_names_kept(tmp_path):
    events = [
        span("op", 1, 1, pid="Spans", tid="PyTorch Profiler"),
        {"ph": "i", "s": "g", "name": "bare", "ts": 5},
    ]
    write_trace(tmp_path / "p-TP-0.trace.json.gz", events)
    result = merge(tmp_path, "p")
    assert check_trace(Path(result.merged)).violations == []
    names = [
        e["args"]["name"]
        for e in read_merged(result.merged)["traceEvents"]
        if e["ph"] == "M" and e["name"].endswith("_name")
    ]
    assert any(name.startswith("[TP00-DP00] Spans") for name in names)
    assert "PyTorch Profiler" in names


def test_what_the_merge_does_not_need_passes_through_unchanged(tmp_path):
    args = {"pid": 3, "ts": "x", "Input Dims": [[4, 64], []], "s": '}, {"ph": "M"', "é": "\u2028"}
    events = [
        named(9, "python"),
        span('a "quoted" {name}\\', 1, 0.125, args=args, cname="good", tts=3),
        {"ph": "C", "name": "counter", "pid": 9, "tid": 9, "ts": 2, "args": {"x": 1.5}},
    ]
    write_trace(tmp_path / "p-TP-0.trace.json.gz", events)
    merged = [e for e in read_merged(merge(tmp_path, "p").merged)["traceEvents"] if e["ph"] != "M"]
    moved = {"pid", "tid", "ts"}
    assert [{k: v for k, v in event.items() if k not in moved} for event in merged] == [
        {k: v for k, v in event.items() if k not in moved} for event in events[1:]
    ]


def test_a_field_that_no_version_of_the_format_has_is_dropped_with_a_warning(tmp_path):
    write_trace(tmp_path / "p-TP-0.trace.json.gz", [span("op", 1, 1), span("op", 2, 1, mine=4)])
    result = merge(tmp_path, "p")
    assert result.warnings == [
        "p-TP-0.trace.json.gz: Object contains unknown field `mine` - at event 1; dropped"
    ]
    assert len(names_of(read_merged(result.merged))) == 2


def test_clocks_that_are_seconds_apart_are_aligned_by_their_anchors(tmp_path):
    """C25: 11.56 s between the traces, 40 us in truth."""
    made = ProfileDir(tmp_path, "p", TWO)
    for rank, trace_us, offset_ns in [(TWO[0], 5_000_000.0, 40_000), (TWO[1], 16_560_000.0, 0)]:
        # both ran at monotonic second 100; rank 1's trace clock is 11.56 s ahead of rank 0's
        at_ns = BASE_NS + int(trace_us * 1000)
        anchors = (anchor(at_ns, offset_ns=100_000_000_000 + offset_ns - at_ns),)
        events = [named(9, "python"), span("step", trace_us, 50.0)]
        segment = made.segment(rank, 0, events, anchors=anchors)
        made.manifest(rank, [segment], wall_minus_monotonic_ns=BASE_NS)
    result = merge(tmp_path, "p")
    document = read_merged(result.merged)
    first, second = (e["ts"] for e in document["traceEvents"] if e["ph"] == "X")
    assert first - second == pytest.approx(40.0)
    start_ns = document["baseTimeNanoseconds"]
    assert start_ns + round(second * 1000) == BASE_NS + 100_000_000_000
    assert result.clock.method == "anchors on the host's monotonic clock"
    assert result.clock.uncertainty_ns == 1000  # two anchors of +-500 ns
    assert document["quarterdeck"]["clock"]["uncertainty_ns"] == 1000


def test_ranks_of_two_hosts_say_that_their_clocks_were_not_compared(tmp_path):
    """C25."""
    made = ProfileDir(tmp_path, "p", TWO)
    for number, rank in enumerate(TWO):
        segment = made.segment(
            rank, 0, [span("op", 1, 1)], anchors=(anchor(BASE_NS, offset_ns=-BASE_NS),)
        )
        made.manifest(rank, [segment], boot_id=f"boot {number}")
    clock = merge(tmp_path, "p").clock
    assert clock.uncertainty_ns is None and clock.hosts == 2
    assert "not compared" in clock.method


def test_an_id_that_names_another_place_is_refused(tmp_path):
    for profile_id in ("../p", "", "a/b", ".hidden", "x" * 200):
        with pytest.raises(BadRequest):
            merge(tmp_path, profile_id)


def test_two_merges_of_one_profile_do_not_write_into_each_other(tmp_path):
    made = whole_profile(tmp_path)
    with atomic_output(tmp_path / "merged-p.trace.json.gz"), pytest.raises(Conflict):
        merge(tmp_path, made.profile_id)


def test_what_a_killed_merge_left_does_not_disturb_the_next_one(tmp_path):
    whole_profile(tmp_path)
    (tmp_path / ".merged-p.trace.json.gz.part").write_bytes(b"half a trace" * 10_000)
    result = merge(tmp_path, "p")
    assert len(names_of(read_merged(result.merged))) == 2
    assert not list(tmp_path.glob(".*.part"))


def test_a_child_that_fails_costs_its_rank_and_the_reason_is_kept(tmp_path):
    made = whole_profile(tmp_path)
    shares = plan_shares(align(find(tmp_path, made.profile_id)))
    bad = msgspec.structs.replace(shares[1].job.segments[0], namespace=1 << 30)
    shares[1].job = msgspec.structs.replace(shares[1].job, segments=[bad])
    problems = []
    with tempfile.TemporaryFile() as first, tempfile.TemporaryFile() as second:
        shares[0].out, shares[1].out = first, second
        run_shares(shares, problems, lambda _: None)
    assert [share.arrived for share in shares] == [True, False]
    assert [(problem.rank, problem.file) for problem in problems] == [("dp0-tp1", "")]
    assert "ValueError: namespace" in problems[0].error


def run_cli(directory: Path, profile_id: str, *, limit_blocks: int = 0):
    limit = f"ulimit -f {limit_blocks}; " if limit_blocks else ""
    command = f"{limit}exec {sys.executable} -m engine.profiling.merge {directory} {profile_id}"
    return subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=60)


def test_the_command_prints_the_result_and_its_exit_code_tells_partial_from_failed(tmp_path):
    whole_profile(tmp_path)
    (tmp_path / "p-dp0-tp1.manifest.json").unlink()
    partial = run_cli(tmp_path, "p")
    assert partial.returncode == 0
    assert json.loads(partial.stdout)["label"] == "1 of 2, missing dp0-tp1"
    assert {"phase": "writing"} in [json.loads(line) for line in partial.stderr.splitlines()]
    nothing = run_cli(tmp_path, "other")
    assert nothing.returncode == 1
    assert json.loads(nothing.stdout)["merged"] is None


@pytest.mark.parametrize("blocks", [2, 8])  # full in a child that writes a piece, and in the end
def test_a_full_disk_leaves_no_file_and_says_so(tmp_path, blocks):
    made = ProfileDir(tmp_path, "p", TWO[:1])
    events = [span(f"{number * 7919:x}" * 5, number * 1.37, 1.0) for number in range(4000)]
    made.manifest(TWO[0], [made.segment(TWO[0], 0, events)])
    full = run_cli(tmp_path, "p", limit_blocks=blocks)
    assert full.returncode == 1
    result = json.loads(full.stdout)
    assert result["merged"] is None
    assert "File too large" in result["errors"][0]["error"]
    assert not list(tmp_path.glob("*merged*")) and not list(tmp_path.glob(".*"))
