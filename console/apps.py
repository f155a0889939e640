"""The Django app, and system checks that report configuration mistakes with a hint."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from django.apps import AppConfig
from django.conf import settings
from django.core import checks
from django.db import connections
from django.db.utils import OperationalError


class ConsoleConfig(AppConfig):
    name = "console"
    verbose_name = "Console"

    def ready(self) -> None:
        checks.register(check_routes, checks.Tags.security)
        checks.register(check_layer)
        checks.register(check_connections)
        checks.register(check_pragmas, checks.Tags.database)


def check_routes(app_configs: Sequence[AppConfig] | None, **kwargs: Any) -> list[checks.Error]:
    """A route that declares no access is refused at run time; say so at start."""
    from console.access import undeclared_routes

    return [
        checks.Error(
            f"The route {pattern!r} declares no access.",
            hint="Decorate its view with console.access.requires(...) or open_to_all.",
            id="console.E001",
        )
        for pattern in undeclared_routes()
    ]


def check_layer(app_configs: Sequence[AppConfig] | None, **kwargs: Any) -> list[checks.Error]:
    backend = str(settings.CHANNEL_LAYERS["default"]["BACKEND"])
    if not backend.endswith("InMemoryChannelLayer") or settings.QUARTERDECK_WORKERS == 1:
        return []
    return [
        checks.Error(
            f"{settings.QUARTERDECK_WORKERS} web workers cannot share an in-memory channel layer.",
            hint="Set REDIS_URL, or QUARTERDECK_WORKERS=1.",
            id="console.E002",
        )
    ]


def check_connections(app_configs: Sequence[AppConfig] | None, **kwargs: Any) -> list[checks.Error]:
    """Under ASGI a persistent connection belongs to a thread that soon dies: it leaks."""
    return [
        checks.Error(
            f"The database {alias!r} keeps connections open (CONN_MAX_AGE).",
            hint="Set CONN_MAX_AGE to 0; on PostgreSQL use psycopg's pool instead.",
            id="console.E003",
        )
        for alias, database in settings.DATABASES.items()
        if database.get("CONN_MAX_AGE", 0) != 0
    ]


WANTED_PRAGMAS: dict[str, tuple[object, str]] = {
    "journal_mode": ("wal", "readers would block writers"),
    "busy_timeout": (20_000, "a writer that waits would fail at once"),
}


def check_pragmas(
    app_configs: Sequence[AppConfig] | None, databases: Sequence[str] | None = None, **kwargs: Any
) -> list[checks.CheckMessage]:
    """Reads SQLite's PRAGMAs back: options in the wrong place are ignored without a word."""
    found: list[checks.CheckMessage] = []
    for alias in databases or []:
        connection = connections[alias]
        if connection.vendor != "sqlite":
            continue
        try:
            with connection.cursor() as cursor:
                values = {name: _pragma(cursor, name) for name in WANTED_PRAGMAS}
        except OperationalError as error:
            found.append(checks.Error(f"{alias}: {error}", id="console.E005"))
            continue
        found += [
            checks.Error(
                f"The database {alias!r} has {name} = {values[name]!r}, not {wanted!r}: {why}.",
                hint="Set it in OPTIONS inside the alias, as console/settings.py does.",
                id="console.E004",
            )
            for name, (wanted, why) in WANTED_PRAGMAS.items()
            if values[name] != wanted
        ]
        if connection.settings_dict["OPTIONS"].get("transaction_mode") != "IMMEDIATE":
            found.append(
                checks.Error(
                    f"The database {alias!r} begins deferred transactions.",
                    hint="Set transaction_mode to IMMEDIATE: a reader that turns writer while "
                    "another one committed is refused at once, whatever the timeout.",
                    id="console.E006",
                )
            )
    return found


def _pragma(cursor: Any, name: str) -> object:
    cursor.execute(f"PRAGMA {name}")
    return cursor.fetchone()[0]
