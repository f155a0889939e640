"""``manage.py model pull``: the embedded model into ``QUARTERDECK_HOME/models``.

The work needs torch, which no console process imports: it runs as a process of its own.
"""

from __future__ import annotations

import subprocess
import sys
from argparse import ArgumentParser
from typing import Any

from django.conf import settings
from django.core.management.base import BaseCommand, CommandError


class Command(BaseCommand):
    help = "Fetch and convert the embedded model; does nothing when it is there."

    def add_arguments(self, parser: ArgumentParser) -> None:
        verbs = parser.add_subparsers(dest="verb", required=True)
        verbs.add_parser("pull", help="SmolLM2-135M-Instruct as a Hugging Face directory")

    def handle(self, *args: Any, **options: Any) -> None:
        models = settings.QUARTERDECK_HOME / "models"
        code = subprocess.run(
            [sys.executable, "-m", "engine.model.embedded", str(models)],
            cwd=settings.BASE_DIR,
            check=False,
        ).returncode
        if code:
            raise CommandError(f"the model was not pulled (exit code {code}), see above")
