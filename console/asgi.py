"""Hop 1: what uvicorn calls. HTTP goes to Django, sockets to Channels, lifespan to this worker."""

from __future__ import annotations

import os

import django
from django.core.asgi import get_asgi_application

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "console.settings")
django.setup(set_prefix=False)

from channels.routing import ProtocolTypeRouter, URLRouter  # noqa: E402 - needs the app registry

from console.lifespan import Lifespan  # noqa: E402
from console.uploads import BoundedBodies, SpooledUploads  # noqa: E402
from console.urls import websocket_urlpatterns  # noqa: E402

application = ProtocolTypeRouter(
    {
        "http": SpooledUploads(BoundedBodies(get_asgi_application())),
        "websocket": URLRouter(websocket_urlpatterns),
        "lifespan": Lifespan(),
    }
)
