"""Catches chosen tensors of chosen requests out of the forward pass, and always ends.

Path: step plan's command -> ``DumpCapture.arm`` -> the runner runs steps that hold a wanted request
through the backend's instrumented forward with a ``Tap`` -> store.py.

What a model backend offers (``model/instrument.py``): its dump points in execution order, and a
second way to run the same forward, with the same collectives, that calls the tap at each point. The
unarmed forward is another function or graph that never sees the tap, so a dump costs nothing until
it is armed.

A wanted tensor is cut to the rows of the request, copied to the CPU and described at once; the copy
waits in a ring of at most ``max_bytes``, where it may give way to newer ones. Files are written on
a thread, when the dump ends or when somebody asks (``materialise``).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Collection, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import msgspec
import torch

from engine.artifacts import Rank
from engine.dumps.points import DumpPoint, DumpSpec, Kind, select
from engine.dumps.statistics import bytes_of, describe, kept_copy
from engine.dumps.store import DumpManifest, Record, write_manifest, write_tensors
from engine.errors import Conflict

MAX_RECORDS = 200_000


@dataclass(frozen=True, slots=True)
class RowSpan:
    """Rows ``start:stop`` of a tensor's first dimension belong to ``rid``; the first of them is at
    ``position`` of its context (prompt and output)."""

    rid: str
    start: int
    stop: int
    position: int


class Tap(Protocol):
    """What the instrumented forward calls, in execution order."""

    def wants(self, name: str, kind: Kind) -> bool:
        """Whether this point is wanted: ask before gathering something only for a dump."""

    def __call__(
        self, name: str, kind: Kind, tensor: torch.Tensor, rows: Sequence[RowSpan] | None
    ) -> None:
        """``tensor`` is read now and not kept. ``rows`` says which request each row of its first
        dimension belongs to; None: it is not made of rows (a weight). A KV tap of one request is
        its whole context, ``[context, heads, width]``, under one span from position 0."""


@dataclass(frozen=True, slots=True)
class View:
    """The tap, and which rows of the batch (and of the tokens with logits) are whose."""

    tap: Tap
    rows: list[RowSpan]
    kept: list[RowSpan]

    def show(
        self,
        name: str,
        given: torch.Tensor | None = None,
        made: torch.Tensor | None = None,
        weight: torch.Tensor | None = None,
    ) -> None:
        """One module: weight, input and output, as a forward hook on it would see them."""
        if weight is not None:
            self.tap(name, "weight", weight, None)
        if given is not None:
            self.tap(name, "input", given, self.rows)
        if made is not None:
            self.tap(name, "output", made, self.rows)


class DumpCapture:
    """What a rank's runner holds for its whole life; used from its step thread alone.

    Unarmed, ``armed`` is the only thing the runner looks at. Armed, it asks ``wants`` for each step
    and calls ``tick`` at least once a second when there is none.
    """

    def __init__(self, rank: Rank, points: Sequence[DumpPoint], form: str) -> None:
        self._rank = rank
        self._points = {point.name: point for point in points}
        self._form = form
        self._session: Session | None = None

    @property
    def armed(self) -> bool:
        return self._session is not None and not self._session.ended

    def arm(self, spec: DumpSpec) -> None:
        """Conflict while another dump runs or its manifest was not taken; BadRequest if a glob or a
        layer matches nothing here."""
        if self._session is not None:
            raise Conflict(f"dump {self._session.spec.dump_id} is still running")
        wanted = select(list(self._points.values()), spec)
        listens = not spec.ranks or self._rank.name in spec.ranks
        manifest = DumpManifest(dump_id=spec.dump_id, rank=self._rank, form=self._form)
        self._session = Session(spec, manifest, self._points, wanted if listens else {})

    def wants(self, rids: Collection[str]) -> bool:
        """Whether a step with these requests must run the instrumented forward."""
        session = self._session
        if session is None or session.over_time():
            return False
        return bool(rids) and (not session.spec.rids or not session.spec.rids.isdisjoint(rids))

    @contextmanager
    def step(self, number: int, *, epoch: int) -> Iterator[Tap]:
        """Around one instrumented forward; ``epoch`` is that of the weights it uses."""
        session = self._session
        assert session, "a step is tapped only while armed"
        session.begin_step(number, epoch)
        yield session
        session.end_step()

    def requests_ended(self, rids: Iterable[str]) -> None:
        """A dump of named requests ends with the last of them."""
        if self._session is not None:
            self._session.requests_ended(rids)

    def tick(self) -> None:
        """Ends a dump whose time is over."""
        if self._session is not None:
            self._session.over_time()

    def stop(self, reason: str) -> None:
        if self._session is None:
            raise Conflict("no dump is armed")
        self._session.finish(reason)

    def materialise(self) -> None:
        """Writes what is kept by now; the dump goes on."""
        if self._session is None:
            raise Conflict("no dump is armed")
        self._session.materialise()

    def take_manifest(self) -> DumpManifest | None:
        """The manifest, once, when all its files are written (or could not be); frees the rank."""
        session = self._session
        if session is None or not session.written.is_set():
            return None
        self._session = None
        return session.manifest

    def close(self) -> None:
        """Ends at once, with the rank; what is kept is still written."""
        if self._session is not None:
            self._session.finish("the rank ended")
            self._session.written.wait()
            self._session = None


class Session:
    """One armed dump: the tap, the ring of kept tensors, and the files made of it."""

    def __init__(
        self,
        spec: DumpSpec,
        manifest: DumpManifest,
        points: dict[str, DumpPoint],
        wanted: dict[str, set[Kind]],
    ) -> None:
        self.spec = spec
        self.manifest = manifest
        self.ended = False
        self.written = threading.Event()
        self._points = points
        self._wanted = wanted
        self._deadline = time.monotonic() + spec.max_seconds
        self._rids_left = set(spec.rids)
        self._steps = 0
        self._step = self._epoch = 0
        self._weights_seen: set[tuple[str, int]] = set()
        self._kept: dict[int, torch.Tensor] = {}  # record's index -> tensor, oldest first
        self._kept_bytes = 0
        self._files = 0
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="dump-writer")

    def wants(self, name: str, kind: Kind) -> bool:
        return kind in self._wanted.get(name, ())

    def __call__(
        self, name: str, kind: Kind, tensor: torch.Tensor, rows: Sequence[RowSpan] | None
    ) -> None:
        if not self.wants(name, kind):
            return
        if rows is None:
            if (name, self._epoch) not in self._weights_seen:
                self._weights_seen.add((name, self._epoch))
                self._keep(name, kind, "", 0, 0, tensor)
            return
        for span in rows:
            if not self.spec.rids or span.rid in self.spec.rids:
                cut = tensor[span.start : span.stop]
                stop = span.position + span.stop - span.start
                self._keep(name, kind, span.rid, span.position, stop, cut)

    def begin_step(self, number: int, epoch: int) -> None:
        self._step, self._epoch = number, epoch

    def end_step(self) -> None:
        self._steps += 1
        if self._steps >= self.spec.max_steps:
            self.finish(f"caught {self._steps} steps")
        elif len(self.manifest.records) >= MAX_RECORDS:
            self.finish(f"reached {MAX_RECORDS} tensors")

    def over_time(self) -> bool:
        """Ends the dump if its time is over; whether it has ended."""
        if time.monotonic() >= self._deadline:
            self.finish(f"reached {self.spec.max_seconds:g} seconds")
        return self.ended

    def requests_ended(self, rids: Iterable[str]) -> None:
        if self.spec.rids:
            self._rids_left.difference_update(rids)
            if not self._rids_left:
                self.finish("the requests ended")

    def finish(self, reason: str) -> None:
        """No further step is tapped. Writes what is kept, then the final manifest."""
        if self.ended:
            return
        self.ended = True
        self.manifest.reason = reason
        self.materialise()
        self._writer.submit(self._complete)
        self._writer.shutdown(wait=False)

    def materialise(self) -> None:
        if self._kept:
            kept, self._kept = self._kept, {}
            name = f"{self.spec.dump_id}-{self.manifest.rank.name}-{self._files:03d}.safetensors"
            self._files += 1
            self._kept_bytes = 0
            self._writer.submit(self._write, name, kept)

    def _keep(
        self, name: str, kind: Kind, rid: str, start: int, stop: int, tensor: torch.Tensor
    ) -> None:
        copy = kept_copy(tensor)
        index = len(self.manifest.records)
        self.manifest.records.append(
            Record(
                name=name,
                kind=kind,
                rid=rid,
                step=self._step,
                epoch=self._epoch,
                start=start,
                stop=stop,
                shard_dim=self._points[name].shard_dim[kind],
                statistics=describe(copy),
                key=f"{index}:{name}:{kind}",
            )
        )
        self._kept[index] = copy
        self._kept_bytes += copy.nbytes
        while self._kept_bytes > self.spec.max_bytes:
            oldest = next(iter(self._kept))
            self._kept_bytes -= self._kept.pop(oldest).nbytes
            self.manifest.evicted += 1

    def _write(self, name: str, kept: dict[int, torch.Tensor]) -> None:
        """On the writer's thread: one file, then the manifest that names it."""
        records = self.manifest.records
        tensors = {
            records[index].key: (records[index].statistics.dtype, list(t.shape), bytes_of(t))
            for index, t in kept.items()
        }
        try:
            write_tensors(Path(self.spec.directory) / name, tensors)
        except OSError as error:
            self.manifest.error = f"cannot write {name}: {error.strerror}"
            return
        for index in kept:
            records[index] = msgspec.structs.replace(records[index], file=name)
        self._write_manifest()

    def _complete(self) -> None:
        self.manifest.complete = True
        self._write_manifest()
        self.written.set()

    def _write_manifest(self) -> None:
        if not self._wanted:
            return  # this rank was not asked; it only ran along
        try:
            write_manifest(Path(self.spec.directory), self.manifest)
        except OSError as error:
            self.manifest.error = f"cannot write the manifest: {error.strerror}"
