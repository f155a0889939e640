"""Hop 2: session, API key, websocket ticket or a peer worker's signature -> one ``Principal``.

Nothing here decides what a principal may do: ``access.py`` declares that per route, and the
services ask ``Principal.require``.
"""

from __future__ import annotations

import functools
import hashlib
import logging
import os
import pwd
import time
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from django.conf import settings
from django.contrib.auth import SESSION_KEY, get_user
from django.contrib.auth.models import User
from django.contrib.sessions.backends.db import SessionStore
from django.core import signing
from django.http import HttpRequest
from django.utils import timezone

from console.database import DatabaseAway, authenticating
from console.models import ApiKey
from console.secrets import persistent_secret
from engine.errors import QuarterdeckError

ROLES = ("viewer", "operator", "admin")
SCOPE_PERMISSIONS = {
    "inference": frozenset({"view_fleet", "use_inference"}),
    "control": frozenset({"view_fleet", "view_jobs", "control_engine"}),
}
TICKET_SALT, TICKET_AGE_S = "quarterdeck.ticket", 30
RELAY_SALT, RELAY_AGE_S = "quarterdeck.relay", 30
RELAY_HEADER = "x-quarterdeck-principal"
STALE_S, SEEN_SESSIONS = 900.0, 1000

log = logging.getLogger(__name__)


class Unauthenticated(QuarterdeckError):
    status_code = 401
    err_type = "unauthenticated"


class Forbidden(QuarterdeckError):
    status_code = 403
    err_type = "forbidden"


@dataclass(frozen=True, slots=True, kw_only=True)
class Principal:
    """Who asks. ``identity`` names the account, ``actor`` is the same for people to read."""

    kind: Literal["anonymous", "session", "key", "relay", "shell", "system"] = "anonymous"
    actor: str = "anonymous"
    role: str = ""
    permissions: frozenset[str] = frozenset()
    user_id: int | None = None
    key_id: int | None = None
    staff: bool = False
    max_new_tokens: int = 0  # 0: no limit
    max_requests_per_minute: int = 0  # 0: no limit
    via: str = ""  # relay: the worker that took the socket
    refusal: str = ""  # why the credentials that came were not taken
    session_key: str = field(default="", repr=False)

    @property
    def identity(self) -> str:
        if self.key_id is not None:
            return f"key:{self.key_id}"
        return f"user:{self.user_id}" if self.user_id is not None else ""

    def may(self, permission: str) -> bool:
        return self.staff if permission == "staff" else permission in self.permissions

    def require(self, permission: str) -> None:
        """Raises ``Unauthenticated`` or ``Forbidden`` with a sentence."""
        if self.may(permission):
            return
        if self.kind == "anonymous":
            raise Unauthenticated(
                self.refusal or "sign in, or send an API key as 'Authorization: Bearer KEY'",
                err_type="invalid_api_key" if self.refusal else None,
            )
        raise Forbidden(f"{self.actor} lacks the right {permission!r}")


ANONYMOUS = Principal()
SYSTEM = Principal(kind="system", actor="system", permissions=frozenset({"control_engine"}))


def principal_of_shell() -> Principal:
    """Whoever may run commands in the home of this console owns all of it."""
    return Principal(
        kind="shell",
        actor=f"shell:{_login_name()}",
        permissions=frozenset({"view_fleet", "view_jobs", "control_engine"}),
    )


def _login_name() -> str:
    """From the system's own tables: the environment could say anything."""
    try:
        return pwd.getpwuid(os.getuid()).pw_name
    except KeyError:
        return str(os.getuid())


# ---------------------------------------------------------------- people


def principal_of_user(user: User, *, session_key: str = "") -> Principal:
    """Reads the user's permissions and groups from the database."""
    names = user.get_all_permissions()
    groups = set(user.groups.values_list("name", flat=True))
    held = [role for role in ROLES if role in groups]
    return Principal(
        kind="session",
        actor=f"user:{user.get_username()}",
        role="admin" if user.is_superuser else (held or [""])[-1],
        permissions=frozenset(
            name.removeprefix("console.") for name in names if name.startswith("console.")
        ),
        user_id=user.pk,
        staff=user.is_staff,
        session_key=session_key,
    )


def principal_of_session(session_key: str) -> Principal:
    """The principal of a stored session, with Django's own check of its hash."""
    store = SessionStore(session_key)
    if not session_key or SESSION_KEY not in store:
        return ANONYMOUS
    request = HttpRequest()
    request.session = store
    user = get_user(request)
    if not isinstance(user, User) or not user.is_active:
        return ANONYMOUS
    return principal_of_user(user, session_key=session_key)


def session_digest(session_key: str) -> str:
    """Names a session in hints, logs and caches without giving it away."""
    return hashlib.sha256(session_key.encode()).hexdigest()


async def session_principal(session_key: str) -> Principal:
    """``principal_of_session``; while the database is away, as it was within ``STALE_S``.

    Nobody can be signed out or demoted while the database is away, so what was true stays true.
    """
    try:
        principal = await authenticating(principal_of_session, session_key)
    except DatabaseAway:
        known = _seen_sessions.get(session_digest(session_key))
        if known is None or time.monotonic() - known[0] > STALE_S:
            raise
        return known[1]
    if len(_seen_sessions) >= SEEN_SESSIONS:
        _seen_sessions.clear()
    _seen_sessions[session_digest(session_key)] = (time.monotonic(), principal)
    return principal


_seen_sessions: dict[str, tuple[float, Principal]] = {}


def forget_session(digest: str) -> None:
    """It was signed out."""
    _seen_sessions.pop(digest, None)


def principal_of_user_id(user_id: int) -> Principal:
    user = User.objects.filter(pk=user_id, is_active=True).first()
    return principal_of_user(user) if user else ANONYMOUS


# ---------------------------------------------------------------- programs


def principal_of_key(key: ApiKey) -> Principal:
    granted: frozenset[str] = frozenset()
    for scope in key.scopes:
        granted |= SCOPE_PERMISSIONS[scope]
    return Principal(
        kind="key",
        actor=f"key:{key.name}",
        role="key",
        permissions=granted,
        key_id=key.pk,
        max_new_tokens=key.max_new_tokens,
        max_requests_per_minute=key.max_requests_per_minute,
    )


def principal_of_key_id(key_id: int) -> Principal:
    key = ApiKey.objects.usable(timezone.now()).filter(pk=key_id).first()
    return principal_of_key(key) if key else ANONYMOUS


# ---------------------------------------------------------------- tickets and relays


def _account(principal: Principal) -> dict[str, Any]:
    return {"user": principal.user_id, "key": principal.key_id, "session": principal.session_key}


def _principal_of_account(account: dict[str, Any]) -> Principal:
    """Rights are read again here: what was signed is who it is, not what they may."""
    if account["key"] is not None:
        return principal_of_key_id(account["key"])
    if account["session"]:
        return principal_of_session(account["session"])
    return ANONYMOUS if account["user"] is None else principal_of_user_id(account["user"])


def make_ticket(principal: Principal) -> str:
    """Opens a socket within ``TICKET_AGE_S`` for a key; browsers have their cookie."""
    return signing.dumps(principal.key_id, salt=TICKET_SALT)


def principal_of_ticket(ticket: str) -> Principal:
    try:
        key_id = signing.loads(ticket, salt=TICKET_SALT, max_age=TICKET_AGE_S)
    except signing.BadSignature:
        return replace(ANONYMOUS, refusal="the ticket is invalid or too old")
    return principal_of_key_id(key_id)


@functools.cache
def _relay_secret() -> str:
    """Of this run: the supervisor removes the file at each start."""
    return persistent_secret(settings.QUARTERDECK_SOCKETS / "relay.key")


def sign_relay(principal: Principal, *, via: str) -> str:
    """The header with which worker ``via`` speaks for ``principal`` to another worker."""
    account = _account(principal) | {"via": via}
    return signing.dumps(account, key=_relay_secret(), salt=RELAY_SALT)


def principal_of_relay(header: str) -> Principal:
    try:
        account = signing.loads(header, key=_relay_secret(), salt=RELAY_SALT, max_age=RELAY_AGE_S)
    except signing.BadSignature:
        return replace(ANONYMOUS, refusal="the relay's signature is invalid")
    principal = _principal_of_account(account)
    if principal is ANONYMOUS:
        return replace(ANONYMOUS, refusal="the account behind the relay may not sign in any more")
    return replace(principal, kind="relay", via=account["via"])


# ---------------------------------------------------------------- again, for each command


def _again(principal: Principal) -> Principal:
    found = _principal_of_account(_account(principal))
    return replace(found, kind=principal.kind, via=principal.via) if found.identity else ANONYMOUS


async def check_again(principal: Principal) -> Principal:
    """The same principal with the rights of now; ``ANONYMOUS`` after logout or revocation.

    While the database is away nobody's rights change, and the principal stays as it is.
    """
    try:
        return await authenticating(_again, principal)
    except DatabaseAway as error:
        log.warning("rights are not read again: %s", error.message)
        return principal
