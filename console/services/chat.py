"""Hop 4 for chats: permission, limits, record. One answer is one stream of ``streams.StreamHub``.

The question is stored while the engine already works on it, the answer when it has ended; no token
waits for the database.
"""

from __future__ import annotations

import uuid
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass
from typing import Annotated, Any, Protocol

import msgspec
from channels.db import database_sync_to_async
from django.db import transaction
from django.utils import timezone

from console.auth import Principal
from console.models import Conversation, Message
from console.services import inference, relay
from console.services.streams import Answer, StreamSource
from console.worker import this_worker
from engine.client import GenerateReqInput
from engine.errors import BadRequest, NotFound
from engine.messages import LogprobParams, SamplingParams, StrRow

TITLE_LENGTH = 60
TOP_LOGPROBS = 5  # alternatives that the token view shows


class ChatParams(msgspec.Struct, frozen=True, kw_only=True):
    """What the Playground lets a person set; ``top_k`` -1 and ``seed`` None mean none."""

    temperature: Annotated[float, msgspec.Meta(ge=0, le=2)] = 0.2
    top_p: Annotated[float, msgspec.Meta(gt=0, le=1)] = 0.9
    top_k: Annotated[int, msgspec.Meta(ge=-1)] = -1
    max_new_tokens: Annotated[int, msgspec.Meta(ge=1)] = 1024
    seed: int | None = None
    stop: list[str] = []
    system: str = ""
    logprobs: bool = False
    entropy: bool = False


class Attachment(Protocol):
    """A socket's hold on a stream, here or on another worker."""

    def frames(self) -> AsyncGenerator[bytes, None]: ...
    async def stop(self) -> None: ...
    async def detach(self) -> None: ...


# ---------------------------------------------------------------- start and resume


async def start(
    principal: Principal,
    *,
    stream_id: str,
    text: str,
    route: str,
    params: ChatParams,
    conversation_id: int | None,
    parent_id: int | None,
) -> Attachment:
    """Begins an answer and attaches to it. Raises ``QuarterdeckError`` for a refusal."""
    principal.require("use_inference")
    worker_id, dp_rank = parse_route(route)
    worker = this_worker()
    worker.hub.check_free(stream_id)
    if worker_id not in ("", worker.id):
        frame = {
            "type": "start",
            "stream": stream_id,
            "text": text,
            "conversation": conversation_id,
            "parent": parent_id,
            "params": params,
        }
        return await relay.start(
            frame, worker=worker_id, path=_path_of(worker_id), principal=principal, via=worker.id
        )
    turns, leaf_id = await _history(principal, conversation_id, parent_id)
    request = _request(turns, text, params, dp_rank)
    [request] = await inference.admit(principal, [request])
    recorder = _Recorder(principal, request, text, params, conversation_id, leaf_id, stream_id)
    engine = worker.engine
    source = StreamSource(
        rows=_rows(request),
        abort=lambda: engine.abort(request.rid or "", actor=principal.actor),
        begin=recorder.begin,
        record=recorder.record,
    )
    return worker.hub.start(stream_id, principal.identity, source)


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


def parse_route(route: str) -> tuple[str, int | None]:
    """``auto``, ``worker:ID`` or ``rank:DP`` -> (worker id or "", dp rank or None)."""
    kind, _, name = route.partition(":")
    if route == "auto":
        return "", None
    if kind == "worker" and name:
        return name, None
    if kind == "rank" and name.isdecimal():
        return "", int(name)
    raise BadRequest(f"route must be auto, worker:ID or rank:DP, got {route!r}")


def _peers() -> list[tuple[str, str]]:
    """The other web workers: (id, unix socket)."""
    worker = this_worker()
    snapshot = worker.engine.snapshot
    views = snapshot.workers if snapshot is not None else []
    return [(v.id, v.via) for v in views if v.kind == "web" and v.via and v.id != worker.id]


def _path_of(worker_id: str) -> str:
    for peer, path in _peers():
        if peer == worker_id:
            return path
    raise NotFound(f"there is no web worker {worker_id!r}", err_type="worker_unknown")


def _request(
    turns: list[dict[str, str]], text: str, params: ChatParams, dp_rank: int | None
) -> GenerateReqInput:
    if not text.strip():
        raise BadRequest("the text is empty")
    system = [{"role": "system", "content": params.system}] if params.system else []
    sampling = SamplingParams(
        temperature=params.temperature,
        top_p=params.top_p,
        top_k=params.top_k,
        max_new_tokens=params.max_new_tokens,
        stop=tuple(params.stop),
        seed=params.seed,
    )
    return GenerateReqInput(
        messages=[*system, *turns, {"role": "user", "content": text}],
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


# ---------------------------------------------------------------- the record


@dataclass(slots=True)
class _Recorder:
    """Writes one question and its answer; chats of API keys are not stored."""

    principal: Principal
    request: GenerateReqInput
    text: str
    params: ChatParams
    conversation_id: int | None
    leaf_id: int | None
    stream_id: str
    message_id: int | None = None

    async def begin(self) -> dict[str, Any]:
        """Fields of the ``started`` frame."""
        if self.principal.user_id is not None:
            await database_sync_to_async(self._store_question)()
        worker = this_worker().id
        return {
            "rid": self.request.rid,
            "conversation": self.conversation_id,
            "message": self.message_id,
            "worker": worker,
            "via": self.principal.via or worker,
        }

    @transaction.atomic
    def _store_question(self) -> None:
        if self.conversation_id is None:
            title = " ".join(self.text.split())[:TITLE_LENGTH]
            conversation = Conversation.objects.create(owner_id=self.principal.user_id, title=title)
            self.conversation_id = conversation.pk
        else:
            Conversation.objects.filter(pk=self.conversation_id).update(updated_at=timezone.now())
        question = Message.objects.create(
            conversation_id=self.conversation_id,
            parent_id=self.leaf_id,
            role=Message.Role.USER,
            text=self.text,
        )
        answer = Message.objects.create(
            conversation_id=self.conversation_id,
            parent=question,
            role=Message.Role.ASSISTANT,
            state=Message.State.RUNNING,
            stream=self.stream_id,
            rid=self.request.rid or "",
            worker=this_worker().id,
            params=msgspec.to_builtins(self.params),
        )
        self.message_id = answer.pk

    async def record(self, answer: Answer) -> None:
        if self.message_id is not None:
            await database_sync_to_async(self._store_answer)(answer)

    def _store_answer(self, answer: Answer) -> None:
        finish = answer.finish
        Message.objects.filter(pk=self.message_id, state=Message.State.RUNNING).update(
            state=_state_of(answer),
            text="".join(answer.text),
            ended_at=timezone.now(),
            rank=answer.rank,
            token_ids=answer.token_ids,
            epochs=answer.epoch_runs,
            logprobs=answer.logprobs or None,
            entropy=answer.entropy or None,
            finish=msgspec.to_builtins(finish) if finish is not None else None,
            ttft_ms=answer.ttft_ms,
            tokens_per_s=answer.tokens_per_s,
            **answer.usage,
        )


def _state_of(answer: Answer) -> str:
    finish = answer.finish
    if finish is None or finish.status_code:
        return Message.State.FAILED
    return Message.State.STOPPED if finish.type == "abort" else Message.State.DONE


@database_sync_to_async
def _history(
    principal: Principal, conversation_id: int | None, parent_id: int | None
) -> tuple[list[dict[str, str]], int | None]:
    """Turns of the branch that ends in ``parent_id`` (default: the newest), and that message."""
    if conversation_id is None:
        return [], None
    messages = {
        message.pk: message
        for message in Message.objects.filter(
            conversation_id=conversation_id, conversation__owner_id=principal.user_id
        ).only("pk", "parent_id", "role", "text")
    }
    if not messages or (parent_id is not None and parent_id not in messages):
        raise NotFound(f"there is no conversation {conversation_id} with that message")
    leaf_id = parent_id if parent_id is not None else max(messages)
    branch: list[Message] = []
    step: int | None = leaf_id
    while step is not None:
        branch.append(messages[step])
        step = messages[step].parent_id
    return _turns(branch[::-1]), leaf_id


def _turns(branch: list[Message]) -> list[dict[str, str]]:
    """Question and answer in turn; a question whose answer failed without text is left out."""
    turns: list[dict[str, str]] = []
    for message in branch:
        if message.role == Message.Role.ASSISTANT and not message.text:
            if turns:
                turns.pop()
        else:
            turns.append({"role": message.role, "content": message.text})
    return turns


def fail_lost_answers(worker_id: str) -> int:
    """A worker that starts has no streams: what its predecessor left running is lost."""
    finish = {"type": "abort", "err_type": "worker_lost", "message": "the web worker went away"}
    return Message.objects.unfinished_on(worker_id).update(
        state=Message.State.FAILED, finish=finish, ended_at=timezone.now()
    )
