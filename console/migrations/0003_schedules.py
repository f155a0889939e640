"""Beat's first schedule: retention of stored chats, once an hour. Editable in the admin."""

from __future__ import annotations

from typing import Any

from django.db import migrations


def make_schedules(apps: Any, schema_editor: Any) -> None:
    hourly, _ = apps.get_model("django_celery_beat", "IntervalSchedule").objects.get_or_create(
        every=1, period="hours"
    )
    apps.get_model("django_celery_beat", "PeriodicTask").objects.get_or_create(
        name="Delete old chats",
        defaults={"task": "console.delete_old_chats", "interval": hourly},
    )


class Migration(migrations.Migration):
    dependencies = [
        ("console", "0002_roles"),
        ("django_celery_beat", "0019_alter_periodictasks_options"),
    ]
    operations = [migrations.RunPython(make_schedules, migrations.RunPython.noop)]
