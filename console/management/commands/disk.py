"""``manage.py disk usage`` and ``manage.py disk tidy``: what the home holds, and back under quota.

Prints one line of JSON: the result of the file job ``tidy_disk``.
"""

from __future__ import annotations

import json
from argparse import ArgumentParser
from typing import Any

from django.core.management.base import BaseCommand

from console.services import disk


class Command(BaseCommand):
    help = "Show or tidy what Quarterdeck wrote to the disk."

    def add_arguments(self, parser: ArgumentParser) -> None:
        verbs = parser.add_subparsers(dest="verb", required=True)
        verbs.add_parser("usage", help="bytes per kind, quota, free space")
        verbs.add_parser("tidy", help="delete the oldest unpinned items over the quota")

    def handle(self, *args: Any, **options: Any) -> None:
        try:
            result = disk.tidy() if options["verb"] == "tidy" else disk.usage()
        except disk.NoSpace as error:
            result = {"error": error.message}
        self.stdout.write(json.dumps(result))
