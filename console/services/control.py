"""The one door for control actions: permission, preview, job, idempotency, send, audit.

Path: pages, Django's admin, HTTP routes, /ws/jobs/, beat and commands -> here -> sending.py ->
engine/client.py.

An action is taken by ``start`` and carried out by this process, whoever stays to listen. Its job
row is written before anything is sent. While the database is away, emergencies (pause, continue,
abort) are done all the same and written down later (``journal.py``); the rest is refused. What
this process cannot finish is settled by another one (``reconcile.py``).
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time
import uuid
from collections.abc import Coroutine, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from console.auth import Forbidden, Principal
from console.database import DatabaseAway, in_database, within
from console.models import Job
from console.services import audit, catalogue, checkpoints, job_view, jobs, sending
from console.services.actions import Action
from console.services.file_actions import FileAction
from console.services.load import Load
from console.services.sending import EMERGENCY_S
from console.services.weight_actions import ReloadWeights
from console.worker import this_worker
from engine.errors import QuarterdeckError

log = logging.getLogger(__name__)

BEGUN_EVERY_S = 0.02
FOLLOW_EVERY_S = 0.25  # how often the row of a job that another process runs is read


# ---------------------------------------------------------------- before


@dataclass(frozen=True, slots=True)
class Preview:
    """``refusal``: why it would be refused now, or ""."""

    will: list[str]
    impact: str
    curl: str
    refusal: str


async def preview(
    principal: Principal, name: str, given: Mapping[str, Any], *, base_url: str
) -> Preview:
    """What an action would do now; nothing is written or sent. Raises ``Forbidden``."""
    action = _permitted(principal, name).read(given)
    load = await sending.load_now()
    refusal = action.refusal(load)
    try:
        action = action.checked()
    except QuarterdeckError as error:
        refusal = error.message
    return Preview(
        will=action.will(),
        impact=action.impact(load),
        curl=job_view.curl(action.name, action.args, base_url),
        refusal=refusal,
    )


def recent_load() -> Load:
    """Out of the newest snapshot, which is at most a second old."""
    client = this_worker().client
    return Load.of(client.snapshot if client is not None else None)


def _permitted(principal: Principal, name: str) -> type[Action]:
    kind = catalogue.find(name)
    principal.require(kind.permission)
    return kind


# ---------------------------------------------------------------- taking an action


class Doing:
    """An action under way; ``job`` is this process's newest knowledge of it."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self._work: asyncio.Task[None] | None = None

    def begin(self, work: Coroutine[Any, Any, None]) -> None:
        """This process carries it out, whoever stays to listen."""
        self._work = asyncio.create_task(work, name=f"job {self.job.key}")
        _works.add(self._work)
        self._work.add_done_callback(_works.discard)

    async def ended(self) -> Job:
        """The job once it has ended. To give up waiting does not stop the action."""
        if self._work is not None:
            await asyncio.shield(self._work)
        while not self.job.ended:  # another process runs it: its row tells
            await asyncio.sleep(FOLLOW_EVERY_S)
            self.job = await in_database(jobs.by_id, self.job.pk)
        return self.job

    async def begun(self, seconds: float) -> Job:
        """The job once the engine has said that it began (``result``), or has ended."""
        until = time.monotonic() + seconds
        while not (self.job.ended or self.job.result) and time.monotonic() < until:
            await self.soon(BEGUN_EVERY_S)
        return self.job

    async def soon(self, seconds: float) -> Job:
        """The job as it is after at most ``seconds``."""
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self.ended()
        return self.job


_works: set[asyncio.Task[None]] = set()


async def start(
    principal: Principal,
    name: str,
    given: Mapping[str, Any],
    *,
    via: str,
    reason: str = "",
    key: str | None = None,
) -> Doing:
    """Takes an action. ``key``: the caller's idempotency key; the same one never acts twice.

    Raises ``Forbidden``, ``BadField``, ``Conflict`` (the key was used otherwise), ``DatabaseAway``.
    """
    try:
        kind = _permitted(principal, name)
    except Forbidden as error:
        await _note_denied(principal, name, via, error)
        raise
    engine_key = _engine_key(principal, key)
    action = await _complete(kind.read(given).identified(engine_key).checked())
    job = jobs.new_job(
        principal, action, key=engine_key, via=via, reason=reason,
        before=recent_load().as_json(),
    )  # fmt: skip
    if not isinstance(action, FileAction):
        jobs.claim(job)
    job, new = await _store(job, action)
    doing = Doing(job)
    if new and not isinstance(action, FileAction):
        doing.begin(sending.carry_out(job, action))
    return doing


async def perform(
    principal: Principal,
    name: str,
    given: Mapping[str, Any],
    *,
    via: str,
    reason: str = "",
    key: str | None = None,
) -> Job:
    """``start``, then the job once it has ended."""
    doing = await start(principal, name, given, via=via, reason=reason, key=key)
    return await doing.ended()


async def close() -> None:
    """This process leaves: what it carries out is handed over, not waited for."""
    works = list(_works)
    for work in works:
        work.cancel()
    await asyncio.gather(*works, return_exceptions=True)


async def _complete(action: Action) -> Action:
    """With what the console knows and the caller did not say."""
    if isinstance(action, ReloadWeights):
        return await in_database(checkpoints.with_step, action)
    return action


def _engine_key(principal: Principal, key: str | None) -> str:
    """Callers choose their own keys; with their name nobody can meet another's."""
    if not key:
        return uuid.uuid4().hex
    return hashlib.sha256(f"{principal.actor}\0{key}".encode()).hexdigest()


async def _store(job: Job, action: Action) -> tuple[Job, bool]:
    """The row and whether it is new; an emergency without a database goes on unwritten."""
    if not action.emergency:
        return await in_database(jobs.insert, job)
    try:
        return await within(EMERGENCY_S, jobs.insert, job)
    except DatabaseAway as error:
        job.late = True
        job.note(f"not written down yet: {error.message}")
        return job, True


async def _note_denied(principal: Principal, name: str, via: str, error: Forbidden) -> None:
    try:
        await within(
            EMERGENCY_S, audit.note_denied, principal, action=name, via=via, why=error.message
        )
    except DatabaseAway as away:
        log.warning("%s was denied %s; not in the audit: %s", principal.actor, name, away.message)
