"""The record of chats: history for the next prompt, one question, one answer.

``begin`` runs while the engine already works, ``end`` when it has ended. Chats of API keys are not
stored.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec
from channels.db import database_sync_to_async
from django.db import IntegrityError, transaction
from django.utils import timezone

from console.auth import Principal
from console.models import Conversation, Message
from console.services.question import Question
from console.services.streams import Answer
from engine.errors import NotFound

TITLE_LENGTH = 60
START = 0  # as a parent: before the first question


@dataclass(frozen=True, slots=True)
class Branch:
    """Where a question goes: the turns before it, and the message it hangs on."""

    turns: list[dict[str, str]]
    leaf_id: int | None


def branch_of(principal: Principal, question: Question) -> Branch:
    """Raises ``NotFound`` when the conversation or the parent is not the principal's."""
    asked = _asked_before(principal, question)
    if asked is not None:  # side by side with an answer that began a moment ago
        conversation_id: int | None = asked.conversation_id
        leaf_id = asked.parent_id
    else:
        conversation_id, leaf_id = question.conversation, question.parent
    if conversation_id is None or (asked is not None and leaf_id is None):
        return Branch([], None)
    messages = {
        message.pk: message
        for message in Message.objects.filter(
            conversation_id=conversation_id, conversation__owner_id=principal.user_id
        ).only("pk", "parent_id", "role", "text")
    }
    leaf_id = leaf_id if leaf_id is not None else max(messages, default=None)
    if leaf_id == START and messages:
        return Branch([], None)
    if leaf_id not in messages:
        raise NotFound(f"there is no conversation {conversation_id} with that message")
    path: list[Message] = []
    step: int | None = leaf_id
    while step is not None:
        path.append(messages[step])
        step = messages[step].parent_id
    return Branch(_turns(path[::-1]), leaf_id)


def _asked_before(principal: Principal, question: Question) -> Message | None:
    if not question.turn or principal.user_id is None:
        return None
    return Message.objects.filter(turn=_turn_key(principal, question)).first()


def _turn_key(principal: Principal, question: Question) -> str:
    """Turn ids come from browsers; with the account before them nobody can meet another's."""
    return f"{principal.identity}:{question.turn}" if question.turn else ""


def _turns(path: list[Message]) -> list[dict[str, str]]:
    """Question and answer in turn; a question whose answer failed without text is left out."""
    turns: list[dict[str, str]] = []
    for message in path:
        if message.role == Message.Role.ASSISTANT and not message.text:
            if turns:
                turns.pop()
        else:
            turns.append({"role": message.role, "content": message.text})
    return turns


@dataclass(slots=True)
class Recorder:
    """Writes one question and its answer."""

    principal: Principal
    question: Question
    rid: str
    worker: str
    leaf_id: int | None
    conversation_id: int | None = None
    message_id: int | None = None

    @property
    def via(self) -> str:
        return self.principal.via or self.worker

    async def begin(self) -> dict[str, Any]:
        """Stores the question; returns what the ``started`` frame says."""
        if self.principal.user_id is not None:
            await database_sync_to_async(self._begin)(self.principal.user_id)
        return {
            "rid": self.rid,
            "conversation": self.conversation_id,
            "message": self.message_id,
            "worker": self.worker,
            "via": self.via,
        }

    def _begin(self, user_id: int) -> None:
        try:
            self._store(user_id)
        except IntegrityError:  # another worker stored the same turn in this moment
            self._store(user_id)

    @transaction.atomic
    def _store(self, user_id: int) -> None:
        asked = _asked_before(self.principal, self.question) or self._ask(user_id)
        answer = Message.objects.create(
            conversation_id=asked.conversation_id,
            parent=asked,
            role=Message.Role.ASSISTANT,
            state=Message.State.RUNNING,
            stream=self.question.stream,
            route=self.question.route,
            compare=self.question.compare,
            rid=self.rid,
            worker=self.worker,
            via=self.via,
            params=msgspec.to_builtins(self.question.params),
        )
        self.conversation_id, self.message_id = asked.conversation_id, answer.pk

    def _ask(self, user_id: int) -> Message:
        conversation_id = self.question.conversation
        if conversation_id is None:
            title = " ".join(self.question.text.split())[:TITLE_LENGTH]
            conversation_id = Conversation.objects.create(owner_id=user_id, title=title).pk
        else:
            Conversation.objects.filter(pk=conversation_id).update(updated_at=timezone.now())
        return Message.objects.create(
            conversation_id=conversation_id,
            parent_id=self.leaf_id,
            role=Message.Role.USER,
            text=self.question.text,
            turn=_turn_key(self.principal, self.question),
        )

    async def end(self, answer: Answer) -> None:
        """Stores what the stream produced."""
        if self.message_id is not None:
            await database_sync_to_async(_store_answer)(self.message_id, answer)


def _store_answer(message_id: int, answer: Answer) -> None:
    finish = answer.finish
    Message.objects.filter(pk=message_id, state=Message.State.RUNNING).update(
        state=_state_of(answer),
        text="".join(answer.text),
        ended_at=timezone.now(),
        rank=answer.rank,
        token_ids=answer.token_ids,
        epochs=answer.epoch_runs,
        kv_epochs=answer.kv_epochs,
        logprobs=answer.logprobs or None,
        entropy=answer.entropy or None,
        top=answer.top or None,
        finish=answer.finish_fields if finish is not None else None,
        slot_freed=answer.confirmed,
        ttft_ms=answer.ttft_ms,
        tokens_per_s=answer.tokens_per_s,
        **answer.usage,
    )


def _state_of(answer: Answer) -> str:
    finish = answer.finish
    if finish is None or finish.status_code:
        return Message.State.FAILED
    return Message.State.STOPPED if finish.type == "abort" else Message.State.DONE


def fail_lost_answers(worker_id: str) -> int:
    """A worker that starts has no streams: what its predecessor left running is lost."""
    finish = {"type": "abort", "err_type": "worker_lost", "message": "the web worker went away"}
    return Message.objects.unfinished_on(worker_id).update(
        state=Message.State.FAILED, finish=finish, ended_at=timezone.now()
    )
