"""Settings of the console. The only file of the console that reads the environment.

The engine's settings are read by ``engine/config.py``; both follow ``QUARTERDECK_HOME``.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
from pathlib import Path
from typing import Any

import dj_database_url
from django.core.exceptions import ImproperlyConfigured

from console import logs
from console.secrets import persistent_secret
from engine.config import from_env
from engine.errors import ConfigError
from engine.runfile import run_file_path

BASE_DIR = Path(__file__).resolve().parent.parent
UNIX_PATH_MAX = 107  # bytes of a socket's path that the kernel takes


def _number(name: str, default: float, *, minimum: float = 0) -> float:
    """A number out of the environment; a bad one stops the start with a sentence."""
    raw = os.environ.get(name) or str(default)
    try:
        value = float(raw)
    except ValueError:
        raise ImproperlyConfigured(f"{name} must be a number, got {raw!r}") from None
    if value < minimum:
        raise ImproperlyConfigured(f"{name} must be at least {minimum:g}, got {raw}")
    return value


def _words(name: str) -> list[str]:
    return [word.strip() for word in os.environ.get(name, "").split(",") if word.strip()]


def _socket_directory(home: Path) -> Path:
    """``home/run``, or a short private directory when sockets would not fit there."""
    if len(str(home / "run" / "worker-999.sock").encode()) <= UNIX_PATH_MAX:
        return home / "run"
    mark = hashlib.sha256(str(home).encode()).hexdigest()[:16]
    return Path(tempfile.gettempdir()) / f"quarterdeck-{os.getuid()}-{mark}"


try:
    QUARTERDECK_ENGINE = from_env(os.environ)
except ConfigError as error:
    raise ImproperlyConfigured(error.message) from error

QUARTERDECK_HOME = Path(QUARTERDECK_ENGINE.home)
QUARTERDECK_SOCKETS = _socket_directory(QUARTERDECK_HOME)
QUARTERDECK_RUN_FILE = run_file_path(QUARTERDECK_HOME)
QUARTERDECK_HOST = os.environ.get("QUARTERDECK_HOST") or "127.0.0.1"
QUARTERDECK_PORT = int(_number("QUARTERDECK_PORT", 8000))
QUARTERDECK_WORKERS = int(_number("QUARTERDECK_WORKERS", 2, minimum=1))
QUARTERDECK_ADMIN_PASSWORD = os.environ.get("QUARTERDECK_ADMIN_PASSWORD", "")
QUARTERDECK_RESUME_GRACE_S = _number("QUARTERDECK_RESUME_GRACE_S", 8)
QUARTERDECK_WEIGHT_ROOTS = [Path(root).resolve() for root in _words("QUARTERDECK_WEIGHT_ROOTS")]
QUARTERDECK_DISK_QUOTA_GB = _number("QUARTERDECK_DISK_QUOTA_GB", 50)  # spools, traces, dumps
QUARTERDECK_CHAT_RETENTION_DAYS = _number("QUARTERDECK_CHAT_RETENTION_DAYS", 90)  # 0: for ever

# ---------------------------------------------------------------- Django

SECRET_KEY = persistent_secret(QUARTERDECK_HOME / "secret.key")
DEBUG = False
ALLOWED_HOSTS = ["localhost", "127.0.0.1", "[::1]", QUARTERDECK_HOST]
ALLOWED_HOSTS += _words("QUARTERDECK_ALLOWED_HOSTS")
CSRF_TRUSTED_ORIGINS = _words("QUARTERDECK_TRUSTED_ORIGINS")  # https://console.example.org
ROOT_URLCONF = "console.urls"
ASGI_APPLICATION = "console.asgi.application"
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"
USE_TZ = True
TIME_ZONE = "UTC"
LOGIN_URL = "/"
LOGIN_REDIRECT_URL = "/fleet/"
DATA_UPLOAD_MAX_MEMORY_SIZE = 64 * 2**20  # batches of token ids

INSTALLED_APPS = [
    "console.apps.ConsoleConfig",
    "django.contrib.admin",
    "django.contrib.auth",
    "django.contrib.contenttypes",
    "django.contrib.sessions",
    "django.contrib.messages",
    "django.contrib.staticfiles",
    "channels",
    "django_celery_beat",
]
MIDDLEWARE = [
    "console.middleware.EdgeMiddleware",
    "servestatic.middleware.ServeStaticMiddleware",
    "console.middleware.SecurityMiddleware",
    "console.middleware.SessionMiddleware",
    "console.middleware.CommonMiddleware",
    "console.middleware.AccessMiddleware",  # before CSRF: who has no key is told so
    "console.middleware.CsrfViewMiddleware",
    "console.middleware.AuthenticationMiddleware",
    "console.middleware.MessageMiddleware",
]
TEMPLATES: list[dict[str, Any]] = [
    {
        "BACKEND": "django.template.backends.django.DjangoTemplates",
        "DIRS": [BASE_DIR / "templates"],
        "APP_DIRS": True,
        "OPTIONS": {
            "context_processors": [
                "django.template.context_processors.request",
                "django.contrib.auth.context_processors.auth",
                "django.contrib.messages.context_processors.messages",
                "console.views.context.shell",
            ]
        },
    }
]

# ---------------------------------------------------------------- safety in the browser

# Django 6's names; console/middleware.py applies them on 5.2 as well.
SECURE_CSP = {
    "default-src": ["'self'"],
    "script-src": ["'self'"],
    "style-src": ["'self'"],
    "img-src": ["'self'", "data:"],
    "connect-src": ["'self'"],
    "object-src": ["'none'"],
    "base-uri": ["'none'"],
    "form-action": ["'self'"],
    "frame-ancestors": ["'none'"],
}
_https = os.environ.get("QUARTERDECK_HTTPS", "") == "1"  # behind a proxy that speaks TLS
SECURE_PROXY_SSL_HEADER = ("HTTP_X_FORWARDED_PROTO", "https") if _https else None
SESSION_COOKIE_SECURE = CSRF_COOKIE_SECURE = _https
SESSION_COOKIE_SAMESITE = "Lax"
SESSION_COOKIE_NAME = "quarterdeck_session"
CSRF_FAILURE_VIEW = "console.views.errors.csrf_failure"
CSRF_COOKIE_NAME = "quarterdeck_csrf"

# ---------------------------------------------------------------- static files

STATIC_URL = "/static/"
STATICFILES_DIRS = [BASE_DIR / "static"]
SERVESTATIC_USE_FINDERS = True
SERVESTATIC_ALLOW_ALL_ORIGINS = False
SERVESTATIC_MAX_AGE = 60

# ---------------------------------------------------------------- database

_SQLITE_OPTIONS = {
    "transaction_mode": "IMMEDIATE",  # a reader that turns writer would be refused at once
    "timeout": 20,
    "init_command": "PRAGMA journal_mode=WAL; PRAGMA synchronous=NORMAL;",
}
_database = dict(
    dj_database_url.parse(
        os.environ.get("DATABASE_URL") or f"sqlite:///{QUARTERDECK_HOME / 'console.sqlite3'}",
        conn_max_age=0,
    )
)
if _database["ENGINE"] == "django.db.backends.sqlite3":
    _database["OPTIONS"] = _SQLITE_OPTIONS
    _database["TEST"] = {"NAME": QUARTERDECK_HOME / "test.sqlite3"}
elif _database["ENGINE"] == "django.db.backends.postgresql":
    _database["OPTIONS"] = {"pool": {"min_size": 1, "max_size": 8}}
DATABASES = {"default": _database}

# ---------------------------------------------------------------- hints and tasks

QUARTERDECK_OWN_VALKEY = not os.environ.get("REDIS_URL")  # the supervisor starts one
REDIS_URL = os.environ.get("REDIS_URL") or f"unix://{QUARTERDECK_SOCKETS / 'valkey.sock'}"
CHANNEL_LAYERS = {
    "default": {
        "BACKEND": "channels_redis.core.RedisChannelLayer",
        "CONFIG": {"hosts": [REDIS_URL], "prefix": "quarterdeck"},
    }
}
CELERY_BROKER_URL = REDIS_URL.replace("unix://", "redis+socket://", 1)
CELERY_TASK_IGNORE_RESULT = True
CELERY_BEAT_SCHEDULE = {  # not for people to edit; their schedules are rows
    "Reconcile jobs": {"task": "console.reconcile", "schedule": 10.0, "options": {"expires": 10}},
}
CELERY_TASK_ACKS_LATE = True
CELERY_TIMEZONE = "UTC"
CELERY_BEAT_SCHEDULER = "django_celery_beat.schedulers:DatabaseScheduler"
CELERY_BROKER_CONNECTION_RETRY_ON_STARTUP = True
CELERY_WORKER_HIJACK_ROOT_LOGGER = False

LOGGING = logs.CONFIG
