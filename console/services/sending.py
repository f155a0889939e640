"""Carrying an action out: one call to the engine under a lease, and what is known of its outcome.

Path: control.py -> here -> engine/client.py. A call is sent once. When its answer is lost (the
deadline passed, the engine restarted, this process died) whoever holds the job asks the router what
became of the call's key; what nobody knows has failed, with that reason.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import msgspec
from django.utils import timezone

from console.database import PATIENCE_S, DatabaseAway, in_database, within
from console.models import Job
from console.models.jobs import RENEW_S
from console.services import jobs, journal
from console.services.actions import Action
from console.services.load import Load
from console.worker import this_worker
from engine.client import EngineClient
from engine.errors import DeadlineExceeded, EngineUnreachable
from engine.messages import ControlReply, GetEpochReqInput, RankAnswer

log = logging.getLogger(__name__)

EMERGENCY_S = 1.0  # how long an emergency waits for the database
ASK_EVERY_S = 0.5
COME_BACK_S = 60.0  # how long an engine may be away before an open call counts as lost
OPEN_S = 1800.0  # how long an open call is asked about
READ_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How a job ended. ``status_code`` is that of an HTTP answer."""

    success: bool
    status_code: int = 200
    err_type: str = ""
    message: str = ""
    result: dict[str, Any] = field(default_factory=dict)
    ranks: list[dict[str, Any]] = field(default_factory=list)

    @property
    def state(self) -> Job.State:
        """``partial``: it happened, but not on every rank; ``refused``: nothing was done."""
        if self.success:
            whole = all(rank["state"] == "done" for rank in self.ranks)
            return Job.State.DONE if whole else Job.State.PARTIAL
        return Job.State.REFUSED if self.status_code < 500 else Job.State.FAILED

    @staticmethod
    def of_reply(reply: ControlReply) -> Outcome:
        return Outcome(
            success=reply.success,
            status_code=reply.status_code,
            err_type=reply.err_type,
            message=reply.message,
            result=reply.result,
            ranks=[_rank(answer) for answer in reply.ranks],
        )


def _rank(answer: RankAnswer) -> dict[str, Any]:
    state = "done" if answer.success else "refused"
    return {"dp": answer.dp, "tp": answer.tp, "state": state, "message": answer.message}


def failed(err_type: str, message: str, *, status_code: int = 503) -> Outcome:
    return Outcome(success=False, status_code=status_code, err_type=err_type, message=message)


# ---------------------------------------------------------------- one job


async def carry_out(job: Job, action: Action) -> None:
    """Sends, waits, writes the end. Cancelled, it hands the job to whoever looks next."""
    try:
        async with kept(job):
            outcome = await _send(job, action)
    except asyncio.CancelledError:
        await _hand_over(job)
        raise
    await end(job, outcome, patience_s=EMERGENCY_S if action.emergency else PATIENCE_S)


async def settle_and_end(job: Job) -> None:
    """For a job whose sender is gone. Cancelled, it hands the job on."""
    try:
        async with kept(job):
            job.note("its process is gone; asking the engine what became of it")
            outcome = await settle(job)
    except asyncio.CancelledError:
        await _hand_over(job)
        raise
    await end(job, outcome, patience_s=PATIENCE_S)


async def end(job: Job, outcome: Outcome, *, patience_s: float) -> None:
    """Writes the end, or keeps it in the journal while the database is away."""
    job.state = outcome.state
    job.status_code = outcome.status_code
    job.message = outcome.message
    job.result = outcome.result | ({"err_type": outcome.err_type} if outcome.err_type else {})
    job.ranks = outcome.ranks
    job.progress = None
    job.after = (await load_now()).as_json()
    job.ended_at = timezone.now()
    job.note(f"{job.state}: {job.message}" if job.message else job.state)
    try:
        await within(patience_s, jobs.finish, job)
    except DatabaseAway:
        await asyncio.to_thread(journal.put, job)


@asynccontextmanager
async def kept(job: Job) -> AsyncIterator[None]:
    """Renews the job's lease meanwhile."""
    task = asyncio.create_task(_renew(job)) if job.pk is not None else None
    try:
        yield
    finally:
        if task is not None:
            task.cancel()


async def _renew(job: Job) -> None:
    while True:
        await asyncio.sleep(RENEW_S)
        try:
            if not await in_database(jobs.renew, job):
                log.warning("job %s has another owner now", job.pk)
                return
        except DatabaseAway as error:
            log.warning("the lease of job %s was not renewed: %s", job.pk, error.message)


async def _hand_over(job: Job) -> None:
    if job.pk is None:
        await asyncio.to_thread(journal.put, _lost(job))
        return
    try:
        await within(EMERGENCY_S, jobs.hand_over, job)
    except DatabaseAway as error:
        log.warning("job %s waits for its lease to end: %s", job.pk, error.message)


def _lost(job: Job) -> Job:
    job.state, job.ended_at = Job.State.FAILED, timezone.now()
    job.message = "its process ended before the engine's answer came"
    return job


async def load_now() -> Load:
    """A true read, or the newest snapshot while the router does not answer."""
    client = this_worker().client
    if client is None:
        return Load.of(None)
    try:
        return Load.of(await client.fleet())
    except (EngineUnreachable, DeadlineExceeded):
        return Load.of(client.snapshot)


# ---------------------------------------------------------------- the engine


async def _send(job: Job, action: Action) -> Outcome:
    client = this_worker().client
    if client is None or not client.joined:
        return failed("engine_unreachable", "the engine is not reachable; nothing was sent")
    job.note("sent to the engine")
    try:
        reply = await client.call(
            action.message, deadline_s=action.wait_s, actor=job.actor, key=job.key,
            **action.engine_fields(),
        )  # fmt: skip
    except (EngineUnreachable, DeadlineExceeded) as error:
        job.note(error.message)
        return await settle(job)
    if reply.err_type == DeadlineExceeded.err_type or reply.result.get("open"):
        job.note(reply.message)
        job.message, job.result = reply.message, reply.result
        await _note_progress(job)
        return await settle(job)
    return Outcome.of_reply(reply)


async def _note_progress(job: Job) -> None:
    """Who watches sees that it began; the row is complete without it."""
    if job.pk is None:
        return
    try:
        await within(EMERGENCY_S, jobs.progress, job)
    except DatabaseAway as error:
        log.info("job %s goes on unseen: %s", job.pk, error.message)


async def settle(job: Job) -> Outcome:
    """What became of a call that was sent, asked until somebody knows."""
    began = heard = time.monotonic()
    while time.monotonic() - began < OPEN_S and time.monotonic() - heard < COME_BACK_S:
        client = this_worker().client
        try:
            if client is not None and client.joined:
                outcome = await _asked(client, job)
                heard = time.monotonic()
                if outcome is not None:
                    return outcome
        except (EngineUnreachable, DeadlineExceeded) as error:
            log.info("job %s: %s", job.pk, error.message)
        await asyncio.sleep(ASK_EVERY_S)
    return failed("outcome_unknown", "the engine did not say what became of the call")


async def _asked(client: EngineClient, job: Job) -> Outcome | None:
    """None while the call is still open."""
    reply = await client.outcome_of(job.key, deadline_s=READ_S)
    state = reply.result.get("state")
    if state == "open":
        return None
    if state == "ended":
        known = reply.result
        return Outcome(
            success=known["success"],
            status_code=int(known.get("status_code") or (200 if known["success"] else 400)),
            err_type=known.get("err_type", ""),
            message=known["message"],
            result=known["result"],
            ranks=[_rank(answer) for answer in msgspec.convert(known["ranks"], list[RankAnswer])],
        )
    committed = await _committed_epoch(client, job.key)
    if committed is not None:
        return Outcome(success=True, message="committed; its answer was lost", result=committed)
    return failed(
        "outcome_unknown",
        "the engine does not know this call: it restarted, or the call never arrived. "
        "It was not sent again.",
    )


async def _committed_epoch(client: EngineClient, key: str) -> dict[str, Any] | None:
    """The ledger of epochs outlives the router: an update that it names was committed."""
    reply = await client.call(GetEpochReqInput, deadline_s=READ_S)
    for record in reversed(reply.result.get("epochs", [])):
        if record.get("job") == key:
            return {
                name: record.get(name)
                for name in ("epoch", "weight_version", "token_step", "checksum")
            }
    return None
