"""Profiles and dumps through the door: rows, who may, files in ranges, names that repeat."""

from __future__ import annotations

import json
import uuid

import pytest
from django.test import RequestFactory

from console.api import files
from console.models import Dump, Job, Profile
from console.services import effects, jobs, profiles, recordings
from console.services.recording_actions import DumpTensors
from console.services.recording_actions import Profile as ProfileAction
from engine.errors import BadRequest, Conflict

pytestmark = pytest.mark.django_db

RECORDED = {
    "dp0-tp0": {"reason": "recorded 8 steps", "error": "", "missing": False, "bytes": 10,
                "events": 3, "steps": 8},
    "dp0-tp1": {"reason": "", "error": "died (signal 9)", "missing": True},
}  # fmt: skip


@pytest.fixture(autouse=True)
def home(settings, tmp_path):
    settings.QUARTERDECK_HOME = tmp_path
    return tmp_path


def job_of(action) -> Job:
    job = Job(key=uuid.uuid4().hex, kind=action.name, title=action.title, args=action.args,
              actor="ada", via="page", state=Job.State.RUNNING)  # fmt: skip
    job.save()
    effects.begun(job)
    return job


def end(job: Job, state: Job.State, **result) -> None:
    job.state, job.result, job.status_code = state, result, 200
    job.save()
    effects.ended(job)


def test_a_profile_with_a_dead_rank_is_merged_by_a_job_of_its_own_and_called_partial():
    """C10, C11: capturing, merging, partial; the missing rank is named."""
    action = ProfileAction(recording_id="p1", merge_profiles=True, num_steps=8)
    job = job_of(action)
    assert Profile.objects.get().state == "capturing"
    end(job, Job.State.PARTIAL, recorded=RECORDED, missing=["dp0-tp1"])
    assert Profile.objects.get().state == "merging"
    merge = Job.objects.get(kind="merge_profile")
    assert (merge.actor, merge.state) == ("ada", "queued")
    said = {"merged": "merged-p1.trace.json.gz", "partial": True, "missing": ["dp0-tp1"],
            "label": "1 of 2, missing dp0-tp1", "ranks_found": ["dp0-tp0"],
            "ranks_expected": ["dp0-tp0", "dp0-tp1"], "clock": None}  # fmt: skip
    end(merge, Job.State.DONE, merge=said, summary={"largest_gap_us": 61_500.0})
    row = Profile.objects.get()
    assert (row.state, row.message) == ("partial", "1 of 2, missing dp0-tp1")
    shown = profiles.as_detail(row)
    assert (shown["ranks_found"], shown["ranks_expected"]) == (1, 2)
    assert shown["largest_gap_ms"] == 61.5
    assert [rank["state"] for rank in shown["ranks"]] == ["done", "failed"]


def test_a_start_that_the_engine_refuses_leaves_no_profile_behind():
    job = job_of(ProfileAction(recording_id="p1"))
    end(job, Job.State.REFUSED)
    assert not Profile.objects.exists()


def test_a_name_that_was_used_before_is_a_conflict():
    job_of(DumpTensors(recording_id="d1"))
    with pytest.raises(Conflict, match="d1"):
        job_of(DumpTensors(recording_id="d1", note="again"))


@pytest.mark.parametrize("output_dir", ["/etc", "../elsewhere", "a/../../b"])
def test_files_go_nowhere_but_under_the_root(output_dir):
    """C15."""
    with pytest.raises(BadRequest, match="is not under"):
        ProfileAction.read({"output_dir": output_dir}).checked()


def test_sglang_spells_numbers_as_strings_and_needs_a_number_of_steps_by_stage():
    """E47: and a start without bounds ends by itself."""
    assert ProfileAction.read({"num_steps": "8"}).spec().num_steps == 8
    with pytest.raises(BadRequest, match="num_steps"):
        ProfileAction.read({"profile_by_stage": True}).checked()
    assert ProfileAction.read({}).checked().spec().max_seconds == 60


@pytest.mark.parametrize("action", [ProfileAction, DumpTensors])
def test_a_recording_cannot_hide_behind_a_page(action):
    with pytest.raises(BadRequest, match="cannot be an id"):
        action.read({"recording_id": "compare", "layers": "0"}).checked()


def test_a_dump_takes_lists_and_texts():
    spec = DumpTensors.read(
        {"modules": "model.*, lm_head", "ranks": "all", "rids": "a,b", "kinds": ["outputs"]}
    ).spec()
    assert (spec.modules, spec.ranks, spec.rids) == (("model.*", "lm_head"), (), {"a", "b"})


def test_the_same_key_is_the_same_recording_whatever_name_it_got():
    first = ProfileAction(num_steps=8).identified("abc")
    job, new = jobs.insert(new_job(first))
    assert new
    again, new = jobs.insert(new_job(ProfileAction(num_steps=8, recording_id="other")))
    assert (again.pk, new) == (job.pk, False)
    with pytest.raises(Conflict, match="key"):
        jobs.insert(new_job(ProfileAction(num_steps=9, recording_id="other")))


def new_job(action) -> Job:
    return Job(key="key", kind=action.name, title=action.title, args=action.args, actor="ada",
               via="http")  # fmt: skip


def test_a_pin_keeps_the_files_from_the_quota_and_from_deletion(home):
    job_of(ProfileAction(recording_id="p1"))
    row = Profile.objects.get()
    row.state = "ready"
    directory = home / "profiles" / "p1"
    directory.mkdir(parents=True)
    recordings.change(row, pinned=True, note="slow prefill")
    assert (directory / ".pinned").exists()
    with pytest.raises(Conflict, match="pinned"):
        recordings.delete(row)
    recordings.change(row, pinned=False, note=None)
    recordings.delete(row)
    assert not directory.exists() and not Profile.objects.exists()


@pytest.mark.parametrize("output_dir", [".", "shared", "shared/below"])
def test_deleting_a_recording_that_is_named_like_its_folder_leaves_the_others(home, output_dir):
    name = "profiles" if output_dir == "." else "shared"
    (home / "profiles" / output_dir).mkdir(parents=True)
    other = home / "profiles" / output_dir / "p2-dp0-tp0.trace.json.gz"
    other.touch()
    job_of(ProfileAction(recording_id="p2", output_dir=output_dir))
    place = output_dir.partition("/")[0]
    end(job_of(ProfileAction(recording_id=name, output_dir=place)), Job.State.DONE, recorded={})
    recordings.delete(Profile.objects.get(recording_id=name))
    assert other.exists()


def test_deleting_one_of_two_in_a_folder_leaves_the_other(home):
    directory = home / "dumps" / "both"
    directory.mkdir(parents=True)
    for name in ("d", "d2"):
        job_of(DumpTensors(recording_id=name, output_dir="both"))
        (directory / f"{name}-dp0-tp0.records.json").write_text(json.dumps({"records": []}))
    Dump.objects.update(state="ready")
    recordings.delete(Dump.objects.get(recording_id="d"))
    assert [path.name for path in directory.iterdir()] == ["d2-dp0-tp0.records.json"]


@pytest.mark.parametrize(
    ("asked", "status", "content_range"),
    [
        (None, 200, None),
        ("bytes=0-3", 206, "bytes 0-3/1000000"),
        ("bytes=999990-", 206, "bytes 999990-999999/1000000"),
        ("bytes=-10", 206, "bytes 999990-999999/1000000"),
        ("bytes=5-5000000", 206, "bytes 5-999999/1000000"),
        ("bytes=0-1,5-6", 200, None),
        ("bytes=0-" + "9" * 5000, 200, None),
        ("bytes=1000000-", 416, "bytes */1000000"),
    ],
)
async def test_a_trace_comes_in_ranges_and_in_chunks(home, asked, status, content_range):
    """C10: each rank's file can be fetched in pieces."""
    content = bytes(range(250)) * 4000
    path = home / "trace.json.gz"
    path.write_bytes(content)
    headers = {"range": asked} if asked else {}
    response = await files.answer(RequestFactory().get("/", headers=headers), path)
    assert (response.status_code, response.get("Content-Range")) == (status, content_range)
    if status == 416:
        return
    chunks = [chunk async for chunk in response]
    assert max(map(len, chunks)) <= files.CHUNK_BYTES
    first = 0
    if content_range:
        first = int(content_range.split()[1].split("-")[0])
    sent = b"".join(chunks)
    assert sent == content[first : first + len(sent)]
    assert int(response["Content-Length"]) == len(sent)
