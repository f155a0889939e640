"""The one door: one action five ways, who may act, keys that never act twice, honest ends."""

from __future__ import annotations

import asyncio

import pytest
from asgiref.sync import sync_to_async
from django.contrib.auth.models import User

from console.auth import Forbidden, principal_of_user
from console.database import DatabaseAway
from console.models import AuditEntry, Job, WeightUpdate
from console.services import audit, control, jobs, journal, reconcile, schedules
from engine import messages as m
from engine.errors import BadRequest, Conflict, NotFound
from tests.console.ways import WAYS, Deed

FLUSH = Deed(name="flush_cache", route="/flush_cache", menu="flush_cache", fields={"timeout_s": 0})


@sync_to_async
def rows(model, **filters):
    return list(model.objects.filter(**filters).order_by("id"))


async def principal(make_user, role: str = "operator"):
    user = await sync_to_async(make_user)(role)
    return await sync_to_async(principal_of_user)(user)


# ---------------------------------------------------------------- five ways


async def settled():
    await asyncio.gather(*control._works)


@pytest.mark.parametrize("way", WAYS)
async def test_one_action_five_ways_makes_the_same_job_and_audit_entry(
    way, engine, make_user, make_key
):
    assert await WAYS[way](FLUSH, make_user, make_key, "operator")
    await settled()
    [job] = await rows(Job)
    assert (job.kind, job.title, job.target) == ("flush_cache", "Flush cache", "engine")
    assert (job.state, job.args, job.reason, job.via) == ("done", {}, "test", way)
    assert job.ranks == [{"dp": dp, "tp": 0, "state": "done", "message": ""} for dp in range(2)]
    assert (job.before["epoch"], job.after["epoch"]) == (1, 1)
    [entry] = await rows(AuditEntry)
    assert (entry.action, entry.target, entry.result) == ("flush_cache", "engine", "done")
    assert (entry.job, entry.via, entry.reason) == (job.pk, way, "test")
    assert entry.actor == job.actor != ""
    assert [type(op) for _, op in engine.ranks.calls] == [m.FlushRank, m.FlushRank]


@pytest.mark.parametrize("way", WAYS)
async def test_a_viewer_is_refused_each_way_and_nothing_reaches_the_engine(
    way, engine, make_user, make_key
):
    assert not await WAYS[way](FLUSH, make_user, make_key, "viewer")
    assert await rows(Job) == []
    assert engine.ranks.calls == []
    assert {entry.result for entry in await rows(AuditEntry)} <= {"denied"}


async def test_who_tries_what_they_may_not_is_in_the_audit(engine, make_user):
    who = await principal(make_user, "viewer")
    with pytest.raises(Forbidden):
        await control.start(who, "pause", {}, via="websocket")
    [entry] = await rows(AuditEntry)
    assert (entry.actor, entry.action, entry.result) == ("user:viewer", "pause", "denied")


async def test_an_unknown_action_is_not_found(engine, make_user):
    with pytest.raises(NotFound, match="flush_cache"):
        await control.start(await principal(make_user), "explode", {}, via="page")


async def test_a_wrong_field_is_named_and_makes_no_job(engine, make_user):
    with pytest.raises(BadRequest, match="mode"):
        await control.start(await principal(make_user), "pause", {"mode": "often"}, via="page")
    assert await rows(Job) == []


# ---------------------------------------------------------------- idempotency


async def test_the_same_key_acts_once(engine, make_user):
    who = await principal(make_user)
    first = await control.perform(who, "flush_cache", {}, via="http", key="mine")
    again = await control.perform(who, "flush_cache", {}, via="http", key="mine")
    assert first.pk == again.pk
    assert len(engine.ranks.calls) == 2  # one per dp group


async def test_the_same_key_at_the_same_time_acts_once(engine, make_user):
    who = await principal(make_user)
    found = await asyncio.gather(
        *(control.perform(who, "flush_cache", {}, via="http", key="mine") for _ in range(5))
    )
    assert len({job.pk for job in found}) == 1
    assert {job.state for job in found} == {"done"}
    assert len(engine.ranks.calls) == 2


async def test_a_key_of_another_action_is_a_conflict(engine, make_user):
    who = await principal(make_user)
    await control.perform(who, "flush_cache", {}, via="http", key="mine")
    with pytest.raises(Conflict, match="key"):
        await control.perform(who, "pause", {}, via="http", key="mine")


async def test_two_accounts_may_choose_the_same_key(engine, make_user):
    one = await principal(make_user)
    other = await principal(make_user, "admin")
    first = await control.perform(one, "flush_cache", {}, via="http", key="mine")
    second = await control.perform(other, "flush_cache", {}, via="http", key="mine")
    assert first.pk != second.pk


# ---------------------------------------------------------------- ends


async def test_a_refusal_of_a_rank_is_the_jobs_end_with_its_sentence(engine, make_user):
    engine.ranks.answer = engine.ranks.refuse
    job = await control.perform(await principal(make_user), "flush_cache", {}, via="page")
    assert job.state == "refused"
    assert "shape of lm_head differs" in job.message
    assert [rank["state"] for rank in job.ranks] == ["refused", "refused"]
    [entry] = await rows(AuditEntry)
    assert entry.result == "refused"


async def test_without_an_engine_nothing_is_sent_and_the_job_says_so(worker, make_user):
    job = await control.perform(await principal(make_user), "flush_cache", {}, via="page")
    assert (job.state, job.status_code) == ("failed", 503)
    assert "nothing was sent" in job.message


async def test_opposite_calls_at_the_same_time_all_return_and_the_state_is_readable(
    engine, make_user
):
    """E12: a single slot for the pending reply would leave the first caller waiting for ever."""
    who = await principal(make_user)
    names = ["pause", "continue"] * 5
    found = await asyncio.wait_for(
        asyncio.gather(*(control.perform(who, name, {}, via="http") for name in names)), 20
    )
    assert {job.state for job in found} == {"done"}
    last = max(found, key=lambda job: job.ended_at).kind
    state = (await engine.worker.client.fleet()).engine.state
    assert state == ("paused" if last == "pause" else "running")


async def test_who_gives_up_waiting_does_not_stop_the_action(engine, make_user):
    doing = await control.start(await principal(make_user), "pause", {}, via="http")
    waiting = asyncio.create_task(doing.ended())
    await asyncio.sleep(0)
    waiting.cancel()
    await settled()
    [job] = await rows(Job)
    assert job.state == "done"


async def test_a_reload_makes_a_lineage_row(engine, make_user, tmp_path):
    (tmp_path / "models" / "step-7").mkdir()
    job = await control.perform(
        await principal(make_user), "reload_weights",
        {"source": "models/step-7", "token_step": "7", "in_flight": "in_place"}, via="page",
    )  # fmt: skip
    assert job.state == "done", job.message
    assert job.title == "Reload weights step-7"
    [update] = await rows(WeightUpdate, epoch=2)
    assert (update.weight_version, update.token_step) == ("step-7", 7)
    assert (update.source, update.policy, update.job_id) == ("models/step-7", "in_place", job.pk)
    assert (update.before["epoch"], update.after["epoch"]) == (1, 2)
    assert update.groups == [0, 1]


async def test_weights_outside_the_roots_are_refused_whether_they_exist_or_not(
    engine, make_user, tmp_path
):
    """C15."""
    who = await principal(make_user)
    (tmp_path / "models" / "link").symlink_to("/etc")
    for path in ("/etc", "models/../../etc", "/nowhere/at/all", "models/link", ""):
        with pytest.raises(BadRequest):
            await control.start(who, "reload_weights", {"model_path": path}, via="http")
    assert engine.ranks.calls == []


# ---------------------------------------------------------------- processes that end


async def test_a_job_whose_process_is_gone_is_settled_by_asking_the_engine(engine, make_user):
    """Sent, but its process died before it could write the end."""
    who = await principal(make_user)
    job = await _left_behind(who, key="k1")
    await engine.worker.client.call(m.FlushCacheReqInput, deadline_s=5, actor="me", key=job.key)
    assert await reconcile.round_to_the_end() == 1
    [after] = await rows(Job)
    assert (after.state, after.attempt) == ("done", 2)
    assert len(await rows(AuditEntry)) == 1
    assert len(engine.ranks.calls) == 2, "it was not sent again"


async def test_a_call_that_the_engine_never_saw_has_failed_and_is_not_sent_again(engine, make_user):
    await _left_behind(await principal(make_user), key="k2")
    await reconcile.round_to_the_end()
    [after] = await rows(Job)
    assert after.state == "failed"
    assert "was not sent again" in after.message
    assert engine.ranks.calls == []


async def test_a_job_with_a_live_lease_is_left_alone(engine, make_user):
    who = await principal(make_user)
    job = jobs.new_job(who, control.catalogue.find("pause")(), key="k", via="page", reason="",
                       before={})  # fmt: skip
    jobs.claim(job)
    await sync_to_async(jobs.insert)(job)
    assert await reconcile.round_to_the_end() == 0


@sync_to_async
def _left_behind(who, key: str) -> Job:
    action = control.catalogue.find("flush_cache")()
    job = jobs.new_job(who, action, key=key, via="page", reason="", before={})
    jobs.claim(job)
    job.owner, job.lease_until = "dead:1", job.created_at
    return jobs.insert(job)[0]


async def test_a_process_that_leaves_hands_its_jobs_over(engine, make_user):
    engine.ranks.silent = True
    await control.start(await principal(make_user), "flush_cache", {}, via="page")
    await asyncio.sleep(0.1)
    await control.close()
    engine.ranks.silent = False
    assert await reconcile.reconcile() == 1


# ---------------------------------------------------------------- the database is away


@pytest.fixture
def no_database(monkeypatch):
    """Everything that the door asks of the database fails at once."""

    async def away(*args, **kwargs):
        raise DatabaseAway("the database is away: test")

    for module in (control, control.sending):
        for name in ("in_database", "within"):
            if hasattr(module, name):
                monkeypatch.setattr(module, name, away)


async def test_emergencies_work_without_the_database_and_are_written_down_later(
    engine, make_user, no_database, monkeypatch
):
    who = await principal(make_user)
    job = await control.perform(who, "pause", {"mode": "retract"}, via="http", reason="fire")
    assert (job.state, job.pk, job.late) == ("done", None, True)
    assert await rows(Job) == []
    assert len(list(journal.directory().glob("*.json"))) == 1

    assert await sync_to_async(journal.read_in)() == 1
    [written] = await rows(Job)
    assert (written.state, written.late, written.reason) == ("done", True, "fire")
    assert any("written down late" in event["text"] for event in written.events)
    [entry] = await rows(AuditEntry)
    assert (entry.result, entry.job) == ("done", written.pk)
    assert list(journal.directory().iterdir()) == []
    assert await sync_to_async(journal.read_in)() == 0


async def test_other_actions_wait_for_the_database(engine, make_user, no_database):
    who = await principal(make_user)
    with pytest.raises(DatabaseAway):
        await control.start(who, "flush_cache", {}, via="http")
    assert engine.ranks.calls == []


async def test_a_job_that_was_written_and_then_lost_the_database_is_ended_from_the_journal(
    engine, make_user, monkeypatch
):
    who = await principal(make_user)
    doing = await control.start(who, "pause", {}, via="http")

    async def away(*args, **kwargs):
        raise DatabaseAway("gone")

    monkeypatch.setattr(control.sending, "within", away)
    await doing.ended()
    [running] = await rows(Job)
    assert running.state == "running"
    await sync_to_async(journal.read_in)()
    [ended] = await rows(Job)
    assert (ended.state, ended.late) == ("done", False)
    assert len(await rows(AuditEntry)) == 1


# ---------------------------------------------------------------- beat


async def test_a_schedule_of_somebody_who_may_not_sign_in_does_nothing(engine, make_user):
    await sync_to_async(make_user)("operator", username="gone", is_active=False)
    with pytest.raises(NotFound, match="gone"):
        await schedules.act({"action": "pause", "as_user": "gone"}, message_id="m")


async def test_a_queue_that_piled_up_acts_once(engine, make_user):
    """C23: no flood after a stop."""
    await sync_to_async(make_user)("operator")
    given = {"action": "flush_cache", "as_user": "operator"}
    done = [await schedules.act(given, message_id=f"m{i}") for i in range(5)]
    assert [job is not None for job in done] == [True, False, False, False, False]


async def test_a_message_that_is_delivered_twice_acts_once(engine, make_user, monkeypatch):
    """C23."""
    monkeypatch.setattr(schedules, "BURST_S", 0.0)
    await sync_to_async(make_user)("operator")
    given = {"action": "flush_cache", "as_user": "operator"}
    for _ in range(2):
        await schedules.act(given, message_id="same")
    assert len(await rows(Job)) == 1


# ---------------------------------------------------------------- preview


async def test_a_preview_counts_whom_it_touches_and_writes_nothing(engine, make_user, tmp_path):
    (tmp_path / "models" / "step-7").mkdir()
    who = await principal(make_user)
    seen = await control.preview(
        who, "reload_weights", {"source": "models/step-7"}, base_url="http://here"
    )
    assert seen.impact == (
        "5 running requests: 3 on dp0, 2 on dp1; policy finish: they end on the old weights."
    )
    assert "/update_weights_from_disk" in seen.curl
    assert seen.refusal == ""
    canary = await control.preview(
        who, "reload_weights", {"source": "models/step-7", "target": "1", "in_flight": "abort"},
        base_url="",
    )  # fmt: skip
    assert canary.impact == "2 running requests: 2 on dp1; policy abort: they end now."
    outside = await control.preview(who, "reload_weights", {"source": "/etc"}, base_url="")
    assert "not under a weights root" in outside.refusal
    assert await rows(Job) == []


async def test_a_preview_needs_the_right_to_act(make_user):
    who = await principal(make_user, "viewer")
    with pytest.raises(Forbidden):
        await control.preview(who, "pause", {}, base_url="")


def test_every_user_of_the_audit_sees_the_same_chain(make_user):
    """Users may go; what they did stays."""
    user = make_user("operator")
    audit.append(actor="user:operator", identity=f"user:{user.pk}", via="page", action="pause",
                 target="engine", result="done")  # fmt: skip
    User.objects.all().delete()
    assert audit.verify().ok
