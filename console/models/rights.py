"""The rights that roles and keys grant. No table: only a home for Django's permissions."""

from __future__ import annotations

from django.db import models


class Right(models.Model):
    """``console/access.py`` names these; migration 0002 gives them to the groups."""

    class Meta:
        managed = False
        default_permissions = ()
        permissions = [
            ("view_fleet", "See engine, workers and ranks"),
            ("use_inference", "Chat and generate"),
            ("control_engine", "Control the engine"),
            ("manage_keys", "Create and revoke own API keys"),
            ("manage_all_keys", "See and revoke everybody's API keys"),
        ]
