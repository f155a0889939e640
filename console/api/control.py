"""SGLang's control routes, old names and new: each is one action through the one door.

Path: urls.py -> here -> services/control.py. An answer is ``{success, message, job, ...}`` with
200, 400 or 409. Clients spell things their own way: numbers as strings, ``abort_all_request``, an
empty body, GET instead of POST. A GET that changes something takes only a Bearer key.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any

import msgspec
from django.http import HttpResponse
from django.views.decorators.http import require_http_methods

from console.access import requires
from console.api.answers import json_answer
from console.api.errors import error_body
from console.fields import BadField, read_json
from console.http import ApiRequest
from console.models import Job
from console.services import catalogue, control, inference
from engine.errors import BadRequest, DeadlineExceeded, QuarterdeckError

View = Callable[[ApiRequest], Coroutine[Any, Any, HttpResponse]]

MARGIN_S = 5.0  # beyond the engine's own deadline
TAKEN_S = 0.05  # for callers that do not want to wait
REASON_HEADER, KEY_HEADER = "x-quarterdeck-reason", "idempotency-key"


def route(name: str, *, also_get: bool = False) -> View:
    """The view of one action."""
    methods = ["GET", "POST", "PUT"] if also_get else ["POST", "PUT"]

    @require_http_methods(methods)
    @requires(catalogue.find(name).permission, key_only_get=also_get)
    async def view(request: ApiRequest) -> HttpResponse:
        return await act(request, name, given_fields(request))

    return view


def given_fields(request: ApiRequest) -> dict[str, Any]:
    """Of the query string and a JSON object in the body, which wins."""
    query = {name: request.GET[name] for name in request.GET}
    if request.method == "GET":
        return query
    body = read_json(request.body, dict[str, Any])
    return query | body


def via_of(request: ApiRequest) -> str:
    return "page" if request.principal.kind == "session" else "http"


async def act(request: ApiRequest, name: str, given: dict[str, Any]) -> HttpResponse:
    """Performs an action and answers as SGLang's clients expect, refusals too."""
    try:
        return answer(*await take(request, name, given))
    except QuarterdeckError as error:
        return refusal(error)


async def take(request: ApiRequest, name: str, given: dict[str, Any]) -> tuple[Job, bool]:
    """The job as it is when the caller wants its answer, and whether that is the end."""
    doing = await start(request, name, given)
    if given.get("is_async"):
        return await doing.soon(TAKEN_S), False
    return await doing.soon(catalogue.find(name).read(given).wait_s + MARGIN_S), True


async def start(request: ApiRequest, name: str, given: dict[str, Any]) -> control.Doing:
    """Reason and idempotency key may come as fields or as headers."""
    return await control.start(
        request.principal,
        name,
        given,
        via=via_of(request),
        reason=str(given.pop("reason", "") or request.headers.get(REASON_HEADER, "")),
        key=str(given.pop("key", "") or request.headers.get(KEY_HEADER, "")) or None,
    )


def refusal(error: QuarterdeckError) -> HttpResponse:
    """``success`` and ``message`` beside the error, for clients that look there."""
    body = {"success": False, "message": error.message, **error_body(error)}
    response = json_answer(body, status=error.status_code)
    if error.retry_after_s:
        response["Retry-After"] = str(error.retry_after_s)
    return response


def answer(job: Job, waited: bool = True) -> HttpResponse:
    """How the job ended; when it has not: 200 for who did not wait, else 504."""
    success = job.state in (Job.State.DONE, Job.State.PARTIAL)
    head: dict[str, Any] = {"job": job.pk, "state": job.state}
    if not job.ended:
        if not waited:
            return json_answer({"success": True, "message": f"job {job.pk} was taken", **head})
        late = DeadlineExceeded(f"job {job.pk} goes on; ask /api/jobs/{job.pk} how it ends")
        return json_answer(
            {"success": False, "message": late.message, **head, **error_body(late)},
            status=late.status_code,
        )
    body = {
        "success": success,
        "message": job.message or job.title,
        "status": "ok" if success else job.state,
        "num_paused_requests": job.result.get("touched", 0),
        **job.result,
        **head,
        "ranks": job.ranks,
    }
    return json_answer(body, status=200 if success else job.status_code or 400)


# ---------------------------------------------------------------- abort


class AbortBody(msgspec.Struct, kw_only=True):
    rid: str | list[str] = ""
    abort_all: bool = False
    prefix: bool = False
    reason: str = ""
    abort_message: str | None = None


@require_http_methods(["POST", "PUT"])
@requires("view_fleet")
async def abort_request(request: ApiRequest) -> HttpResponse:
    """Ends by exact rid, from whichever worker; says at once what was found.

    A client that ends its own request needs the right to generate and makes no job; everything
    wider is a control action.
    """
    body = read_json(request.body, AbortBody)
    rids = body.rid if isinstance(body.rid, list) else [body.rid]
    if not body.abort_all and not all(rids):
        raise BadRequest("give a rid, or abort_all to end every request")
    if body.abort_all:
        return _found([await _abort(request, "abort_all", {}, body)])
    if body.prefix or not request.principal.may("use_inference"):
        fields = [{"rid": rid, "prefix": body.prefix} for rid in rids]
        return _found([await _abort(request, "abort_request", given, body) for given in fields])
    found: list[str] = []
    for rid in rids:
        found += await inference.abort(
            request.principal, rid=rid, reason=body.reason or body.abort_message or ""
        )
    return json_answer(_abort_answer(found))


async def _abort(request: ApiRequest, name: str, given: dict[str, Any], body: AbortBody) -> Job:
    reason = {"reason": body.reason or body.abort_message or ""}
    doing = await start(request, name, given | reason)
    return await doing.ended()


def _found(jobs: list[Job]) -> HttpResponse:
    found = [rid for job in jobs for rid in job.result.get("found", [])]
    bad = [job for job in jobs if job.state != Job.State.DONE]
    if bad:
        return answer(bad[0])
    return json_answer(_abort_answer(found) | {"job": jobs[-1].pk})


def _abort_answer(found: list[str]) -> dict[str, Any]:
    message = f"aborted {len(found)} requests" if found else "no such request is running"
    return {"success": bool(found), "message": message, "found": found}


# ---------------------------------------------------------------- internal state

CHANGEABLE = {
    "log_level": ("configure_logging", "level"),
    "forward_sleep_time": ("slow_down", "forward_sleep_time"),
}


class InternalStateBody(msgspec.Struct, kw_only=True):
    server_args: dict[str, Any] = {}


@require_http_methods(["POST", "PUT"])
@requires("control_engine")
async def set_internal_state(request: ApiRequest) -> HttpResponse:
    """Changes what can be changed while serving; each change is an action of its own."""
    wanted = read_json(request.body, InternalStateBody).server_args
    unknown = sorted(set(wanted) - set(CHANGEABLE))
    if unknown or not wanted:
        raise BadField(
            f"server_args must name some of {', '.join(CHANGEABLE)}; got {', '.join(unknown)}",
            param="server_args",
        )
    jobs: list[Job] = []
    for field, value in wanted.items():
        name, argument = CHANGEABLE[field]
        doing = await start(request, name, {argument: value})
        jobs.append(await doing.ended())
    bad = [job for job in jobs if job.state != Job.State.DONE]
    if bad:
        return answer(bad[0])
    updated = {"updated": True, "server_args": wanted, "jobs": [job.pk for job in jobs]}
    return json_answer({"success": True, "message": "", **updated})
