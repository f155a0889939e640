"""Who is connected and what runs for whom: worker leases and the table of live rids. Pure.

Path: client.py -> router/process.py (this table) -> scheduler/process.py.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

from engine.messages import Lease, Reserve, WorkerView

LEASE_S = 10.0
LAGGING_S = 1.0
RESERVATION_S = 60.0  # a reservation that nobody submits is dropped after this


@dataclass(slots=True)
class Entry:
    """One live request. ``dp`` is None until it is dispatched."""

    rid: str
    parent: str
    inbox: str
    reserved_at: float
    priority: int = 0
    actor: str = ""
    pinned_dp: int | None = None
    dp: int | None = None
    accepted_at: float = 0.0
    prompt_tokens: int = 0
    max_new_tokens: int = 0
    fingerprint: int = 0
    aborted: str | None = None  # the reason; final, also when it comes before the submit

    @property
    def http_worker_ipc(self) -> str:
        """The owner, under the name that ``row_for`` copies."""
        return self.inbox


@dataclass(slots=True)
class Holder:
    """One lease and what came with its newest renewal."""

    lease: Lease
    seen_at: float


@dataclass(slots=True)
class Registry:
    """Every live lease and rid; a rid is here from its reservation to its last block's release."""

    leases: dict[str, Holder] = field(default_factory=dict)
    entries: dict[str, Entry] = field(default_factory=dict)
    children: dict[str, set[str]] = field(default_factory=lambda: defaultdict(set))

    # ------------------------------------------------------------------ leases

    def renew(self, lease: Lease, now: float) -> bool:
        """True when this inbox is new."""
        is_new = lease.inbox not in self.leases
        self.leases[lease.inbox] = Holder(lease, now)
        return is_new

    def superseded(self, lease: Lease) -> list[str]:
        """Older inboxes of the same worker: a worker that joins again has given them up."""
        return [
            inbox
            for inbox, holder in self.leases.items()
            if holder.lease.worker_id == lease.worker_id
            and holder.lease.kind == lease.kind
            and inbox != lease.inbox
            and (holder.lease.pid != lease.pid or holder.lease.generation < lease.generation)
        ]

    def of_pid(self, pid: int) -> list[str]:
        return [inbox for inbox, holder in self.leases.items() if holder.lease.pid == pid]

    def lapsed(self, now: float) -> list[str]:
        return [inbox for inbox, holder in self.leases.items() if now - holder.seen_at > LEASE_S]

    def drop_lease(self, inbox: str) -> list[Entry]:
        """Forgets the lease; returns the entries that lost their owner (removed as well)."""
        self.leases.pop(inbox, None)
        return [
            self.remove(rid)
            for rid in [rid for rid, entry in self.entries.items() if entry.inbox == inbox]
        ]

    def worker_views(self) -> list[WorkerView]:
        return [
            WorkerView(
                id=lease.worker_id,
                kind=lease.kind,
                pid=lease.pid,
                ipc=lease.inbox,
                streams=lease.streams,
                lag_s=lease.lag_s,
                rss_bytes=lease.rss_bytes,
                since=lease.since,
                seen_at=holder.seen_at,
                via=lease.via,
                state="lagging" if lease.lag_s > LAGGING_S else "ok",
            )
            for holder in sorted(self.leases.values(), key=lambda h: (h.lease.kind, h.lease.since))
            for lease in (holder.lease,)
        ]

    # ------------------------------------------------------------------ requests

    def taken(self, rids: list[str]) -> list[str]:
        """Those of ``rids`` that are live already or occur twice."""
        return [rid for rid in rids if rid in self.entries or rids.count(rid) > 1]

    def reserve(self, message: Reserve, now: float) -> None:
        for rid in message.rids:
            self.entries[rid] = Entry(
                rid=rid,
                parent=message.parent,
                inbox=message.http_worker_ipc,
                reserved_at=now,
                priority=message.priority,
                actor=message.actor,
                pinned_dp=message.dp_rank,
            )
            self.children[message.parent].add(rid)

    def remove(self, rid: str) -> Entry:
        entry = self.entries.pop(rid)
        siblings = self.children[entry.parent]
        siblings.discard(rid)
        if not siblings:
            del self.children[entry.parent]
        return entry

    def named(self, rid: str, *, prefix: bool = False) -> list[Entry]:
        """The entries that ``rid`` means: that request, or all children of that parent."""
        if prefix:
            return [entry for name, entry in self.entries.items() if name.startswith(rid)]
        found = set(self.children.get(rid, ()))
        if rid in self.entries:
            found.add(rid)
        return [self.entries[name] for name in sorted(found)]

    def of_rank(self, dp: int) -> list[Entry]:
        return [entry for entry in self.entries.values() if entry.dp == dp]

    def stale_reservations(self, now: float) -> list[Entry]:
        return [
            entry
            for entry in self.entries.values()
            if entry.dp is None and now - entry.reserved_at > RESERVATION_S
        ]
