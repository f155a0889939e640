"""API keys: create, revoke, authenticate, and the limits that a key carries."""

from __future__ import annotations

import asyncio
import datetime
import logging
import secrets
import time
from dataclasses import dataclass, replace

from django.db import transaction
from django.utils import timezone

from console import auth, events
from console.database import DatabaseAway, authenticating, in_database
from console.models import ApiKey
from engine.errors import BadRequest

log = logging.getLogger(__name__)

KEY_PREFIX = "qd-"
CACHE_S = 1.0  # how long a revoked key may still work; one look-up per key, worker and second
CACHE_KEYS = 1000
WATCH_S = 10.0  # resolution of ``last_used_at``, age of what is known without the database

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


@dataclass(frozen=True, slots=True)
class Known:
    """What a key was when it was read, at ``at`` of the monotonic clock."""

    at: float
    principal: auth.Principal
    expires_at: datetime.datetime | None = None

    def now(self) -> auth.Principal:
        expired = self.expires_at is not None and self.expires_at <= timezone.now()
        return INVALID if expired else self.principal


_known: dict[str, Known] = {}  # by digest


async def authenticate(token: str) -> auth.Principal:
    """The principal of a key; an anonymous one that says why when the key is no good.

    While the database is away no key is made or revoked, so what was read last stays true.
    """
    digest = ApiKey.digest_of(token)
    known = _known.get(digest)
    if known is not None and time.monotonic() - known.at < CACHE_S:
        return known.now()
    try:
        known = await authenticating(_look_up, digest)
    except DatabaseAway:
        if known is None:
            raise
        return known.now()
    if len(_known) >= CACHE_KEYS:
        _known.clear()
    _known[digest] = known
    return known.principal


def forget(key_id: int) -> None:
    """Drops a key from the cache; what does not hear of it forgets within ``CACHE_S``."""
    for digest, known in list(_known.items()):
        if known.principal.key_id == key_id:
            del _known[digest]


def _look_up(digest: str) -> Known:
    key = ApiKey.objects.filter(digest=digest).usable(timezone.now()).first()
    return _as_known(key) if key is not None else Known(time.monotonic(), INVALID)


def _as_known(key: ApiKey) -> Known:
    return Known(time.monotonic(), auth.principal_of_key(key), key.expires_at)


async def watch() -> None:
    """Until cancelled: knows every usable key, and writes down which ones were used."""
    used: set[int] = set()
    while True:
        used |= {
            known.principal.key_id
            for known in _known.values()
            if known.principal.key_id and time.monotonic() - known.at < WATCH_S
        }
        try:
            found = await authenticating(_read_all)
            _known.clear()
            _known.update(found)
            await in_database(note_used, used)
            used.clear()
        except DatabaseAway as error:
            log.warning("keys are not read: %s", error.message)
        await asyncio.sleep(WATCH_S)


def _read_all() -> dict[str, Known]:
    """As of a moment ago, so that the next request looks again."""
    usable = ApiKey.objects.usable(timezone.now())
    old = time.monotonic() - WATCH_S
    return {key.digest: replace(_as_known(key), at=old) for key in usable}


def note_used(key_ids: set[int]) -> None:
    ApiKey.objects.filter(pk__in=key_ids).update(last_used_at=timezone.now())
