"""Hop 4 for chats: permission, limits, record. One answer is one stream of ``streams.py``."""

from __future__ import annotations

import uuid
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Protocol

import msgspec
from channels.db import database_sync_to_async

from console.auth import Principal
from console.services import inference, record, relay
from console.services.question import Question, parse_route
from console.services.streams import StreamSource
from console.worker import this_worker
from engine.client import GenerateReqInput
from engine.errors import BadRequest, NotFound
from engine.messages import LogprobParams, SamplingParams, StrRow

TOP_LOGPROBS = 5  # alternatives that the token view shows


class Attachment(Protocol):
    """A socket's hold on a stream, here or on another worker."""

    def frames(self) -> AsyncGenerator[bytes, None]: ...
    async def stop(self) -> None: ...
    async def detach(self) -> None: ...


async def start(principal: Principal, question: Question) -> Attachment:
    """Begins an answer and attaches to it. Raises ``QuarterdeckError`` for a refusal."""
    principal.require("use_inference")
    worker_id, dp_rank = parse_route(question.route)
    worker, engine = this_worker(), this_worker().engine
    worker.hub.check_free(question.stream)
    if worker_id not in ("", worker.id):
        return await relay.start(
            {"type": "start", **msgspec.to_builtins(question)},
            worker=worker_id,
            path=_path_of(worker_id),
            principal=principal,
            via=worker.id,
        )
    branch = await database_sync_to_async(record.branch_of)(principal, question)
    request = _request(branch.turns, question, dp_rank)
    [request] = await inference.admit(principal, [request])
    rid = request.rid or ""
    recorder = record.Recorder(principal, question, rid, worker.id, branch.leaf_id)
    source = StreamSource(
        rows=_rows(request),
        abort=lambda: engine.abort(rid, actor=principal.actor),
        begin=recorder.begin,
        record=recorder.end,
    )
    return worker.hub.start(question.stream, principal.identity, source)


async def resume(
    principal: Principal, *, stream_id: str, next_index: int, local: bool
) -> Attachment:
    """Attaches to a stream of this worker or, unless ``local``, of whichever worker holds it."""
    principal.require("use_inference")
    worker = this_worker()
    attachment = worker.hub.resume(stream_id, principal.identity, next_index)
    if attachment is not None:
        return attachment
    for worker_id, path in [] if local else _peers():
        found = await relay.resume(
            stream_id,
            next_index,
            worker=worker_id,
            path=path,
            principal=principal,
            via=worker.id,
        )
        if found is not None:
            return found
    raise NotFound(f"no worker holds stream {stream_id!r} any more", err_type="stream_unknown")


def _peers() -> list[tuple[str, str]]:
    """The other web workers: (id, unix socket)."""
    worker = this_worker()
    snapshot = worker.client.snapshot if worker.client is not None else None
    views = snapshot.workers if snapshot is not None else []
    return [(v.id, v.via) for v in views if v.kind == "web" and v.via and v.id != worker.id]


def _path_of(worker_id: str) -> str:
    for peer, path in _peers():
        if peer == worker_id:
            return path
    raise NotFound(f"there is no web worker {worker_id!r}", err_type="worker_unknown")


def _request(
    turns: list[dict[str, str]], question: Question, dp_rank: int | None
) -> GenerateReqInput:
    if not question.text.strip():
        raise BadRequest("the text is empty")
    params = question.params
    system = [{"role": "system", "content": params.system}] if params.system else []
    defaults = this_worker().engine.sampling_defaults
    sampling = SamplingParams(
        temperature=defaults.temperature if params.temperature is None else params.temperature,
        top_p=params.top_p or defaults.top_p,
        top_k=params.top_k or defaults.top_k,
        repetition_penalty=defaults.repetition_penalty,
        max_new_tokens=params.max_new_tokens,
        stop=tuple(params.stop),
        seed=params.seed,
    )
    return GenerateReqInput(
        messages=[*system, *turns, {"role": "user", "content": question.text}],
        sampling=sampling,
        rid=f"chat-{uuid.uuid4().hex}",
        logprob=LogprobParams(top_num=TOP_LOGPROBS) if params.logprobs else None,
        return_entropy=params.entropy,
        dp_rank=dp_rank,
    )


async def _rows(request: GenerateReqInput) -> AsyncGenerator[StrRow, None]:
    async with aclosing(inference.generate([request])) as rows:
        async for _, row in rows:
            yield row
