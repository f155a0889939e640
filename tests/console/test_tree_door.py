"""The door in a whole tree: real Celery, real beat, real sockets, and each of them taken away."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest

from engine.weights.checkpoint import SINGLE
from tests.console.tree import ROOT, Tree, eventually, running_tree
from tests.engine.weights.checkpoints import disagreements, scripted_checkpoint

pytestmark = pytest.mark.e2e

LONG = {"max_new_tokens": 4000, "ignore_eos": True}


@pytest.fixture(scope="module")
def tree(tmp_path_factory):
    with running_tree(tmp_path_factory.mktemp("tree")) as tree:
        yield tree


def checkpoint(tree: Tree, index: int) -> str:
    path = tree.home / "models" / f"step-{index}"
    path.mkdir(exist_ok=True)
    scripted_checkpoint(path / SINGLE, index)
    return f"models/step-{index}"


def act(tree: Tree, name: str, **fields) -> dict:
    """Through ``/api/control``, to its end."""
    job = tree.post(f"/api/control/{name}", fields).json()["job"]
    return ended(tree, job["id"])


def ended(tree: Tree, job_id: int, timeout_s: float = 30) -> dict:
    found: dict = {}

    def over() -> bool:
        found.update(tree.get(f"/api/jobs/{job_id}").json()["job"])
        return found["ended_at"] is not None

    eventually(over, timeout_s, f"job {job_id} has not ended: {found}")
    return found


def jobs(tree: Tree, **filters: str) -> list[dict]:
    query = "&".join(f"{name}={value}" for name, value in filters.items())
    return tree.get(f"/api/jobs?{query}").json()["jobs"]


def audit(tree: Tree, **filters: str) -> list[dict]:
    query = "&".join(f"{name}={value}" for name, value in filters.items())
    return tree.get(f"/api/audit?{query}").json()["entries"]


@contextlib.contextmanager
def busy(tree: Tree, count: int = 4) -> Iterator[list[dict]]:
    """Long generations in the background; their answers once they have ended."""
    answers: list[dict] = []

    def generate(number: int) -> None:
        body = {"text": f"long {number}", "rid": f"busy-{number}-{time.time()}",
                "sampling_params": LONG}  # fmt: skip
        with contextlib.suppress(httpx.TransportError):  # its worker may be killed
            answers.append(tree.post("/generate", body).json())

    threads = [threading.Thread(target=generate, args=[n]) for n in range(count)]
    for thread in threads:
        thread.start()
    eventually(lambda: tree.running() >= count, 10, tree)
    try:
        yield answers
    finally:
        tree.post("/abort_request", {"abort_all": True})
        for thread in threads:
            thread.join(30)


# ---------------------------------------------------------------- weights


def test_a_reload_under_load_is_proved_by_every_token(tree):
    """C12, E22: tokens prove their labels; every worker says the new version at once."""
    act(tree, "reload_weights", source=checkpoint(tree, 1), token_step=101)
    with busy(tree) as answers:
        preview = tree.post(
            "/api/control/reload_weights/preview",
            {"source": checkpoint(tree, 2), "in_flight": "in_place"},
        ).json()
        assert preview["impact"].startswith("4 running requests: ")
        job = act(tree, "reload_weights", source="models/step-2", token_step=102,
                  in_flight="in_place", reason="better")  # fmt: skip
        assert job["state"] == "done", job["message"]
        assert job["before"]["token_step"] == 101
        assert job["after"]["token_step"] == 102
        for _ in range(10):
            told = tree.get("/get_weight_version").json()
            assert (told["token_step"], told["epoch"]) == (102, job["after"]["epoch"])
        time.sleep(0.3)
    index_of = {job["before"]["epoch"]: 1, job["after"]["epoch"]: 2}
    for answer in answers:
        info = answer["meta_info"]
        runs = [(end - start, epoch) for epoch, start, end in info["epochs"]]
        assert disagreements(answer["output_ids"], runs, index_of) == []
        assert [epoch for _, epoch in runs] == sorted(index_of)
        steps = [step for step, start, end in steps_of(info) for _ in range(start, end)]
        assert info["token_steps"] == steps
        assert info["kv_token_steps"][-1][2] >= info["completion_tokens"]


def steps_of(info: dict) -> list[tuple[int, int, int]]:
    """Checkpoint ``step-N`` was loaded as the trainer's step 100 + N."""
    return [
        (int(label.removeprefix("step-")) + 100, start, end)
        for label, start, end in info["weight_versions"]
    ]


def test_the_timeline_says_what_served_when(tree):
    before = time.time()
    time.sleep(0.2)
    job = act(tree, "reload_weights", source=checkpoint(tree, 3), token_step=103)
    time.sleep(0.2)
    after = time.time()

    def served(at: float) -> list:
        ranks = tree.get(f"/api/weights/at?time={at}").json()["ranks"]
        return [(rank["dp"], rank["token_step"]) for rank in ranks]

    eventually(lambda: served(after) == [(0, 103), (1, 103)], 10, tree)
    assert all(step != 103 for _, step in served(before))
    shown = tree.get("/api/weights").json()
    assert (shown["versions"][0]["token_step"], shown["versions"][0]["ended_at"]) == (103, None)
    assert shown["updates"][0]["job"] == job["id"]
    lineage = tree.get(f"/api/epochs/{shown['versions'][0]['epoch']}").json()
    assert (lineage["job"], lineage["source"]) == (job["id"], "models/step-3")
    assert len(lineage["checksum"]) == 64


def test_a_canary_is_mixed_and_a_roll_back_ends_it(tree):
    act(tree, "reload_weights", source=checkpoint(tree, 4), target="1")
    assert tree.fleet()["engine"]["state"] == "mixed"
    groups = tree.get("/api/weights").json()["groups"]
    assert groups[0]["weight_version"] != groups[1]["weight_version"] == "step-4"
    job = act(tree, "roll_back", epoch=groups[0]["epoch"])
    assert job["state"] == "done", job["message"]
    assert tree.fleet()["engine"]["state"] == "running"


def test_buckets_over_http_are_one_epoch_and_their_spools_go(tree):
    file = tree.home / "models" / "bytes.safetensors"
    scripted_checkpoint(file, 5)
    begun = tree.post("/begin_weight_update", {"token_step": 105}).json()
    with tree.client() as client:
        for _ in range(3):
            response = client.post(
                "/update_weights_from_tensor", params={"session_id": begun["session_id"]},
                content=file.read_bytes(), headers={"Content-Type": "application/octet-stream"},
            )  # fmt: skip
            assert response.json()["success"], response.text
    ended = tree.post("/end_weight_update", {"session_id": begun["session_id"]}).json()
    assert ended["success"], ended
    assert tree.get("/get_weight_version").json()["token_step"] == 105
    with tree.client() as client:
        refused = client.post(
            "/update_weights_from_tensor", content=b"\x80\x04" + b"x" * 3_000_000,
            headers={"Content-Type": "application/octet-stream"},
        )  # fmt: skip
    assert refused.status_code == 400
    assert "engine/weights/sender.py" in refused.json()["message"]
    assert [p for p in (tree.home / "spool").iterdir() if p.suffix == ".part"] == []


def test_a_checkpoint_is_registered_read_and_ready_to_load(tree):
    path = checkpoint(tree, 6)
    answer = tree.post("/api/checkpoints", {"path": path, "token_step": "106", "run": "r"}).json()
    assert answer["success"], answer
    [found] = [c for c in tree.get("/api/checkpoints").json()["checkpoints"] if c["path"] == path]
    assert (found["state"], found["token_step"], found["run"]) == ("ok", 106, "r")
    assert len(found["checksum"]) == 64


# ---------------------------------------------------------------- sockets and requests


def test_an_action_on_one_socket_is_seen_on_every_other(tree):
    sockets = [tree.socket("/ws/jobs/") for _ in range(6)]  # on both workers, by chance
    for socket in sockets:
        assert json.loads(socket.recv(10))["type"] == "jobs"
    sockets[0].send(json.dumps({"type": "act", "action": "freeze_gc", "ref": "x"}))
    for socket in sockets:
        while True:
            frame = json.loads(socket.recv(10))
            if frame["type"] == "job" and frame["job"]["kind"] == "freeze_gc":
                break
        socket.close()


def test_requests_in_flight_show_who_sent_them_and_can_be_aborted(tree):
    with busy(tree, 2):
        shown = tree.get("/api/requests").json()["requests"]
        assert {row["phase"] for row in shown} <= {"decode", "prefill", "queued"}
        assert {row["actor"] for row in shown} == {"key:test"}
        assert all(row["max_new_tokens"] == 4000 and row["epoch"] for row in shown)
        job = act(tree, "abort_request", rid=shown[0]["rid"])
        assert job["state"] == "done"
        eventually(lambda: tree.running() == 1, 5, tree)


# ---------------------------------------------------------------- beat, leases, the shell


def test_a_schedule_in_the_admins_table_acts_through_the_door(tree):
    """C23: beat sends soon after it is asked to."""
    tree.manage(
        "shell", "-c",
        "from django_celery_beat.models import *; import json; "
        "i, _ = IntervalSchedule.objects.get_or_create(every=2, period='seconds'); "
        "PeriodicTask.objects.create(name='t', task='console.act', interval=i, "
        "kwargs=json.dumps({'action': 'flush_cache', 'as_user': 'admin', 'reason': 'nightly'}))",
    )  # fmt: skip
    eventually(lambda: any(j["via"] == "beat" for j in jobs(tree, kind="flush_cache")), 40, tree)
    tree.manage(
        "shell", "-c",
        "from django_celery_beat.models import *; "
        "PeriodicTask.objects.get(name='t').delete()",
    )  # fmt: skip
    [job, *_] = [j for j in jobs(tree, kind="flush_cache") if j["via"] == "beat"]
    shown = ended(tree, job["id"])
    assert (shown["state"], shown["actor"], shown["reason"]) == ("done", "user:admin", "nightly")


def test_the_end_of_a_pauses_lease_is_one_entry_of_the_engine(tree):
    tree.post("/pause_generation", {"lease_s": 1})
    eventually(lambda: audit(tree, action="pause_lease_expired"), 15, tree)
    eventually(lambda: tree.fleet()["engine"]["state"] == "running", 5, tree)
    time.sleep(2)
    [entry] = audit(tree, action="pause_lease_expired")
    assert (entry["actor"], entry["via"]) == ("engine", "engine")


def test_the_shell_goes_through_the_same_door(tree):
    told = tree.manage("control", "flush_cache", "timeout_s=0", "--reason", "by hand")
    assert "done" in told
    [job, *_] = jobs(tree, kind="flush_cache")
    assert (job["via"], job["actor"].startswith("shell:")) == ("command", True)
    assert "unbroken" in tree.manage("audit", "verify")


# ---------------------------------------------------------------- what is taken away


def test_a_web_worker_that_dies_in_a_call_leaves_it_to_the_other(tree):
    """The call is not sent again: the other worker asks the engine what became of it."""
    with busy(tree, 2):
        body = {"timeout_s": 4, "reason": "slow"}
        job = tree.post("/api/control/flush_cache", body).json()["job"]
        owner = tree.get(f"/api/jobs/{job['id']}").json()["job"]["owner"]
        worker = owner.split(":")[0]
        os.kill(int(owner.split(":")[1]), signal.SIGKILL)
        shown = ended(tree, job["id"], 60)
        assert shown["attempt"] == 2
        assert shown["state"] in ("done", "refused"), "requests of that worker died with it"
        assert "asking the engine what became of it" in str(shown["events"])
    eventually(lambda: worker in {w["id"] for w in tree.fleet()["workers"]}, 20, tree)


def test_a_router_that_dies_in_a_call_leaves_an_honest_end(tree):
    """C11: its successor does not know the call; it was not sent again."""
    with busy(tree, 2):
        job = tree.post("/api/control/flush_cache", {"timeout_s": 20}).json()["job"]
        router = next(
            process for process in tree.processes()
            if process.cmdline()[:1] == ["quarterdeck: router"]
        )  # fmt: skip
        os.kill(router.pid, signal.SIGKILL)
        shown = ended(tree, job["id"], 60)
        assert shown["state"] == "failed"
        assert "was not sent again" in shown["message"]
    eventually(lambda: tree.is_ready(), 60, tree)


def big_checkpoint(tree: Tree, gigabytes: float) -> str:
    """A sparse file: quick to make, long to read."""
    count = int(gigabytes * 2**30)
    header = json.dumps({"w": {"dtype": "U8", "shape": [count], "data_offsets": [0, count]}})
    header += " " * (-len(header) % 8)
    path = tree.home / "models" / "big" / SINGLE
    path.parent.mkdir(exist_ok=True)
    with open(path, "wb") as file:
        file.write(len(header).to_bytes(8, "little") + header.encode())
        file.truncate(8 + len(header) + count)
    return "models/big"


def test_a_celery_worker_that_is_killed_ends_its_job_after_its_return(tree):
    """C24: the job is in the database, whoever runs it."""
    path = big_checkpoint(tree, 1.0)
    job = tree.post("/api/control/register_checkpoint", {"path": path}).json()["job"]
    eventually(
        lambda: tree.get(f"/api/jobs/{job['id']}").json()["job"]["state"] == "running", 20, tree
    )
    old = tree.kill("celery worker")
    eventually(lambda: restarted(tree, "celery worker", old), 30, tree)
    back = time.monotonic()
    shown = ended(tree, job["id"], 60)
    assert shown["state"] in ("done", "failed"), shown
    assert shown["message"] or shown["state"] == "done"
    assert time.monotonic() - back < 30 + 15, "lease and tick, and the reading itself"
    assert not [p for p in programs() if "job" in p]


def restarted(tree: Tree, title: str, old_pid: int) -> bool:
    with contextlib.suppress(LookupError):
        return tree.child(title).pid != old_pid
    return False


def programs() -> list[str]:
    found = []
    for process in psutil.process_iter(["cmdline"]):
        text = " ".join(process.info["cmdline"] or [])
        if "engine.weights.checkpoint" in text:
            found.append(text)
    return found


@contextlib.contextmanager
def frozen(*processes: psutil.Process) -> Iterator[None]:
    """Stopped, which is worse than dead: nothing refuses, nothing answers."""
    for process in processes:
        process.suspend()
    try:
        yield
    finally:
        for process in processes:
            process.resume()


def test_control_works_while_celery_and_valkey_hang(tree):
    celery = tree.child("celery worker")
    hung = [tree.child("valkey"), tree.child("celery beat"), celery, *celery.children()]
    with busy(tree, 2), frozen(*hung):
        for path, body in (
            ("/pause_generation", {"mode": "in_place"}),
            ("/continue_generation", {}),
            ("/abort_request", {"abort_all": True}),
        ):
            for _ in range(3):
                began = time.monotonic()
                response = tree.post(path, body)
                assert response.status_code == 200, response.text
                assert time.monotonic() - began < 3
    assert tree.fleet()["engine"]["state"] == "running"


@contextlib.contextmanager
def no_database(home: Path) -> Iterator[None]:
    """The file is gone: whoever connects finds an empty database."""
    kept = home / "kept"
    kept.mkdir()
    for file in home.glob("console.sqlite3*"):
        file.rename(kept / file.name)
    try:
        yield
    finally:
        for file in home.glob("console.sqlite3*"):
            file.unlink()
        for file in kept.iterdir():
            file.rename(home / file.name)
        kept.rmdir()


@contextlib.contextmanager
def locked_database(home: Path) -> Iterator[None]:
    """Another process holds the write lock: every writer waits."""
    with contextlib.closing(sqlite3.connect(home / "console.sqlite3", isolation_level=None)) as db:
        db.execute("BEGIN IMMEDIATE")
        yield
        db.execute("ROLLBACK")


def by_socket(socket, reason: str) -> str:
    """Continue, by a frame on a socket that was open before."""
    frame = {"type": "act", "action": "continue", "reason": reason, "ref": "away"}
    socket.send(json.dumps(frame))
    while True:
        heard = json.loads(socket.recv(15))
        assert heard["type"] != "error", heard
        if heard["type"] == "ended":
            return heard["job"]["state"]


def by_browser(browser: httpx.Client, reason: str) -> str:
    """Pause, by the page of somebody who signed in before."""
    body = {"mode": "in_place", "reason": reason}
    response = browser.post("/api/control/pause", json=body)
    assert response.status_code in (200, 202), response.text
    return response.json()["job"]["state"]


@pytest.mark.parametrize("away", [no_database, locked_database])
def test_emergencies_work_while_the_database_is_away_and_are_recorded_later(tree, away):
    for _ in range(20):  # both workers have met the key
        before = {job["id"] for job in jobs(tree)}
    socket = tree.socket("/ws/jobs/")
    with contextlib.ExitStack() as stack:
        browser = stack.enter_context(tree.browser())
        browser.get("/api/fleet").raise_for_status()  # its worker has met the session
        stack.enter_context(away(tree.home))
        for path in ("/pause_generation", "/continue_generation", "/abort_request"):
            body = {"abort_all": True} if path == "/abort_request" else {}
            began = time.monotonic()
            response = tree.post(path, body | {"reason": away.__name__})
            assert response.status_code == 200, response.text
            assert time.monotonic() - began < 10
        assert by_socket(socket, away.__name__) == "done"
        assert by_browser(browser, away.__name__) in ("done", "running")
        told = tree.manage("control", "pause", "--reason", away.__name__)
        assert "done" in told
        assert tree.fleet()["engine"]["state"] == "paused"
        if away is no_database:  # behind a lock it would be patient
            assert tree.post("/flush_cache", {}).status_code == 503
        tree.manage("control", "continue", "--reason", away.__name__)

    def recorded() -> bool:
        return len(jobs(tree, q=away.__name__)) == 7 and not any(
            job["ended_at"] is None for job in jobs(tree, q=away.__name__)
        )

    eventually(recorded, 45, tree)
    found = jobs(tree, q=away.__name__)
    assert {job["state"] for job in found} == {"done"}
    assert all(job["late"] for job in found) or away is locked_database
    assert not before & {job["id"] for job in found}
    assert len(audit(tree, q=away.__name__)) == 7
    socket.close()
    assert "unbroken" in tree.manage("audit", "verify")
    assert list((tree.home / "late-jobs").glob("*.json")) == []


def test_two_hundred_hints_of_one_process_need_one_connection(tree):
    """C5: a loop per hint would leave dead ones behind, and say so."""
    job = act(tree, "freeze_gc")
    told = subprocess.run(
        [sys.executable, "manage.py", "shell", "-c",
         "import time; from console.link import Link; link = Link('command'); "
         "from console.models import Job; from console.services import jobs; "
         f"job = Job.objects.get(pk={job['id']}); "
         "[jobs.progress(job) for _ in range(200)]; time.sleep(2); link.close(); print('told')"],
        cwd=ROOT, env=tree.environment, capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip
    assert "told" in told.stdout
    assert "lost" not in told.stderr, told.stderr
    assert "closed" not in told.stderr
    assert "Event loop is closed" not in tree.log
