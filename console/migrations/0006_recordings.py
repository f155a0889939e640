"""Profiles and dumps, and the right of every role to read their rows."""

from __future__ import annotations

from typing import Any

import django.db.models.deletion
import django.utils.timezone
from django.db import migrations, models

READABLE = ("profile", "dump")


def give_rights(apps: Any, schema_editor: Any) -> None:
    """Django makes permissions only after all migrations, so the ones needed are made here."""
    content_types = apps.get_model("contenttypes", "ContentType").objects
    permissions = apps.get_model("auth", "Permission").objects
    groups = apps.get_model("auth", "Group").objects
    for model in READABLE:
        content_type, _ = content_types.get_or_create(app_label="console", model=model)
        permission, _ = permissions.get_or_create(
            content_type=content_type, codename=f"view_{model}",
            defaults={"name": f"Can view {model}"},
        )  # fmt: skip
        for role in ("viewer", "operator", "admin"):
            groups.get(name=role).permissions.add(permission)


class Migration(migrations.Migration):
    dependencies = [
        ("console", "0005_door"),
    ]

    operations = [
        migrations.CreateModel(
            name="Dump",
            fields=[
                (
                    "id",
                    models.BigAutoField(
                        auto_created=True, primary_key=True, serialize=False, verbose_name="ID"
                    ),
                ),
                ("recording_id", models.CharField(max_length=128, unique=True)),
                ("directory", models.CharField(max_length=500)),
                (
                    "state",
                    models.CharField(
                        choices=[
                            ("capturing", "Capturing"),
                            ("merging", "Merging"),
                            ("ready", "Ready"),
                            ("partial", "Partial"),
                            ("failed", "Failed"),
                        ],
                        default="capturing",
                        max_length=10,
                    ),
                ),
                ("message", models.TextField(blank=True)),
                ("ranks", models.JSONField(blank=True, default=dict)),
                ("missing", models.JSONField(blank=True, default=list)),
                ("bytes", models.PositiveBigIntegerField(default=0)),
                ("pinned", models.BooleanField(default=False)),
                ("note", models.CharField(blank=True, max_length=500)),
                ("actor", models.CharField(max_length=200)),
                ("reason", models.CharField(blank=True, max_length=500)),
                (
                    "created_at",
                    models.DateTimeField(db_index=True, default=django.utils.timezone.now),
                ),
                ("rids", models.JSONField(blank=True, default=list)),
                ("tensors", models.PositiveIntegerField(default=0)),
                ("form", models.CharField(blank=True, max_length=100)),
                ("epoch", models.PositiveIntegerField(blank=True, null=True)),
                ("token_step", models.BigIntegerField(blank=True, null=True)),
                (
                    "job",
                    models.ForeignKey(
                        blank=True,
                        null=True,
                        on_delete=django.db.models.deletion.SET_NULL,
                        related_name="+",
                        to="console.job",
                    ),
                ),
            ],
            options={
                "ordering": ["-created_at", "-id"],
                "abstract": False,
            },
        ),
        migrations.CreateModel(
            name="Profile",
            fields=[
                (
                    "id",
                    models.BigAutoField(
                        auto_created=True, primary_key=True, serialize=False, verbose_name="ID"
                    ),
                ),
                ("recording_id", models.CharField(max_length=128, unique=True)),
                ("directory", models.CharField(max_length=500)),
                (
                    "state",
                    models.CharField(
                        choices=[
                            ("capturing", "Capturing"),
                            ("merging", "Merging"),
                            ("ready", "Ready"),
                            ("partial", "Partial"),
                            ("failed", "Failed"),
                        ],
                        default="capturing",
                        max_length=10,
                    ),
                ),
                ("message", models.TextField(blank=True)),
                ("ranks", models.JSONField(blank=True, default=dict)),
                ("missing", models.JSONField(blank=True, default=list)),
                ("bytes", models.PositiveBigIntegerField(default=0)),
                ("pinned", models.BooleanField(default=False)),
                ("note", models.CharField(blank=True, max_length=500)),
                ("actor", models.CharField(max_length=200)),
                ("reason", models.CharField(blank=True, max_length=500)),
                (
                    "created_at",
                    models.DateTimeField(db_index=True, default=django.utils.timezone.now),
                ),
                ("steps", models.PositiveIntegerField(default=0)),
                ("largest_gap_ms", models.FloatField(blank=True, null=True)),
                ("merge", models.JSONField(blank=True, default=dict)),
                (
                    "job",
                    models.ForeignKey(
                        blank=True,
                        null=True,
                        on_delete=django.db.models.deletion.SET_NULL,
                        related_name="+",
                        to="console.job",
                    ),
                ),
            ],
            options={
                "ordering": ["-created_at", "-id"],
                "abstract": False,
            },
        ),
        migrations.RunPython(give_rights, migrations.RunPython.noop),
    ]
