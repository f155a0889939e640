"""A websocket client against the ASGI application, in this process.

(``channels.testing`` cannot be imported without daphne.)
"""

from __future__ import annotations

import json
from typing import Any

from asgiref.sync import sync_to_async
from asgiref.testing import ApplicationCommunicator
from django.test import Client

HOST = (b"host", b"localhost:8000")
OURS = (b"origin", b"http://localhost:8000")


class Socket(ApplicationCommunicator):
    def __init__(self, application: Any, path: str, *headers: tuple[bytes, bytes], server=None):
        path, _, query = path.partition("?")
        scope = {
            "type": "websocket",
            "path": path,
            "query_string": query.encode(),
            "headers": [HOST, *headers],
            "subprotocols": [],
            "server": server or ("127.0.0.1", 8000),
        }
        super().__init__(application, scope)

    async def open(self) -> str:
        """``open``, or ``refused`` at the handshake."""
        await self.send_input({"type": "websocket.connect"})
        answer = await self.receive_output(5)
        return "open" if answer["type"] == "websocket.accept" else "refused"

    async def say(self, frame: dict[str, Any] | str) -> None:
        text = frame if isinstance(frame, str) else json.dumps(frame)
        await self.send_input({"type": "websocket.receive", "text": text})

    async def hear(self, timeout: float = 5) -> dict[str, Any]:
        """The next frame; ``{"type": "close", "code": ...}`` when the server closed."""
        message = await self.receive_output(timeout)
        if message["type"] == "websocket.close":
            return {"type": "close", "code": message["code"]}
        return json.loads(message["text"])

    async def leave(self) -> None:
        await self.send_input({"type": "websocket.disconnect", "code": 1005})
        await self.wait(5)


def cookie_of(client: Client) -> tuple[bytes, bytes]:
    return (b"cookie", f"quarterdeck_session={client.session.session_key}".encode())


@sync_to_async
def cookie_for(sign_in: Any, role: str, **fields: Any) -> tuple[bytes, bytes]:
    return cookie_of(sign_in(role, **fields))
