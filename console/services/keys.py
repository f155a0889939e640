"""API keys: create, revoke, authenticate, and the limits that a key carries."""

from __future__ import annotations

import datetime
import secrets
import time
from dataclasses import replace

from channels.db import database_sync_to_async
from django.db import transaction
from django.utils import timezone

from console import auth, events
from console.models import ApiKey
from engine.errors import BadRequest

KEY_PREFIX = "qd-"
CACHE_S = 1.0  # how long a revoked key may still work; one look-up per key, worker and second
CACHE_KEYS = 1000
USED_EVERY_S = 60  # resolution of ``last_used_at``

INVALID = replace(auth.ANONYMOUS, refusal="the API key is unknown, expired or revoked")


@transaction.atomic
def create_key(
    *,
    name: str,
    scopes: list[str],
    owner_id: int | None = None,
    expires_days: int | None = None,
    max_requests_per_minute: int = 0,
    max_new_tokens: int = 0,
) -> tuple[ApiKey, str]:
    """Returns the row and the key itself, which cannot be read again."""
    unknown = set(scopes) - set(auth.SCOPE_PERMISSIONS)
    if unknown or not scopes:
        raise BadRequest(f"scopes must be some of {sorted(auth.SCOPE_PERMISSIONS)}, got {scopes}")
    if not name.strip():
        raise BadRequest("a key needs a name")
    if expires_days is not None and expires_days < 1:
        raise BadRequest("expires_days must be at least 1")
    token = KEY_PREFIX + secrets.token_urlsafe(32)
    expires_at = None
    if expires_days is not None:
        expires_at = timezone.now() + datetime.timedelta(days=expires_days)
    key = ApiKey.objects.create(
        name=name.strip(),
        prefix=token[: len(KEY_PREFIX) + 6],
        digest=ApiKey.digest_of(token),
        scope_inference="inference" in scopes,
        scope_control="control" in scopes,
        owner_id=owner_id,
        expires_at=expires_at,
        max_requests_per_minute=max_requests_per_minute,
        max_new_tokens=max_new_tokens,
    )
    return key, token


@transaction.atomic
def revoke_key(*, key_id: int, principal: auth.Principal) -> bool:
    """False when there is no such key, it is revoked already, or it is somebody else's."""
    keys = ApiKey.objects.filter(pk=key_id, revoked_at=None)
    if not principal.may("manage_all_keys"):
        keys = keys.filter(owner_id=principal.user_id)
    changed = keys.update(revoked_at=timezone.now())
    if changed:
        events.publish_on_commit(events.KeyRevoked(key_id=key_id))
    return bool(changed)


# ---------------------------------------------------------------- authentication

_known: dict[str, tuple[float, auth.Principal]] = {}


async def authenticate(token: str) -> auth.Principal:
    """The principal of a key; an anonymous one that says why when the key is no good."""
    digest = ApiKey.digest_of(token)
    known = _known.get(digest)
    if known is not None and time.monotonic() - known[0] < CACHE_S:
        return known[1]
    principal = await database_sync_to_async(_look_up)(token)
    if len(_known) >= CACHE_KEYS:
        _known.clear()
    _known[digest] = (time.monotonic(), principal)
    return principal


def forget(key_id: int) -> None:
    """Drops a key from the cache; what does not hear of it forgets within ``CACHE_S``."""
    for digest, (_, principal) in list(_known.items()):
        if principal.key_id == key_id:
            del _known[digest]


def _look_up(token: str) -> auth.Principal:
    now = timezone.now()
    key = ApiKey.objects.by_token(token).usable(now).first()
    if key is None:
        return INVALID
    stale = now - datetime.timedelta(seconds=USED_EVERY_S)
    if key.last_used_at is None or key.last_used_at < stale:
        ApiKey.objects.filter(pk=key.pk).update(last_used_at=now)
    return auth.principal_of_key(key)
