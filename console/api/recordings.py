"""Profiles and dumps over HTTP: SGLang's routes, the library, files in ranges.

Path: urls.py -> here -> services/control.py (what acts), services/profiles.py and dumps.py.
"""

from __future__ import annotations

from typing import Any

import msgspec
from django.http import HttpResponse, HttpResponseBase
from django.views.decorators.http import require_GET, require_http_methods

from console.access import requires
from console.api import files
from console.api.answers import json_answer
from console.api.control import answer, given_fields, refusal, start
from console.database import in_database
from console.fields import read_json, read_number
from console.http import ApiRequest
from console.models import Dump, Profile
from console.services import dumps, profiles, recordings
from console.services.recordings import Row
from console.worker import this_worker
from engine.errors import BadRequest, EngineUnreachable, QuarterdeckError
from engine.messages import GetDumpPointsReqInput

PAGE_SIZE = 50
BEGIN_S = 65.0  # longer than the engine may take to arm
READ_S = 30.0
MAX_PIXELS = 8_000


# ---------------------------------------------------------------- acting


async def _begin(request: ApiRequest, name: str, id_field: str) -> HttpResponse:
    """Answers when every rank has armed; the job goes on."""
    try:
        doing = await start(request, name, given_fields(request))
        job = await doing.begun(BEGIN_S)
    except QuarterdeckError as error:
        return refusal(error)
    if job.ended and job.status_code >= 400:
        return answer(job)
    recording_id = job.args.get("recording_id", "")
    body = {
        "success": True, "message": job.message, "job": job.pk, "state": job.state,
        id_field: recording_id, **{k: v for k, v in job.result.items() if k != "open"},
    }  # fmt: skip
    return json_answer(body)


@require_http_methods(["GET", "POST", "PUT"])
@requires("control_engine", key_only_get=True)
async def start_profile(request: ApiRequest) -> HttpResponse:
    """SGLang's fields; an empty body works."""
    return await _begin(request, "profile", "profile_id")


@require_http_methods(["POST", "PUT"])
@requires("control_engine")
async def lazy_dump_tensors(request: ApiRequest) -> HttpResponse:
    """``{modules, layers, kinds, ranks, rids, max_steps|num_steps, max_seconds, max_bytes}``."""
    return await _begin(request, "dump", "dump_id")


@require_GET
@requires("view_fleet")
async def dump_points(request: ApiRequest) -> HttpResponse:
    client = this_worker().client
    if client is None:
        raise EngineUnreachable("the engine is not reachable")
    reply = await client.call(
        GetDumpPointsReqInput, deadline_s=READ_S, actor=request.principal.actor
    )
    if not reply.success:
        raise QuarterdeckError(
            reply.message, err_type=reply.err_type, status_code=reply.status_code
        )
    return json_answer(reply.result)


# ---------------------------------------------------------------- profiles


@require_GET
@requires("view_fleet")
async def list_profiles(request: ApiRequest) -> HttpResponse:
    return json_answer(await in_database(profiles.page, **_asked(request)))


class ChangeBody(msgspec.Struct, kw_only=True):
    pinned: bool | None = None
    note: str | None = None


@require_http_methods(["GET", "PATCH", "DELETE"])
@requires("view_fleet")
async def profile(request: ApiRequest, name: str) -> HttpResponse:
    """PATCH ``{pinned, note}`` and DELETE need the right to control."""
    row = await in_database(recordings.by_name, Profile, name)
    if request.method == "GET":
        return json_answer(await in_database(_profile_detail, row))
    if await _changed(request, row):
        return json_answer({"deleted": name})
    return json_answer({"profile": profiles.as_json(row)})


def _profile_detail(row: Profile) -> dict[str, Any]:
    return {"profile": profiles.as_detail(row), "summary": profiles.summary_of(row)}


@require_GET
@requires("view_fleet")
async def compare_profiles(request: ApiRequest) -> HttpResponse:
    """``?a=ID&b=ID``: what changed from A to B, per recorded step."""
    a, b = await _both(request, Profile)
    return json_answer(await profiles.compare(a, b))


@require_GET
@requires("view_fleet")
async def profile_lanes(request: ApiRequest, name: str) -> HttpResponse:
    """``?from&to&pixels``; microseconds."""
    ask = request.GET
    row = await in_database(recordings.by_name, Profile, name)
    found = await in_database(
        lambda: profiles.lanes(
            row,
            begin_us=_time(ask.get("from")),
            end_us=_time(ask.get("to")),
            pixels=min(max(1, read_number("pixels", ask.get("pixels", "1000"))), MAX_PIXELS),
        )
    )
    return json_answer(found)


@require_http_methods(["GET", "HEAD"])
@requires("view_fleet")
async def profile_file(request: ApiRequest, name: str, file: str) -> HttpResponseBase:
    row = await in_database(recordings.by_name, Profile, name)
    return await files.answer(request, recordings.file_named(row, file))


# ---------------------------------------------------------------- dumps


@require_GET
@requires("view_fleet")
async def list_dumps(request: ApiRequest) -> HttpResponse:
    return json_answer(await in_database(dumps.page, **_asked(request)))


@require_GET
@requires("view_fleet")
async def dump_state(request: ApiRequest, name: str) -> HttpResponse:
    row = await in_database(recordings.by_name, Dump, name)
    return json_answer(dumps.state_of(row))


@require_http_methods(["GET", "PATCH", "DELETE"])
@requires("view_fleet")
async def dump(request: ApiRequest, name: str) -> HttpResponse:
    row = await in_database(recordings.by_name, Dump, name)
    if request.method == "GET":
        return json_answer(await in_database(dumps.as_detail, row))
    if await _changed(request, row):
        return json_answer({"deleted": name})
    return json_answer({"dump": dumps.as_json(row)})


@require_GET
@requires("view_fleet")
async def compare_dumps(request: ApiRequest) -> HttpResponse:
    a, b = await _both(request, Dump)
    return json_answer(await dumps.compare(a, b))


@require_GET
@requires("view_fleet")
async def dump_view(request: ApiRequest, name: str) -> HttpResponse:
    """``?key=RANK:KEY``: heat map and values of one tensor."""
    row = await in_database(recordings.by_name, Dump, name)
    return json_answer(await dumps.view(row, request.GET.get("key", "")))


@require_http_methods(["GET", "HEAD"])
@requires("view_fleet")
async def dump_file(request: ApiRequest, name: str, file: str) -> HttpResponseBase:
    row = await in_database(recordings.by_name, Dump, name)
    return await files.answer(request, recordings.file_named(row, file))


# ---------------------------------------------------------------- both


def _asked(request: ApiRequest) -> dict[str, Any]:
    ask = request.GET
    return {
        "offset": read_number("offset", ask.get("offset", "0")),
        "size": PAGE_SIZE,
        "state": ask.get("state", ""),
        "words": ask.get("q", ""),
        "pinned": ask.get("pinned") == "yes",
    }


async def _both(request: ApiRequest, kind: type[Row]) -> tuple[Row, Row]:
    """The recordings that ``a`` and ``b`` name."""
    a, b = (request.GET.get(name, "") for name in "ab")
    return (
        await in_database(recordings.by_name, kind, a),
        await in_database(recordings.by_name, kind, b),
    )


async def _changed(request: ApiRequest, row: Profile | Dump) -> bool:
    """PATCH or DELETE; True if the row is gone."""
    request.principal.require("control_engine")
    if request.method == "DELETE":
        await in_database(recordings.delete, row)
        return True
    body = read_json(request.body, ChangeBody)
    await in_database(lambda: recordings.change(row, pinned=body.pinned, note=body.note))
    return False


def _time(text: str | None) -> float | None:
    if text is None:
        return None
    try:
        return float(text)
    except ValueError:
        raise BadRequest(f"{text!r} is no time in microseconds") from None
