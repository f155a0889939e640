"""Weight sessions and epochs, as the router keeps them, and what of it survives a restart. Pure.

An update is a session: buckets stage under one id, a commit makes ONE epoch of all of them. The
``Ledger`` is the content of ``engine/state.json``: written before the first commit
(``committing``) and after the last (``committed``).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec

from engine.messages import WeightSource, WeightUpdate

SESSION_IDLE_S = 60.0


class EpochRecord(msgspec.Struct, kw_only=True, frozen=True):
    """What one epoch is. ``paths`` load it: in order, a later file wins parameter by parameter."""

    epoch: int
    weight_version: str
    token_step: int | None = None
    paths: tuple[str, ...] = ()
    checksum: str = ""
    source: str = "start"
    job: str = ""
    actor: str = ""
    at: float = 0.0
    groups: tuple[int, ...] = ()


class PauseRecord(msgspec.Struct, kw_only=True, frozen=True):
    mode: str
    until: float


class Ledger(msgspec.Struct, kw_only=True):
    """``next_epoch`` never goes back, so an epoch number is never used twice."""

    next_epoch: int = 2
    committed: int = 1  # the newest epoch that all groups had
    groups: dict[int, int] = {}  # dp groups that serve another one (a canary)
    committing: int | None = None
    epochs: dict[int, EpochRecord] = {}
    relabels: list[tuple[float, int, str]] = []
    pause: PauseRecord | None = None
    lost: str = ""  # why an older epoch serves than the last committed one
    model_path: str = ""  # of the model that these epochs belong to

    def for_model(self, model_path: str) -> Ledger:
        """Another model: its weights are a new epoch; numbers go on."""
        if not self.model_path:
            return Ledger(model_path=model_path)
        epoch = self.next_epoch
        return Ledger(
            model_path=model_path,
            next_epoch=epoch + 1,
            committed=epoch,
            epochs=dict(self.epochs),
            relabels=self.relabels,
        )

    def epoch_of(self, dp: int) -> int:
        return self.groups.get(dp, self.committed)

    def begin_commit(self, record: EpochRecord) -> None:
        self.epochs[record.epoch] = record
        self.next_epoch = max(self.next_epoch, record.epoch + 1)
        self.committing = record.epoch

    def end_commit(self, groups: list[int], *, everywhere: bool) -> None:
        """``everywhere``: all groups have it, so a restart serves it."""
        epoch, self.committing = self.committing, None
        assert epoch is not None
        self.lost = ""
        if everywhere:
            self.committed, self.groups = epoch, {}
        else:
            self.groups.update(dict.fromkeys(groups, epoch))

    def relabel(self, version: str, at: float) -> None:
        """New lineage row, same epoch."""
        old = self.epochs[self.committed]
        self.epochs[self.committed] = msgspec.structs.replace(old, weight_version=version)
        self.relabels.append((at, self.committed, version))

    def at_start(self, model_path: str, exists: Callable[[str], bool], now: float) -> None:
        """What to serve after a restart: the last committed weights that can still be loaded.

        Never silently the start model: an epoch whose files are gone is named in ``lost``, and the
        next older one that can be loaded serves under its own number.
        """
        if self.committed not in self.epochs:
            self.epochs[self.committed] = EpochRecord(
                epoch=self.committed, weight_version="default", paths=(model_path,), at=now
            )
        self.committing = None
        for epoch in sorted((e for e in self.epochs if e <= self.committed), reverse=True):
            if all(map(exists, self.epochs[epoch].paths)):
                if epoch != self.committed:
                    self.lost = f"weights of epoch {self.committed} are gone, serving epoch {epoch}"
                    self.committed = epoch
                break
        else:
            self.lost = f"the weights of every epoch up to {self.committed} are gone"
        self.groups = {
            dp: epoch
            for dp, epoch in self.groups.items()
            if epoch in self.epochs and all(map(exists, self.epochs[epoch].paths))
        }


@dataclass(slots=True)
class Session:
    """One open update: what it is, and the buckets that are staged on every target rank."""

    id: str
    terms: WeightUpdate  # token_step, weight_version, in_flight, target ... of the begin call
    groups: list[int]
    touched_at: float
    implicit: bool = False
    sources: list[WeightSource] = field(default_factory=list)
    checksums: list[str] = field(default_factory=list)
    names: set[str] = field(default_factory=set)
    busy: bool = False

    def idle(self, now: float) -> bool:
        return not self.busy and not self.implicit and now - self.touched_at > SESSION_IDLE_S
