"""Every route of the console. Each view declares its access (``console/access.py``)."""

from __future__ import annotations

from typing import Any, cast

from django.contrib import admin
from django.urls import path, re_path

from console.api import console, control, loads, metrics, native, openai, recordings, unsupported
from console.api import jobs as jobs_api
from console.api import weights as weights_api
from console.consumers.chat import ChatConsumer
from console.consumers.fleet import FleetConsumer
from console.consumers.jobs import JobsConsumer
from console.sockets import SocketGate, refuse_socket
from console.views import connect, fleet, jobs, keys, login, playground, requests, weights
from console.views import recordings as recording_pages

handler404 = "console.views.errors.not_found"
handler500 = "console.views.errors.server_error"

pages = [
    path("", login.home, name="home"),
    path("logout/", login.sign_out, name="logout"),
    path("fleet/", fleet.fleet, name="fleet"),
    path("playground/", playground.playground, name="playground"),
    path("playground/<int:conversation_id>/", playground.playground, name="conversation"),
    path("requests/", requests.requests, name="requests"),
    path("weights/", weights.weights, name="weights"),
    path("profiles/", recording_pages.profiles, name="profiles"),
    path("profiles/compare/", recording_pages.compare_profiles, name="profile-compare"),
    path("profiles/<str:name>/", recording_pages.profile, name="profile"),
    path("profiles/<str:name>/viewer/", recording_pages.profile_viewer, name="profile-viewer"),
    path("dumps/", recording_pages.dumps, name="dumps"),
    path("dumps/compare/", recording_pages.compare_dumps, name="dump-compare"),
    path("dumps/<str:name>/", recording_pages.dump, name="dump"),
    path("jobs/", jobs.jobs, name="jobs"),
    path("jobs/audit/", jobs.audit, name="audit"),
    path("jobs/<int:job_id>/", jobs.job, name="job"),
    path("connect/", connect.connect, name="connect"),
    path("keys/", keys.keys, name="keys"),
    path("keys/create/", keys.create, name="key-create"),
    path("keys/<int:key_id>/revoke/", keys.revoke, name="key-revoke"),
]

console_api = [
    path("api/fleet", console.read_fleet),
    path("api/fleet/history", console.fleet_history),
    path("api/ws-ticket", console.make_ticket),
    path("api/conversations", console.list_conversations),
    path("api/conversations/<int:conversation_id>", console.conversation),
    path("api/conversations/<int:conversation_id>/export", console.export_conversation),
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
    path("metrics", metrics.metrics),
    path("ready", native.ready),
    path("health_generate", native.health_generate),
    path("generate", native.generate),
    path("get_model_info", native.get_model_info),
    path("get_server_info", native.get_server_info),
    path("get_weight_version", native.get_weight_version),
    path("tokenize", native.tokenize),
    path("detokenize", native.detokenize),
    path("v1/tokenize", native.tokenize),
    path("v1/detokenize", native.detokenize),
]

CONTROL_ROUTES = {  # route -> action; those that SGLang also has as GET
    "pause_generation": ("pause", False),
    "continue_generation": ("continue", False),
    "flush_cache": ("flush_cache", True),
    "release_memory_occupation": ("release_memory", True),
    "resume_memory_occupation": ("resume_memory", True),
    "slow_down": ("slow_down", True),
    "freeze_gc": ("freeze_gc", True),
    "configure_logging": ("configure_logging", True),
    "begin_weight_update": ("begin_weight_update", False),
    "end_weight_update": ("end_weight_update", False),
    "update_weights_from_disk": ("reload_weights", False),
    "update_weights_from_distributed": ("update_from_distributed", False),
    "init_weights_update_group": ("join_weight_group", False),
    "destroy_weights_update_group": ("leave_weight_group", False),
    "update_weight_version": ("relabel_weights", False),
    "stop_profile": ("stop_profile", True),
}

control_api = [
    *(
        path(name, control.route(action, also_get=also_get))
        for name, (action, also_get) in CONTROL_ROUTES.items()
    ),
    path("abort_request", control.abort_request),
    path("update_weights_from_tensor", weights_api.update_weights_from_tensor),
    path("get_weights_by_name", weights_api.get_weights_by_name),
    path("get_load", loads.get_load),
    path("v1/loads", loads.v1_loads),
    path("get_internal_state", loads.get_internal_state),
    path("set_internal_state", control.set_internal_state),
    path("api/control/<str:name>/preview", jobs_api.preview),
    path("api/control/<str:name>", jobs_api.act),
    path("api/jobs", jobs_api.list_jobs),
    path("api/jobs/<int:job_id>", jobs_api.job),
    path("api/audit", jobs_api.list_audit),
    path("api/audit/verify", jobs_api.verify_audit),
    path("api/audit/export.csv", jobs_api.export_audit, {"form": "csv"}),
    path("api/audit/export.json", jobs_api.export_audit, {"form": "json"}),
    path("api/requests", jobs_api.list_requests),
    path("api/disk", jobs_api.disk_usage),
    path("api/weights", weights_api.timeline),
    path("api/weights/at", weights_api.served_at),
    path("api/epochs/<int:number>", weights_api.epoch),
    path("api/checkpoints", weights_api.checkpoint_list),
]

recording_api = [
    path("start_profile", recordings.start_profile),
    path("lazy_dump_tensors", recordings.lazy_dump_tensors),
    path("lazy_dump_tensors/points", recordings.dump_points),
    path("lazy_dump_tensors/<str:name>", recordings.dump_state),
    path("api/profiles", recordings.list_profiles),
    path("api/profiles/compare", recordings.compare_profiles),
    path("api/profiles/<str:name>", recordings.profile),
    path("api/profiles/<str:name>/lanes", recordings.profile_lanes),
    path("api/profiles/<str:name>/files/<str:file>", recordings.profile_file),
    path("api/dumps", recordings.list_dumps),
    path("api/dumps/compare", recordings.compare_dumps),
    path("api/dumps/<str:name>", recordings.dump),
    path("api/dumps/<str:name>/view", recordings.dump_view),
    path("api/dumps/<str:name>/files/<str:file>", recordings.dump_file),
]

not_built = [
    path(name, unsupported.route(sentence)) for name, sentence in unsupported.ROUTES.items()
]

urlpatterns = [
    *pages,
    *console_api,
    *openai_api,
    *native_api,
    *control_api,
    *recording_api,
    *not_built,
    path("admin/login/", login.admin_login),
    path("admin/logout/", login.sign_out),
    path("admin/", admin.site.urls),
]

# Django's ``path`` is typed for views; Channels' router takes ASGI applications.
websocket_urlpatterns: list[Any] = [
    path("ws/chat/", cast(Any, SocketGate(ChatConsumer))),
    path("ws/fleet/", cast(Any, SocketGate(FleetConsumer))),
    path("ws/jobs/", cast(Any, SocketGate(JobsConsumer))),
    re_path(r"", cast(Any, refuse_socket)),
]
