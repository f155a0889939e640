"""Conversations and keys: to look at, revoke and delete."""

from __future__ import annotations

from typing import TYPE_CHECKING

from django.contrib import admin
from django.db.models import QuerySet
from django.http import HttpRequest

from console.auth import principal_of_user
from console.models import ApiKey, Conversation, Message
from console.services import keys

if TYPE_CHECKING:
    MessageInlineBase = admin.TabularInline[Message, Conversation]
    ConversationAdminBase = admin.ModelAdmin[Conversation]
    ApiKeyAdminBase = admin.ModelAdmin[ApiKey]
else:
    MessageInlineBase = admin.TabularInline
    ConversationAdminBase = ApiKeyAdminBase = admin.ModelAdmin


class MessageInline(MessageInlineBase):
    model = Message
    fields = ("role", "state", "text", "worker", "rank", "completion_tokens", "epochs")
    readonly_fields = fields
    extra = 0
    can_delete = False

    def has_add_permission(self, request: HttpRequest, obj: object = None) -> bool:
        return False


@admin.register(Conversation)
class ConversationAdmin(ConversationAdminBase):
    list_display = ("title", "owner", "pinned", "updated_at")
    list_filter = ("pinned", "owner")
    search_fields = ("title", "messages__text")
    readonly_fields = ("created_at", "updated_at")
    inlines = (MessageInline,)


@admin.register(ApiKey)
class ApiKeyAdmin(ApiKeyAdminBase):
    """Keys are made on the Keys page or the command line, where the key can be shown once."""

    list_display = ("name", "prefix", "owner", "state", "expires_at", "last_used_at")
    list_filter = ("scope_inference", "scope_control")
    search_fields = ("name", "prefix")
    readonly_fields = ("prefix", "owner", "created_at", "last_used_at", "revoked_at")
    actions = ("revoke",)

    def has_add_permission(self, request: HttpRequest) -> bool:
        return False

    @admin.action(description="Revoke selected keys", permissions=["change"])
    def revoke(self, request: HttpRequest, queryset: QuerySet[ApiKey]) -> None:
        assert request.user.is_authenticated
        principal = principal_of_user(request.user)
        revoked = sum(
            keys.revoke_key(key_id=key_id, principal=principal)
            for key_id in queryset.values_list("pk", flat=True)
        )
        self.message_user(request, f"{revoked} keys revoked.")
