"""Weights over HTTP: tensors as bytes, values by name, checkpoints, epochs, the timeline."""

from __future__ import annotations

import math
from typing import Any

import msgspec
from django.http import HttpResponse
from django.views.decorators.http import require_GET, require_http_methods

from console.access import requires
from console.api.answers import json_answer
from console.api.control import act, answer, given_fields, refusal, take
from console.database import in_database
from console.fields import BadField, Int, read_fields, read_json
from console.http import ApiRequest
from console.models import Job
from console.services import checkpoints, fleet, spool, weights
from console.worker import this_worker
from engine.errors import EngineUnreachable, QuarterdeckError
from engine.messages import GetWeightsByNameReqInput

READ_S = 30.0


# ---------------------------------------------------------------- tensors


class TensorBody(msgspec.Struct, kw_only=True):
    """``serialized_named_tensors``: base64 of safetensors bytes, one or the same for each rank."""

    serialized_named_tensors: list[str] | str


@require_http_methods(["POST", "PUT"])
@requires("control_engine")
async def update_weights_from_tensor(request: ApiRequest) -> HttpResponse:
    """Safetensors bytes as the body (fields in the query string), or base64 in JSON."""
    try:
        spooled = request.scope.get(spool.SCOPE_KEY)
        if isinstance(spooled, QuarterdeckError):
            raise spooled
        if spooled is not None:
            given = {name: request.GET[name] for name in request.GET}
        elif request.content_type == "application/json":
            given = given_fields(request)
            texts = read_fields(given, TensorBody).serialized_named_tensors
            del given["serialized_named_tensors"]
            spooled = await spool.write(spool.from_base64(texts))
        else:
            given = {name: request.GET[name] for name in request.GET}
            spooled = await spool.write(request.body)
        return await _update(request, given, spooled)
    except QuarterdeckError as error:
        return refusal(error)


async def _update(
    request: ApiRequest, given: dict[str, Any], spooled: spool.Spooled
) -> HttpResponse:
    """The engine owns the file once it has taken the call; of any other nothing is left."""
    fields = {**given, "path": spooled.path, "size": spooled.size}
    try:
        job, waited = await take(request, "update_from_tensor", fields)
    except QuarterdeckError:
        spooled.discard()
        raise
    if not _took(job, spooled):
        spooled.discard()
    return answer(job, waited)


def _took(job: Job, spooled: spool.Spooled) -> bool:
    """Not a call that was refused or never sent, nor an older one with the same key."""
    unsent = job.result.get("err_type") == EngineUnreachable.err_type
    return job.args.get("path") == spooled.path and job.state != Job.State.REFUSED and not unsent


# ---------------------------------------------------------------- values


class NameBody(msgspec.Struct, kw_only=True):
    name: str
    truncate_size: Int = 100
    all_ranks: bool = False


@require_http_methods(["GET", "POST"])
@requires("control_engine")
async def get_weights_by_name(request: ApiRequest) -> HttpResponse:
    """The first values of one parameter: a list, or every rank's with ``all_ranks``."""
    asked = read_fields(given_fields(request), NameBody)
    reply = await this_worker().engine.call(
        GetWeightsByNameReqInput,
        deadline_s=READ_S,
        actor=request.principal.actor,
        name=asked.name,
        truncate_size=asked.truncate_size,
    )
    if not reply.success:
        raise QuarterdeckError(
            reply.message, status_code=reply.status_code, err_type=reply.err_type
        )
    ranks = [{"dp": rank.dp, "tp": rank.tp, **rank.result} for rank in reply.ranks]
    if asked.all_ranks:
        return json_answer({"success": True, "message": "", "ranks": ranks})
    return json_answer(ranks[0].get("values", []))


# ---------------------------------------------------------------- lineage


@require_GET
@requires("view_fleet")
async def timeline(request: ApiRequest) -> HttpResponse:
    client = this_worker().client
    snapshot = client.snapshot if client is not None else None
    return json_answer(await in_database(weights.timeline, snapshot))


@require_GET
@requires("view_fleet")
async def served_at(request: ApiRequest) -> HttpResponse:
    """``?time=T``: which weights each rank served at that Unix time."""
    try:
        moment = float(request.GET.get("time", ""))
    except ValueError:
        moment = math.nan
    if not 0 <= moment < 4e9:
        raise BadField("time must be in seconds since the Unix epoch", param="time")
    return json_answer(await in_database(weights.served_at, moment))


@require_GET
@requires("view_fleet")
async def epoch(request: ApiRequest, number: int) -> HttpResponse:
    """Which weights an epoch was: version, trainer's step, update job, checksum, who served it."""
    return json_answer(await fleet.read_epoch(number))


# ---------------------------------------------------------------- checkpoints


@require_http_methods(["GET", "POST"])
@requires("view_fleet")
async def checkpoint_list(request: ApiRequest) -> HttpResponse:
    """GET lists what is known; POST ``{path, token_step, run, note}`` registers one."""
    if request.method == "GET":
        return json_answer({"checkpoints": await in_database(checkpoints.listed)})
    return await act(request, "register_checkpoint", read_json(request.body, dict[str, Any]))
