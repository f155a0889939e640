"""Job rows: one owner at a time, leases, programs in processes of their own, lists and sockets."""

from __future__ import annotations

import asyncio
import datetime
import os
import signal
import sys
import threading
import time
from typing import ClassVar

import msgspec
import psutil
import pytest
from asgiref.sync import sync_to_async
from django.contrib.auth.models import Group, User
from django.db import connection
from django.utils import timezone

from console.asgi import application
from console.auth import SYSTEM, principal_of_user
from console.models import AuditEntry, Checkpoint, Job
from console.services import (
    catalogue,
    checkpoints,
    control,
    effects,
    file_jobs,
    jobs,
    reconcile,
)
from console.services.file_actions import FileAction, RegisterCheckpoint
from console.services.sending import Outcome
from engine.errors import Conflict
from tests.console.checkpoints import make_checkpoint
from tests.console.communicator import OURS, Socket, cookie_for


class Script(FileAction, frozen=True, kw_only=True):
    """Runs Python text: for tests of what surrounds a program."""

    name: ClassVar[str] = "script"

    code: str

    @property
    def title(self) -> str:
        return "Script"

    def will(self) -> list[str]:
        return []

    def command(self) -> list[str]:
        return [sys.executable, "-c", self.code]


@pytest.fixture
def script(database, monkeypatch):
    """``script(code)`` is a queued job that runs it."""
    monkeypatch.setitem(catalogue.ACTIONS, "script", Script)

    def make(code: str) -> Job:
        job = jobs.new_job(SYSTEM, Script(code=code), key=os.urandom(8).hex(), via="beat",
                           reason="", before={})  # fmt: skip
        return jobs.insert(job)[0]

    return make


def again(job: Job) -> Job:
    return Job.objects.get(pk=job.pk)


# ---------------------------------------------------------------- owners


def test_one_of_many_takers_gets_the_job(script):
    job = script("")
    taken: list[Job] = []

    def take():
        found = jobs.take(job.pk)
        if found is not None:
            taken.append(found)
        connection.close()

    threads = [threading.Thread(target=take) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(taken) == 1
    assert (again(job).state, again(job).attempt) == ("running", 1)


def test_a_running_job_is_taken_only_once_its_lease_is_over(script):
    job = script("")
    assert jobs.take(job.pk) is not None
    assert jobs.take(job.pk) is None
    past = timezone.now() - datetime.timedelta(seconds=1)
    Job.objects.filter(pk=job.pk).update(lease_until=past)
    assert jobs.take(job.pk).attempt == 2


def test_who_lost_the_job_can_neither_renew_nor_end_it(script, monkeypatch):
    job = jobs.take(script("").pk)
    Job.objects.filter(pk=job.pk).update(owner="another:1")
    assert not jobs.renew(job)
    job.state = Job.State.DONE
    assert not jobs.finish(job)
    assert again(job).state == "running"
    assert AuditEntry.objects.count() == 0


def test_an_ended_job_ends_once(script):
    job = jobs.take(script("").pk)
    job.state = Job.State.DONE
    assert jobs.finish(job)
    assert not jobs.finish(job)
    assert AuditEntry.objects.count() == 1


def test_the_same_key_stores_one_row(script):
    first = script("")
    twin = jobs.new_job(SYSTEM, Script(code=""), key=first.key, via="http", reason="", before={})
    found, new = jobs.insert(twin)
    assert (found.pk, new) == (first.pk, False)
    other = jobs.new_job(SYSTEM, Script(code="1"), key=first.key, via="http", reason="", before={})
    with pytest.raises(Conflict):
        jobs.insert(other)


# ---------------------------------------------------------------- programs


def test_the_last_line_of_a_program_is_the_jobs_result(script):
    job = script("print('reading'); print('{\"bytes\": 7}')")
    file_jobs.run(job.pk)
    ended = again(job)
    assert (ended.state, ended.result) == ("done", {"bytes": 7})
    [entry] = AuditEntry.objects.all()
    assert (entry.action, entry.result, entry.actor) == ("script", "done", "system")


def test_a_program_that_says_why_it_cannot_has_its_sentence_as_the_end(script):
    job = script('print(\'{"error": "the disk is full"}\')')
    file_jobs.run(job.pk)
    assert (again(job).state, again(job).message) == ("refused", "the disk is full")


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("raise SystemExit('no such file')", "ended with code 1: no such file"),
        ("import os; os.kill(os.getpid(), 9)", "was killed by signal 9"),
        ("print('all is well')", "ended with code 0: all is well"),
    ],
)
def test_a_program_that_breaks_leaves_a_reason(script, code, said):
    job = script(code)
    file_jobs.run(job.pk)
    assert again(job).state == "failed"
    assert said in again(job).message


def test_a_program_that_wants_too_much_memory_fails_alone(script, monkeypatch):
    monkeypatch.setattr(Script, "memory_bytes", 300 * 2**20)
    job = script("b = bytearray(10**9); print('{}')")
    file_jobs.run(job.pk)
    assert again(job).state == "failed"
    assert "MemoryError" in again(job).message


def test_a_program_that_takes_too_long_is_killed(script, monkeypatch):
    monkeypatch.setattr(Script, "deadline_s", 0.5)
    job = script("import time; time.sleep(60)")
    began = time.monotonic()
    file_jobs.run(job.pk)
    assert time.monotonic() - began < 10
    assert "signal 9" in again(job).message


def test_a_program_whose_job_went_to_another_owner_is_stopped_and_says_nothing(script, monkeypatch):
    monkeypatch.setattr(file_jobs, "RENEW_S", 0.2)
    job = script("import time; time.sleep(60)")
    timer = threading.Timer(0.5, lambda: (Job.objects.update(owner="other:1"), connection.close()))
    timer.start()
    file_jobs.run(job.pk)
    timer.join()
    assert (again(job).state, again(job).owner) == ("running", "other:1")
    assert not [p for p in psutil.Process().children() if "sleep(60)" in " ".join(p.cmdline())]


def test_a_job_that_kills_its_process_each_time_is_given_up(script):
    job = script("print('{}')")
    Job.objects.filter(pk=job.pk).update(attempt=3)
    file_jobs.run(job.pk)
    assert again(job).state == "failed"
    assert "3 times" in again(job).message


async def test_a_queued_job_whose_hint_was_lost_is_sent_again(script, monkeypatch):
    job = await sync_to_async(script)("")
    sent: list[tuple] = []
    monkeypatch.setattr(reconcile.events, "enqueue_on_commit", lambda *task: sent.append(task))
    await reconcile.reconcile()
    assert sent == []
    old = timezone.now() - datetime.timedelta(seconds=6)
    await Job.objects.filter(pk=job.pk).aupdate(changed_at=old)
    await reconcile.reconcile()
    assert sent == [(effects.RUN_TASK, job.pk)]


def test_a_terminated_runner_takes_its_program_along(script):
    """The program dies with whoever started it, however that one ended."""
    job = script("import time; time.sleep(60)")
    pid = os.fork()
    if pid == 0:
        connection.connection = None
        file_jobs.run(job.pk)
        os._exit(0)

    def program() -> list[psutil.Process]:
        return [p for p in psutil.process_iter(["cmdline"])
                if "import time; time.sleep(60)" in " ".join(p.info["cmdline"] or [])]  # fmt: skip

    until(program)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    until(lambda: not program())


def until(condition, timeout_s: float = 15) -> None:
    began = time.monotonic()
    while not condition():
        assert time.monotonic() - began < timeout_s
        time.sleep(0.05)


# ---------------------------------------------------------------- checkpoints


@pytest.fixture
def home(tmp_path, settings):
    settings.QUARTERDECK_HOME = tmp_path
    settings.QUARTERDECK_ENGINE = msgspec.structs.replace(
        settings.QUARTERDECK_ENGINE, model_path=str(tmp_path / "models" / "served")
    )
    (tmp_path / "models").mkdir()
    return tmp_path


def run_all() -> None:
    for job in Job.objects.filter(state=Job.State.QUEUED):
        file_jobs.run(job.pk)


def test_a_registered_checkpoint_is_read_for_its_checksum(home, database):
    make_checkpoint(home / "models" / "step-7")
    action = RegisterCheckpoint.read(
        {"path": "models/step-7", "token_step": "7", "run": "grpo", "note": "best"}
    ).checked()
    job, _ = jobs.insert(jobs.new_job(SYSTEM, action, key="k", via="http", reason="", before={}))
    [row] = Checkpoint.objects.all()
    assert (row.state, row.token_step, row.run, row.note) == ("found", 7, "grpo", "best")
    run_all()
    [row] = Checkpoint.objects.all()
    assert again(job).state == "done", again(job).message
    assert (row.state, row.tensors, len(row.checksum)) == ("ok", 3, 64)
    checkpoints.register(RegisterCheckpoint(path=row.path, token_step=8), actor="other")
    row.refresh_from_db()
    assert (row.state, row.token_step, row.registered_by) == ("ok", 8, "system")


def test_a_checkpoint_that_is_cut_off_is_incomplete_with_a_reason(home, database):
    path = make_checkpoint(home / "models" / "step-8")
    file = next(path.glob("*.safetensors"))
    os.truncate(file, file.stat().st_size - 10)
    action = RegisterCheckpoint.read({"path": str(path)}).checked()
    jobs.insert(jobs.new_job(SYSTEM, action, key="k", via="http", reason="", before={}))
    run_all()
    [row] = Checkpoint.objects.all()
    assert row.state == "incomplete"
    assert "cut off" in row.message


def test_new_and_changed_checkpoints_are_discovered_and_vanished_ones_marked(home, database):
    path = make_checkpoint(home / "models" / "run" / "step-1", age_s=60)
    assert checkpoints.discover() == [str(path)]
    checkpoints.register(RegisterCheckpoint(path=str(path)), actor="system")
    assert checkpoints.discover() == []
    make_checkpoint(path, age_s=50)
    assert checkpoints.discover() == [str(path)]
    make_checkpoint(path)
    assert checkpoints.discover() == [], "it may still be being written"
    path.rename(home / "gone")
    checkpoints.discover()
    assert Checkpoint.objects.get().state == "gone"
    (home / "gone").rename(path)
    checkpoints.register(RegisterCheckpoint(path=str(path), note="back"), actor="system")
    assert (Checkpoint.objects.get().state, Checkpoint.objects.get().note) == ("found", "back")


# ---------------------------------------------------------------- HTTP and the socket


def test_jobs_are_listed_filtered_and_shown_in_full(script, sign_in):
    done = script("print('{}')")
    file_jobs.run(done.pk)
    script("")
    client = sign_in("viewer")
    assert [job["state"] for job in client.get("/api/jobs").json()["jobs"]] == ["queued", "done"]
    [found] = client.get("/api/jobs?state=done").json()["jobs"]
    assert found["id"] == done.pk
    assert client.get("/api/jobs?kind=pause").json() == {"jobs": [], "next": None}
    shown = client.get(f"/api/jobs/{done.pk}").json()["job"]
    assert shown["request"] == {"code": "print('{}')"}
    assert [event["text"] for event in shown["events"]][-1] == "done"
    assert shown["curl"].startswith("curl -X POST http://testserver/api/control/script")
    assert client.get("/api/jobs/999999").status_code == 404


async def test_the_socket_tells_every_change_even_without_hints(script, sign_in, worker):
    """C5: the row is the truth."""
    cookie = await cookie_for(sign_in, "viewer")
    socket = Socket(application, "/ws/jobs/", cookie, OURS)
    watch = asyncio.create_task(worker.jobs.watch())
    assert await socket.open() == "open"
    assert (await socket.hear())["type"] == "jobs"
    job = await sync_to_async(script)("print('{}')")
    assert (await socket.hear())["job"]["state"] == "queued"
    await sync_to_async(file_jobs.run)(job.pk)
    states = []
    while not states or states[-1] != "done":
        states.append((await socket.hear())["job"]["state"])
    assert states in (["done"], ["running", "done"])
    await socket.leave()
    watch.cancel()


async def test_a_viewer_watches_jobs_and_may_not_act(script, sign_in, worker):
    cookie = await cookie_for(sign_in, "viewer")
    socket = Socket(application, "/ws/jobs/", cookie, OURS)
    await socket.open()
    await socket.hear()
    for frame in ("act", "preview"):
        await socket.say({"type": frame, "action": "pause"})
        answer = await socket.hear()
        assert (answer["type"], answer["error"]["code"]) == ("error", "forbidden")
    await socket.leave()


async def test_a_command_after_a_demotion_is_refused(script, sign_in, worker):
    """C15: rights are read again at each command, not only at the handshake."""
    cookie = await cookie_for(sign_in, "operator")
    socket = Socket(application, "/ws/jobs/", cookie, OURS)
    await socket.open()
    await socket.hear()
    user = await User.objects.aget(username="operator")
    await user.groups.aset([await Group.objects.aget(name="viewer")])
    await socket.say({"type": "act", "action": "pause"})
    assert (await socket.hear())["error"]["code"] == "forbidden"
    await socket.leave()
    assert await Job.objects.acount() == 0


def test_an_outcome_names_what_happened():
    ranks = [{"state": "done"}, {"state": "refused"}]
    assert Outcome(success=True).state == "done"
    assert Outcome(success=True, ranks=ranks).state == "partial"
    assert Outcome(success=False, status_code=409).state == "refused"
    assert Outcome(success=False, status_code=504).state == "failed"


def test_a_wrong_number_in_a_list_query_is_named(sign_in):
    response = sign_in("viewer").get("/api/jobs?offset=x")
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "offset"


async def test_previews_over_http_need_the_right_and_say_what_would_happen(sign_in, make_user):
    who = await sync_to_async(make_user)("operator")
    seen = await control.preview(
        await sync_to_async(principal_of_user)(who), "drain_rank", {"dp": 1}, base_url=""
    )
    assert seen.will == ["dp1 takes no new requests; those that run there end normally."]
    assert seen.refusal == "The engine is not reachable now."
