"""The first account, and the roles that accounts have."""

from __future__ import annotations

import secrets

from django.contrib.auth.models import Group, User
from django.db import transaction

ADMIN_NAME = "admin"


@transaction.atomic
def ensure_admin(password: str) -> str:
    """Makes the user ``admin`` if there is none; returns a password made up here, or "".

    A given ``password`` becomes the admin's, also when the account exists.
    """
    user = User.objects.filter(username=ADMIN_NAME).first()
    if user is not None and (not password or user.check_password(password)):
        return ""
    made_up = "" if password else secrets.token_urlsafe(12)
    if user is None:
        user = User.objects.create_superuser(ADMIN_NAME, password=password or made_up)
        user.groups.add(Group.objects.get(name="admin"))
    else:
        user.set_password(password)
        user.save(update_fields=["password"])
    return made_up
