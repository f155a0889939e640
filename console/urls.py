"""Every route of the console. Each view declares its access (``console/access.py``)."""

from __future__ import annotations

from typing import Any, cast

from django.contrib import admin
from django.urls import path, re_path

from console.api import console, native, openai
from console.consumers.chat import ChatConsumer
from console.consumers.fleet import FleetConsumer
from console.sockets import SocketGate, refuse_socket
from console.views import connect, fleet, keys, login, playground

handler404 = "console.views.errors.not_found"
handler500 = "console.views.errors.server_error"

pages = [
    path("", login.home, name="home"),
    path("logout/", login.sign_out, name="logout"),
    path("fleet/", fleet.fleet, name="fleet"),
    path("playground/", playground.playground, name="playground"),
    path("playground/<int:conversation_id>/", playground.playground, name="conversation"),
    path("connect/", connect.connect, name="connect"),
    path("keys/", keys.keys, name="keys"),
    path("keys/create/", keys.create, name="key-create"),
    path("keys/<int:key_id>/revoke/", keys.revoke, name="key-revoke"),
]

console_api = [
    path("api/fleet", console.read_fleet),
    path("api/ws-ticket", console.make_ticket),
    path("api/conversations", console.list_conversations),
    path("api/conversations/<int:conversation_id>", console.conversation),
    path("api/conversations/<int:conversation_id>/export", console.export_conversation),
    path("api/epochs/<int:number>", console.epoch),
    path("api/tokens", console.token_bytes),
]

openai_api = [
    path("v1/models", openai.models),
    path("v1/models/<path:name>", openai.model),
    path("v1/chat/completions", openai.chat_completions),
    path("v1/completions", openai.completions),
]

native_api = [
    path("health", native.health),
    path("ready", native.ready),
    path("health_generate", native.health_generate),
    path("generate", native.generate),
    path("abort_request", native.abort_request),
    path("get_model_info", native.get_model_info),
    path("get_server_info", native.get_server_info),
    path("get_weight_version", native.get_weight_version),
    path("tokenize", native.tokenize),
    path("detokenize", native.detokenize),
    path("v1/tokenize", native.tokenize),
    path("v1/detokenize", native.detokenize),
]

NOT_BUILT = (
    "clear_hicache_storage_backend",
    "dump_expert_distribution_record",
    "invocations",
    "ping",
    "start_expert_distribution_record",
    "stop_expert_distribution_record",
    "vertex_generate",
)

urlpatterns = [
    *pages,
    *console_api,
    *openai_api,
    *native_api,
    *(path(name, native.not_supported) for name in NOT_BUILT),
    path("admin/login/", login.admin_login),
    path("admin/logout/", login.sign_out),
    path("admin/", admin.site.urls),
]

# Django's ``path`` is typed for views; Channels' router takes ASGI applications.
websocket_urlpatterns: list[Any] = [
    path("ws/chat/", cast(Any, SocketGate(ChatConsumer))),
    path("ws/fleet/", cast(Any, SocketGate(FleetConsumer))),
    re_path(r"", cast(Any, refuse_socket)),
]
