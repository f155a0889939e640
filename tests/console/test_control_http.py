"""SGLang's control routes, as its clients use them: names, spellings, bodies, status codes."""

from __future__ import annotations

import base64
import json
import struct

import pytest
from asgiref.sync import sync_to_async
from django.test import AsyncClient
from django_celery_beat.models import IntervalSchedule, PeriodicTask

from console.models import Checkpoint, Engine, Job
from console.uploads import BoundedBodies, SpooledUploads
from engine import messages as m

SAFETENSORS = struct.pack("<Q", 2) + b"{}"
PICKLE = b"\x80\x04\x95\x0b\x00\x00\x00\x00\x00\x00\x00}\x94."


class Trainer:
    """A client with a key that may control."""

    def __init__(self, key: str) -> None:
        self.headers = {"Authorization": f"Bearer {key}"}
        self.client = AsyncClient()

    async def post(self, path: str, body: object = None, **headers: str):
        content = "" if body is None else json.dumps(body)
        return await self.client.post(
            path, content, content_type="application/json", headers=self.headers | headers
        )

    async def get(self, path: str):
        return await self.client.get(path, headers=self.headers)


@pytest.fixture
async def trainer(engine, make_key):
    return Trainer(await sync_to_async(make_key)("control"))


@pytest.fixture
def weights(tmp_path):
    (tmp_path / "models" / "step-7").mkdir()
    return str(tmp_path / "models" / "step-7")


# ---------------------------------------------------------------- the routes


ROUTES = [
    ("/pause_generation", None, m.PauseRank),
    ("/pause_generation", {}, m.PauseRank),
    ("/continue_generation", None, None),
    ("/flush_cache", {"timeout_s": "0"}, m.FlushRank),
    ("/slow_down", {"forward_sleep_time": "0.5"}, m.SlowDown),
    ("/freeze_gc", None, m.FreezeGC),
    ("/configure_logging", {"log_level": "debug"}, m.SetLogging),
    ("/destroy_weights_update_group", {"group_name": "g"}, m.LeaveGroup),
    (
        "/init_weights_update_group",
        {"master_address": "h", "master_port": "29500", "rank_offset": "1", "world_size": "3"},
        m.JoinGroup,
    ),
]


@pytest.mark.parametrize(("path", "body", "op"), ROUTES)
async def test_a_control_route_reaches_every_rank_and_answers_in_json(
    path, body, op, engine, trainer
):
    response = await trainer.post(path, body)
    answer = response.json()
    assert (response.status_code, answer["success"]) == (200, True), answer
    assert isinstance(answer["message"], str)
    assert answer["status"] == "ok"
    assert await Job.objects.filter(pk=answer["job"], state="done").acount() == 1
    assert [type(found) for _, found in engine.ranks.calls] == ([op] * 2 if op else [])


@pytest.mark.parametrize("path", ["/flush_cache", "/freeze_gc", "/slow_down?forward_sleep_time=0"])
async def test_get_does_the_same_with_a_key(path, engine, trainer):
    response = await trainer.get(path)
    assert (response.status_code, response.json()["success"]) == (200, True)
    assert len(engine.ranks.calls) == 2


async def test_a_second_pause_is_harmless(trainer):
    """E11."""
    for _ in range(2):
        assert (await trainer.post("/pause_generation", {"mode": "in_place"})).status_code == 200
    assert (await trainer.post("/continue_generation")).status_code == 200
    assert (await trainer.post("/continue_generation")).status_code == 200


async def test_an_illegal_move_is_409_with_a_sentence(trainer):
    response = await trainer.post("/release_memory_occupation", {})
    answer = response.json()
    assert (response.status_code, answer["success"]) == (409, False)
    assert "pause" in answer["message"]


async def test_a_wrong_field_is_400_with_its_name(trainer):
    response = await trainer.post("/pause_generation", {"mode": "sometimes"})
    answer = response.json()
    assert (response.status_code, answer["success"]) == (400, False)
    assert answer["error"]["param"] == "mode"


async def test_a_body_that_is_no_object_is_400(trainer):
    assert (await trainer.post("/pause_generation", ["abort"])).status_code == 400
    response = await trainer.client.post(
        "/pause_generation", "{", content_type="application/json", headers=trainer.headers
    )
    assert response.status_code == 400


async def test_unknown_fields_are_let_through(trainer):
    body = {"mode": "abort", "some_future_field": 1}
    assert (await trainer.post("/pause_generation", body)).status_code == 200


# ---------------------------------------------------------------- weights


async def test_a_reload_with_a_clients_own_spelling(engine, trainer, weights):
    """AReaL says ``abort_all_request`` and sends numbers as texts."""
    body = {"model_path": weights, "abort_all_request": "true", "token_step": "42",
            "weight_version": "v42", "load_format": "auto", "flush_cache": True}  # fmt: skip
    answer = (await trainer.post("/update_weights_from_disk", body)).json()
    assert answer["success"], answer
    assert (answer["epoch"], answer["weight_version"], answer["token_step"]) == (2, "v42", 42)
    assert answer["num_paused_requests"] == 0
    job = await Job.objects.aget(pk=answer["job"])
    assert job.args["abort_all_requests"] is True
    assert (await trainer.get("/get_weight_version")).json()["weight_version"] == "v42"


async def test_the_step_of_a_registered_checkpoint_comes_with_it(engine, trainer, weights):
    await Checkpoint.objects.acreate(path=weights, token_step=43)
    answer = (await trainer.post("/update_weights_from_disk", {"model_path": weights})).json()
    assert (answer["token_step"], answer["weight_version"]) == (43, "step-7")


async def test_who_does_not_wait_gets_the_jobs_number(engine, trainer, weights):
    body = {"model_path": weights, "is_async": True}
    answer = (await trainer.post("/update_weights_from_disk", body)).json()
    assert answer["success"]
    assert answer["job"]


async def test_the_same_idempotency_key_updates_once(engine, trainer, weights):
    headers = {"Idempotency-Key": "step-42"}
    answers = [
        (await trainer.post("/update_weights_from_disk", {"model_path": weights}, **headers)).json()
        for _ in range(3)
    ]
    assert {answer["epoch"] for answer in answers} == {2}
    assert {answer["job"] for answer in answers} == {answers[0]["job"]}


async def test_a_session_of_buckets_is_one_update(engine, trainer, tmp_path):
    begun = (await trainer.post("/begin_weight_update", {"token_step": 9})).json()
    for _ in range(3):
        response = await trainer.client.post(
            f"/update_weights_from_tensor?session_id={begun['session_id']}", SAFETENSORS,
            content_type="application/octet-stream", headers=trainer.headers,
        )  # fmt: skip
        assert response.status_code == 200, response.content
    assert "epoch" not in response.json()
    ended = (await trainer.post("/end_weight_update", {"session_id": begun["session_id"]})).json()
    assert (ended["success"], ended["epoch"], ended["token_step"]) == (True, 2, 9)


async def test_a_bucket_while_a_session_of_another_is_open_is_409_and_leaves_no_file(
    engine, trainer, tmp_path
):
    await trainer.post("/begin_weight_update", {})
    response = await trainer.client.post(
        "/update_weights_from_tensor", SAFETENSORS,
        content_type="application/octet-stream", headers=trainer.headers,
    )  # fmt: skip
    assert response.status_code == 409
    assert list((tmp_path / "spool").iterdir()) == []


async def test_tensors_for_a_session_that_is_gone_leave_no_file(engine, trainer, tmp_path):
    response = await trainer.client.post(
        "/update_weights_from_tensor?session_id=gone", SAFETENSORS,
        content_type="application/octet-stream", headers=trainer.headers,
    )  # fmt: skip
    assert response.status_code == 404
    assert list((tmp_path / "spool").iterdir()) == []


async def test_tensors_that_are_sent_again_with_their_key_leave_one_file(engine, trainer, tmp_path):
    begun = (await trainer.post("/begin_weight_update", {})).json()
    answers = [
        await trainer.client.post(
            f"/update_weights_from_tensor?session_id={begun['session_id']}&key=bucket-1",
            SAFETENSORS, content_type="application/octet-stream", headers=trainer.headers,
        )
        for _ in range(2)
    ]  # fmt: skip
    assert len({answer.json()["job"] for answer in answers}) == 1
    assert len(list((tmp_path / "spool").iterdir())) == 1


async def test_a_file_of_the_server_cannot_be_named_as_tensors(engine, trainer, tmp_path):
    """Neither any file of the machine nor one that an epoch needs: the engine would delete it."""
    (tmp_path / "spool").mkdir()
    kept = tmp_path / "spool" / "epoch-1.safetensors"
    kept.write_bytes(SAFETENSORS)
    for path in (str(kept), str(tmp_path / "spool" / ".."), "/etc/passwd"):
        response = await trainer.post("/api/control/update_from_tensor", {"path": path})
        assert response.status_code == 400, response.content
    assert kept.exists()
    assert await Job.objects.acount() == 0


async def test_tensors_may_come_as_base64_and_never_as_a_pickle(engine, trainer):
    good = {"serialized_named_tensors": [base64.b64encode(SAFETENSORS).decode()] * 2}
    answer = (await trainer.post("/update_weights_from_tensor", good)).json()
    assert answer["success"], answer
    bad = {"serialized_named_tensors": [base64.b64encode(PICKLE).decode()]}
    response = await trainer.post(
        "/update_weights_from_tensor", {"serialized_named_tensors": "\u00e9"}
    )
    assert response.status_code == 400
    response = await trainer.post("/update_weights_from_tensor", bad)
    assert response.status_code == 400
    assert "engine/weights/sender.py" in response.json()["message"]


async def test_distributed_buckets_need_lists_of_one_length(trainer):
    body = {"names": ["a", "b"], "dtypes": ["float32"], "shapes": [[1], [1]]}
    response = await trainer.post("/update_weights_from_distributed", body)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "names"


async def test_values_are_a_list_or_every_ranks(trainer):
    assert (await trainer.get("/get_weights_by_name?name=w&truncate_size=2")).json() == [0.5, 0.5]
    body = {"name": "w", "truncate_size": "2", "all_ranks": True}
    shown = (await trainer.post("/get_weights_by_name", body)).json()
    assert [(rank["dp"], rank["values"]) for rank in shown["ranks"]] == [
        (0, [0.5, 0.5]), (1, [0.5, 0.5]),
    ]  # fmt: skip


async def test_relabelling_touches_no_request(engine, trainer):
    """E23, C20."""
    answer = (await trainer.post("/update_weight_version", {"new_version": "v3"})).json()
    assert (answer["success"], answer["new_version"]) == (True, "v3")
    assert engine.ranks.calls == []


# ---------------------------------------------------------------- loads and state


async def test_loads_in_both_forms(trainer):
    old = (await trainer.get("/get_load")).json()
    assert old == [
        {"dp_rank": 0, "num_reqs": 3, "num_waiting_reqs": 0, "num_tokens": 0},
        {"dp_rank": 1, "num_reqs": 2, "num_waiting_reqs": 0, "num_tokens": 0},
    ]
    new = (await trainer.get("/v1/loads?include=core&dp_rank=1")).json()
    assert new["dp_rank_count"] == 2
    assert [load["num_running_reqs"] for load in new["loads"]] == [2]
    assert new["aggregate"]["total_running_reqs"] == 2


async def test_internal_state_changes_only_what_can_be_changed(engine, trainer):
    body = {"server_args": {"log_level": "warning", "forward_sleep_time": 0}}
    assert (await trainer.post("/set_internal_state", body)).json()["updated"] is True
    ops = {type(op) for _, op in engine.ranks.calls}
    assert ops == {m.SetLogging, m.SlowDown}
    response = await trainer.post("/set_internal_state", {"server_args": {"dp_size": 4}})
    assert response.status_code == 400
    assert "dp_size" in response.json()["error"]["message"]


# ---------------------------------------------------------------- abort


async def test_aborts_say_what_they_found(trainer):
    none = (await trainer.post("/abort_request", {"rid": "unknown"})).json()
    assert (none["success"], none["found"]) == (False, [])
    everything = (await trainer.post("/abort_request", {"abort_all": True})).json()
    assert everything["found"] == []
    assert await Job.objects.filter(kind="abort_all").acount() == 1
    assert (await trainer.post("/abort_request", {"rid": ""})).status_code == 400


async def test_a_client_ends_its_own_request_without_a_job(engine, make_key):
    client = Trainer(await sync_to_async(make_key)("inference"))
    assert (await client.post("/abort_request", {"rid": ["a", "b"]})).status_code == 200
    assert await Job.objects.acount() == 0
    for wide in ({"abort_all": True}, {"rid": "a", "prefix": True}):
        assert (await client.post("/abort_request", wide)).status_code == 403


# ---------------------------------------------------------------- uploads


async def upload(trainer, content: bytes, *, announced: int | None = None, key: str = ""):
    """Through the ASGI edge, chunk by chunk, as a server would call it."""
    seen: dict = {}

    async def application(scope, receive, send):
        seen.update(scope=scope, body=(await receive())["body"])

    chunks = [content[i : i + 7] for i in range(0, len(content), 7)] or [b""]
    messages = [
        {"type": "http.request", "body": chunk, "more_body": i + 1 < len(chunks)}
        for i, chunk in enumerate(chunks)
    ]

    async def receive():
        return messages.pop(0) if messages else {"type": "http.disconnect"}

    headers = [
        (b"authorization", (key or trainer.headers["Authorization"]).encode()),
        (b"content-type", b"application/octet-stream"),
        (b"content-length", str(len(content) if announced is None else announced).encode()),
    ]
    scope = {"type": "http", "path": "/update_weights_from_tensor", "headers": headers}
    await SpooledUploads(application)(scope, receive, None)
    return seen


async def test_a_large_body_goes_to_disk_before_django_sees_it(trainer, tmp_path):
    seen = await upload(trainer, SAFETENSORS * 1)
    spooled = seen["scope"]["quarterdeck.spooled"]
    assert (spooled.size, seen["body"]) == (len(SAFETENSORS), b"")
    assert [str(path) for path in (tmp_path / "spool").iterdir()] == [spooled.path]


async def test_a_refused_body_is_read_to_its_end_and_leaves_nothing(trainer, tmp_path):
    seen = await upload(trainer, PICKLE * 50)
    assert seen["scope"]["quarterdeck.spooled"].err_type == "pickle_refused"
    assert list((tmp_path / "spool").iterdir()) == []


async def test_a_stranger_cannot_fill_the_disk(trainer, tmp_path):
    seen = await upload(trainer, SAFETENSORS, key="Bearer qd-wrong")
    assert "quarterdeck.spooled" not in seen["scope"]
    assert not (tmp_path / "spool").exists()


# ---------------------------------------------------------------- admin


async def staff(make_user, role: str) -> AsyncClient:
    client = AsyncClient()
    await client.aforce_login(await sync_to_async(make_user)(role, is_staff=True))
    return client


async def test_the_admin_asks_before_it_acts(engine, make_user, weights):
    client = await staff(make_user, "operator")
    row = await Engine.objects.aget()
    page = await client.get("/admin/console/engine/")
    for verb in ("Reload weights", "Pause", "Continue", "Flush cache", "Drain a rank",
                 "Abort all requests"):  # fmt: skip
        assert verb in page.content.decode()
    form = {"action": "reload_weights", "_selected_action": row.pk}
    asked = (await client.post("/admin/console/engine/", form)).content.decode()
    for field in ("token_step", "weight_version", "in_flight", "reason", "What will happen"):
        assert field in asked
    filled = form | {"preview": "1", "model_path": weights, "in_flight": "abort"}
    shown = (await client.post("/admin/console/engine/", filled)).content.decode()
    assert "3 on dp0, 2 on dp1; policy abort: they end now." in shown
    assert await Job.objects.acount() == 0


async def test_the_admin_acts_only_with_a_reason_and_once_per_page(engine, make_user, weights):
    client = await staff(make_user, "operator")
    row = await Engine.objects.aget()
    form = {"action": "reload_weights", "_selected_action": row.pk, "apply": "1", "key": "k",
            "model_path": weights, "in_flight": "finish", "token_step": "7"}  # fmt: skip
    page = await client.post("/admin/console/engine/", form)
    assert page.status_code == 200
    assert await Job.objects.acount() == 0
    for _ in range(2):
        done = await client.post("/admin/console/engine/", form | {"reason": "better"})
        assert done.status_code == 302
    [job] = [job async for job in Job.objects.all()]
    assert (job.state, job.via, job.reason, job.result["token_step"]) == (
        "done", "admin", "better", 7,
    )  # fmt: skip


async def test_the_admin_reloads_from_one_checkpoint(engine, make_user, weights):
    client = await staff(make_user, "operator")
    checkpoint = await Checkpoint.objects.acreate(path=weights, token_step=5)
    form = {"action": "reload_weights", "_selected_action": checkpoint.pk, "apply": "1",
            "in_flight": "finish", "reason": "r", "token_step": "5"}  # fmt: skip
    await client.post("/admin/console/checkpoint/", form)
    job = await Job.objects.aget()
    assert (job.args["model_path"], job.args["token_step"]) == (weights, 5)


@pytest.mark.parametrize("model", ["job", "auditentry", "weightupdate", "serving"])
async def test_records_are_read_only_even_for_a_superuser(engine, trainer, make_user, model):
    await trainer.post("/freeze_gc")
    user = await sync_to_async(make_user)("admin", is_staff=True, is_superuser=True)
    client = AsyncClient()
    await client.aforce_login(user)
    page = await client.get(f"/admin/console/{model}/")
    assert page.status_code == 200
    assert (await client.get(f"/admin/console/{model}/add/")).status_code == 403
    assert (await client.get(f"/admin/console/{model}/1/delete/")).status_code == 403


# ---------------------------------------------------------------- schedules in the admin


async def schedule(client: AsyncClient, kwargs: object) -> str:
    """The form's complaint about the arguments, or "" when it was stored."""
    interval, _ = await IntervalSchedule.objects.aget_or_create(every=1, period="hours")
    form = {"name": "nightly", "regtask": "console.act", "enabled": "on", "interval": interval.pk,
            "args": "[]", "kwargs": json.dumps(kwargs)}  # fmt: skip
    response = await client.post("/admin/django_celery_beat/periodictask/add/", form)
    if response.status_code == 302:
        return ""
    errors = response.context["adminform"].form.errors
    return " ".join(errors.get("kwargs", [str(errors)]))


async def test_a_schedule_is_checked_when_it_is_written(database, make_user):
    client = await staff(make_user, "admin")
    good = {"action": "flush_cache", "fields": {"timeout_s": 5}, "as_user": "admin"}
    assert "there is no action" in await schedule(client, {**good, "action": "explode"})
    assert "timeout_s" in await schedule(client, {**good, "fields": {"timeout_s": "soon"}})
    assert "as_user" in await schedule(client, {"action": "flush_cache"})
    assert "only a superuser" in await schedule(client, {**good, "as_user": "root"})
    assert await PeriodicTask.objects.filter(name="nightly").acount() == 0
    assert await schedule(client, good) == ""
    assert await PeriodicTask.objects.filter(name="nightly").acount() == 1


async def test_an_operator_cannot_edit_schedules(database, make_user):
    client = await staff(make_user, "operator")
    response = await client.get("/admin/django_celery_beat/periodictask/add/")
    assert response.status_code == 403


async def test_a_stranger_cannot_fill_memory_or_disk_with_any_other_body(settings):
    """Django would collect all of it, in a file, before it asks who sends it."""
    settings.DATA_UPLOAD_MAX_MEMORY_SIZE = 1000
    heard, sent = [], []

    async def application(scope, receive, send):
        heard.append(await receive())
        while heard[-1]["type"] == "http.request":
            heard.append(await receive())

    async def receive():
        return {"type": "http.request", "body": b"x" * 400, "more_body": True}

    async def send(message):
        sent.append(message)

    await BoundedBodies(application)({"type": "http", "path": "/"}, receive, send)
    assert [message["type"] for message in heard] == ["http.request"] * 2 + ["http.disconnect"]
    assert sent[0]["status"] == 413
    assert (b"connection", b"close") in sent[0]["headers"]
    assert json.loads(sent[1]["body"])["error"]["code"] == "body_too_large"


@pytest.mark.parametrize("path", ["\0", "models/a\0b", "x" * 5000, "models/" + "\u00e9" * 200])
async def test_what_is_no_path_is_refused_by_name(path, engine, trainer):
    fields = {"reload_weights": "model_path", "register_checkpoint": "path", "dump": "output_dir"}
    for action, field in fields.items():
        response = await trainer.post(f"/api/control/{action}", {field: path})
        assert response.status_code == 400, (action, response.content)
        assert response.json()["error"]["param"] == field


@pytest.mark.parametrize(
    "path",
    ["/api/jobs?offset=", "/api/audit?offset=", "/api/profiles?offset=", "/api/epochs/"],
)
async def test_a_number_beyond_every_column_is_refused(path, engine, trainer):
    for digits in (20, 5000):
        assert (await trainer.get(path + "9" * digits)).status_code in (400, 404)
