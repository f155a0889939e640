"""kill -9 of each process under ``manage.py serve``, and what is left after the supervisor."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time

import httpx
import psutil
import pytest

from engine.config import CHECKOUT
from tests.e2e.serving import Served, serving, wait_for

pytestmark = pytest.mark.e2e


def fleet(served: Served) -> dict:
    with served.client() as client:
        return client.get("/api/fleet").json()


def short_answer(served: Served) -> int:
    try:
        with served.client() as client:
            body = {"text": "[[eos 3]]", "sampling_params": {"max_new_tokens": 8}}
            return client.post("/generate", json=body).status_code
    except httpx.TransportError:
        return 0


class Stream(threading.Thread):
    """A long /generate stream in a thread; ``ended`` tells how it ended."""

    def __init__(self, served: Served, worker: str | None = None) -> None:
        super().__init__(daemon=True)
        self.served, self.worker = served, worker
        self.chunks, self.ended, self.via = 0, "", ""
        self.start()

    def run(self) -> None:
        body = {"text": "long", "stream": True, "sampling_params": {"max_new_tokens": 6000}}
        try:
            with (
                self.served.client() as client,
                client.stream("POST", "/generate", json=body) as response,
            ):
                self.via = response.headers["x-quarterdeck-worker"]
                for line in response.iter_lines():
                    if line == "data: [DONE]":
                        return
                    if line.startswith("data:"):
                        self.chunks += 1
                        chunk = json.loads(line[5:])
                        reason = chunk.get("meta_info", {}).get("finish_reason")
                        self.ended = (reason or {}).get("type", "") or chunk.get("error", "") or ""
        except httpx.TransportError as error:
            self.ended = type(error).__name__


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    with serving(tmp_path_factory.mktemp("serve"), SCRIPTED_STEP_S="0.02") as running:
        yield running


def test_every_worker_answers_and_says_who_it_is(served):
    """E2: health_generate is 200 on every worker, idle or not."""
    workers = set()
    for _ in range(20):
        response = httpx.get(f"{served.url}/health_generate", timeout=10)
        assert response.status_code == 200
        workers.add(response.headers["x-quarterdeck-worker"])
    assert workers == {"1", "2"}


def test_a_dead_web_worker_frees_its_slots_and_comes_back(served):
    streams = [Stream(served) for _ in range(8)]
    wait_for(lambda: all(s.chunks > 3 for s in streams), 20, "streams run")
    hit = [s for s in streams if s.via == "1"]
    spared = [s for s in streams if s.via == "2"]
    assert hit and spared
    served.kill("quarterdeck: web 1")
    began = time.monotonic()
    wait_for(lambda: all(not s.is_alive() for s in hit), 5, "its sockets close")
    wait_for(lambda: sum(r["running"] for r in fleet(served)["ranks"]) == len(spared), 5,
             "its slots are free")  # fmt: skip
    assert all(s.is_alive() for s in spared)
    wait_for(
        lambda: {w["id"] for w in fleet(served)["workers"] if w["kind"] == "web"} == {"1", "2"},
        20 - (time.monotonic() - began), "the worker is back",
    )  # fmt: skip
    with served.client() as client:
        client.post("/abort_request", json={"abort_all": True})
    wait_for(lambda: all(not s.is_alive() for s in spared), 5, "the others end on an abort")
    assert {s.ended for s in spared} == {"abort"}


@pytest.mark.parametrize("title", ["[celeryd", "[celery beat]", "valkey-server"])
def test_a_dead_helper_process_hurts_no_request_and_restarts(served, title):
    stream = Stream(served)
    wait_for(lambda: stream.chunks > 3, 20, "the stream runs")
    victim = served.kill(title)
    seen = stream.chunks
    wait_for(lambda: stream.chunks > seen + 20, 10, "the stream goes on")

    def is_back() -> bool:
        try:
            return served.find(title).pid != victim.pid
        except LookupError:
            return False

    wait_for(is_back, 20, "it is back")
    assert stream.is_alive()
    with served.client() as client:
        client.post("/abort_request", json={"abort_all": True})
    stream.join(5)
    assert stream.ended == "abort"


def test_a_dead_engine_launcher_ends_requests_and_the_engine_returns(served):
    """E7: in-flight requests get an error at once, readiness turns false until it is back."""
    stream = Stream(served)
    wait_for(lambda: stream.chunks > 3, 20, "the stream runs")
    served.kill("quarterdeck: engine")
    stream.join(5)
    assert not stream.is_alive() and stream.ended
    wait_for(lambda: not served.ready(), 5, "it is not ready")
    assert served.wait_ready(60) < 60
    wait_for(lambda: short_answer(served) == 200, 20, "it answers")


def test_a_second_supervisor_on_the_same_home_is_refused(served):
    environment = {**os.environ, "QUARTERDECK_HOME": str(served.home), "QUARTERDECK_PORT": "0"}
    second = subprocess.run(
        [sys.executable, "manage.py", "serve"], cwd=CHECKOUT, env=environment,
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert second.returncode != 0
    assert f"pid {served.process.pid}" in second.stderr
    assert served.ready()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_nothing_of_ours_is_left_after_the_supervisor(tmp_path, number):
    """E6: no process, no port, no socket; then the same port and home serve again."""
    with serving(tmp_path) as running:
        children = running.children()
        assert len(children) >= 9
        began = time.monotonic()
        running.process.send_signal(number)
        running.process.wait(15)
        _, alive = psutil.wait_procs(children, timeout=3)
        assert not alive, [child.cmdline() for child in alive]
        assert time.monotonic() - began < 15
        with pytest.raises(httpx.ConnectError):
            httpx.get(f"{running.url}/health", timeout=2)
    with serving(tmp_path) as again:
        assert short_answer(again) == 200


def test_a_web_worker_never_imports_torch(served):
    """The libraries a running web worker has mapped or opened include none of torch's."""
    maps = {m.path for m in served.find("quarterdeck: web 1").memory_maps()}
    assert maps
    assert not [path for path in maps if "torch" in path or "transformers" in path]
