"""Weight sessions and epochs, as the router keeps them, and what of it survives a restart. Pure.

An update is a session: buckets stage under one id, a commit makes ONE epoch of all of them. The
``Ledger`` is the content of ``engine/state.json``: written before the first commit
(``committing``) and after the last (``committed``).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec

from engine.messages import RankAnswer, WeightSource, WeightUpdate

KEEP_RECORDS = 2_000
SAID = ("token_step", "weight_version", "in_flight", "flush_cache", "checksum")
FLAGS = ("abort_all_requests", "keep_pause", "dry_run", "torch_empty_cache")


class EpochRecord(msgspec.Struct, kw_only=True, frozen=True):
    """What one epoch is. ``paths`` load it: in order, a later file wins parameter by parameter.

    ``checksum`` is that of the staged tensors (weights/checkpoint.py); ``complete``: they are every
    parameter, so it is also the checksum of ``paths``.
    """

    epoch: int
    weight_version: str
    token_step: int | None = None
    paths: tuple[str, ...] = ()
    checksum: str = ""
    complete: bool = False
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

    def problem(self) -> str:
        """Why a ledger that was read cannot be one that was written, or ""."""
        unknown = {self.committed, *self.groups.values()} - self.epochs.keys()
        if unknown:
            return f"it has no record of epoch {min(unknown)}"
        if self.next_epoch <= max(self.epochs):
            return f"epoch {max(self.epochs)} would be used again"
        return ""

    def epoch_of(self, dp: int) -> int:
        return self.groups.get(dp, self.committed)

    def checksum_of(self, epoch: int) -> str:
        """What the weights of ``epoch`` must read as; "" where that is not known."""
        record = self.epochs[epoch]
        return record.checksum if record.complete else ""

    def present(self, dp_groups: int) -> set[int]:
        """Epochs that should serve now."""
        return {self.epoch_of(dp) for dp in range(dp_groups)}

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

    def abort_commit(self) -> None:
        """No group took it: the epoch's number is spent, its record tells of tokens made at the
        edge of a death."""
        self.committing = None

    def fall_back(self, epoch: int) -> None:
        """An older epoch serves everywhere, because the weights of the right one are gone."""
        self.lost = f"weights of epoch {self.committed} are gone, serving epoch {epoch}"
        self.committed, self.groups = epoch, {}

    def older_than(self, epoch: int) -> list[int]:
        return sorted((known for known in self.epochs if known < epoch), reverse=True)

    def forget_old(self) -> None:
        """Bounds the file: the newest records stay, and those that serve."""
        for epoch in sorted(self.epochs)[:-KEEP_RECORDS]:
            if epoch != self.committed and epoch not in self.groups.values():
                del self.epochs[epoch]

    def relabel(self, epoch: int, version: str, at: float) -> None:
        """New lineage row, same epoch."""
        old = self.epochs[epoch]
        self.epochs[epoch] = msgspec.structs.replace(old, weight_version=version)
        self.relabels = [*self.relabels, (at, epoch, version)][-KEEP_RECORDS:]

    def at_start(self, model_path: str, loadable: Callable[[str], bool], now: float) -> None:
        """What to serve after a restart: the last committed weights that can still be loaded.

        Never silently the start model: an epoch whose files are gone is named in ``lost``, and the
        next older one that can be loaded serves under its own number.
        """
        if self.committed not in self.epochs:
            self.epochs[self.committed] = EpochRecord(
                epoch=self.committed, weight_version="default", paths=(model_path,), at=now
            )
        self.committing = None
        self.groups = {
            dp: epoch
            for dp, epoch in self.groups.items()
            if epoch in self.epochs and all(map(loadable, self.epochs[epoch].paths))
        }
        for epoch in (self.committed, *self.older_than(self.committed)):
            if all(map(loadable, self.epochs[epoch].paths)):
                if epoch != self.committed:
                    self.fall_back(epoch)
                return
        self.lost = f"the weights of every epoch up to {self.committed} are gone"


@dataclass(slots=True)
class Session:
    """One open update: what it is, and the buckets that are staged on every target rank."""

    id: str
    terms: WeightUpdate  # token_step, weight_version, in_flight, target ... of the calls so far
    groups: list[int]
    touched_at: float
    implicit: bool = False  # opened by a bucket while paused; continue commits it
    sources: list[WeightSource] = field(default_factory=list)
    checksum: str = ""  # of everything staged so far
    missing: int = 0  # parameters that are not staged
    busy: bool = False
    failed: str = ""  # why it can only be dropped

    def idle(self, now: float, idle_s: float) -> bool:
        """Nobody sends any more. A failed session of a pause waits for the end of the pause."""
        kept = self.busy or (self.failed and self.implicit)
        return not kept and now - self.touched_at > idle_s

    def took(self, source: WeightSource, answer: RankAnswer) -> None:
        """A bucket is staged everywhere."""
        self.sources.append(source)
        self.saw(answer)

    def saw(self, answer: RankAnswer) -> None:
        """What a rank says of all that is staged; all ranks say the same."""
        self.checksum = str(answer.result.get("checksum", ""))
        self.missing = int(answer.result.get("missing", 0))

    @property
    def paths(self) -> tuple[str, ...]:
        return tuple(source.spool_path or source.path for source in self.sources)


def merged_terms(earlier: WeightUpdate, later: WeightUpdate) -> WeightUpdate:
    """The terms of a session after another call: what that one says wins."""
    said = {name: value for name in SAID if (value := getattr(later, name)) is not None}
    flags = {name: True for name in FLAGS if getattr(later, name)}
    return msgspec.structs.replace(earlier, **said, **flags)
