"""``manage.py audit verify``: walks the hash chain; exit code 1 and a sentence where it breaks.

``manage.py audit export`` prints all entries as JSON, oldest first.
"""

from __future__ import annotations

import json
from argparse import ArgumentParser
from typing import Any

from django.core.management.base import BaseCommand, CommandError

from console.models import AuditEntry
from console.services import audit


class Command(BaseCommand):
    help = "Verify or export the audit."

    def add_arguments(self, parser: ArgumentParser) -> None:
        verbs = parser.add_subparsers(dest="verb", required=True)
        verbs.add_parser("verify", help="check every entry against the one before it")
        verbs.add_parser("export", help="print all entries as JSON")

    def handle(self, *args: Any, **options: Any) -> None:
        if options["verb"] == "export":
            self.stdout.write(json.dumps(audit.as_list(AuditEntry.objects.all()), indent=2))
            return
        verdict = audit.verify()
        if not verdict.ok:
            raise CommandError(f"the audit is broken: {verdict.problem}", returncode=1)
        self.stdout.write(f"{verdict.entries} entries, unbroken")
