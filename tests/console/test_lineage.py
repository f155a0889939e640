"""What served when: spells of ranks, epochs, updates, and what the engine did by itself."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace

import msgspec
import pytest
from asgiref.sync import sync_to_async
from django.test import AsyncClient

from console.auth import principal_of_user
from console.database import DatabaseAway
from console.models import AuditEntry, Engine, Job, Serving, WeightUpdate
from console.services import chronicle, control, weights
from console.services.chronicle import Chronicle, Picture, Rank
from engine.messages import EngineView, FleetSnapshot, Notice, RankView

VIEW = EngineView(state="running", epoch=1, weight_version="v1", token_step=1, model="m",
                  generation=1)  # fmt: skip
START = 1_700_000_000.0


def picture(at: float, epochs: dict[int, int | None], *, pid: int = 1, **fields) -> Picture:
    ranks = tuple(Rank(dp, 0, pid, epoch, START + at) for dp, epoch in epochs.items())
    return Picture(START + at, VIEW, ranks, tuple(fields.get("notices", ())))


def spells(dp: int = 0) -> list[tuple[int, float, float | None]]:
    """(epoch, begin, end) in seconds after START."""
    return [
        (s.epoch, s.started_at.timestamp() - START,
         s.ended_at.timestamp() - START if s.ended_at else None)
        for s in Serving.objects.filter(dp=dp).order_by("started_at", "id")
    ]  # fmt: skip


# ---------------------------------------------------------------- spells


def test_a_commit_ends_one_spell_and_begins_the_next(database):
    for at, epoch in ((0, 1), (5, 1), (7, 2), (9, 2)):
        chronicle.record(picture(at, {0: epoch, 1: epoch}))
    assert spells(0) == spells(1) == [(1, 0, 7), (2, 7, None)]


def test_every_worker_writes_and_there_is_one_spell(database):
    for at, epoch in ((0, 1), (7, 2), (8, 3)):
        for _ in range(3):
            chronicle.record(picture(at, {0: epoch}))
    assert spells() == [(1, 0, 7), (2, 7, 8), (3, 8, None)]


@pytest.mark.parametrize("at", [float("nan"), 1e300])
async def test_a_picture_with_a_time_of_no_calendar_ends_no_worker(at, engine, worker):
    snapshot = worker.client.snapshot
    told = msgspec.structs.replace(snapshot.engine, model="another")
    worker.chronicle.put(msgspec.structs.replace(snapshot, at=at))
    worker.chronicle.put(msgspec.structs.replace(snapshot, at=at, ranks=[]))
    worker.chronicle.put(msgspec.structs.replace(snapshot, engine=told))
    await worker.chronicle.write(worker.client)
    assert (await Engine.objects.aget()).model_path == "another"


def test_a_worker_that_is_behind_changes_nothing(database):
    chronicle.record(picture(0, {0: 1}))
    chronicle.record(picture(8, {0: 3}))
    chronicle.record(picture(7, {0: 2}))
    assert spells() == [(1, 0, 8), (3, 8, None)]


def test_a_rank_that_restarts_begins_a_new_spell_and_serves_nothing_between(database):
    chronicle.record(picture(0, {0: 1}))
    chronicle.record(picture(5, {0: None}))
    chronicle.record(picture(9, {0: 1}, pid=2))
    assert spells() == [(1, 0, 5), (1, 9, None)]


def test_an_engine_that_nobody_saw_stop_served_until_it_was_last_seen(database):
    chronicle.record(picture(0, {0: 1}))
    chronicle.record(picture(20, {0: 1}))
    chronicle.record(picture(500, {0: 1}, pid=2))
    assert spells() == [(1, 0, 20), (1, 500, None)]


def test_what_served_at_a_time_is_a_query(database, settings):
    for epoch, step in ((1, 100), (2, 101)):
        WeightUpdate.objects.create(epoch=epoch, weight_version=f"v{epoch}", token_step=step)
    chronicle.record(picture(0, {0: 1, 1: 1}))
    chronicle.record(picture(7, {0: 2, 1: 1}))
    chronicle.record(picture(9, {0: 2, 1: 2}))

    def served(at: float) -> list[tuple[int, str, int]]:
        ranks = weights.served_at(START + at)["ranks"]
        return [(r["dp"], r["weight_version"], r["token_step"]) for r in ranks]

    assert served(3) == [(0, "v1", 100), (1, "v1", 100)]
    assert served(8) == [(0, "v2", 101), (1, "v1", 100)]
    assert served(9) == [(0, "v2", 101), (1, "v2", 101)]
    assert served(-1) == []
    assert served(500) == [], "nobody has confirmed it for so long"


def test_versions_are_listed_newest_first_with_their_time(database):
    now = time.time() - START
    chronicle.record(picture(now - 20, {0: 1, 1: 1}))
    chronicle.record(picture(now - 5, {0: 2, 1: 1}))
    chronicle.record(picture(now - 4, {0: 2, 1: 2}))
    newest, oldest = weights.versions()
    assert (newest["epoch"], newest["ended_at"]) == (2, None)
    assert newest["started_at"] == pytest.approx(START + now - 5)
    assert oldest["ended_at"] == pytest.approx(START + now - 4)


def test_a_spell_that_nobody_confirms_any_more_is_over(database):
    chronicle.record(picture(0, {0: 1}))
    [version] = weights.versions()
    assert version["ended_at"] == pytest.approx(START)


# ---------------------------------------------------------------- the engine


async def operator(make_user):
    user = await sync_to_async(make_user)("operator")
    return await sync_to_async(principal_of_user)(user)


async def test_the_start_is_in_the_lineage_without_a_job(engine):
    [update] = [u async for u in WeightUpdate.objects.all()]
    assert (update.epoch, update.source, update.job_id) == (1, "start", None)
    assert await Engine.objects.acount() == 1
    assert await Serving.objects.filter(ended_at=None).acount() == 2


async def test_a_reload_and_a_roll_back_are_two_epochs_with_their_jobs(engine, make_user, tmp_path):
    who = await operator(make_user)
    (tmp_path / "models" / "step-7").mkdir()
    reload = await control.perform(
        who, "reload_weights", {"source": "models/step-7", "token_step": 7}, via="page"
    )
    back = await control.perform(who, "roll_back", {"epoch": 1}, via="page")
    assert (reload.state, back.state) == ("done", "done"), back.message
    await seen_by_chronicle(engine, epoch=3)
    found = [(u.epoch, u.source, u.job_id) async for u in WeightUpdate.objects.order_by("epoch")]
    assert found == [
        (1, "start", None),
        (2, "models/step-7", reload.pk),
        (3, "epoch 1", back.pk),
    ]
    assert await Serving.objects.filter(epoch=3, ended_at=None).acount() == 2


async def seen_by_chronicle(engine, *, epoch: int) -> None:
    client = engine.worker.client
    async with asyncio.timeout(10):
        while {rank.epoch for rank in client.snapshot.ranks} != {epoch}:
            await asyncio.sleep(0.02)
    await engine.worker.chronicle.write(client)


async def test_an_epoch_names_its_job_over_http(engine, make_user, make_key, tmp_path):
    (tmp_path / "models" / "step-7").mkdir()
    job = await control.perform(
        await operator(make_user), "reload_weights",
        {"source": "models/step-7", "token_step": 7, "weight_version": "seven"}, via="page",
    )  # fmt: skip
    key = await sync_to_async(make_key)("inference")
    client, headers = AsyncClient(), {"Authorization": f"Bearer {key}"}
    found = (await client.get("/api/epochs/2", headers=headers)).json()
    assert (found["job"], found["token_step"], found["weight_version"]) == (job.pk, 7, "seven")
    assert found["source"] == "models/step-7"
    assert (await client.get("/api/epochs/99", headers=headers)).status_code == 404
    engine.worker.client.snapshot = None
    shown = (await client.get("/api/weights", headers=headers)).json()
    assert [update["job"] for update in shown["updates"]] == [job.pk]


async def test_a_relabel_changes_the_name_and_makes_no_update(engine, make_user):
    who = await operator(make_user)
    job = await control.perform(who, "relabel_weights", {"new_version": "renamed"}, via="http")
    assert job.state == "done"
    [update] = [u async for u in WeightUpdate.objects.all()]
    assert (update.epoch, update.weight_version) == (1, "renamed")


async def test_a_failed_reload_is_an_update_that_failed(engine, make_user, tmp_path):
    (tmp_path / "models" / "bad").mkdir()
    engine.ranks.answer = engine.ranks.refuse
    job = await control.perform(
        await operator(make_user), "reload_weights", {"source": "models/bad"}, via="page"
    )
    [failed] = [u async for u in WeightUpdate.objects.filter(epoch=None)]
    assert (failed.state, failed.job_id, failed.groups) == ("refused", job.pk, [])


# ---------------------------------------------------------------- notices


def snapshot(**fields) -> FleetSnapshot:
    rank = RankView(dp=0, tp=0, pid=1, state="running", epoch=1, weight_version="v", token_step=1,
                    running=0, waiting=0, kv_used=0, kv_total=1, tokens_per_s=0, step_s=0,
                    rss_bytes=0, seen_at=START)  # fmt: skip
    return FleetSnapshot(seq=1, at=START, engine=VIEW, workers=[], ranks=[rank], **fields)


def test_what_the_engine_did_by_itself_is_one_audit_entry(database):
    notice = Notice(id="n1", at=START, kind="pause_lease_expired", text="the lease ran out")
    for _ in range(3):
        chronicle.record(Picture.of(snapshot(notices=[notice])))
    [entry] = AuditEntry.objects.all()
    assert (entry.actor, entry.via, entry.action) == ("engine", "engine", "pause_lease_expired")
    assert entry.detail["message"] == "the lease ran out"
    assert entry.at.timestamp() == START


async def test_a_pause_whose_lease_runs_out_is_written_down_once(engine, make_user):
    who = await operator(make_user)
    await control.perform(who, "pause", {"lease_s": "0.2"}, via="http")
    client = engine.worker.client
    async with asyncio.timeout(10):
        while not client.snapshot.notices:
            await asyncio.sleep(0.05)
    await engine.worker.chronicle.write(client)
    found = [e.action async for e in AuditEntry.objects.order_by("id")]
    assert found == ["pause", "pause_lease_expired"]
    assert client.snapshot.engine.state in ("running", "paused")
    assert await Job.objects.acount() == 1


# ---------------------------------------------------------------- the chronicle itself


def test_only_changes_are_kept_to_be_written():
    quiet = Chronicle()
    for second in range(100):
        shot = snapshot()
        shot.at, shot.seq = START + second, second
        quiet.put(shot)
    assert len(quiet._waiting) == 1


async def test_nothing_is_lost_while_the_database_is_away(database, engine, monkeypatch):
    kept = Chronicle()
    kept._epochs = {1, 2, 3}
    for at, epoch in ((0, 1), (7, 2), (8, 3)):
        kept._waiting.append(replace(picture(at, {0: epoch}), at=START + at))
    await Serving.objects.all().adelete()

    async def away(*args):
        raise DatabaseAway("test")

    with monkeypatch.context() as patch, pytest.raises(DatabaseAway):
        patch.setattr(chronicle, "in_database", away)
        await kept.write(engine.worker.client)
    await kept.write(engine.worker.client)
    assert await sync_to_async(spells)() == [(1, 0, 7), (2, 7, 8), (3, 8, None)]
