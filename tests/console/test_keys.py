"""API keys: shown once, hashed, scoped, limited, expiring, revocable."""

from __future__ import annotations

import datetime
from io import StringIO

import pytest
from asgiref.sync import async_to_sync
from django.core.management import CommandError, call_command
from django.utils import timezone

from console import auth
from console.models import ApiKey
from console.services import inference, keys, limits
from engine.client import GenerateReqInput
from engine.errors import BadRequest
from engine.messages import SamplingParams


def authenticate(token: str) -> auth.Principal:
    keys._known.clear()
    return async_to_sync(keys.authenticate)(token)


def test_the_key_itself_is_stored_nowhere(make_key):
    token = make_key("inference")
    row = ApiKey.objects.values().get()
    assert token not in {str(value) for value in row.values()}
    assert token.startswith(row["prefix"])
    assert len(row["prefix"]) < 12


def test_scopes_become_rights(make_key):
    assert authenticate(make_key("inference")).may("use_inference")
    assert not authenticate(make_key("inference")).may("control_engine")
    control = authenticate(make_key("control"))
    assert control.may("control_engine")
    assert not control.may("use_inference")
    assert not control.may("manage_keys")
    assert not control.may("staff")


@pytest.mark.parametrize(
    "change",
    [
        {"expires_at": timezone.now() - datetime.timedelta(seconds=1)},
        {"revoked_at": timezone.now()},
    ],
)
def test_an_expired_or_revoked_key_is_nobody(make_key, change):
    token = make_key("inference")
    ApiKey.objects.update(**change)
    assert authenticate(token).kind == "anonymous"
    assert "expired or revoked" in authenticate(token).refusal


def test_a_key_dies_with_its_owners_account(make_key, make_user):
    user = make_user("operator")
    token = make_key("inference", owner_id=user.pk)
    assert authenticate(token).kind == "key"
    user.is_active = False
    user.save()
    assert authenticate(token).kind == "anonymous"


def test_use_is_noted_by_the_watch(make_key):
    make_key("inference")
    key = ApiKey.objects.get()
    keys.note_used({key.pk})
    key.refresh_from_db()
    assert key.last_used_at is not None


def test_a_known_key_costs_no_query(make_key, django_assert_num_queries):
    token = make_key("inference")
    authenticate(token)
    with django_assert_num_queries(0):
        async_to_sync(keys.authenticate)(token)


@pytest.mark.parametrize(
    "fields",
    [
        {"scopes": []},
        {"scopes": ["root"]},
        {"scopes": ["inference"], "name": " "},
        {"scopes": ["inference"], "expires_days": 0},
    ],
)
def test_a_senseless_key_is_refused(database, fields):
    with pytest.raises(BadRequest):
        keys.create_key(**({"name": "n"} | fields))


def test_the_rate_is_counted_here_when_valkey_is_away(make_key, settings, worker):
    settings.REDIS_URL = "unix:///nowhere.sock"
    limits._local.clear()
    principal = authenticate(make_key("inference", max_requests_per_minute=3))

    async def three_and_one() -> None:
        await limits.count_requests(principal, 3)
        with pytest.raises(limits.RateLimited) as refusal:
            await limits.count_requests(principal, 1)
        assert 1 <= refusal.value.retry_after_s <= 61
        await worker.valkey.aclose()

    async_to_sync(three_and_one)()


def test_answers_are_cut_to_the_keys_longest(make_key):
    principal = authenticate(make_key("inference", max_new_tokens=10))
    request = GenerateReqInput(
        text="x", sampling=SamplingParams(max_new_tokens=500, min_new_tokens=20)
    )
    [admitted] = async_to_sync(inference.admit)(principal, [request])
    assert admitted.sampling.max_new_tokens == 10
    assert admitted.sampling.min_new_tokens == 10


def test_the_command_prints_the_key_alone(database):
    out = StringIO()
    call_command("apikey", "create", "ci", "--scope", "inference", "--scope", "control", stdout=out)
    token = out.getvalue().strip()
    assert authenticate(token).actor == "key:ci"
    assert out.getvalue() == token + "\n"


def test_the_command_refuses_a_senseless_expiry(database):
    with pytest.raises(CommandError, match="expires_days"):
        call_command("apikey", "create", "ci", "--scope", "inference", "--expires-days", "0")


# ---------------------------------------------------------------- the page


def test_a_new_key_is_shown_once(sign_in):
    browser = sign_in("operator")
    form = {"name": "trainer", "scopes": ["inference", "control"], "expires_days": "30"}
    shown = browser.post("/keys/create/", form)
    token = shown.context["new_key"]["secret"]
    assert token in shown.content.decode()
    assert "no-store" in shown["Cache-Control"]
    assert token not in browser.get("/keys/").content.decode()
    assert authenticate(token).may("control_engine")


def test_the_form_says_what_is_wrong(sign_in):
    answer = sign_in("operator").post("/keys/create/", {"name": "x", "expires_days": "30"})
    assert answer.status_code == 400
    assert answer.context["form"].errors["scopes"]


def test_an_operator_sees_and_revokes_only_their_own(sign_in, make_key, make_user):
    make_key("inference", owner_id=make_user("admin").pk)
    browser = sign_in("operator")
    assert list(browser.get("/keys/").context["keys"]) == []
    browser.post(f"/keys/{ApiKey.objects.get().pk}/revoke/")
    assert ApiKey.objects.get().revoked_at is None


def test_an_admin_revokes_anybodys(sign_in, make_key):
    make_key("inference")
    browser = sign_in("admin")
    assert len(browser.get("/keys/").context["keys"]) == 1
    browser.post(f"/keys/{ApiKey.objects.get().pk}/revoke/")
    assert ApiKey.objects.get().state == "revoked"


def test_nobody_grants_a_key_rights_that_they_lack(make_user, client):
    from django.contrib.auth.models import Permission

    user = make_user("viewer")
    user.user_permissions.add(Permission.objects.get(codename="manage_keys"))
    client.force_login(user)
    answer = client.post("/keys/create/", {"name": "x", "scopes": ["control"]})
    assert answer.status_code == 400
    assert ApiKey.objects.count() == 0
