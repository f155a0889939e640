"""The groups viewer, operator and admin, with the rights that they start with.

Later changes in the admin stay: this runs once.
"""

from __future__ import annotations

from typing import Any

from django.db import migrations

VIEWER = ["view_fleet"]
OPERATOR = [*VIEWER, "use_inference", "control_engine", "manage_keys"]
ADMIN = [*OPERATOR, "manage_all_keys"]
NAMES = {
    "view_fleet": "See engine, workers and ranks",
    "use_inference": "Chat and generate",
    "control_engine": "Control the engine",
    "manage_keys": "Create and revoke own API keys",
    "manage_all_keys": "See and revoke everybody's API keys",
}
ADMIN_MODELS = ("apikey", "conversation", "message")


def make_groups(apps: Any, schema_editor: Any) -> None:
    """Django makes permissions only after all migrations, so the ones needed are made here."""
    group = apps.get_model("auth", "Group")
    rights = {
        codename: _permission(apps, "right", codename, name) for codename, name in NAMES.items()
    }
    records = [
        _permission(apps, model, f"{verb}_{model}", f"Can {verb} {model}")
        for model in ADMIN_MODELS
        for verb in ("view", "change", "delete")
    ]
    for name, codenames in (("viewer", VIEWER), ("operator", OPERATOR), ("admin", ADMIN)):
        role, _ = group.objects.get_or_create(name=name)
        role.permissions.add(*(rights[codename] for codename in codenames))
        if name == "admin":
            role.permissions.add(*records)


def _permission(apps: Any, model: str, codename: str, name: str) -> Any:
    content_type, _ = apps.get_model("contenttypes", "ContentType").objects.get_or_create(
        app_label="console", model=model
    )
    permission, _ = apps.get_model("auth", "Permission").objects.get_or_create(
        content_type=content_type, codename=codename, defaults={"name": name}
    )
    return permission


class Migration(migrations.Migration):
    dependencies = [
        ("console", "0001_initial"),
        ("auth", "0012_alter_user_first_name_max_length"),
        ("contenttypes", "0002_remove_content_type_name"),
    ]
    operations = [migrations.RunPython(make_groups, migrations.RunPython.noop)]
