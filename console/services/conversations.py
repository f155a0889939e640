"""Stored chats: list, search, rename, delete, export, retention. Everybody sees their own alone."""

from __future__ import annotations

import datetime
from typing import Any

from django.conf import settings
from django.db import transaction
from django.utils import timezone

from console.auth import Principal
from console.models import Conversation, Message
from console.models.chat import ConversationQuerySet
from engine.errors import NotFound

QUESTION_FIELDS = ("id", "role", "text", "state")
ANSWER_FIELDS = (
    *QUESTION_FIELDS,
    "stream",
    "route",
    "compare",
    "rid",
    "worker",
    "via",
    "rank",
    "params",
    "token_ids",
    "epochs",
    "kv_epochs",
    "logprobs",
    "entropy",
    "top",
    "finish",
    "slot_freed",
    "ttft_ms",
    "tokens_per_s",
)


def own(principal: Principal) -> ConversationQuerySet:
    if principal.user_id is None:
        return Conversation.objects.none()
    return Conversation.objects.of(principal.user_id)


def page(principal: Principal, *, words: str, offset: int, size: int) -> dict[str, Any]:
    """``size`` conversations from ``offset`` on, newest first, and whether there are more."""
    found = own(principal)
    if words:
        found = found.matching(words)
    rows = list(found[offset : offset + size + 1])
    return {
        "conversations": [_summary(row) for row in rows[:size]],
        "next": offset + size if len(rows) > size else None,
    }


def _summary(conversation: Conversation) -> dict[str, Any]:
    return {
        "id": conversation.pk,
        "title": conversation.title,
        "pinned": conversation.pinned,
        "created_at": conversation.created_at.timestamp(),
        "updated_at": conversation.updated_at.timestamp(),
    }


def read(principal: Principal, conversation_id: int) -> dict[str, Any]:
    conversation = own(principal).filter(pk=conversation_id).first()
    if conversation is None:
        raise _unknown(conversation_id)
    messages = [_message(message) for message in conversation.messages.all()]
    return {**_summary(conversation), "messages": messages}


def _message(message: Message) -> dict[str, Any]:
    """Times are seconds since the Unix epoch; ``parent`` is the id of the message before."""
    answers = message.role == Message.Role.ASSISTANT
    fields = {
        name: getattr(message, name) for name in (ANSWER_FIELDS if answers else QUESTION_FIELDS)
    }
    fields |= {"parent": message.parent_id, "created_at": message.created_at.timestamp()}
    if answers:
        fields["usage"] = {
            "prompt_tokens": message.prompt_tokens,
            "completion_tokens": message.completion_tokens,
            "cached_tokens": message.cached_tokens,
        }
    return fields


def change(principal: Principal, conversation_id: int, fields: dict[str, Any]) -> None:
    """Sets ``title`` and ``pinned``, whichever are given."""
    conversations = own(principal).filter(pk=conversation_id)
    changed = conversations.update(**fields) if fields else conversations.count()
    if not changed:
        raise _unknown(conversation_id)


def delete(principal: Principal, conversation_id: int) -> None:
    deleted, _ = own(principal).filter(pk=conversation_id).delete()
    if not deleted:
        raise _unknown(conversation_id)


def as_markdown(content: dict[str, Any]) -> str:
    """For people: who said what, and where an answer came from."""
    lines = [f"# {content['title']}", ""]
    for message in content["messages"]:
        lines += [f"## {message['role'].capitalize()}", "", message["text"], ""]
        if message["role"] == Message.Role.ASSISTANT:
            epochs = ", ".join(str(epoch) for _, epoch in message["epochs"]) or "none"
            lines += [
                f"*worker {message['worker']}, rank {message['rank']}, epochs {epochs}, "
                f"{message['usage']['completion_tokens']} tokens, {message['state']}*",
                "",
            ]
    return "\n".join(lines)


@transaction.atomic
def delete_old_chats(now: datetime.datetime | None = None) -> int:
    """Retention: deletes conversations that rested longer than the setting; how many they were."""
    days = settings.QUARTERDECK_CHAT_RETENTION_DAYS
    if not days:
        return 0
    moment = (now or timezone.now()) - datetime.timedelta(days=days)
    _, deleted = Conversation.objects.older_than(moment).delete()
    return deleted.get("console.Conversation", 0)


def _unknown(conversation_id: int) -> NotFound:
    return NotFound(f"there is no conversation {conversation_id}")
