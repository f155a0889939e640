"""``manage.py web``: one web worker by itself, or one of several under ``manage.py serve``."""

from __future__ import annotations

import socket
from argparse import ArgumentParser
from pathlib import Path
from typing import Any

from django.conf import settings
from django.core.management.base import BaseCommand

from console.serving import private_listener, public_listener, run_worker
from console.worker import Worker, become
from engine.process_guard import die_with_parent


class Command(BaseCommand):
    help = "Run one web worker."

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("--id", default="1", help="the worker's name")
        parser.add_argument("--fd", type=int, help="a listening socket that the parent holds")
        parser.add_argument("--unix", type=Path, help="path of the worker's own socket")

    def handle(self, *args: Any, **options: Any) -> None:
        worker_id, path = options["id"], options["unix"]
        if options["fd"] is not None:
            die_with_parent(f"web {worker_id}")
            public = socket.socket(fileno=options["fd"])
        else:
            public = public_listener(settings.QUARTERDECK_HOST, settings.QUARTERDECK_PORT)
        path = path or settings.QUARTERDECK_SOCKETS / f"worker-{worker_id}.sock"
        become(Worker(worker_id, str(path)))
        run_worker([public, private_listener(path)])
