"""Stored chats. A message is written when its answer ends, never while tokens flow."""

from __future__ import annotations

import datetime

from django.conf import settings
from django.db import models
from django.utils import timezone


class ConversationQuerySet(models.QuerySet["Conversation"]):
    def of(self, user_id: int) -> ConversationQuerySet:
        return self.filter(owner_id=user_id)

    def matching(self, words: str) -> ConversationQuerySet:
        """Title or any message holds ``words``, whatever the case."""
        found = models.Q(title__icontains=words) | models.Q(messages__text__icontains=words)
        return self.filter(found).distinct()

    def older_than(self, moment: datetime.datetime) -> ConversationQuerySet:
        return self.filter(updated_at__lt=moment, pinned=False)


class Conversation(models.Model):
    owner = models.ForeignKey(
        settings.AUTH_USER_MODEL, on_delete=models.CASCADE, related_name="conversations"
    )
    title = models.CharField(max_length=200)
    pinned = models.BooleanField(default=False, help_text="Retention leaves it alone")
    created_at = models.DateTimeField(default=timezone.now, editable=False)
    updated_at = models.DateTimeField(default=timezone.now, db_index=True)

    objects = ConversationQuerySet.as_manager()

    class Meta:
        ordering = ["-updated_at", "-id"]

    def __str__(self) -> str:
        return self.title


class MessageQuerySet(models.QuerySet["Message"]):
    def unfinished_on(self, worker: str) -> MessageQuerySet:
        return self.filter(state=Message.State.RUNNING, worker=worker)


class Message(models.Model):
    """One turn. ``parent`` makes a tree, so an edited question starts a branch of its own."""

    class Role(models.TextChoices):
        SYSTEM = "system"
        USER = "user"
        ASSISTANT = "assistant"

    class State(models.TextChoices):
        RUNNING = "running"
        DONE = "done"
        STOPPED = "stopped"
        FAILED = "failed"

    conversation = models.ForeignKey(
        Conversation, on_delete=models.CASCADE, related_name="messages"
    )
    parent = models.ForeignKey(
        "self", null=True, blank=True, on_delete=models.CASCADE, related_name="children"
    )
    role = models.CharField(max_length=9, choices=Role)
    state = models.CharField(max_length=7, choices=State, default=State.DONE)
    text = models.TextField(blank=True)
    created_at = models.DateTimeField(default=timezone.now, editable=False)
    ended_at = models.DateTimeField(null=True, blank=True)

    # A question; answers side by side share it, whichever workers they run on.
    turn = models.CharField(max_length=128, blank=True, editable=False)

    # Where an answer came from. ``epochs`` are runs [count, epoch] over ``token_ids``,
    # ``kv_epochs`` over the keys of the whole context.
    compare = models.BooleanField(default=False, help_text="One of several, side by side")
    route = models.CharField(max_length=64, blank=True)
    stream = models.CharField(max_length=64, blank=True, db_index=True)
    rid = models.CharField(max_length=128, blank=True)
    worker = models.CharField(max_length=32, blank=True)
    via = models.CharField(max_length=32, blank=True)
    rank = models.IntegerField(null=True, blank=True)
    params = models.JSONField(default=dict, blank=True)
    token_ids = models.JSONField(default=list, blank=True)
    epochs = models.JSONField(default=list, blank=True)
    kv_epochs = models.JSONField(null=True, blank=True)
    logprobs = models.JSONField(null=True, blank=True)
    entropy = models.JSONField(null=True, blank=True)
    top = models.JSONField(null=True, blank=True)
    finish = models.JSONField(null=True, blank=True)
    slot_freed = models.BooleanField(null=True, blank=True)
    prompt_tokens = models.PositiveIntegerField(default=0)
    completion_tokens = models.PositiveIntegerField(default=0)
    cached_tokens = models.PositiveIntegerField(default=0)
    ttft_ms = models.FloatField(null=True, blank=True)
    tokens_per_s = models.FloatField(null=True, blank=True)

    objects = MessageQuerySet.as_manager()

    class Meta:
        ordering = ["id"]
        constraints = [
            models.UniqueConstraint(
                fields=["turn"], condition=~models.Q(turn=""), name="one_question_per_turn"
            )
        ]

    def __str__(self) -> str:
        return f"{self.role}: {self.text[:60]}"
