"""What the engine did, written down as it happens: who served which epoch when, epochs, notices.

Path: engine/client.py (each snapshot) -> here -> ``Serving``, ``WeightUpdate``, ``AuditEntry``.
Every web worker sees every snapshot; whichever comes first writes, and the others find it written.
"""

from __future__ import annotations

import asyncio
import datetime
import logging
from collections import deque
from dataclasses import dataclass
from typing import Any

from django.conf import settings
from django.db import DataError, IntegrityError, transaction
from django.utils import timezone

from console.database import DatabaseAway, in_database
from console.models import Engine, Job, Serving, WeightUpdate
from console.models.engines import SILENT_S
from console.services import audit
from engine.client import EngineClient
from engine.errors import DeadlineExceeded, EngineUnreachable
from engine.messages import EngineView, FleetSnapshot, GetEpochReqInput, Notice

log = logging.getLogger(__name__)

CONFIRM_S = 10.0  # how often an open spell is confirmed
RETRY_S = 2.0
KEPT_PICTURES = 1000  # changes that wait while the database is away
READ_S = 5.0
FACTS_OF_EPOCH = ("weight_version", "token_step", "source", "checksum", "actor")


@dataclass(frozen=True, slots=True)
class Rank:
    """``epoch`` is None while the rank serves nothing."""

    dp: int
    tp: int
    pid: int
    epoch: int | None
    seen_at: float


@dataclass(frozen=True, slots=True)
class Picture:
    """The part of a snapshot that is history."""

    at: float
    engine: EngineView
    ranks: tuple[Rank, ...]
    notices: tuple[Notice, ...]

    @staticmethod
    def of(snapshot: FleetSnapshot) -> Picture:
        ranks = tuple(
            Rank(r.dp, r.tp, r.pid, None if r.state == "starting" else r.epoch, r.seen_at)
            for r in snapshot.ranks
        )
        return Picture(snapshot.at, snapshot.engine, ranks, tuple(snapshot.notices))

    def differs(self, other: Picture | None) -> bool:
        return other is None or self._facts() != other._facts()

    def _facts(self) -> tuple[Any, ...]:
        ranks = [(rank.dp, rank.tp, rank.pid, rank.epoch) for rank in self.ranks]
        return self.engine, ranks, [notice.id for notice in self.notices]


class Chronicle:
    """Of one web worker. ``put`` gets every snapshot, ``watch`` writes what changed."""

    def __init__(self) -> None:
        self._waiting: deque[Picture] = deque(maxlen=KEPT_PICTURES)
        self._newest: Picture | None = None
        self._changed = asyncio.Event()
        self._epochs: set[int] = set()  # that have a lineage row

    def put(self, snapshot: FleetSnapshot) -> None:
        picture = Picture.of(snapshot)
        if picture.differs(self._newest):
            self._waiting.append(picture)
            self._changed.set()
        self._newest = picture

    async def watch(self, client: EngineClient) -> None:
        """Until cancelled."""
        while True:
            try:
                async with asyncio.timeout(CONFIRM_S):
                    await self._changed.wait()
            except TimeoutError:
                if self._newest is not None:
                    self._waiting.append(self._newest)
            self._changed.clear()
            try:
                await self.write(client)
            except (DatabaseAway, EngineUnreachable, DeadlineExceeded) as error:
                log.warning("the chronicle waits: %s", error.message)
                self._changed.set()
                await asyncio.sleep(RETRY_S)

    async def write(self, client: EngineClient) -> None:
        """Everything that waits, in its order. What fails stays for the next time."""
        while self._waiting:
            picture = self._waiting[0]
            try:
                await in_database(record, picture)
            except (ValueError, OverflowError, DataError, IntegrityError) as error:
                log.warning("a picture that no column holds is left out: %s", error)
            else:
                await self._learn_epochs(client, picture)
            self._waiting.popleft()

    async def _learn_epochs(self, client: EngineClient, picture: Picture) -> None:
        new = {rank.epoch for rank in picture.ranks if rank.epoch} - self._epochs
        for epoch in sorted(new):
            reply = await client.call(GetEpochReqInput, deadline_s=READ_S, epoch=epoch)
            for facts in reply.result.get("epochs", []):
                await in_database(note_epoch, facts)
            self._epochs.add(epoch)


# ---------------------------------------------------------------- rows


@transaction.atomic
def record(picture: Picture) -> None:
    """Idempotent; a picture older than what is written changes nothing."""
    engine = _engine_row(picture)
    spells = {(s.dp, s.tp): s for s in Serving.objects.open().filter(engine=engine)}
    for rank in picture.ranks:
        _record_rank(engine, rank, spells.get((rank.dp, rank.tp)), picture.at)
    for notice in picture.notices:
        audit.note_change(
            notice=notice.id, at=_moment(notice.at), action=notice.kind, text=notice.text
        )


def _engine_row(picture: Picture) -> Engine:
    view = picture.engine
    fields = {
        "model_path": view.model,
        "state": view.state,
        "epoch": view.epoch,
        "weight_version": view.weight_version or "",
        "token_step": view.token_step,
        "generation": view.generation,
        "seen_at": _moment(picture.at),
    }
    engine, _ = Engine.objects.update_or_create(
        home=str(settings.QUARTERDECK_HOME), defaults=fields
    )
    return engine


def _record_rank(engine: Engine, rank: Rank, spell: Serving | None, at: float) -> None:
    began = _moment(rank.seen_at if rank.epoch is not None else at)
    if spell is not None:
        if spell.started_at > began:
            return  # written by a worker that knew more
        if (spell.epoch, spell.pid) == (rank.epoch, rank.pid):
            _confirm(spell, _moment(at))
            return
        quiet = (began - spell.confirmed_at).total_seconds() > SILENT_S
        Serving.objects.filter(pk=spell.pk).update(ended_at=spell.confirmed_at if quiet else began)
    if rank.epoch is not None:
        Serving.objects.create(
            engine=engine, dp=rank.dp, tp=rank.tp, epoch=rank.epoch, pid=rank.pid,
            started_at=began, confirmed_at=max(began, _moment(at)),
        )  # fmt: skip


def _confirm(spell: Serving, at: datetime.datetime) -> None:
    if at - spell.confirmed_at > datetime.timedelta(seconds=CONFIRM_S / 2):
        Serving.objects.filter(pk=spell.pk).update(confirmed_at=at)


def note_epoch(facts: dict[str, Any]) -> None:
    """The lineage row of an epoch that no job of this console wrote: the start's, for example."""
    job = Job.objects.filter(key=facts["job"]).first() if facts.get("job") else None
    fields = {name: facts.get(name) for name in FACTS_OF_EPOCH}
    fields |= {"groups": list(facts.get("groups", [])), "at": _moment(facts["at"]), "job": job}
    WeightUpdate.objects.get_or_create(
        epoch=facts["epoch"], defaults={k: v for k, v in fields.items() if v is not None}
    )


def _moment(at: float) -> datetime.datetime:
    return datetime.datetime.fromtimestamp(at, tz=timezone.get_default_timezone())
