"""One web worker: uvicorn on its public listener and its own unix socket.

Path: supervisor.py -> ``manage.py web`` -> here -> asgi.py.
"""

from __future__ import annotations

import os
import socket
from pathlib import Path

import uvicorn

from console.lifespan import leave
from console.worker import this_worker

BACKLOG = 2048
SHUTDOWN_GRACE_S = 3


class WorkerServer(uvicorn.Server):
    """Uvicorn, which tells the engine to drop this worker's requests before it closes sockets."""

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        await leave(this_worker())
        await super().shutdown(sockets)


def public_listener(host: str, port: int) -> socket.socket:
    """A listening socket that shares its port with the other workers' (SO_REUSEPORT)."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    listener.bind((host, port))
    listener.listen(BACKLOG)
    listener.setblocking(False)
    return listener


def private_listener(path: Path) -> socket.socket:
    """The unix socket on which the other workers reach this one; only this user may."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    mask = os.umask(0o177)
    try:
        listener.bind(str(path))
    finally:
        os.umask(mask)
    listener.listen(BACKLOG)
    listener.setblocking(False)
    return listener


def run_worker(sockets: list[socket.socket]) -> None:
    """Serves ``this_worker`` until SIGTERM or SIGINT."""
    config = uvicorn.Config(
        "console.asgi:application",
        loop="uvloop",
        http="httptools",
        ws="websockets-sansio",
        ws_per_message_deflate=False,
        ws_max_size=2**20,
        lifespan="on",
        access_log=False,
        log_config=None,
        server_header=False,
        proxy_headers=False,
        backlog=BACKLOG,
        timeout_keep_alive=75,
        timeout_graceful_shutdown=SHUTDOWN_GRACE_S,
    )
    WorkerServer(config).run(sockets=sockets)
