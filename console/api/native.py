"""SGLang's own routes: ``/generate``, health, model and server information."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from django.conf import settings
from django.http import HttpRequest, HttpResponse
from django.views.decorators.http import require_GET, require_http_methods, require_POST

from console.access import open_to_all, requires
from console.api import meta
from console.api.answers import json_answer
from console.api.expand import Expanded, expand
from console.api.loads import internal_states
from console.api.schemas import DetokenizeBody, GenerateBody, TokenizeBody, decode
from console.api.sse import DONE, event, event_stream
from console.http import ApiRequest
from console.services import fleet, inference
from console.services.rows import collect
from console.services.tokens import token_text
from console.version import VERSION
from console.worker import this_worker
from engine.client import GenerateReqInput
from engine.errors import EngineUnreachable
from engine.messages import Provenance, SamplingParams, StrRow, merge
from engine.runfile import read_run_file
from engine.tokenizer import Tokenizer

HEALTH_DEADLINE_S = 20.0
HEARTBEAT_FRESH_S = 5.0


# ---------------------------------------------------------------- generate


@require_http_methods(["POST", "PUT"])
@requires("use_inference")
async def generate(request: ApiRequest) -> HttpResponse:
    body = decode(request, GenerateBody)
    asked_at = time.time()
    expanded = expand(body, max_context=this_worker().engine.max_context)
    requests = await inference.admit(request.principal, expanded.requests)
    if body.stream:
        events = _events(body, expanded, requests, asked_at)
        return await event_stream(events)  # type: ignore[return-value]
    rows = await collect(inference.generate(requests, expanded.parent), len(requests))
    for row in rows:
        meta.raise_failure(row.finish)
    answers = [
        await _result(asked, row, asked_at) for asked, row in zip(requests, rows, strict=True)
    ]
    return json_answer(answers if expanded.many else answers[0])


async def _events(
    body: GenerateBody, expanded: Expanded, requests: list[GenerateReqInput], asked_at: float
) -> AsyncGenerator[bytes, None]:
    """Cumulative values as SGLang streams them; with ``stream_output`` the news of every list."""
    progress = [_Progress(cumulative=not body.stream_output) for _ in requests]
    async with aclosing(inference.generate(requests, expanded.parent)) as rows:
        async for index, row in rows:
            shown = progress[index].take(row)
            answer = await _result(requests[index], shown, asked_at, progress[index])
            if expanded.many:
                answer["index"] = index
            yield event(answer)
    yield DONE


class _Progress:
    """What a stream has told so far of one request."""

    def __init__(self, *, cumulative: bool) -> None:
        self._cumulative = cumulative
        self._whole: StrRow | None = None
        self.provenance: Provenance | None = None
        self.total = 0  # output tokens, those of the newest row included
        self.before = 0  # output tokens before the first one that is shown

    def take(self, row: StrRow) -> StrRow:
        """The row to show for the news ``row``."""
        self.provenance = self.provenance or row.provenance
        self.total += len(row.output_ids)
        if not self._cumulative:
            self.before = self.total - len(row.output_ids)
            return row
        self._whole = row if self._whole is None else merge(self._whole, row)
        return self._whole


async def _result(
    asked: GenerateReqInput, row: StrRow, asked_at: float, progress: _Progress | None = None
) -> dict[str, Any]:
    """One answer: ``text``, ``output_ids`` and ``meta_info``."""
    before = progress.before if progress else 0
    provenance = (progress.provenance if progress else None) or row.provenance
    info: dict[str, Any] = {
        "id": row.rid,
        "finish_reason": meta.finish_reason(row.finish),
        "prompt_tokens": provenance.prompt_tokens if provenance else 0,
        "completion_tokens": before + len(row.output_ids),
        "cached_tokens": provenance.cached_tokens if provenance else 0,
        "dp_rank": provenance.dp_rank if provenance else None,
        "weight_form": provenance.weight_form if provenance else None,
        "queue_time": provenance.queued_s if provenance else None,
        "e2e_latency": time.time() - asked_at,
        **await meta.provenance(row, before),
    }
    if asked.logprob is not None:
        texts = _texts(row) if asked.return_text_in_logprobs else None
        info |= meta.output_logprobs(row.output_ids, row.output_logprobs, texts)
        info |= meta.input_logprobs(row.input_logprobs, texts)
    if asked.return_entropy:
        info["output_token_entropy_val"] = row.entropy or []
    if asked.return_hidden_states:
        info["hidden_states"] = meta.hidden_states(row)
    answer: dict[str, Any] = {"text": row.text, "output_ids": row.output_ids, "meta_info": info}
    if asked.return_bytes:
        answer["bytes"] = meta.as_base64(row.raw_bytes)
    return answer


def _texts(row: StrRow) -> dict[int, str]:
    tokenizer = this_worker().engine.tokenizer
    return {token: token_text(tokenizer, token) for token in meta.tokens_of(row)}


# ---------------------------------------------------------------- health


@require_GET
@open_to_all
async def health(request: HttpRequest) -> HttpResponse:
    """This process answers."""
    return HttpResponse(status=200)


@require_GET
@open_to_all
async def ready(request: HttpRequest) -> HttpResponse:
    """This worker is joined and some rank runs."""
    worker = this_worker()
    snapshot = worker.client.snapshot if worker.client is not None else None
    state = snapshot.engine.state if snapshot is not None else "unreachable"
    return json_answer({"state": state}, status=200 if worker.ready else 503)


@require_GET
@open_to_all
async def health_generate(request: HttpRequest) -> HttpResponse:
    """A token was made, just now; while paused or updating: every rank's heartbeat is fresh."""
    snapshot = await fleet.read_snapshot()
    state = snapshot.engine.state
    if state in ("pausing", "paused", "updating"):
        oldest = min((rank.seen_at for rank in snapshot.ranks), default=0.0)
        fresh = time.time() - oldest < HEARTBEAT_FRESH_S
        return HttpResponse(status=200 if fresh else 503, headers={"X-Quarterdeck-State": state})
    probe = GenerateReqInput(
        input_ids=[0], sampling=SamplingParams(max_new_tokens=1, temperature=0.0), no_logs=True
    )
    try:
        async with asyncio.timeout(HEALTH_DEADLINE_S):
            [row] = await collect(inference.generate([probe]), 1)
    except TimeoutError:
        return HttpResponse(status=503, headers={"X-Quarterdeck-State": state})
    made = bool(row.output_ids)
    return HttpResponse(status=200 if made else 503, headers={"X-Quarterdeck-State": state})


# ---------------------------------------------------------------- information


@require_GET
@requires("view_fleet")
async def get_model_info(request: ApiRequest) -> HttpResponse:
    snapshot = await fleet.read_snapshot()
    path = _config("model_path")
    return json_answer(
        {
            "model_path": path,
            "tokenizer_path": path,
            "is_generation": True,
            "preferred_sampling_params": None,
            "weight_version": snapshot.engine.weight_version,
            "epoch": snapshot.engine.epoch,
            "max_context": this_worker().engine.max_context,
        }
    )


@require_GET
@requires("view_fleet")
async def get_weight_version(request: ApiRequest) -> HttpResponse:
    engine = (await fleet.read_snapshot()).engine
    return json_answer(
        {
            "weight_version": engine.weight_version,
            "epoch": engine.epoch,
            "token_step": engine.token_step,
        }
    )


SERVER_FIELDS = ("model_path", "backend", "device", "dtype", "weights", "deterministic", "dp", "tp")


@require_GET
@requires("view_fleet")
async def get_server_info(request: ApiRequest) -> HttpResponse:
    """Named fields only, so that no secret can slip in."""
    snapshot = await fleet.read_snapshot()
    info: dict[str, Any] = {name: _config(name) for name in SERVER_FIELDS}
    info |= {
        "version": VERSION,
        "tokenizer_path": info["model_path"],
        "dp_size": info["dp"],
        "tp_size": info["tp"],
        "weight_form": info["weights"],
        "weight_version": snapshot.engine.weight_version,
        "state": snapshot.engine.state,
        "internal_states": internal_states(snapshot),
    }
    return json_answer(info)


def _config(name: str) -> Any:
    """A field of the running engine's own configuration."""
    run = read_run_file(settings.QUARTERDECK_RUN_FILE)
    if run is None or run.config is None:
        raise EngineUnreachable("the engine is not up", retry_after_s=2)
    return getattr(run.config, name)


# ---------------------------------------------------------------- tokenizer


@require_POST
@requires("use_inference")
async def tokenize(request: ApiRequest) -> HttpResponse:
    body = decode(request, TokenizeBody)
    engine = this_worker().engine
    tokens = await engine.encode(body.prompt, add_special_tokens=body.add_special_tokens)
    return json_answer(
        {"tokens": tokens, "count": len(tokens), "max_model_len": engine.max_context}
    )


@require_POST
@requires("use_inference")
async def detokenize(request: ApiRequest) -> HttpResponse:
    """``pieces`` are the tokens one by one, for views that show them apart."""
    body = decode(request, DetokenizeBody)
    tokenizer = this_worker().engine.tokenizer
    text, pieces = await asyncio.to_thread(_decoded, tokenizer, body)
    return json_answer({"text": text, "pieces": pieces})


def _decoded(tokenizer: Tokenizer, body: DetokenizeBody) -> tuple[str, list[str]]:
    text = tokenizer.decode(body.tokens, skip_special_tokens=body.skip_special_tokens)
    return text, [token_text(tokenizer, token) for token in body.tokens]
