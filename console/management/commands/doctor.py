"""``manage.py doctor``: is everything there, and what to do where it is not."""

from __future__ import annotations

import sys
from typing import Any

from django.core.management.base import BaseCommand

from console.services.health import examine


class Command(BaseCommand):
    help = "Check versions, model, database, ports and tools; exit code 1 when something is bad."
    requires_system_checks: list[str] = []

    def handle(self, *args: Any, **options: Any) -> None:
        worst = 0
        for finding in examine():
            self.stdout.write(f"{finding.tone:>4}  {finding.what}")
            if finding.advice:
                self.stdout.write(f"      {finding.advice}")
            worst = max(worst, finding.tone == "bad")
        if worst:
            sys.exit(1)
