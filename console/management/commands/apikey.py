"""``manage.py apikey create NAME --scope inference --scope control [--expires-days N]``.

Prints the key alone on stdout, so that a script can take it.
"""

from __future__ import annotations

from argparse import ArgumentParser
from typing import Any

from django.core.management.base import BaseCommand, CommandError

from console.auth import SCOPE_PERMISSIONS
from console.services import keys
from engine.errors import BadRequest


class Command(BaseCommand):
    help = "Create an API key and print it; it cannot be shown again."

    def add_arguments(self, parser: ArgumentParser) -> None:
        verbs = parser.add_subparsers(dest="verb", required=True)
        create = verbs.add_parser("create", help="create a key and print it")
        create.add_argument("name")
        create.add_argument(
            "--scope",
            action="append",
            required=True,
            choices=sorted(SCOPE_PERMISSIONS),
            help="what the key may do; may be given several times",
        )
        create.add_argument("--expires-days", type=int, default=None, metavar="N")
        create.add_argument(
            "--max-requests-per-minute", type=int, default=0, metavar="N", help="0: no limit"
        )
        create.add_argument(
            "--max-new-tokens", type=int, default=0, metavar="N", help="0: no limit"
        )

    def handle(self, *args: Any, **options: Any) -> None:
        try:
            _, token = keys.create_key(
                name=options["name"],
                scopes=options["scope"],
                expires_days=options["expires_days"],
                max_requests_per_minute=options["max_requests_per_minute"],
                max_new_tokens=options["max_new_tokens"],
            )
        except BadRequest as error:
            raise CommandError(error.message) from error
        self.stdout.write(token)
