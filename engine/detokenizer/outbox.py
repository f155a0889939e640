"""Text rows on their way to web workers: a full inbox delays that worker alone. No socket here.

Path: process.py -> here -> ``wire.SocketMapping``.

A batch for a worker that takes nothing now waits; rows that come meanwhile are merged per request.
What waits is bounded: a row that would go over a bound ends its request with ``slow_consumer``, and
a worker that takes nothing for ``EVICT_S`` is given up.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from engine import messages as m
from engine.wire import Codec

WORKER_BYTES = 8 * 2**20
REQUEST_BYTES = 2**20
FRAME_BYTES = 2**18  # of merged rows; the queue behind the socket holds whole frames
EVICT_S = 10.0
REMEMBERED_INBOXES = 1_024  # names of inboxes that are gone; a name is never used again


@dataclass(slots=True)
class _Group:
    """Consecutive rows of one request that go out as one row."""

    rows: list[m.StrRow]
    size: int = 0


@dataclass(slots=True)
class _Waiting:
    """What one worker has not taken. ``head`` is a frame that was refused; it goes first."""

    head: bytes
    since: float  # when the worker last took something, or first took nothing
    groups: deque[_Group] = field(default_factory=deque)
    open: dict[str, _Group] = field(default_factory=dict)  # by rid; a terminal row closes it
    size: int = 0  # bytes of head and groups

    def add(self, row: m.StrRow, size: int) -> None:
        group = self.open.get(row.rid)
        if group is None:
            group = self.open[row.rid] = _Group([])
            self.groups.append(group)
        group.rows.append(row)
        group.size += size
        self.size += size
        if row.finish is not None:
            del self.open[row.rid]

    def next_frame(self) -> bytes:
        """Moves the oldest groups, merged, into ``head``; "" when nothing is left."""
        rows: list[m.StrRow] = []
        moved = 0
        while self.groups and moved < FRAME_BYTES:
            group = self.groups.popleft()
            if self.open.get(group.rows[0].rid) is group:
                del self.open[group.rows[0].rid]
            moved += group.size
            rows.append(m.merge_all(group.rows))
        self.head = Codec.encode(m.BatchStrOutput(rows=rows)) if rows else b""
        self.size = len(self.head) + sum(group.size for group in self.groups)
        return self.head


class Outbox:
    """``send(inbox, frame)`` is False when the inbox takes nothing now. Times are monotonic."""

    def __init__(self, send: Callable[[str, bytes], bool]) -> None:
        self.counters = {"slow_consumers": 0, "evicted_inboxes": 0, "undeliverable_rows": 0}
        self._send = send
        self._waiting: dict[str, _Waiting] = {}
        self._gone: dict[str, None] = {}
        self._slow: list[m.StrRow] = []

    @property
    def blocked(self) -> bool:
        return bool(self._waiting)

    def deliver(self, rows: Iterable[m.StrRow], now: float) -> None:
        """One batch per inbox; what is refused waits for ``retry``."""
        for inbox, theirs in m.by_inbox(rows).items():
            if inbox in self._gone:
                self.counters["undeliverable_rows"] += len(theirs)
                continue
            waiting = self._waiting.get(inbox)
            if waiting is not None:
                self._add(waiting, theirs)
                continue
            frame = Codec.encode(m.BatchStrOutput(rows=theirs))
            if not self._send(inbox, frame):
                self._waiting[inbox] = _Waiting(frame, now, size=len(frame))

    def retry(self, now: float) -> list[str]:
        """Sends what waits. Inboxes that took nothing for too long: they are forgotten here."""
        given_up = []
        for inbox, waiting in list(self._waiting.items()):
            while waiting.head and self._send(inbox, waiting.head):
                waiting.since = now
                waiting.next_frame()
            if not waiting.head:
                del self._waiting[inbox]
            elif now - waiting.since >= EVICT_S:
                self.counters["evicted_inboxes"] += 1
                self.forget(inbox)
                given_up.append(inbox)
        return given_up

    def forget(self, inbox: str) -> None:
        """Drops what waits for ``inbox`` and whatever will come for it."""
        self._waiting.pop(inbox, None)
        self._gone[inbox] = None
        while len(self._gone) > REMEMBERED_INBOXES:
            del self._gone[next(iter(self._gone))]

    def take_slow(self) -> list[m.StrRow]:
        """Terminal rows that were made here since the last call; they wait like others."""
        slow, self._slow = self._slow, []
        return slow

    def _add(self, waiting: _Waiting, rows: list[m.StrRow]) -> None:
        ended: set[str] = set()
        for row in rows:
            if row.rid in ended:
                self.counters["undeliverable_rows"] += 1
                continue
            size = len(Codec.encode(row))
            group = waiting.open.get(row.rid)
            if (group.size if group else 0) + size > REQUEST_BYTES or (
                waiting.size + size > WORKER_BYTES
            ):
                self.counters["slow_consumers"] += 1
                end = _slow_consumer(row)
                if row.finish is None:
                    self._slow.append(end)
                    ended.add(row.rid)
                row, size = end, len(Codec.encode(end))
            waiting.add(row, size)


def _slow_consumer(row: m.StrRow) -> m.StrRow:
    finish = m.Finish(
        type="abort",
        status_code=503,
        err_type="slow_consumer",
        message="the web worker did not take this answer's rows in time",
    )
    return m.row_for(row, m.StrRow, finish=finish)
