"""Jobs, audit and lineage: read-only, whoever looks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from django.contrib import admin
from django.http import HttpRequest

from console.models import AuditEntry, Dump, Job, Profile, Serving, WeightUpdate

if TYPE_CHECKING:
    JobBase = admin.ModelAdmin[Job]
    AuditBase = admin.ModelAdmin[AuditEntry]
    UpdateBase = admin.ModelAdmin[WeightUpdate]
    ServingBase = admin.ModelAdmin[Serving]
    ProfileBase = admin.ModelAdmin[Profile]
    DumpBase = admin.ModelAdmin[Dump]
else:
    JobBase = AuditBase = UpdateBase = ServingBase = ProfileBase = DumpBase = admin.ModelAdmin


def _never(self: object, request: HttpRequest, obj: object = None) -> bool:
    return False


@admin.register(Job)
class JobAdmin(JobBase):
    list_display = ("id", "title", "state", "actor", "via", "created_at", "ended_at")
    list_filter = ("state", "kind", "via")
    search_fields = ("title", "actor", "reason", "message", "key")
    date_hierarchy = "created_at"
    has_add_permission = has_change_permission = has_delete_permission = _never


@admin.register(AuditEntry)
class AuditAdmin(AuditBase):
    list_display = ("id", "at", "actor", "via", "action", "target", "result", "job")
    list_filter = ("action", "result", "via")
    search_fields = ("actor", "action", "target", "reason", "hash")
    date_hierarchy = "at"
    has_add_permission = has_change_permission = has_delete_permission = _never


@admin.register(WeightUpdate)
class WeightUpdateAdmin(UpdateBase):
    list_display = ("at", "epoch", "weight_version", "token_step", "state", "source", "actor")
    list_filter = ("state", "policy")
    search_fields = ("weight_version", "source", "checksum", "actor")
    has_add_permission = has_change_permission = has_delete_permission = _never


@admin.register(Serving)
class ServingAdmin(ServingBase):
    list_display = ("dp", "tp", "epoch", "started_at", "ended_at", "confirmed_at", "pid")
    list_filter = ("dp", "tp")
    has_add_permission = has_change_permission = has_delete_permission = _never


@admin.register(Profile)
class ProfileAdmin(ProfileBase):
    list_display = ("recording_id", "state", "steps", "bytes", "pinned", "actor", "created_at")
    list_filter = ("state", "pinned")
    search_fields = ("recording_id", "note", "reason", "actor")
    has_add_permission = has_change_permission = has_delete_permission = _never


@admin.register(Dump)
class DumpAdmin(DumpBase):
    list_display = ("recording_id", "state", "tensors", "form", "bytes", "actor", "created_at")
    list_filter = ("state", "pinned")
    search_fields = ("recording_id", "note", "reason", "actor")
    has_add_permission = has_change_permission = has_delete_permission = _never
