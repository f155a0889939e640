"""``manage.py engine``: the engine by itself, in the foreground; becomes ``engine.launch``."""

from __future__ import annotations

import os
import sys
from typing import Any

from django.conf import settings
from django.core.management.base import BaseCommand


class Command(BaseCommand):
    help = "Run the engine alone (router, ranks, detokenizers); stop it with Ctrl-C."
    requires_system_checks: list[str] = []

    def handle(self, *args: Any, **options: Any) -> None:
        os.chdir(settings.BASE_DIR)
        os.execv(sys.executable, [sys.executable, "-m", "engine.launch"])
