"""``manage.py bench``: ours against its peers, as a table and as ``QUARTERDECK_HOME/bench/*.json``.

The work loads models and stands on the engine's side: it runs as a process of its own.
"""

from __future__ import annotations

import subprocess
import sys
from argparse import ArgumentParser
from typing import Any

from django.conf import settings
from django.core.management.base import BaseCommand, CommandError


class Command(BaseCommand):
    help = "Measure this machine against the peers that are made (see docs/bench.md)."
    requires_system_checks: list[str] = []

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("--only", action="append", default=[], metavar="ROW")
        parser.add_argument("--rounds", metavar="N")
        parser.add_argument("--json", metavar="PATH")
        parser.add_argument("--make-peers", action="store_true")

    def handle(self, *args: Any, **options: Any) -> None:
        wanted = [part for row in options["only"] for part in ("--only", row)]
        for name in ("rounds", "json"):
            if options[name] is not None:
                wanted += [f"--{name}", options[name]]
        if options["make_peers"]:
            wanted.append("--make-peers")
        command = [sys.executable, "-m", "engine.bench", *wanted]
        if subprocess.run(command, cwd=settings.BASE_DIR, check=False).returncode:
            raise CommandError("the bench did not finish, see above")
