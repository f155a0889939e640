"""Routes of the field that this server knows and does not have: 501 with a sentence."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any

from django.http import HttpRequest, HttpResponse

from console.access import requires
from console.api.errors import NotSupported, error_response

EXPERTS = "expert distribution is not recorded: this engine serves dense models"
HICACHE = "there is no hierarchical cache; /flush_cache drops the KV cache"
HOSTED = "SageMaker and Vertex routes are not built; use /v1/chat/completions or /generate"
PEERS = "seeding another instance is not built; it can read the same checkpoint from disk"
IPC = "CUDA IPC handles are not taken yet; use disk, tensor or distributed updates"
ROUTES = {
    "start_expert_distribution_record": EXPERTS,
    "stop_expert_distribution_record": EXPERTS,
    "dump_expert_distribution_record": EXPERTS,
    "clear_hicache_storage_backend": HICACHE,
    "ping": HOSTED,
    "invocations": HOSTED,
    "vertex_generate": HOSTED,
    "init_weights_send_group_for_remote_instance": PEERS,
    "send_weights_to_remote_instance": PEERS,
    "update_weights_from_ipc": IPC,
}


def route(sentence: str) -> Callable[[HttpRequest], Coroutine[Any, Any, HttpResponse]]:
    @requires("view_fleet")
    async def view(request: HttpRequest) -> HttpResponse:
        return error_response(request, NotSupported(sentence))

    return view
