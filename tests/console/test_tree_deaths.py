"""Who dies takes only its own work along, comes back, and leaves nothing behind (DESIGN 1)."""

from __future__ import annotations

import json
import os
import signal
import socket as sockets
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import psutil
import pytest

from console import supervisor
from console.supervisor import Child, GaveUp, Spec, Supervisor
from engine.process_guard import PARENT_PID
from engine.weights.checkpoint import SINGLE
from tests.console.test_tree_chat import LONG, hear, start
from tests.console.tree import ROOT, Tree, eventually, running_tree
from tests.engine.weights.checkpoints import scripted_checkpoint

e2e = pytest.mark.e2e


@pytest.fixture(scope="module")
def tree(tmp_path_factory):
    with running_tree(tmp_path_factory.mktemp("tree")) as tree:
        yield tree


def restarted(tree: Tree, title: str, old_pid: int) -> bool:
    try:
        return tree.child(title).pid != old_pid
    except LookupError:
        return False


# ---------------------------------------------------------------- one dies, the others go on


@e2e
def test_a_dead_web_worker_ends_its_streams_frees_their_slots_and_comes_back(tree):
    """Streams relayed to it end with ``worker_lost``; those of the other worker never notice."""
    socket = taken_by(tree, "1")
    start(socket, route="worker:2", params=LONG)
    hear(socket, count=3)
    other = taken_by(tree, "1")
    spared = start(other, route="worker:1", params={"max_new_tokens": 300})
    hear(other, count=3)
    dead = tree.kill("web 2")
    lost = hear(socket)[-1]
    assert (lost["type"], lost["finish"]["err_type"]) == ("end", "worker_lost")
    assert eventually(lambda: tree.running() <= 1, 5) < 5
    end = hear(other)[-1]
    assert (end["stream"], end["usage"]["completion_tokens"]) == (spared, 300)
    socket.close()
    other.close()
    assert eventually(lambda: restarted(tree, "web 2", dead) and joined(tree, "2"), 20) < 20


def joined(tree: Tree, worker: str) -> bool:
    return tree.is_ready() and worker in {w["id"] for w in tree.fleet()["workers"]}


def taken_by(tree: Tree, worker: str):
    """A chat socket that worker ``worker`` took."""
    while True:
        socket = tree.socket("/ws/chat/")
        start(socket, params={"max_new_tokens": 1})
        if hear(socket)[0]["via"] == worker:
            return socket
        socket.close()


@e2e
def test_connections_that_come_while_a_worker_restarts_wait_and_are_not_refused(tree):
    dead = tree.kill("web 1")
    with ThreadPoolExecutor(8) as pool:
        codes = list(pool.map(lambda _: tree.get("/api/fleet").status_code, range(24)))
    assert codes == [200] * 24
    eventually(lambda: restarted(tree, "web 1", dead) and joined(tree, "1"), 20)


@e2e
def test_no_request_notices_that_valkey_died(tree):
    stop, failures = threading.Event(), []

    def ask() -> None:
        while not stop.is_set():
            response = tree.post(
                "/generate", {"text": "x", "sampling_params": {"max_new_tokens": 5}}
            )
            if response.status_code != 200:
                failures.append(response.text)

    with tree.socket("/ws/chat/") as socket, ThreadPoolExecutor(2) as pool:
        work = pool.submit(ask)
        start(socket, params={"max_new_tokens": 200})
        hear(socket, count=3)
        dead = tree.kill("valkey-server")
        assert hear(socket)[-1]["finish"]["type"] == "length"
        eventually(lambda: restarted(tree, "valkey-server", dead), 10)
        time.sleep(1)
        stop.set()
        work.result()
    assert failures == []
    with tree.browser() as browser, tree.socket("/ws/chat/", browser) as socket:
        browser.post("/logout/")
        with pytest.raises(Exception, match="4401"):
            socket.recv(timeout=10)  # by a hint, or by the sweep while listeners come back


@e2e
@pytest.mark.parametrize("title", ["celery worker", "celery beat"])
def test_celery_comes_back_and_serving_goes_on(tree, title):
    name = {"celery worker": "celeryd", "celery beat": "celery beat"}[title]
    eventually(lambda: restarted(tree, name, 0), 20, tree)
    dead = tree.kill(name)
    assert tree.get("/health_generate").status_code == 200
    eventually(lambda: restarted(tree, name, dead), 15, tree)


@e2e
def test_a_dead_engine_ends_requests_at_once_and_is_started_again(tree):
    """E7: meanwhile no worker says that it is ready."""
    with ThreadPoolExecutor(1) as pool:
        body = {"text": "x", "sampling_params": {"max_new_tokens": 4000, "ignore_eos": True}}
        answer = pool.submit(tree.post, "/generate", body)
        eventually(lambda: tree.running() == 1, 5)
        dead = tree.kill("quarterdeck: engine")
        response = answer.result(timeout=6)
    assert response.status_code == 503
    assert int(response.headers["retry-after"]) >= 1
    each_worker_says(tree, 503, 3)
    assert tree.get("/health").status_code == 200
    assert tree.fleet()["engine"]["state"] != "running" or restarted(tree, "engine", dead)
    eventually(lambda: tree.get("/health_generate").status_code == 200, 60, tree)
    each_worker_says(tree, 200, 10)


def each_worker_says(tree: Tree, status: int, timeout_s: float) -> None:
    """``/ready`` of both."""
    said: set[str] = set()

    def all_said() -> bool:
        asked = tree.get("/ready")
        if asked.status_code == status:
            said.add(asked.headers["x-quarterdeck-worker"])
        return said == {"1", "2"}

    eventually(all_said, timeout_s, tree)


# ---------------------------------------------------------------- start and stop


@e2e
def test_a_second_serve_on_the_same_home_is_refused_with_a_sentence(tree):
    done = subprocess.run(
        [sys.executable, "manage.py", "serve"],
        cwd=ROOT,
        env=tree.environment,
        capture_output=True,
        text=True,
        timeout=30,
    )
    assert done.returncode == 1
    assert f"pid {tree.process.pid}" in done.stderr
    assert "QUARTERDECK_HOME" in done.stderr
    assert "Traceback" not in done.stderr
    assert tree.is_ready()


@e2e
def test_a_port_that_is_taken_is_named(tree, tmp_path):
    port = tree.url.rsplit(":", 1)[1]
    with running_tree(tmp_path, wait=False, QUARTERDECK_PORT=port) as second:
        assert second.process.wait(30) == 1
        assert f"cannot listen on 127.0.0.1:{port}" in second.log
        assert "Traceback" not in second.log


@e2e
def test_a_missing_model_is_named_with_the_command_that_fetches_it(tmp_path):
    with running_tree(tmp_path, wait=False, QUARTERDECK_MODEL=str(tmp_path / "none")) as tree:
        assert tree.process.wait(30) == 1
        assert "manage.py model pull" in tree.log


@e2e
@pytest.mark.parametrize("ending", [signal.SIGTERM, signal.SIGKILL])
def test_nothing_of_ours_is_left_however_the_supervisor_ends(tmp_path, ending):
    """E6, C24, C32: no process, no port, no socket. The same home starts again, serves what was
    loaded and knows its jobs."""
    with running_tree(tmp_path) as tree:
        (tmp_path / "models" / "step-7").mkdir()
        scripted_checkpoint(tmp_path / "models" / "step-7" / SINGLE, 7)
        body = {"model_path": "models/step-7", "weight_version": "v7", "token_step": 7}
        loaded = tree.post("/update_weights_from_disk", body).json()
        assert loaded["success"], loaded
        job = tree.get(f"/api/jobs/{loaded['job']}").json()["job"]
        port = int(tree.url.rsplit(":", 1)[1])
        eventually(lambda: len(tree.processes()) >= 12, 20, tree)
        processes = tree.processes()
        with tree.socket("/ws/chat/") as socket:
            start(socket, params=LONG)
            hear(socket, count=3)
            os.kill(tree.process.pid, ending)
            if ending == signal.SIGTERM:
                frames = hear(socket)  # the stream ends, it does not just stop
                assert frames[-1]["type"] == "end"
                assert tree.process.wait(15) == 0
        tree.process.wait(5)
        _, left = psutil.wait_procs([p for p in processes if alive(p)], timeout=3)
        assert [p for p in left if alive(p)] == []
        with sockets.socket() as probe:
            probe.setsockopt(sockets.SOL_SOCKET, sockets.SO_REUSEADDR, 1)
            probe.bind(("127.0.0.1", port))
    if ending == signal.SIGKILL:  # which leaves more behind
        with running_tree(tmp_path) as again:
            assert again.get("/health_generate").status_code == 200
            serves = {"weight_version": "v7", "token_step": 7, "epoch": loaded["epoch"]}
            assert again.get("/get_weight_version").json() == serves
            known = again.get(f"/api/jobs/{job['id']}").json()["job"]
            assert known | {"curl": ""} == job | {"curl": ""}  # the port is another one


def alive(process: psutil.Process) -> bool:
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@e2e
def test_an_engine_that_cannot_start_ends_the_tree_with_the_reason(tmp_path):
    """E7: a code that is not zero."""
    with running_tree(tmp_path, wait=False, QUARTERDECK_KV_TOKENS="17") as tree:
        assert tree.process.wait(60) == 1
        assert "kv_tokens" in tree.log


# ---------------------------------------------------------------- the supervisor by itself


def short_lived(code: int) -> Child:
    return Child(Spec(name="brief", command=[sys.executable, "-c", f"raise SystemExit({code})"]))


def test_restarts_back_off_and_the_fifth_failure_in_a_minute_gives_up(monkeypatch):
    """E5, E7: with a sentence that names the child."""
    child, delays = short_lived(3), []
    for _ in range(4):
        child.start()
        child.process.wait()
        child.plan_restart("exit code 3")
        delays.append(round(child.start_at - time.monotonic()))
    assert delays == [1, 2, 4, 8]
    child.start()
    child.process.wait()
    with pytest.raises(GaveUp, match="brief ended 5 times within 60 s, last with exit code 3"):
        child.plan_restart("exit code 3")


def test_what_is_served_does_not_end_because_celery_cannot_start():
    child = short_lived(1)
    child.spec = replace(child.spec, later=True)
    delays = []
    for _ in range(7):
        child.started_at = time.monotonic()
        child.plan_restart("exit code 1")
        delays.append(round(child.start_at - time.monotonic()))
    assert delays == [1, 2, 4, 8, 16, 30, 30]


SLOW_WORKER = """
import socket, sys, time
time.sleep(6)
listener = socket.socket(socket.AF_UNIX)
listener.bind(sys.argv[1])
listener.listen()
while True:
    client, _ = listener.accept()
    client.recv(1000)
    client.sendall(b"HTTP/1.1 200 OK\\r\\n\\r\\n")
    client.close()
"""


@pytest.fixture
def signals():
    """The supervisor takes the process's signals; afterwards they are as before."""
    taken = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGCHLD)
    before = {number: signal.getsignal(number) for number in taken}
    yield
    signal.set_wakeup_fd(-1)
    for number, handler in before.items():
        signal.signal(number, handler)


def test_a_worker_that_is_slow_to_start_is_waited_for_and_not_killed(tmp_path, signals):
    """E5: it takes longer than the 5 s after which uvicorn's own supervisor would kill it."""
    path = tmp_path / "worker.sock"
    command = [sys.executable, "-c", SLOW_WORKER, str(path)]
    with sockets.create_server(("127.0.0.1", 0)) as listener:
        told: list[str] = []

        def announce(url: str) -> None:
            told.append(url)
            os.kill(os.getpid(), signal.SIGTERM)  # ends the loop

        tree = Supervisor(announce)
        child = Child(Spec(name="web 1", command=command, stop_s=0.5))
        tree._groups, tree._workers, tree._listeners = [[child]], [path], [listener]
        began = time.monotonic()
        tree.main_loop()
        assert time.monotonic() - began > 6
        assert len(told) == 1
        assert child.failures == [] and child.process.poll() is None
        tree.shutdown()
    assert child.process.returncode == -signal.SIGTERM


def test_any_number_of_web_workers_has_one_beat(settings, signals, monkeypatch):
    """C23."""
    monkeypatch.setenv(PARENT_PID, "0")
    settings.QUARTERDECK_WORKERS, settings.QUARTERDECK_PORT = 4, 0
    tree = Supervisor(print)
    tree.startup()
    names = [child.spec.name for child in tree._children()]
    tree.shutdown()
    assert sorted(name for name in names if name.startswith("web")) == [
        f"web {number}" for number in (1, 2, 3, 4)
    ]
    assert names.count("celery beat") == names.count("celery worker") == 1


def test_a_child_that_ran_for_long_starts_again_without_delay_growth():
    child = short_lived(1)
    child.delay_s, child.started_at = 8.0, time.monotonic() - supervisor.STABLE_S - 1
    child.plan_restart("exit code 1")
    assert child.start_at - time.monotonic() < 1.1


def test_a_child_that_ignores_sigterm_is_killed_in_time():
    code = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(flush=True)"
    command = [sys.executable, "-c", code + "; time.sleep(60)"]
    child = Child(Spec(name="stubborn", command=command, stop_s=0.3))
    child.start()
    time.sleep(0.5)
    began = time.monotonic()
    child.stop()
    child.finish(began + 0.3)
    assert time.monotonic() - began < 2
    assert child.process.returncode == -signal.SIGKILL


def test_the_lock_names_who_holds_it(tmp_path):
    lock = supervisor.lock_home(tmp_path)
    code = (
        "import django; django.setup()\n"
        "from pathlib import Path; from console import supervisor\n"
        f"supervisor.lock_home(Path({str(tmp_path)!r}))"
    )
    environment = {**os.environ, "DJANGO_SETTINGS_MODULE": "console.settings"}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True
    )
    lock.close()
    assert f"pid {os.getpid()}" in done.stderr


def test_listeners_share_one_port_that_others_cannot_take(settings):
    settings.QUARTERDECK_PORT, settings.QUARTERDECK_WORKERS = 0, 3
    listeners = supervisor.open_listeners()
    ports = {listener.getsockname()[1] for listener in listeners}
    assert len(ports) == 1
    settings.QUARTERDECK_PORT = ports.pop()
    with pytest.raises(GaveUp, match="cannot listen"):
        supervisor.open_listeners()
    for listener in listeners:
        listener.close()


def test_sockets_and_the_relays_secret_of_a_killed_run_are_swept(tmp_path):
    for name in ("worker-1.sock", "valkey.sock", "relay.key", "engine.json"):
        (tmp_path / name).write_text(json.dumps(name))
    supervisor.sweep_sockets(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["engine.json"]
