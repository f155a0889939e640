"""Generation for the HTTP surface and for chats: permission, a key's limits, then the engine."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from dataclasses import replace

import msgspec

from console.auth import Principal
from console.services import limits
from console.worker import this_worker
from engine.client import GenerateReqInput
from engine.messages import StrRow


async def admit(principal: Principal, requests: list[GenerateReqInput]) -> list[GenerateReqInput]:
    """Checks the right and the rate; answers are cut to the key's longest answer.

    Raises ``Forbidden``, ``Unauthenticated`` or ``RateLimited``.
    """
    principal.require("use_inference")
    await limits.count_requests(principal, len(requests))
    requests = [replace(request, actor=principal.actor) for request in requests]
    if not principal.max_new_tokens:
        return requests
    return [_cut(request, principal.max_new_tokens) for request in requests]


def _cut(request: GenerateReqInput, longest: int) -> GenerateReqInput:
    sampling = request.sampling
    if sampling.max_new_tokens <= longest:
        return request
    cut = msgspec.structs.replace(
        sampling, max_new_tokens=longest, min_new_tokens=min(sampling.min_new_tokens, longest)
    )
    return replace(request, sampling=cut)


def generate(
    requests: list[GenerateReqInput], parent: str | None = None
) -> AsyncGenerator[tuple[int, StrRow], None]:
    """Rows of admitted requests as they come: (index in ``requests``, row).

    Closing it early aborts what still runs. Raises ``QuarterdeckError`` for a refusal.
    """
    return this_worker().engine.generate_many(requests, parent)


async def abort(principal: Principal, *, rid: str, reason: str = "") -> list[str]:
    """Ends a request by its exact rid, or all children of that parent; which ones were found."""
    principal.require("use_inference")
    reason = reason or "aborted by the client"
    reply = await this_worker().engine.abort(rid, actor=principal.actor, reason=reason)
    found: list[str] = reply.result.get("found", [])
    return found
