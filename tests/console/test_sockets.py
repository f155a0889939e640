"""Open sockets: commands after logout, lost rights, bad frames, and the live picture."""

from __future__ import annotations

import asyncio
from typing import get_args

import pytest
from asgiref.sync import sync_to_async
from django.contrib.auth.models import Group
from django.db import transaction
from django.test import AsyncClient

from console import auth, events
from console.asgi import application
from console.lifespan import on_hint
from console.services import sockets as socket_service
from engine.messages import EngineView, FleetSnapshot, RankView
from tests.console.communicator import OURS, Socket, cookie_for

RESUME = {"type": "resume", "stream": "s", "next": 0}


@pytest.fixture
async def hints(worker):
    listener = asyncio.create_task(events.listen(on_hint))
    await asyncio.sleep(0.01)
    yield
    listener.cancel()
    await asyncio.gather(listener, return_exceptions=True)


async def open_socket(path: str, *headers) -> Socket:
    socket = Socket(application, path, *headers)
    assert await socket.open() == "open"
    return socket


async def test_a_command_after_logout_is_refused_and_the_socket_closes(make_user):
    """C15."""
    client = AsyncClient()
    await client.aforce_login(await sync_to_async(make_user)("operator"))
    cookie = (b"cookie", f"quarterdeck_session={client.session.session_key}".encode())
    socket = await open_socket("/ws/chat/", OURS, cookie)
    await client.post("/logout/")
    await socket.say(RESUME)
    assert await socket.hear() == {"type": "close", "code": 4401}
    await socket.leave()


async def test_logout_closes_sockets_that_say_nothing(make_user, hints):
    """C15."""
    client = AsyncClient()
    await client.aforce_login(await sync_to_async(make_user)("operator"))
    cookie = (b"cookie", f"quarterdeck_session={client.session.session_key}".encode())
    chat = await open_socket("/ws/chat/", OURS, cookie)
    await client.post("/logout/")
    assert await chat.hear() == {"type": "close", "code": 4401}
    await chat.leave()


async def test_a_lost_hint_is_made_up_for_by_the_sweep(make_user, worker, monkeypatch):
    monkeypatch.setattr(socket_service, "SWEEP_S", 0.05)
    sweep = asyncio.create_task(worker.sockets.sweep())
    client = AsyncClient()
    await client.aforce_login(await sync_to_async(make_user)("operator"))
    cookie = (b"cookie", f"quarterdeck_session={client.session.session_key}".encode())
    chat = await open_socket("/ws/chat/", OURS, cookie)
    await client.post("/logout/")
    assert await chat.hear() == {"type": "close", "code": 4401}
    await chat.leave()
    sweep.cancel()
    assert len(worker.sockets) == 0


async def test_a_demoted_user_cannot_go_on_commanding(make_user):
    """C15."""
    user = await sync_to_async(make_user)("operator")
    client = AsyncClient()
    await client.aforce_login(user)
    cookie = (b"cookie", f"quarterdeck_session={client.session.session_key}".encode())
    socket = await open_socket("/ws/chat/", OURS, cookie)
    await user.groups.aset([await Group.objects.aget(name="viewer")])
    await socket.say(RESUME)
    frame = await socket.hear()
    assert frame["error"]["type"] == "forbidden"
    await socket.leave()


async def test_a_revoked_key_closes_its_sockets(make_key, hints):
    from console.models import ApiKey
    from console.services import keys

    token = await sync_to_async(make_key)("inference")
    socket = await open_socket("/ws/chat/", (b"authorization", f"Bearer {token}".encode()))
    admin = auth.Principal(kind="session", permissions=frozenset({"manage_all_keys"}))
    key = await ApiKey.objects.aget()
    await sync_to_async(keys.revoke_key)(key_id=key.pk, principal=admin)
    assert await socket.hear() == {"type": "close", "code": 4401}
    await socket.leave()


@pytest.mark.parametrize(
    "frame",
    [
        "not json",
        "[]",
        '{"type": "dance"}',
        '{"type": "start"}',
        '{"type": "stop", "stream": 3}',
        '{"type": "stop", "x":' + "[" * 5000,
        '{"type": "stop", "stream": "\\ud800"}',
        '{"type": "resume", "stream": "s", "next": 99999999999999999999}',
    ],
)
async def test_a_bad_frame_is_answered_and_the_socket_stays(frame, sign_in):
    socket = await open_socket("/ws/chat/", OURS, await cookie_for(sign_in, "operator"))
    await socket.say(frame)
    answer = await socket.hear()
    assert answer["type"] == "error"
    assert answer["error"]["status_code"] == 400
    await socket.say(RESUME)
    assert (await socket.hear())["error"]["type"] == "stream_unknown"
    await socket.leave()


async def test_a_bad_parameter_names_its_field(sign_in):
    socket = await open_socket("/ws/chat/", OURS, await cookie_for(sign_in, "operator"))
    await socket.say({"type": "start", "stream": "s", "text": "x", "params": {"top_p": 0}})
    assert "$.params.top_p" in (await socket.hear())["error"]["message"]
    await socket.leave()


async def test_without_an_engine_a_start_is_refused_with_a_sentence(sign_in):
    socket = await open_socket("/ws/chat/", OURS, await cookie_for(sign_in, "operator"))
    await socket.say({"type": "start", "stream": "s", "text": "hello"})
    answer = await socket.hear()
    assert (answer["stream"], answer["error"]["type"]) == ("s", "engine_unreachable")
    await socket.leave()


async def test_a_ticket_opens_a_socket_for_the_key_that_asked_for_it(make_key):
    token = await sync_to_async(make_key)("inference")
    answer = await AsyncClient().post(
        "/api/ws-ticket", headers={"Authorization": f"Bearer {token}"}
    )
    socket = await open_socket(f"/ws/fleet/?ticket={answer.json()['ticket']}")
    assert (await socket.hear())["type"] == "snapshot"
    await socket.leave()


async def test_a_relay_counts_on_the_unix_socket_alone(make_user):
    user = await sync_to_async(make_user)("operator")
    principal = await sync_to_async(auth.principal_of_user)(user)
    header = (auth.RELAY_HEADER.encode(), auth.sign_relay(principal, via="2").encode())
    public = Socket(application, "/ws/chat/", header)
    assert await public.open() == "open"
    assert await public.hear() == {"type": "close", "code": 4401}
    private = Socket(application, "/ws/chat/", header, server=("/run/worker-1.sock", None))
    assert await private.open() == "open"
    await private.say(RESUME)
    assert (await private.hear())["type"] == "error"
    await private.leave()


async def test_a_forged_relay_is_refused_on_the_unix_socket_too(make_user):
    await sync_to_async(make_user)("operator")
    forged = (auth.RELAY_HEADER.encode(), b"eyJ1c2VyIjoxfQ:forged")
    socket = Socket(application, "/ws/chat/", forged, server=("/run/worker-1.sock", None))
    assert await socket.open() == "open"
    assert await socket.hear() == {"type": "close", "code": 4401}


# ---------------------------------------------------------------- hints


def test_every_event_is_in_the_union_and_every_one_is_handled(worker):
    assert set(get_args(events.Known)) == set(events.Event.__subclasses__())
    on_hint(events.SessionEnded(session="x"))
    on_hint(events.KeyRevoked(key_id=1))


def test_a_hint_is_small_and_waits_for_the_commit(database, monkeypatch):
    sent = []
    monkeypatch.setattr(events, "_send", sent.append)
    with pytest.raises(ValueError, match="4096"):
        events.publish_on_commit(events.SessionEnded(session="x" * 5000))
    with transaction.atomic():
        events.publish_on_commit(events.KeyRevoked(key_id=1))
        assert sent == []
    assert len(sent) == 1


def test_a_broker_that_is_away_costs_a_hint_and_nothing_else(database, settings, caplog):
    settings.CHANNEL_LAYERS = {
        "default": {
            "BACKEND": "channels_redis.core.RedisChannelLayer",
            "CONFIG": {"hosts": ["unix:///nowhere.sock"]},
        }
    }
    events.publish_on_commit(events.KeyRevoked(key_id=1))
    assert "a hint was lost" in caplog.text


# ---------------------------------------------------------------- the live picture


def snapshot(running: int) -> FleetSnapshot:
    engine = EngineView(
        state="running", epoch=1, weight_version="v1", token_step=7, model="m", generation=1
    )
    rank = RankView(
        dp=0,
        tp=0,
        pid=1,
        state="running",
        epoch=1,
        weight_version="v1",
        token_step=7,
        running=running,
        waiting=0,
        kv_used=0,
        kv_total=10,
        tokens_per_s=0.0,
        step_s=0.0,
        rss_bytes=0,
        seen_at=0.0,
    )
    return FleetSnapshot(seq=1, at=1.0, engine=engine, workers=[], ranks=[rank])


async def test_the_fleet_is_whole_at_first_and_then_what_changed(sign_in, worker):
    worker.feed.put(snapshot(0))
    socket = await open_socket("/ws/fleet/", OURS, await cookie_for(sign_in, "viewer"))
    first = await socket.hear()
    assert first["type"] == "snapshot"
    assert first["engine"]["weight_version"] == "v1"
    worker.feed.put(snapshot(3))
    second = await socket.hear()
    assert second["type"] == "delta"
    assert second["seq"] == first["seq"] + 1
    assert second["ranks"][0]["running"] == 3
    assert "engine" not in second
    await socket.leave()


async def test_a_socket_that_missed_a_picture_gets_the_whole_one(sign_in, worker):
    socket = await open_socket("/ws/fleet/", OURS, await cookie_for(sign_in, "viewer"))
    await socket.hear()
    worker.feed.put(snapshot(1))
    worker.feed.put(snapshot(2))
    frame = await socket.hear()
    assert (frame["type"], frame["ranks"][0]["running"]) == ("snapshot", 2)
    await socket.leave()


async def test_a_client_that_saw_a_gap_asks_for_the_whole_picture(sign_in, worker):
    socket = await open_socket("/ws/fleet/", OURS, await cookie_for(sign_in, "viewer"))
    await socket.hear()
    await socket.say({"type": "snapshot"})
    assert (await socket.hear())["type"] == "snapshot"
    await socket.leave()


async def test_a_hidden_tab_is_left_in_peace_until_it_is_shown(sign_in, worker):
    socket = await open_socket("/ws/fleet/", OURS, await cookie_for(sign_in, "viewer"))
    await socket.hear()
    await socket.say({"type": "rate", "hidden": True})
    await asyncio.sleep(0.05)
    worker.feed.put(snapshot(1))
    await socket.hear()  # the one that was on its way
    worker.feed.put(snapshot(2))
    assert await socket.receive_nothing(timeout=0.1)
    await socket.say({"type": "rate", "hidden": False})
    assert (await socket.hear())["ranks"][0]["running"] == 2
    await socket.leave()


async def test_silence_of_the_engine_is_shown_as_such(worker, monkeypatch):
    from console.services import feed

    worker.feed.put(snapshot(1))
    monkeypatch.setattr(feed, "QUIET_S", 0.0)
    watch = asyncio.create_task(worker.feed.watch())
    seen = worker.feed.seq
    await asyncio.wait_for(worker.feed.after(seen), 3)
    watch.cancel()
    assert b'"unreachable"' in worker.feed.snapshot
