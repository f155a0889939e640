from __future__ import annotations

import hashlib
import json
import os
import signal
import time
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path

import pytest
import torch

from engine.artifacts import Rank
from engine.errors import BadRequest, Conflict
from engine.profiling import capture as capture_module
from engine.profiling.capture import Capture
from engine.profiling.manifest import ProfileFile, RankManifest, find, write_profile
from engine.profiling.merge import merge
from engine.profiling.rules import check_trace
from engine.profiling.spec import parse_spec
from tests.engine.profiling.traces import read_merged

RANK = Rank(dp=0, tp=1)


class ToyEngine:
    """A forward of a few small linears, driven through a capture as the runner would."""

    def __init__(self, directory: Path, rank: Rank = RANK) -> None:
        self.directory = directory
        self.capture = Capture(rank)
        self.model = torch.nn.Sequential(*[torch.nn.Linear(16, 16) for _ in range(4)])
        self.number = 0

    def arm(self, **raw: object) -> None:
        base = {"profile_id": "p", "directory": str(self.directory)}
        self.capture.arm(parse_spec(base | raw))

    def step(self, stage: str = "decode") -> None:
        self.number += 1
        with self.capture.step(self.number, stage, rows=2, tokens=2), torch.inference_mode():
            self.model(torch.ones(2, 16))

    def manifest(self, timeout_s: float = 30.0) -> RankManifest:
        """What the capture says when all its files are written."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            self.capture.tick()
            if manifest := self.capture.take_manifest():
                return manifest
            time.sleep(0.01)
        raise AssertionError("the capture did not end")

    def names(self) -> list[str]:
        """Names of the recorded steps, over all segments."""
        events = []
        for path in sorted(self.directory.glob("p-*-s*.trace.json.gz")):
            events += read_merged(path)["traceEvents"]
        return [
            event["name"]
            for event in events
            if event.get("cat") == "user_annotation"
            and not event["name"].startswith("quarterdeck.clock.")
        ]


@pytest.fixture
def toy(tmp_path: Path) -> Iterator[ToyEngine]:
    engine = ToyEngine(tmp_path)
    yield engine
    engine.capture.close()


def test_a_capture_of_some_steps_ends_by_itself_and_describes_its_files(toy):
    toy.step()
    toy.arm(num_steps="3")
    assert toy.capture.armed
    while toy.capture.armed:
        toy.step()
    manifest = toy.manifest()
    assert manifest.complete and manifest.reason == "recorded 3 steps"
    assert toy.names() == [f"decode[step={number} bs=2 toks=2]" for number in (2, 3, 4)]
    for segment in manifest.segments:
        data = (toy.directory / segment.path).read_bytes()
        assert (len(data), hashlib.sha256(data).hexdigest()) == (segment.bytes, segment.sha256)
        assert segment.events == len(read_merged(toy.directory / segment.path)["traceEvents"])
    assert find(toy.directory, "p").sources[0].manifest == manifest
    assert not list(toy.directory.glob(".*"))


def test_nothing_is_recorded_and_no_profiler_runs_while_unarmed(toy):
    with toy.capture.step(1, "decode", rows=1, tokens=1):
        assert not torch.autograd._profiler_enabled()
    assert not toy.capture.armed
    toy.arm(num_steps=1)
    with toy.capture.step(2, "decode", rows=1, tokens=1):
        assert torch.autograd._profiler_enabled()
    assert not torch.autograd._profiler_enabled()


def test_the_merged_clock_puts_each_step_where_the_runner_saw_it(toy):
    write_profile(toy.directory, ProfileFile(profile_id="p", ranks=[RANK]))
    toy.arm(num_steps=4)
    while toy.capture.armed:
        toy.step()
    manifest = toy.manifest()
    result = merge(toy.directory, "p")
    assert result.label == "1 of 1" and not result.partial
    assert check_trace(Path(result.merged)).violations == []
    assert result.clock.uncertainty_ns < 2_000_000
    document = read_merged(result.merged)
    to_wall = manifest.wall_minus_monotonic_ns
    for mark in manifest.steps:
        name = f"decode[step={mark.step} bs=2 toks=2]"
        found = [event for event in document["traceEvents"] if event["name"] == name]
        assert len(found) == int(mark.recorded)
        for event in found:
            start_ns = document["baseTimeNanoseconds"] + round(event["ts"] * 1000)
            slack_ns = result.clock.uncertainty_ns
            assert mark.start_ns + to_wall - slack_ns <= start_ns
            assert start_ns + round(event["dur"] * 1000) <= mark.end_ns + to_wall + slack_ns


def test_time_without_requests_is_not_counted_as_a_pause_of_the_capture(toy):
    toy.arm(num_steps=2)
    toy.step()
    time.sleep(0.5)
    while toy.capture.armed:
        toy.step()
    manifest = toy.manifest()
    own_ms = sum(mark.pause_ns for mark in manifest.steps) / 1e6
    assert 0 < own_ms < 450
    assert any(mark.pause_ns for mark in manifest.steps if not mark.recorded)


def test_segments_stay_below_their_bound(toy, monkeypatch):
    monkeypatch.setattr(capture_module, "SEGMENT_BYTES", 40_000)
    toy.arm(num_steps=12)
    while toy.capture.armed:
        toy.step()
    manifest = toy.manifest()
    assert len(manifest.segments) > 2
    assert len(toy.names()) == 12
    assert all(segment.events * 250 < 60_000 for segment in manifest.segments)


def test_stages_are_recorded_apart_each_for_its_own_number_of_steps(toy):
    toy.arm(num_steps=2, profile_by_stage=True)
    for stage in ("prefill", "decode", "decode", "decode", "prefill", "prefill", "decode"):
        toy.step(stage)
    manifest = toy.manifest()
    assert manifest.reason == "recorded 4 steps"
    stages = [stage for stage, _ in groupby(segment.stage for segment in manifest.segments)]
    assert stages == ["prefill", "decode", "prefill"]
    assert [name.split(" ")[0] for name in toy.names()] == [
        "prefill[step=1",
        "decode[step=2",
        "decode[step=3",
        "prefill[step=5",
    ]


def test_recording_starts_at_the_step_that_was_asked_for(toy):
    toy.arm(start_step=3, num_steps=1)
    for _ in range(5):
        toy.step()
    toy.manifest()
    assert toy.names() == ["decode[step=3 bs=2 toks=2]"]


def test_a_capture_ends_without_any_step_when_its_time_is_over(toy):
    """E47, C11: nobody has to stop it."""
    toy.arm(max_seconds=0.05)
    assert toy.capture.armed
    time.sleep(0.06)
    manifest = toy.manifest()
    assert manifest.reason == "reached 0.05 seconds"
    assert manifest.segments == [] and manifest.complete


def test_a_capture_without_any_bound_has_bounds():
    """E47: who starts it and never stops it fills neither disk nor memory."""
    spec = parse_spec({"profile_id": "p", "directory": "d"})
    assert 0 < spec.max_seconds <= 60
    assert 0 < spec.max_bytes <= 2**30
    assert spec.step_limit <= 10_000


def test_a_capture_ends_in_the_middle_of_recording_when_its_time_is_over(toy):
    toy.arm(max_seconds=0.3)
    deadline = time.monotonic() + 20
    while toy.capture.armed and time.monotonic() < deadline:
        toy.step()
    assert toy.manifest().reason == "reached 0.3 seconds"
    assert not torch.autograd._profiler_enabled()


def test_a_capture_ends_when_it_has_written_enough(toy):
    """E47, C11."""
    toy.arm(max_bytes=1000)
    while toy.capture.armed:
        toy.step()
    assert toy.manifest().reason == "reached 1000 bytes"


def test_stop_gives_the_manifest_once_the_files_are_complete(toy):
    """E47: they can be read at once."""
    toy.arm()
    toy.step()
    toy.step()
    toy.capture.stop("stopped by admin")
    manifest = toy.manifest()
    assert manifest.reason == "stopped by admin"
    assert len(toy.names()) == 2
    assert toy.capture.take_manifest() is None
    with pytest.raises(Conflict):
        toy.capture.stop("again")


def test_a_second_capture_is_refused_until_the_first_was_taken(toy):
    toy.arm(num_steps=1)
    with pytest.raises(Conflict, match="profile p is still running"):
        toy.arm(num_steps=1)
    toy.step()
    toy.manifest()
    toy.arm(num_steps=1, profile_id="q")
    toy.step()
    assert toy.manifest().profile_id == "q"


def test_a_forward_that_fails_fails_as_before_and_the_capture_still_ends(toy):
    toy.arm(num_steps=2)
    with pytest.raises(ZeroDivisionError), toy.capture.step(1, "decode", rows=1, tokens=1):
        _ = 1 / 0
    toy.step()
    assert toy.manifest().reason == "recorded 2 steps"


def test_a_directory_that_cannot_be_written_is_refused_when_arming(toy):
    with pytest.raises(BadRequest, match="cannot write into"):
        toy.arm(directory=str(toy.directory / "missing"))
    assert not toy.capture.armed


def test_a_directory_that_vanishes_ends_the_capture_with_the_reason(toy, tmp_path_factory):
    directory = tmp_path_factory.mktemp("vanishing") / "d"
    directory.mkdir()
    toy.arm(directory=str(directory), max_seconds=20)
    directory.rmdir()
    deadline = time.monotonic() + 15
    while toy.capture.armed and time.monotonic() < deadline:
        toy.step()
    manifest = toy.manifest()
    assert "No such file" in manifest.reason
    assert manifest.segments == []


def test_the_death_of_the_packing_process_ends_the_capture_and_not_the_engine(toy):
    toy.arm(max_seconds=30)
    child = toy.capture._session.writer._child
    os.kill(child.pid, signal.SIGKILL)
    child.wait()
    deadline = time.monotonic() + 20
    while toy.capture.armed and time.monotonic() < deadline:
        toy.step()
    manifest = toy.manifest()
    assert "packing process" in " ".join(manifest.errors)
    assert manifest.segments == []


def test_memory_events_are_recorded_in_the_trace_and_not_as_a_pickle(toy):
    toy.arm(num_steps=1, activities=["MEM"])
    toy.step()
    manifest = toy.manifest()
    text = json.dumps(read_merged(toy.directory / manifest.segments[0].path))
    assert "[memory]" in text
    assert not [path for path in toy.directory.iterdir() if "pickle" in path.name]


@pytest.mark.parametrize(
    ("raw", "sentence"),
    [
        ({"profile_by_stage": True}, "profile_by_stage needs num_steps"),
        ({"num_steps": "many"}, "num_steps"),
        ({"num_steps": 0}, "num_steps must be above 0"),
        ({"max_seconds": 1e9}, "max_seconds"),
        ({"activities": ["RPD"]}, "activities"),
        ({"activities": []}, "at least one of CPU, GPU and MEM"),
        ({"profile_id": "../x"}, "may hold up to 128 letters"),
    ],
)
def test_a_request_that_makes_no_sense_is_refused_with_a_sentence(raw, sentence):
    """E47: among them profile_by_stage without num_steps."""
    with pytest.raises(BadRequest, match=sentence):
        parse_spec({"profile_id": "p", "directory": "d"} | raw)
