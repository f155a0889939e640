"""The HTTP surface of a whole tree: two web workers, two scripted ranks, real processes."""

from __future__ import annotations

import json
import re
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import openai
import pytest

from tests.console.tree import Tree, eventually, running_tree

pytestmark = pytest.mark.e2e

LONG = {"max_new_tokens": 4000, "ignore_eos": True}


@pytest.fixture(scope="module")
def tree(tmp_path_factory):
    with running_tree(tmp_path_factory.mktemp("tree")) as tree:
        yield tree


@pytest.fixture
def client(tree) -> openai.OpenAI:
    with openai.OpenAI(base_url=f"{tree.url}/v1", api_key=tree.key, max_retries=0) as client:
        yield client


def events(response: httpx.Response) -> list:
    lines = [line[6:] for line in response.iter_lines() if line.startswith("data: ")]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


# ---------------------------------------------------------------- the openai package


def test_the_package_lists_the_model_under_its_name(client):
    [model] = client.models.list().data
    assert model.id == "scripted"
    assert client.models.retrieve("default").id == "scripted"


def test_the_package_chats_streamed_and_not_with_equal_text(client):
    ask = {"model": "default", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 30}
    whole = client.chat.completions.create(**ask, temperature=0)
    parts = list(
        client.chat.completions.create(
            **ask, temperature=0, stream=True, stream_options={"include_usage": True}
        )
    )
    text = "".join(p.choices[0].delta.content or "" for p in parts if p.choices)
    assert text == whole.choices[0].message.content
    assert len({p.id for p in parts}) == 1
    assert parts[0].choices[0].delta.role == "assistant"
    assert parts[-2].choices[0].finish_reason == whole.choices[0].finish_reason == "length"
    assert parts[-1].usage.completion_tokens == whole.usage.completion_tokens == 30
    assert whole.usage.prompt_tokens + 30 == whole.usage.total_tokens


def test_the_package_reads_logprobs_and_several_choices(client):
    answer = client.chat.completions.create(
        model="default",
        messages=[{"role": "user", "content": "hello"}],
        max_tokens=5,
        n=3,
        logprobs=True,
        top_logprobs=2,
    )
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    content = answer.choices[0].logprobs.content
    assert len(content) == 5
    assert bytes(content[0].bytes).decode(errors="replace") == content[0].token
    assert len(content[0].top_logprobs) == 2


def test_the_package_completes_text_and_batches(client):
    answer = client.completions.create(model="default", prompt=["a", "b"], max_tokens=4, logprobs=1)
    assert [choice.index for choice in answer.choices] == [0, 1]
    assert len(answer.choices[0].logprobs.tokens) == 4
    streamed = client.completions.create(model="default", prompt="a", max_tokens=4, stream=True)
    assert "".join(p.choices[0].text for p in streamed) == answer.choices[0].text


def test_the_package_maps_our_refusals_to_its_exceptions(client, tree):
    chat = client.chat.completions.create
    hello = [{"role": "user", "content": "hello"}]
    with pytest.raises(openai.NotFoundError) as missing:
        chat(model="gpt-9", messages=hello)
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as wrong:
        chat(model="default", messages=hello, extra_body={"top_p": 7})
    assert wrong.value.param == "top_p"
    with pytest.raises(openai.BadRequestError) as long:
        chat(model="default", messages=[{"role": "user", "content": "word " * 9000}])
    assert long.value.code == "context_length_exceeded"
    with (
        openai.OpenAI(base_url=f"{tree.url}/v1", api_key="qd-no", max_retries=0) as stranger,
        pytest.raises(openai.AuthenticationError),
    ):
        stranger.models.list()
    control = tree.new_key("control")
    with (
        openai.OpenAI(base_url=f"{tree.url}/v1", api_key=control, max_retries=0) as controller,
        pytest.raises(openai.PermissionDeniedError),
    ):
        controller.models.list()


def test_stop_texts_never_leak_into_either_form(client):
    """E32: streamed and whole text are the same."""
    ask = {"model": "default", "messages": [{"role": "user", "content": "hello"}], "temperature": 0}
    plain = client.chat.completions.create(**ask, max_tokens=40).choices[0].message.content
    stop = plain[20:26]
    cut = client.chat.completions.create(**ask, max_tokens=40, stop=[stop]).choices[0]
    parts = client.chat.completions.create(**ask, max_tokens=40, stop=[stop], stream=True)
    streamed = "".join(p.choices[0].delta.content or "" for p in parts if p.choices)
    assert stop not in cut.message.content
    assert cut.message.content == streamed == plain[: plain.index(stop)]
    assert cut.finish_reason == "stop"


# ---------------------------------------------------------------- /generate


def test_generate_streams_cumulative_values_and_deltas_that_add_up_to_the_whole(tree):
    ask = {
        "text": "hello",
        "sampling_params": {"max_new_tokens": 20, "temperature": 0},
        "return_logprob": True,
        "top_logprobs_num": 2,
    }
    whole = tree.post("/generate", ask).json()
    with tree.stream("/generate", ask | {"stream": True}) as response:
        cumulative = events(response)
    with tree.stream("/generate", ask | {"stream": True, "stream_output": True}) as response:
        deltas = events(response)
    last = cumulative[-1]
    assert (last["text"], last["output_ids"]) == (whole["text"], whole["output_ids"])
    for name in ("output_token_logprobs", "output_top_logprobs", "epochs", "completion_tokens"):
        assert last["meta_info"][name] == whole["meta_info"][name]
    assert "".join(d["text"] for d in deltas) == whole["text"]
    assert [i for d in deltas for i in d["output_ids"]] == whole["output_ids"]
    for delta in deltas:
        assert len(delta["output_ids"]) == len(delta["meta_info"]["output_token_logprobs"])
    assert deltas[-1]["meta_info"]["completion_tokens"] == 20
    assert deltas[-1]["meta_info"]["epochs"][-1][2] == 20


def test_a_batch_answers_in_order_with_its_ids(tree):
    ask = {
        "text": ["one", "two", "three"],
        "rid": ["b-1", "b-2", "b-3"],
        "sampling_params": {"max_new_tokens": 5, "temperature": 0},
    }
    answers = tree.post("/generate", ask).json()
    assert [a["meta_info"]["id"] for a in answers] == ["b-1", "b-2", "b-3"]
    alone = tree.post("/generate", ask | {"text": "two", "rid": "b-4"}).json()
    assert answers[1]["text"] == alone["text"]
    with tree.stream("/generate", ask | {"stream": True}) as response:
        streamed = events(response)
    assert {e["index"] for e in streamed} == {0, 1, 2}


def test_meta_info_names_the_weights_of_every_token(tree):
    info = tree.post("/generate", {"text": "x", "sampling_params": {"max_new_tokens": 7}}).json()
    info = info["meta_info"]
    assert info["epochs"] == [[1, 0, 7]]
    assert info["weight_versions"] == [["default", 0, 7]]
    assert info["token_steps"] == [None] * 7
    assert info["weight_version"] == "default"
    assert info["finish_reason"]["type"] in ("length", "stop")


def test_text_and_ids_of_it_are_the_same_prompt_and_pieces_join_to_the_text(tree):
    tokens = tree.post("/tokenize", {"prompt": "hello world"}).json()
    ask = {"sampling_params": {"max_new_tokens": 6, "temperature": 0}}
    by_text = tree.post("/generate", ask | {"text": "hello world"}).json()
    by_ids = tree.post("/generate", ask | {"input_ids": tokens["tokens"]}).json()
    assert by_text["text"] == by_ids["text"]
    assert by_text["meta_info"]["prompt_tokens"] == tokens["count"]
    plain = tree.post("/detokenize", {"tokens": by_text["output_ids"]}).json()
    assert "".join(plain["pieces"]) == plain["text"]


@pytest.mark.parametrize("stream", [False, True])
def test_output_ids_are_the_new_tokens_alone(tree, stream):
    """E35: no id of the prompt in front of them."""
    prompt = list(range(100, 110))
    ask = {"input_ids": prompt, "sampling_params": {"max_new_tokens": 4, "ignore_eos": True}}
    with tree.stream("/generate", ask | {"stream": stream}) as response:
        answer = events(response)[-1] if stream else json.loads(response.read())
    info = answer["meta_info"]
    assert len(answer["output_ids"]) == info["completion_tokens"] == 4
    assert info["prompt_tokens"] == 10
    text = tree.post("/detokenize", {"tokens": answer["output_ids"]}).json()["text"]
    assert answer["text"].strip() == text.strip()


def test_return_bytes_gives_the_exact_bytes(tree):
    import base64

    answer = tree.post("/generate", {"text": "x", "return_bytes": True}).json()
    assert base64.b64decode(answer["bytes"]).decode(errors="ignore").startswith(answer["text"][:5])


def test_the_same_id_twice_is_409_and_the_first_goes_on(tree):
    """E19."""
    ask = {
        "text": "x",
        "rid": "twice",
        "sampling_params": {"max_new_tokens": 150, "ignore_eos": True},
    }
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(tree.post, "/generate", ask)
        eventually(lambda: tree.running() == 1, 5)
        for _ in range(4):  # on whichever worker
            assert tree.post("/generate", ask).status_code == 409
        assert first.result().json()["meta_info"]["completion_tokens"] == 150


def test_an_abort_reaches_the_request_from_any_worker_and_keeps_what_was_made(tree):
    """E14, E15, E18: partial lists of equal length, and the version."""
    for attempt in range(4):
        rid = f"abort-{attempt}"
        ask = {"text": "x", "rid": rid, "sampling_params": LONG, "return_logprob": True}
        with ThreadPoolExecutor(1) as pool:
            answer = pool.submit(tree.post, "/generate", ask)
            eventually(lambda: tree.running() == 1, 5)
            time.sleep(0.1)
            assert tree.post("/abort_request", {"rid": rid[:-1]}).json()["success"] is False
            assert tree.post("/abort_request", {"rid": rid}).json()["found"] == [rid]
            body = answer.result(timeout=2).json()
        assert body["meta_info"]["finish_reason"]["type"] == "abort"
        made = body["output_ids"]
        assert 0 < len(made) < 4000
        assert len(body["meta_info"]["output_token_logprobs"]) == len(made)
        assert body["meta_info"]["weight_version"] == "default"


@pytest.mark.parametrize("stream", [False, True])
def test_an_abort_at_the_pause_gate_is_an_answer_without_tokens(tree, stream):
    """E15, E18, E39: it never runs, and no key is missing; streamed it is one clean chunk."""
    ask = {"text": "x", "rid": "gate", "stream": stream, **EVERYTHING}
    assert tree.post("/pause_generation", {"mode": "in_place"}).status_code == 200
    try:
        with ThreadPoolExecutor(1) as pool:
            asked = pool.submit(tree.post, "/generate", ask)
            eventually(lambda: tree.get("/api/requests").json()["requests"], 5, tree)
            assert tree.post("/abort_request", {"rid": "gate"}).json()["found"] == ["gate"]
            response = asked.result(timeout=5)
    finally:
        tree.post("/continue_generation", {})
    assert response.status_code == 200, response.text
    if stream:
        *chunks, last = [line[6:] for line in response.text.splitlines() if line]
        assert (len(chunks), last) == (1, "[DONE]")
        answer = json.loads(chunks[0])
    else:
        answer = response.json()
    info = answer["meta_info"]
    assert (info["finish_reason"]["type"], info["finish_reason"]["status_code"]) == ("abort", None)
    assert (answer["text"], answer["output_ids"], info["completion_tokens"]) == ("", [], 0)
    assert info["weight_version"] == "default"
    for name in ("output_token_logprobs", "output_top_logprobs", "output_token_ids_logprobs",
                 "input_token_logprobs", "output_token_entropy_val", "hidden_states"):  # fmt: skip
        assert info[name] == [], name
    assert tree.running() == 0


def test_an_empty_rid_is_no_abort_of_everything(tree):
    """E14."""
    assert tree.post("/abort_request", {"rid": ""}).status_code == 400
    inference = tree.new_key("inference")
    with httpx.Client(base_url=tree.url, headers={"Authorization": f"Bearer {inference}"}) as http:
        assert http.post("/abort_request", json={"abort_all": True}).status_code == 403
    assert tree.post("/abort_request", {"abort_all": True}).status_code == 200


# ---------------------------------------------------------------- who leaves


def test_clients_that_vanish_free_their_slots_within_a_second(tree):
    """C1: 32 at once, half of them streaming; each closes its socket without a word."""
    eventually(lambda: tree.running() == 0, 5)
    clients = [tree.client() for _ in range(32)]

    def ask(at: int) -> None:
        try:
            body = {"text": f"prompt {at}", "sampling_params": LONG, "stream": at % 2 == 0}
            with clients[at].stream("POST", "/generate", json=body) as response:
                for _ in response.iter_raw():
                    pass
        except (httpx.HTTPError, OSError, RuntimeError):
            return

    threads = [threading.Thread(target=ask, args=(at,)) for at in range(32)]
    for thread in threads:
        thread.start()
    eventually(lambda: tree.running() == 32, 10, tree)
    for client in clients:
        pool = client._transport._pool
        for connection in pool.connections:
            connection._connection._network_stream._sock.shutdown(2)
    assert eventually(lambda: tree.running() == 0, 5) < 1.0
    for thread in threads:
        thread.join(10)
    for client in clients:
        client.close()
    assert tree.fleet()["counters"]["live_requests"] == 0


def test_the_first_chunk_comes_long_before_the_last(tree):
    body = {
        "text": "x",
        "sampling_params": {"max_new_tokens": 100, "ignore_eos": True},
        "stream": True,
    }
    began = time.monotonic()
    with tree.stream("/generate", body) as response:
        times = [time.monotonic() - began for _ in response.iter_raw()]
    assert times[0] < times[-1] / 3
    assert len(times) > 20
    assert response.headers["x-accel-buffering"] == "no"


# ---------------------------------------------------------------- every worker


GREEDY = {"max_new_tokens": 12, "temperature": 0}
EVERYTHING = {
    "sampling_params": GREEDY, "return_logprob": True, "logprob_start_len": 0,
    "top_logprobs_num": 2, "token_ids_logprob": [3, 4], "return_text_in_logprobs": True,
    "return_entropy": True, "return_hidden_states": True, "return_bytes": True,
    "data_parallel_rank": 0,
}  # fmt: skip
ANSWERS = {
    "rich": ("/generate", {"text": "same", **EVERYTHING}),
    "batch": ("/generate", {"text": ["same", "other"], **EVERYTHING}),
    "streamed": ("/generate", {"text": "same", "stream": True, **EVERYTHING}),
    "chat": ("/v1/chat/completions", {"model": "default",
        "messages": [{"role": "user", "content": "same"}], "max_tokens": 12, "temperature": 0,
        "logprobs": True, "top_logprobs": 2}),
    "completion": ("/v1/completions", {"model": "default",
        "prompt": ["same", "other"], "max_tokens": 12, "temperature": 0, "logprobs": 1}),
    "tokens": ("/tokenize", {"prompt": "same"}),
    "text": ("/detokenize", {"tokens": [100, 101, 102]}),
    "refusal": ("/generate", {"text": "same", "sampling_params": {"top_p": 7}}),
}  # fmt: skip
OWN = re.compile(  # what differs between two equal requests: names, clocks, what is cached by now
    r'"(id|created|queue_time|e2e_latency|cached_tokens)":("[^"]*"|[^,}]*)|'
    r'"prompt_tokens_details":\{[^}]*\}'
)


@pytest.mark.parametrize("kind", ANSWERS)
def test_every_worker_takes_connections_and_gives_the_same_answers(tree, kind):
    """E4: equal to the byte, for each form of an answer that there is."""
    path, body = ANSWERS[kind]
    seen: dict[str, set[str]] = {}
    with ThreadPoolExecutor(8) as pool:
        while len(seen) < 2:
            for response in pool.map(lambda _: tree.post(path, body), range(16)):
                worker = response.headers["x-quarterdeck-worker"]
                assert response.headers["x-quarterdeck-via"] == worker
                text = response.text if kind != "streamed" else response.text.split("data: ")[-2]
                seen.setdefault(worker, set()).add(OWN.sub("", text))
    assert seen["1"] == seen["2"]
    assert len(seen["1"]) == 1 and len(min(seen["1"])) > 20


def test_every_worker_refuses_what_has_no_key(tree):
    """E9: also on routes that control the engine."""
    paths = ("/generate", "/v1/chat/completions", "/abort_request", "/get_server_info",
             "/pause_generation", "/update_weights_from_disk")  # fmt: skip
    seen = set()
    for path in paths * 12:
        response = httpx.post(tree.url + path, json={}, verify=False)
        assert response.status_code == 401
        seen.add((path, response.headers["x-quarterdeck-worker"]))
    assert seen == {(path, worker) for path in paths for worker in ("1", "2")}


def test_health_is_200_on_an_idle_worker_each_time(tree):
    """E2: whichever worker takes it."""
    seen = set()
    for _ in range(20):
        response = httpx.get(f"{tree.url}/health_generate", verify=False)
        assert response.status_code == 200
        assert response.headers["x-quarterdeck-state"] == "running"
        seen.add(response.headers["x-quarterdeck-worker"])
    assert seen == {"1", "2"}


def test_the_rate_of_a_key_is_counted_over_all_workers(tree):
    key = tree.new_key("inference", options=("--max-requests-per-minute", "5"))
    if time.time() % 60 > 50:
        time.sleep(60 - time.time() % 60)  # the test wants one window
    ask = {"text": "x", "sampling_params": {"max_new_tokens": 1}}
    headers = {"Authorization": f"Bearer {key}"}
    responses = [
        httpx.post(f"{tree.url}/generate", json=ask, headers=headers, verify=False)
        for _ in range(12)
    ]
    codes = [response.status_code for response in responses]
    assert (codes.count(200), codes.count(429)) == (5, 7)
    assert int(responses[-1].headers["retry-after"]) >= 1


def test_server_information_holds_no_secret(tree):
    """C15."""
    shown = tree.get("/get_server_info").text + tree.get("/get_model_info").text
    secret = (tree.home / "secret.key").read_text()
    assert secret not in shown
    assert not any(word in shown.lower() for word in ("password", "secret", "api_key", "token_key"))
    info = tree.get("/get_server_info").json()
    assert info["dp_size"] == 2
    assert info["internal_states"][0]["memory_usage"]["token_capacity"] > 0


def test_the_fleet_names_both_workers_and_both_ranks(tree):
    fleet = tree.fleet()
    assert fleet["engine"]["state"] == "running"
    web = [worker for worker in fleet["workers"] if worker["kind"] == "web"]
    assert {worker["id"] for worker in web} == {"1", "2"}
    assert {(rank["dp"], rank["state"]) for rank in fleet["ranks"]} == {
        (0, "running"),
        (1, "running"),
    }


def test_requests_and_sockets_leave_no_descriptor_behind(tree: Tree):
    """C7: 500 requests and 200 socket sessions."""

    def use(at: int) -> None:
        tree.get("/api/conversations" if at % 2 else "/api/fleet")
        if at % 5 < 2:
            with tree.socket("/ws/fleet/") as socket:
                socket.recv(timeout=5)

    def descriptors() -> list[int]:
        return [tree.child(f"web {number}").num_fds() for number in (1, 2)]

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(use, range(60)))
        time.sleep(0.5)
        before = descriptors()
        list(pool.map(use, range(500)))
    eventually(lambda: all(a <= b + 3 for a, b in zip(descriptors(), before, strict=True)), 10)


def test_a_web_worker_that_served_all_this_never_imported_torch(tree: Tree):
    """Its memory maps name every library that was loaded."""
    for number in (1, 2):
        maps = {region.path for region in tree.child(f"web {number}").memory_maps()}
        assert not [path for path in maps if "torch" in path or "triton" in path]


def test_a_celery_task_runs_in_the_tree(tree: Tree):
    code = (
        "import datetime; from django.utils import timezone as t;"
        "from django.contrib.auth.models import User; from console.models import Conversation as C;"
        "from console.tasks import delete_old_chats as d; import console.celery;"
        "C.objects.create(owner=User.objects.first(), title='old',"
        " updated_at=t.now() - datetime.timedelta(days=999)); d.delay()"
    )
    tree.manage("shell", "-c", code)
    count = (
        "from console.models import Conversation as C; print(C.objects.filter(title='old').count())"
    )
    eventually(lambda: tree.manage("shell", "-v", "0", "-c", count).strip() == "0", 20, tree)


def test_200_hints_of_one_synchronous_process_leave_no_error_line(tree: Tree):
    """C5: each comes from an event loop of its own."""
    code = (
        "from console import events as e\n"
        "for n in range(200): e.publish_on_commit(e.KeyRevoked(key_id=10**6 + n))\n"
        "print('done')"
    )
    done = tree.manage_process("shell", "-v", "0", "-c", code)
    assert done.stdout.strip() == "done"
    assert done.stderr == ""


def test_metrics_are_the_same_whichever_worker_is_scraped(tree: Tree):
    """C29: one owner of every number, so counters never jump back between two workers."""
    tree.post("/generate", {"text": "[[eos 5]]", "sampling_params": {"max_new_tokens": 9}})
    seen: dict[str, list[float]] = {}
    for _ in range(12):
        response = httpx.get(f"{tree.url}/metrics")
        worker = response.headers["x-quarterdeck-worker"]
        tokens = sum(
            float(line.rpartition(" ")[2])
            for line in response.text.splitlines()
            if line.startswith("quarterdeck_rank_output_tokens_total{")
        )
        seen.setdefault(worker, []).append(tokens)
    assert set(seen) == {"1", "2"}
    assert len({value for values in seen.values() for value in values}) == 1
    assert 'quarterdeck_engine_up{state="running"} 1.0' in response.text
