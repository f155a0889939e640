"""``manage.py control ACTION [name=value ...] --reason WHY``: a control action from the shell.

The same door as everywhere: job row, audit entry, per-rank answers. Pause, continue and abort work
without the database, too. Values are JSON where they parse as JSON, else texts.
"""

from __future__ import annotations

import json
from argparse import ArgumentParser
from typing import Any

from django.core.management.base import BaseCommand, CommandError

from console.auth import principal_of_shell
from console.link import Link
from console.models import Job
from console.services import control
from console.services.catalogue import ACTIONS
from engine.errors import QuarterdeckError


class Command(BaseCommand):
    help = "Carry out a control action on the engine of this home."

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("action", choices=sorted(ACTIONS))
        parser.add_argument("fields", nargs="*", metavar="name=value")
        parser.add_argument("--reason", default="", help="kept in the audit")
        parser.add_argument("--key", default=None, help="idempotency key")
        parser.add_argument("--preview", action="store_true", help="only say what it would do")

    def handle(self, *args: Any, **options: Any) -> None:
        fields = dict(map(_field, options["fields"]))
        link = Link("command")
        try:
            if options["preview"]:
                self._preview(link, options["action"], fields)
            else:
                self._act(link, fields, options)
        except QuarterdeckError as error:
            raise CommandError(error.message) from error
        finally:
            link.close()

    def _preview(self, link: Link, action: str, fields: dict[str, Any]) -> None:
        seen = link.run(control.preview(principal_of_shell(), action, fields, base_url=""))
        self.stdout.write("\n".join([*seen.will, seen.impact, seen.refusal]).rstrip())

    def _act(self, link: Link, fields: dict[str, Any], options: dict[str, Any]) -> None:
        job = link.run(
            control.perform(
                principal_of_shell(), options["action"], fields,
                via="command", reason=options["reason"], key=options["key"],
            )
        )  # fmt: skip
        self.stdout.write(f"job {job.pk or 'not written yet'}: {job.state} {job.message}".rstrip())
        for rank in job.ranks:
            self.stdout.write(f"  dp{rank['dp']} tp{rank['tp']}: {rank['state']} {rank['message']}")
        if job.result:
            self.stdout.write(json.dumps(job.result))
        if job.state not in (Job.State.DONE, Job.State.PARTIAL):
            raise CommandError(f"{options['action']} was {job.state}", returncode=1)


def _field(text: str) -> tuple[str, Any]:
    name, equals, value = text.partition("=")
    if not equals:
        raise CommandError(f"{text!r} is not name=value")
    try:
        return name, json.loads(value)
    except ValueError:
        return name, value
