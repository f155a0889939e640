"""The audit's guards in the database, the rights of the roles on what 0004 made, two schedules."""

from __future__ import annotations

from typing import Any

from django.db import migrations

VIEW_JOBS = ("view_jobs", "See jobs, requests and audit")
READABLE = ("auditentry", "checkpoint", "engine", "job", "serving", "weightupdate")
SCHEDULES = ("periodictask", "intervalschedule", "crontabschedule", "clockedschedule")


def guard_audit(apps: Any, schema_editor: Any) -> None:
    from console.models.audit import GUARDS

    for statement in GUARDS.get(schema_editor.connection.vendor, ()):
        schema_editor.execute(statement)


def unguard_audit(apps: Any, schema_editor: Any) -> None:
    from console.models.audit import UNGUARDS

    for statement in UNGUARDS.get(schema_editor.connection.vendor, ()):
        schema_editor.execute(statement)


def give_rights(apps: Any, schema_editor: Any) -> None:
    """Django makes permissions only after all migrations, so the ones needed are made here."""
    view_jobs = _permission(apps, "console", "right", *VIEW_JOBS)
    records = [
        _permission(apps, "console", model, f"view_{model}", f"Can view {model}")
        for model in READABLE
    ]
    schedules = [
        _permission(apps, "django_celery_beat", model, f"{verb}_{model}", f"Can {verb} {model}")
        for model in SCHEDULES
        for verb in ("view", "add", "change", "delete")
    ]
    groups = apps.get_model("auth", "Group").objects
    for role in ("viewer", "operator", "admin"):
        groups.get(name=role).permissions.add(view_jobs, *records)
    groups.get(name="admin").permissions.add(*schedules)


def _permission(apps: Any, app: str, model: str, codename: str, name: str) -> Any:
    content_type, _ = apps.get_model("contenttypes", "ContentType").objects.get_or_create(
        app_label=app, model=model
    )
    permission, _ = apps.get_model("auth", "Permission").objects.get_or_create(
        content_type=content_type, codename=codename, defaults={"name": name}
    )
    return permission


def make_schedules(apps: Any, schema_editor: Any) -> None:
    interval = apps.get_model("django_celery_beat", "IntervalSchedule").objects
    task = apps.get_model("django_celery_beat", "PeriodicTask").objects
    minute, _ = interval.get_or_create(every=1, period="minutes")
    hour, _ = interval.get_or_create(every=1, period="hours")
    task.get_or_create(
        name="Find checkpoints",
        defaults={"task": "console.find_checkpoints", "interval": minute, "expire_seconds": 60},
    )
    task.get_or_create(
        name="Tidy the disk",
        defaults={"task": "console.tidy_disk", "interval": hour, "expire_seconds": 600},
    )


class Migration(migrations.Migration):
    dependencies = [
        ("console", "0004_control"),
        ("contenttypes", "0002_remove_content_type_name"),
        ("django_celery_beat", "0019_alter_periodictasks_options"),
    ]
    operations = [
        migrations.AlterModelOptions(
            name="right",
            options={
                "default_permissions": (),
                "managed": False,
                "permissions": [
                    ("view_fleet", "See engine, workers and ranks"),
                    ("view_jobs", "See jobs, requests and audit"),
                    ("use_inference", "Chat and generate"),
                    ("control_engine", "Control the engine"),
                    ("manage_keys", "Create and revoke own API keys"),
                    ("manage_all_keys", "See and revoke everybody's API keys"),
                ],
            },
        ),
        migrations.RunPython(guard_audit, unguard_audit),
        migrations.RunPython(give_rights, migrations.RunPython.noop),
        migrations.RunPython(make_schedules, migrations.RunPython.noop),
    ]
