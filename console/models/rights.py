"""The rights that roles and keys grant. No table: only a home for Django's permissions."""

from __future__ import annotations

from django.db import models


class Right(models.Model):
    """``console/access.py`` names these; migrations 0002 and 0005 give them to the groups."""

    class Meta:
        managed = False
        default_permissions = ()
        permissions = [
            ("view_fleet", "See engine, workers and ranks"),
            ("view_jobs", "See jobs, requests and audit"),
            ("use_inference", "Chat and generate"),
            ("control_engine", "Control the engine"),
            ("manage_keys", "Create and revoke own API keys"),
            ("manage_all_keys", "See and revoke everybody's API keys"),
        ]
