"""Beat's schedules in the admin: a scheduled control action is checked when it is written.

Else a typing error would show at night, in a log. Nobody but a superuser may schedule an action for
somebody else.
"""

from __future__ import annotations

import json
from typing import Any

from django import forms
from django.contrib import admin
from django.contrib.auth.models import User
from django.http import HttpRequest
from django_celery_beat.admin import PeriodicTaskAdmin, PeriodicTaskForm
from django_celery_beat.models import PeriodicTask

from console.auth import principal_of_user
from console.fields import read_fields
from console.services import catalogue
from console.services.schedules import ACT_TASK, Schedule
from engine.errors import QuarterdeckError


class ScheduleForm(PeriodicTaskForm):  # type: ignore[misc]
    """Checks the keyword arguments of ``console.act``."""

    editor: User  # set by the admin

    def clean(self) -> dict[str, Any]:
        data: dict[str, Any] = super().clean()
        if (data.get("task") or data.get("regtask")) == ACT_TASK and not self.errors:
            try:
                check_schedule(self.editor, json.loads(data["kwargs"] or "{}"))
            except QuarterdeckError as error:
                raise forms.ValidationError({"kwargs": error.message}) from error
        return data


def check_schedule(editor: User, given: dict[str, Any]) -> None:
    """Raises ``BadField``, ``NotFound`` or ``Forbidden`` with what is wrong."""
    schedule = read_fields(given, Schedule)
    action = catalogue.find(schedule.action)
    if not editor.is_superuser:
        schedule.require_own(editor.get_username())
    principal_of_user(editor).require(action.permission)
    action.read(schedule.fields).checked()


admin.site.unregister(PeriodicTask)


@admin.register(PeriodicTask)
class ScheduleAdmin(PeriodicTaskAdmin):  # type: ignore[misc]
    form = ScheduleForm

    def get_form(self, request: HttpRequest, obj: object = None, **options: Any) -> Any:
        form = super().get_form(request, obj, **options)
        form.editor = request.user
        return form
