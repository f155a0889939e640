"""Profiles and dumps come through the one door: each way the same job, and no way for a viewer."""

from __future__ import annotations

import asyncio

import pytest

from console.models import AuditEntry, Dump, Job, Profile
from console.services import control, sending
from engine import messages as m
from tests.console.ways import WAYS, Deed, signed_in

STEPS = {"num_steps": 2}
POINTS = {"modules": "model.layers.*", "kinds": "output, logits", "layers": "0-1", "max_steps": 2}
DEEDS = {
    "profile": Deed(name="profile", route="/start_profile", menu="profile_merge", form=STEPS,
                    fields=STEPS | {"merge_profiles": True}),
    "dump": Deed(name="dump", route="/lazy_dump_tensors", menu="lazy_dump", fields=POINTS),
}  # fmt: skip
ROWS = {"profile": Profile, "dump": Dump}
STARTS = {"profile": m.StartProfile, "dump": m.ArmDump}


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(sending, "ASK_EVERY_S", 0.02)


@pytest.mark.parametrize("kind", DEEDS)
@pytest.mark.parametrize("way", WAYS)
async def test_a_recording_is_the_same_job_whichever_way_it_came(
    way, kind, engine, make_user, make_key
):
    deed = DEEDS[kind]
    assert await WAYS[way](deed, make_user, make_key, "operator")
    await asyncio.gather(*control._works)
    job = await Job.objects.aget(kind=kind)
    row = await ROWS[kind].objects.aget()
    assert (job.state, job.via, job.reason) == ("done", way, "test"), job.message
    assert job.args == deed.fields | {"recording_id": row.recording_id}
    assert (job.target, job.title) == (row.recording_id, f"{kind.title()} {row.recording_id}")
    assert [rank["state"] for rank in job.ranks] == ["done", "done"]
    assert (row.job_id, row.actor, row.reason) == (job.pk, job.actor, "test")
    assert sorted(row.ranks) == ["dp0-tp0", "dp1-tp0"]
    entry = await AuditEntry.objects.aget(action=kind)
    assert (entry.target, entry.result, entry.job) == (row.recording_id, "done", job.pk)
    assert (entry.via, entry.reason, entry.actor) == (way, "test", job.actor)
    started = [op for _, op in engine.ranks.calls if isinstance(op, STARTS[kind])]
    assert len(started) == 2 and started[0] == started[1]


@pytest.mark.parametrize("kind", DEEDS)
@pytest.mark.parametrize("way", WAYS)
async def test_a_viewer_records_nothing_whichever_way_it_came(
    way, kind, engine, make_user, make_key
):
    assert not await WAYS[way](DEEDS[kind], make_user, make_key, "viewer")
    assert not await Job.objects.aexists() and not await ROWS[kind].objects.aexists()
    assert engine.ranks.calls == []
    assert {entry.result async for entry in AuditEntry.objects.all()} <= {"denied"}


async def test_a_viewer_looks_at_recordings_and_changes_none(database, make_user):
    viewer = await signed_in(make_user, "viewer")
    for kind, model in ROWS.items():
        await model.objects.acreate(recording_id="r1", directory="/nowhere", state="ready")
        assert (await viewer.get(f"/api/{kind}s/r1")).status_code == 200
        for send in (viewer.patch, viewer.delete):
            answer = await send(f"/api/{kind}s/r1", {"pinned": True}, "application/json")
            assert answer.status_code == 403
        stop = await viewer.post(f"/api/control/stop_{kind}", {}, "application/json")
        assert stop.status_code == 403
        assert not (await model.objects.aget()).pinned
