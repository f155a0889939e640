"""Fixtures of the console's tests: a worker of this process, accounts with roles, keys."""

from __future__ import annotations

import asyncio

import pytest
from django.contrib.auth.models import Group, User
from django.db import connection
from django.test import Client

from console import auth
from console import worker as worker_module
from console.models.audit import GUARDS, UNGUARDS
from console.services import control, reconcile
from console.services import keys as key_service
from console.worker import Worker, become
from engine.client import EngineClient
from tests.console.engine import in_process_engine


@pytest.fixture(autouse=True)
def _quick_settings(settings, monkeypatch):
    monkeypatch.setenv("CELERY_BROKER_URL", "memory://")
    settings.PASSWORD_HASHERS = ["django.contrib.auth.hashers.MD5PasswordHasher"]
    settings.CHANNEL_LAYERS = {"default": {"BACKEND": "channels.layers.InMemoryChannelLayer"}}


@pytest.fixture(autouse=True)
def worker(_quick_settings):
    """This process as web worker 1, without an engine."""
    before = worker_module._current
    become(Worker("1", "/nowhere/worker-1.sock"))
    key_service._known.clear()
    auth._seen_sessions.clear()
    yield worker_module.this_worker()
    worker_module._current = before


@pytest.fixture
def database(transactional_db, django_db_serialized_rollback):
    """Real transactions, since async code reads from other threads; the roles are there again.

    Afterwards every table is emptied, the audit too: only without its guards.
    """
    _execute(GUARDS)
    yield
    _execute(UNGUARDS)


def _execute(statements: dict[str, list[str]]) -> None:
    with connection.cursor() as cursor:
        for statement in statements[connection.vendor]:
            cursor.execute(statement)


@pytest.fixture
def make_user(database):
    """``make_user("operator")`` is a user of that name and role."""

    def make(role: str, **fields) -> User:
        user = User.objects.create_user(fields.pop("username", role), password="pw", **fields)
        user.groups.add(Group.objects.get(name=role))
        return user

    return make


@pytest.fixture
def sign_in(make_user):
    """A browser that is signed in as a new user of a role."""

    def sign(role: str, **fields) -> Client:
        client = Client()
        client.force_login(make_user(role, **fields))
        return client

    return sign


@pytest.fixture
def make_key(database):
    """``make_key("inference", expires_days=1)`` is the key itself."""

    def make(*scopes: str, **fields) -> str:
        return key_service.create_key(name="test", scopes=list(scopes), **fields)[1]

    return make


@pytest.fixture
async def engine(tmp_path, settings, worker, database):
    """A small engine that this worker is joined to; its home is the console's home."""
    settings.QUARTERDECK_HOME = tmp_path
    with in_process_engine(tmp_path) as engine:
        client = await EngineClient.connect(
            engine.run_file, kind="web", worker_id="1", timeout_s=10
        )
        worker.client = engine.client = client
        client.subscribe(worker.chronicle.put)
        engine.worker = worker
        await serving(client)
        worker.chronicle.put(client.snapshot)
        await worker.chronicle.write(client)
        yield engine
        await control.close()
        await reconcile.close()
        await client.close()
        worker.client = None


async def serving(client: EngineClient) -> None:
    """Until every rank has reported."""
    async with asyncio.timeout(10):
        while client.snapshot is None or any(r.state != "running" for r in client.snapshot.ranks):
            await asyncio.sleep(0.02)
