"""Settings, database, secrets, headers, imports: what everything else stands on."""

from __future__ import annotations

import datetime
import os
import re
import stat
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from asgiref.sync import sync_to_async
from django.core.checks import run_checks
from django.db import connection
from django.test import AsyncClient, Client
from django.utils import timezone
from django_celery_beat.models import IntervalSchedule, PeriodicTask
from django_celery_beat.schedulers import ModelEntry

from console.apps import check_connections, check_layer, check_pragmas
from console.celery import app as celery
from console.secrets import persistent_secret
from console.version import VERSION

ROOT = Path(__file__).resolve().parent.parent.parent


def in_a_new_process(code: str, tmp_path: Path, **environment: str) -> subprocess.CompletedProcess:
    env = {**os.environ, "QUARTERDECK_HOME": str(tmp_path), "OMP_NUM_THREADS": "1", **environment}
    return subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env=env,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


# ---------------------------------------------------------------- settings


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("QUARTERDECK_WORKERS", "two"),
        ("QUARTERDECK_WORKERS", "0"),
        ("QUARTERDECK_RESUME_GRACE_S", "-1"),
        ("QUARTERDECK_DTYPE", "fp7"),
        ("QUARTERDECK_DP", "0"),
    ],
)
def test_a_bad_setting_stops_the_start_with_a_sentence(name, value, tmp_path):
    code = "import sys; sys.argv = ['manage.py', 'check']; import manage; manage.main()"
    done = in_a_new_process(code, tmp_path, **{name: value})
    assert done.returncode == 1
    assert done.stderr.startswith("Configuration: ")
    assert name.removeprefix("QUARTERDECK_").lower() in done.stderr.lower()
    assert "Traceback" not in done.stderr


def test_only_the_settings_read_the_environment():
    reads = re.compile(r"os\.environ\.get|os\.getenv|os\.environ\[[^]]+\](?! =)|from_env\(")
    readers = {
        str(path.relative_to(ROOT))
        for path in (ROOT / "console").rglob("*.py")
        if reads.search(path.read_text())
    }
    assert readers == {"console/settings.py"}


def test_a_home_too_deep_for_sockets_gets_a_short_private_place(tmp_path):
    deep = tmp_path / ("d" * 60) / ("e" * 60)
    code = "from django.conf import settings as s; print(s.QUARTERDECK_SOCKETS)"
    done = in_a_new_process(
        code, deep, DJANGO_SETTINGS_MODULE="console.settings", QUARTERDECK_HOME=str(deep)
    )
    assert len(done.stdout.strip()) < 80, done.stderr


def test_the_version_is_the_one_of_pyproject_and_changelog():
    pyproject = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert pyproject["project"]["version"] == VERSION
    assert VERSION in (ROOT / "CHANGELOG.md").read_text()


def test_a_secret_is_made_once_and_is_private(tmp_path):
    path = tmp_path / "home" / "secret.key"
    first = persistent_secret(path)
    assert persistent_secret(path) == first
    assert len(first) > 60
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert [p.name for p in path.parent.iterdir()] == ["secret.key"]


# ---------------------------------------------------------------- database


@pytest.mark.django_db
def test_sqlite_took_the_options_that_were_meant_for_it():
    """C8."""
    assert check_pragmas(None, databases=["default"]) == []
    with connection.cursor() as cursor:
        cursor.execute("PRAGMA journal_mode")
        assert cursor.fetchone() == ("wal",)


@pytest.mark.django_db
def test_options_in_the_wrong_place_are_reported(monkeypatch):
    """C8."""
    monkeypatch.setitem(connection.settings_dict, "OPTIONS", {})
    with connection.cursor() as cursor:
        cursor.execute("PRAGMA busy_timeout = 5")
    try:
        found = {check.id for check in check_pragmas(None, databases=["default"])}
        assert found == {"console.E004", "console.E006"}
    finally:
        with connection.cursor() as cursor:
            cursor.execute("PRAGMA busy_timeout = 20000")


WRITER = """
import django, sys, time
django.setup()
from django.db import transaction
from console.models import ApiKey
deadline, done = time.monotonic() + 3, 0
while time.monotonic() < deadline:
    with transaction.atomic():
        key = ApiKey.objects.get()
        key.max_new_tokens += 1
        key.save()
    done += 1
print(done)
"""


def test_two_processes_that_read_and_write_never_meet_a_locked_database(tmp_path):
    """C8: deferred transactions would fail here at once, whatever the timeout."""
    env = {"DJANGO_SETTINGS_MODULE": "console.settings"}
    prepare = (
        "import django; django.setup()\n"
        "from django.core.management import call_command; call_command('migrate', verbosity=0)\n"
        "from console.services.keys import create_key; create_key(name='n', scopes=['control'])"
    )
    made = in_a_new_process(prepare, tmp_path, **env)
    assert made.returncode == 0, made.stderr
    full = {**os.environ, **env, "QUARTERDECK_HOME": str(tmp_path)}
    writers = [
        subprocess.Popen(
            [sys.executable, "-c", WRITER],
            cwd=ROOT,
            env=full,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for _ in range(2)
    ]
    outputs = [writer.communicate(timeout=60) for writer in writers]
    assert all(writer.returncode == 0 for writer in writers), outputs
    done = sum(int(out) for out, _ in outputs)
    count = (
        "import django; django.setup()\n"
        "from console.models import ApiKey; print(ApiKey.objects.get().max_new_tokens)"
    )
    assert int(in_a_new_process(count, tmp_path, **env).stdout) == done > 20


# ---------------------------------------------------------------- beat


@pytest.mark.django_db
@pytest.mark.parametrize("time_zone", ["UTC", "America/New_York", "Asia/Kolkata"])
def test_beat_is_due_neither_an_hour_late_nor_again_and_again(settings, time_zone):
    """C23: whatever the clock on the wall says, and once after it was away for a day."""
    settings.TIME_ZONE = time_zone
    every = IntervalSchedule.objects.create(every=60, period="seconds")
    now = timezone.now()
    for age_s, due in ((30, False), (61, True), (86_400, True)):
        last = now - datetime.timedelta(seconds=age_s)
        row = PeriodicTask.objects.create(
            name=f"{age_s} s ago", task="console.reconcile", interval=every, last_run_at=last
        )
        entry = ModelEntry(PeriodicTask.objects.get(pk=row.pk), app=celery)
        is_due, next_s = entry.is_due()
        assert is_due is due
        assert 25 <= next_s <= 60
        assert next(entry).is_due()[0] is False


def test_beat_reads_its_rows_in_utc(settings):
    """C23."""
    assert (settings.USE_TZ, celery.conf.timezone) == (True, "UTC")
    assert celery.conf.beat_scheduler.endswith(":DatabaseScheduler")


# ---------------------------------------------------------------- checks


def test_the_project_passes_its_own_checks(settings):
    settings.QUARTERDECK_WORKERS = 1  # the tests' in-memory layer allows no more
    assert run_checks() == []


def test_an_in_memory_layer_with_two_workers_is_refused(settings):
    """C2."""
    settings.QUARTERDECK_WORKERS = 2
    assert [error.id for error in check_layer(None)] == ["console.E002"]
    settings.QUARTERDECK_WORKERS = 1
    assert check_layer(None) == []


def test_persistent_connections_are_refused(settings, monkeypatch):
    """C7."""
    monkeypatch.setitem(settings.DATABASES["default"], "CONN_MAX_AGE", 60)
    assert [error.id for error in check_connections(None)] == ["console.E003"]


def test_a_route_that_declares_no_access_is_an_error_at_start(settings):
    from django.http import HttpResponse
    from django.urls import path

    from console.apps import check_routes

    class Routes:
        urlpatterns = [path("forgotten", lambda request: HttpResponse())]

    settings.ROOT_URLCONF = Routes
    [error] = check_routes(None)
    assert error.id == "console.E001"
    assert "forgotten" in error.msg


def test_the_doctor_says_what_is_wrong_and_what_to_do(tmp_path):
    code = "import sys; sys.argv = ['manage.py', 'doctor']; import manage; manage.main()"
    done = in_a_new_process(code, tmp_path, QUARTERDECK_MODEL=str(tmp_path / "none"))
    assert done.returncode == 1
    lines = done.stdout.splitlines()
    at = lines.index(f" bad  no model in {tmp_path / 'none'}")
    assert "manage.py model pull" in lines[at + 1]
    assert any(line.startswith("  ok  Python") for line in lines)


# ---------------------------------------------------------------- headers


PAGES = ["/fleet/", "/playground/", "/connect/", "/keys/", "/admin/"]


def assert_safe(response):
    policy = response["Content-Security-Policy"]
    assert "script-src 'self'" in policy
    assert "unsafe" not in policy
    assert response["X-Content-Type-Options"] == "nosniff"
    assert response["X-Frame-Options"] == "DENY"
    assert response["X-Quarterdeck-Worker"] == response["X-Quarterdeck-Via"] == "1"


def test_every_page_carries_the_policy_and_no_inline_script(make_user, client):
    user = make_user("admin", is_staff=True, is_superuser=True)
    assert_safe(client.get("/"))
    client.force_login(user)
    for page in PAGES:
        response = client.get(page)
        assert response.status_code == 200, page
        assert_safe(response)
        html = response.content.decode()
        scripts = re.findall(r"<script\b([^>]*)>", html)
        assert all("src=" in s or "application/json" in s for s in scripts), page
        assert not re.search(r"\son\w+=|\sstyle=|<style", html), page


@pytest.mark.parametrize("path", ["/health", "/ready", "/v1/models", "/nothing", "/static/x.js"])
def test_every_answer_names_its_worker(path, database):
    assert_safe(Client().get(path))


async def test_a_fault_of_ours_is_named_by_an_id_that_the_log_has(make_key, monkeypatch, caplog):
    async def broken():
        raise ValueError("a bug")

    monkeypatch.setattr("console.services.fleet.read_fleet", broken)
    bearer = {"Authorization": f"Bearer {await sync_to_async(make_key)('control')}"}
    client = AsyncClient(raise_request_exception=False)
    response = await client.get("/api/fleet", headers=bearer)
    assert response.status_code == 500
    message = response.json()["error"]["message"]
    assert "a bug" not in message
    identity = message.split()[2].rstrip(";")
    assert identity in caplog.text
    assert "ValueError: a bug" in caplog.text
    assert_safe(response)


def test_signing_in_goes_to_the_fleet_and_signing_out_to_the_form(make_user):
    browser = Client()
    make_user("operator")
    assert browser.get("/").status_code == 200
    wrong = browser.post("/", {"username": "operator", "password": "wrong"})
    assert wrong.status_code == 200
    assert wrong.context["form"].errors
    entered = browser.post("/", {"username": "operator", "password": "pw"})
    assert entered["Location"] == "/fleet/"
    assert browser.get("/")["Location"] == "/fleet/"
    assert browser.get("/logout/").status_code == 405
    assert browser.post("/logout/")["Location"] == "/"
    assert browser.get("/fleet/")["Location"] == "/?next=/fleet/"


def test_the_sign_in_returns_to_our_own_pages_only(make_user):
    make_user("operator")
    form = {"username": "operator", "password": "pw", "next": "https://evil.example/"}
    assert Client().post("/", form)["Location"] == "/fleet/"


# ---------------------------------------------------------------- imports


def test_a_web_worker_imports_no_torch_triton_or_transformers(tmp_path):
    code = (
        "import sys, console.asgi, console.serving\n"
        "heavy = {'torch', 'triton', 'transformers', 'safetensors'} & set(sys.modules)\n"
        "print(heavy)"
    )
    assert in_a_new_process(code, tmp_path).stdout.strip() == "set()"


def test_settings_stay_short():
    assert len((ROOT / "console/settings.py").read_text().splitlines()) < 200
