"""Fixtures of the console's tests: a worker of this process, accounts with roles, keys."""

from __future__ import annotations

import pytest
from django.contrib.auth.models import Group, User
from django.test import Client

from console import worker as worker_module
from console.services import keys as key_service
from console.worker import Worker, become


@pytest.fixture(autouse=True)
def _quick_settings(settings):
    settings.PASSWORD_HASHERS = ["django.contrib.auth.hashers.MD5PasswordHasher"]
    settings.CHANNEL_LAYERS = {"default": {"BACKEND": "channels.layers.InMemoryChannelLayer"}}


@pytest.fixture(autouse=True)
def worker(_quick_settings):
    """This process as web worker 1, without an engine."""
    before = worker_module._current
    become(Worker("1", "/nowhere/worker-1.sock"))
    key_service._known.clear()
    yield worker_module.this_worker()
    worker_module._current = before


@pytest.fixture
def database(transactional_db, django_db_serialized_rollback):
    """Real transactions, since async code reads from other threads; the roles are there again."""


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
