"""``manage.py serve``: the whole of Quarterdeck, until SIGTERM or Ctrl-C."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import setproctitle
from django.conf import settings
from django.core.management import call_command
from django.core.management.base import BaseCommand, CommandError
from django.db import connections

from console import supervisor
from console.services.accounts import ADMIN_NAME, ensure_admin


class Command(BaseCommand):
    help = "Start the engine, the web workers and everything they need."
    requires_system_checks: list[str] = []  # after the database is migrated, below

    def handle(self, *args: Any, **options: Any) -> None:
        setproctitle.setproctitle("quarterdeck: serve")
        home = settings.QUARTERDECK_HOME
        try:
            lock = supervisor.lock_home(home)
            supervisor.sweep_sockets(settings.QUARTERDECK_SOCKETS)
            self._prepare()
            self._run(home)
        except supervisor.GaveUp as error:
            raise CommandError(str(error), returncode=1) from error
        lock.close()

    def _prepare(self) -> None:
        """Database, admin and model; nothing is kept open that a child would inherit."""
        call_command("migrate", verbosity=0, interactive=False)
        self.check(databases=["default"])
        self._password = ensure_admin(settings.QUARTERDECK_ADMIN_PASSWORD)
        connections.close_all()
        self._ensure_model(Path(settings.QUARTERDECK_ENGINE.model_path))

    def _ensure_model(self, path: Path) -> None:
        """The embedded model is fetched when it is missing; any other one must be there."""
        if not path.is_dir() and path.parent == settings.QUARTERDECK_HOME / "models":
            call_command("model", "pull")
        if not path.is_dir():
            raise supervisor.GaveUp(
                f"there is no model in {path}; "
                "run 'manage.py model pull', or set QUARTERDECK_MODEL to a Hugging Face directory"
            )

    def _run(self, home: Path) -> None:
        tree = supervisor.Supervisor(announce=self._announce)
        try:
            tree.startup()
            supervisor.write_address(home / "serve.json", tree.url)
            tree.main_loop()
        finally:
            tree.shutdown()

    def _announce(self, url: str) -> None:
        self.stdout.write(f"\nQuarterdeck is ready: {url}\n")
        if self._password:
            self.stdout.write(
                f"Sign in as {ADMIN_NAME!r} with the password {self._password} "
                "(shown this once; set QUARTERDECK_ADMIN_PASSWORD to choose another)\n"
            )
        sys.stdout.flush()
