"""Chats through a whole tree: any worker, any rank, stop, resume, vanish, sign out."""

from __future__ import annotations

import json
import time
import uuid
from concurrent.futures import ThreadPoolExecutor

import pytest
from websockets.exceptions import ConnectionClosed

from tests.console.tree import Tree, eventually, running_tree

pytestmark = pytest.mark.e2e

LONG = {"max_new_tokens": 4000, "temperature": 0}


@pytest.fixture(scope="module")
def tree(tmp_path_factory):
    with running_tree(tmp_path_factory.mktemp("tree")) as tree:
        yield tree


def start(socket, text: str = "hello", **fields) -> str:
    stream = str(uuid.uuid4())
    params = {"max_new_tokens": 24, "temperature": 0} | fields.pop("params", {})
    frame = {"type": "start", "stream": stream, "text": text, "params": params, **fields}
    socket.send(json.dumps(frame))
    return stream


def hear(socket, count: int | None = None) -> list[dict]:
    """Frames up to the end of a stream, or ``count`` of them."""
    frames: list[dict] = []
    while len(frames) != count:
        frames.append(json.loads(socket.recv(timeout=10)))
        if frames[-1]["type"] in ("end", "error"):
            break
    return frames


def text_of(frames: list[dict]) -> str:
    return "".join(frame.get("text", "") for frame in frames)


@pytest.mark.parametrize("route", ["auto", "worker:1", "worker:2", "rank:0", "rank:1"])
def test_an_answer_comes_through_each_route_with_the_same_text(tree, route):
    seen = set()
    for _ in range(3):
        with tree.socket("/ws/chat/") as socket:
            start(socket, route=route)
            frames = hear(socket)
        started, end = frames[0], frames[-1]
        assert [f["index"] for f in frames] == list(range(len(frames)))
        assert end["finish"]["type"] == "length"
        assert end["text_length"] == len(text_of(frames))
        kind, _, name = route.partition(":")
        if kind == "worker":
            assert started["worker"] == end["worker"] == name
        if kind == "rank":
            assert end["rank"] == int(name)
        seen.add(text_of(frames))
    with tree.socket("/ws/chat/") as socket:
        start(socket)
        seen.add(text_of(hear(socket)))
    assert len(seen) == 1


def test_a_relayed_answer_names_both_workers(tree):
    with tree.socket("/ws/chat/") as socket:
        start(socket)
        here = hear(socket)[0]["worker"]
        there = {"1": "2", "2": "1"}[here]
        start(socket, route=f"worker:{there}")
        started = hear(socket)[0]
    assert (started["worker"], started["via"]) == (there, here)


def test_50_chats_over_two_workers_are_exact(tree):
    """C2: nothing depends on which worker takes which connection."""

    def chat(at: int) -> tuple[str, str]:
        with tree.socket("/ws/chat/") as socket:
            start(socket, text=f"question {at % 5}")
            frames = hear(socket)
        assert frames[-1]["finish"]["type"] == "length"
        assert frames[-1]["text_length"] == len(text_of(frames))
        return text_of(frames), frames[-1]["worker"]

    with ThreadPoolExecutor(16) as pool:
        answers = list(pool.map(chat, range(50)))
    assert {worker for _, worker in answers} == {"1", "2"}
    for kind in range(5):
        assert len({text for text, _ in answers[kind::5]}) == 1


def test_several_streams_share_a_socket(tree):
    with tree.socket("/ws/chat/") as socket:
        streams = [start(socket, text=f"q{at}") for at in range(5)]
        frames = []
        while sum(frame["type"] == "end" for frame in frames) < 5:
            frames.append(json.loads(socket.recv(timeout=10)))
    for stream in streams:
        mine = [f for f in frames if f["stream"] == stream]
        assert [f["index"] for f in mine] == list(range(len(mine)))


@pytest.mark.parametrize("route", ["worker:1", "worker:2"])
def test_stop_ends_the_work_and_says_that_the_slot_is_free(tree, route):
    """C1: also through a relay."""
    with tree.socket("/ws/chat/") as socket:
        stream = start(socket, route=route, params=LONG)
        hear(socket, count=5)
        socket.send(json.dumps({"type": "stop", "stream": stream}))
        end = hear(socket)[-1]
    assert (end["finish"]["type"], end["slot_freed"]) == ("abort", True)
    eventually(lambda: tree.running() == 0, 3)


def test_a_reload_resumes_on_whichever_worker_it_lands(tree):
    with tree.socket("/ws/chat/") as socket:
        stream = start(socket, params={"max_new_tokens": 200})
        frames = hear(socket, count=4)
    for _ in range(6):  # both workers take one of these
        with tree.socket("/ws/chat/") as socket:
            socket.send(json.dumps({"type": "resume", "stream": stream, "next": len(frames)}))
            frames += hear(socket, count=3)
    with tree.socket("/ws/chat/") as socket:
        socket.send(json.dumps({"type": "resume", "stream": stream, "next": len(frames)}))
        frames += hear(socket)
        start(socket, params={"max_new_tokens": 200})
        assert text_of(hear(socket)) == text_of(frames)
    assert [f["index"] for f in frames] == list(range(len(frames)))
    assert [f["type"] for f in frames].count("end") == 1


@pytest.mark.parametrize("path", ["/ws/chat/", "/ws/fleet/", "/ws/jobs/"])
def test_no_socket_pays_for_compression(tree, path):
    """C26: this client offers permessage-deflate, whose buffers would cost each socket 300 KB."""
    with tree.socket(path) as socket:
        assert "permessage-deflate" in socket.request.headers["Sec-WebSocket-Extensions"]
        assert "Sec-WebSocket-Extensions" not in socket.response.headers


def test_nobody_resumes_the_stream_of_another_account(tree):
    with tree.socket("/ws/chat/") as mine, tree.browser() as browser:
        stream = start(mine, params=LONG)
        hear(mine, count=2)
        for _ in range(4):
            with tree.socket("/ws/chat/", browser) as theirs:
                theirs.send(json.dumps({"type": "resume", "stream": stream}))
                assert hear(theirs)[0]["error"]["type"] == "stream_unknown"
        mine.send(json.dumps({"type": "stop", "stream": stream}))
        hear(mine)


def test_sockets_that_vanish_free_their_slots_within_the_grace(tree):
    """C1: closed without a close frame, half of them relayed."""
    sockets = [tree.socket("/ws/chat/") for _ in range(32)]
    for at, socket in enumerate(sockets):
        start(socket, text=f"prompt {at}", route=f"worker:{1 + at % 2}", params=LONG)
    eventually(lambda: tree.running() == 32, 10, tree)
    for socket in sockets:
        socket.socket.shutdown(2)
        socket.socket.close()
    took = eventually(lambda: tree.running() == 0, 10)
    assert took < 2 + 1  # grace and a second
    for socket in sockets:
        socket.close()


def test_a_chat_is_stored_with_where_it_came_from(tree: Tree):
    with tree.browser() as browser:
        with tree.socket("/ws/chat/", browser) as socket:
            start(socket, text="what is a ship", route="rank:1", params={"logprobs": True})
            frames = hear(socket)
        started, end = frames[0], frames[-1]
        content = browser.get(f"/api/conversations/{started['conversation']}").json()
        question, answer = content["messages"]
        assert question["text"] == "what is a ship"
        assert answer["id"] == started["message"]
        assert answer["text"] == text_of(frames)
        assert (answer["worker"], answer["rank"]) == (end["worker"], 1)
        assert answer["epochs"] == [[24, 1]]
        assert len(answer["logprobs"]) == len(answer["token_ids"]) == 24
        assert answer["rid"] == started["rid"]
        page = browser.get(f"/playground/{started['conversation']}/")
        assert "what is a ship" in page.text


def test_a_conversation_goes_on_with_what_was_said(tree):
    with tree.browser() as browser, tree.socket("/ws/chat/", browser) as socket:
        start(socket, text="first")
        first = hear(socket)
        start(socket, text="second", conversation=first[0]["conversation"])
        second = hear(socket)
    assert second[0]["conversation"] == first[0]["conversation"]
    prompt = second[-1]["usage"]["prompt_tokens"]
    assert prompt > first[-1]["usage"]["prompt_tokens"] + 24


def test_answers_side_by_side_on_two_workers_share_one_question(tree):
    with tree.browser() as browser:
        with tree.socket("/ws/chat/", browser) as socket:
            fields = {"turn": str(uuid.uuid4()), "compare": True, "text": "compare"}
            for number in (1, 2):
                start(socket, route=f"worker:{number}", **fields)
            frames = [*hear(socket), *hear(socket)]
        [conversation] = {f["conversation"] for f in frames if f["type"] == "started"}
        messages = browser.get(f"/api/conversations/{conversation}").json()["messages"]
    assert [m["role"] for m in messages] == ["user", "assistant", "assistant"]
    assert {m["worker"] for m in messages[1:]} == {"1", "2"}


def test_signing_out_closes_the_sockets_of_that_session_on_every_worker(tree):
    """C1, C15."""
    with tree.browser() as browser, tree.browser() as bystander:
        sockets = [tree.socket("/ws/chat/", browser) for _ in range(8)]
        spared = tree.socket("/ws/chat/", bystander)
        start(sockets[0], params=LONG, route="worker:1")
        start(sockets[1], params=LONG, route="worker:2")
        eventually(lambda: tree.running() == 2, 5)
        browser.post("/logout/")
        for socket in sockets:
            with pytest.raises(ConnectionClosed) as closed:
                for _ in range(10_000):
                    socket.recv(timeout=3)
            assert closed.value.rcvd.code == 4401
        eventually(lambda: tree.running() == 0, 2.5)  # at once: no grace after a sign-out
        spared.send(json.dumps({"type": "resume", "stream": "x"}))
        assert hear(spared)[0]["type"] == "error"
        spared.close()


def test_the_live_picture_comes_each_second_and_its_numbers_follow(tree):
    with tree.socket("/ws/fleet/") as socket:
        picture = json.loads(socket.recv(timeout=5))
        assert picture["type"] == "snapshot"
        assert picture["engine"]["state"] == "running"
        began = time.monotonic()
        deltas = [json.loads(socket.recv(timeout=5)) for _ in range(3)]
    assert 1.5 < time.monotonic() - began < 5
    assert [d["seq"] for d in deltas] == [picture["seq"] + n for n in (1, 2, 3)]
