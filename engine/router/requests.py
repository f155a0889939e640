"""Generation requests at the front desk: admission, dispatch, holding, aborts, ends.

Path: client.py -> process.py -> here -> scheduler/process.py. Every request that comes in
here leaves with exactly one terminal row: from its rank, or from here when no rank can give it.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, Protocol

import msgspec

from engine import messages as m
from engine.config import EngineConfig
from engine.router.dispatch import Dispatcher, detokenizer_of
from engine.router.registry import Entry, Registry
from engine.router.state import EngineState

QUARANTINE_S = 600.0
DEATHS_BEFORE_QUARANTINE = 2
DELIVERY_S = 2.0  # after its end, a request's last rows may still be with its detokenizer


class Sockets(Protocol):
    """Where the desk's messages go; none of these blocks."""

    inbox: str

    def to_inbox(self, inbox: str, message: msgspec.Struct) -> None: ...
    def to_rank(self, dp: int, message: msgspec.Struct) -> bool: ...
    def to_detokenizer(self, index: int, message: msgspec.Struct) -> None: ...


class RequestDesk:
    """The life of every rid between its reservation and the release of its blocks."""

    def __init__(
        self,
        config: EngineConfig,
        registry: Registry,
        state: EngineState,
        sockets: Sockets,
        count: Callable[..., None],
    ) -> None:
        self._config, self._registry, self._state = config, registry, state
        self._sockets, self._count = sockets, count
        self._dispatcher = Dispatcher(config.dp, config.limits.block_tokens)
        self._open_tokens: dict[int, dict[str, int]] = {dp: {} for dp in range(config.dp)}
        self._held: dict[str, m.TokenizedGenerateReqInput] = {}
        self._holding = False
        self._deaths: dict[int, tuple[int, float]] = {}  # fingerprint -> (deaths, newest)
        self._ended: deque[tuple[float, Entry]] = deque()  # whose answer may be under way

    # ------------------------------------------------------------------ admission

    def reserve(self, message: m.Reserve) -> None:
        refusal = self._refusal_of(message)
        if refusal is None:
            self._registry.reserve(message, time.time())
            refusal = {"epoch": self._state.engine_view().epoch or 0}
        else:
            self._count("refused")
        reply = m.reply_to(message, m.ReserveReply, parent=message.parent, **refusal)
        self._sockets.to_inbox(message.http_worker_ipc, reply)

    def _refusal_of(self, message: m.Reserve) -> dict[str, Any] | None:
        if message.http_worker_ipc not in self._registry.leases:
            rejoin = m.Rejoin(inbox=message.http_worker_ipc, reason="no lease")
            self._sockets.to_inbox(message.http_worker_ipc, rejoin)
            return _refusal(503, "engine_unreachable", "this worker has no lease; try again", 1)
        if taken := self._registry.taken(message.rids):
            return _refusal(409, "duplicate_rid", f"request id {taken[0]!r} is in use")
        if message.dp_rank is not None and not 0 <= message.dp_rank < self._config.dp:
            return _refusal(
                400, "invalid_request_error",
                f"data_parallel_rank {message.dp_rank} does not exist; this engine has ranks "
                f"0 to {self._config.dp - 1}",
            )  # fmt: skip
        groups = self._state.dispatch_groups()
        if not groups or (message.dp_rank is not None and message.dp_rank not in groups):
            return _refusal(503, "engine_restarting", "no rank can take the request now", 2)
        limits, live = self._config.limits, len(self._registry.entries)
        most = self._config.dp * limits.max_running + limits.max_waiting
        if len(message.rids) > most:
            text = f"{len(message.rids)} requests at once; this engine holds {most} at most"
            return _refusal(400, "invalid_request_error", text)
        if live + len(message.rids) > len(groups) * limits.max_running + limits.max_waiting:
            return _refusal(503, "overloaded", f"{live} requests are open, that is the limit", 1)
        return None

    def release(self, message: m.Release) -> None:
        for rid in message.rids:
            entry = self._registry.entries.get(rid)
            if entry is not None and entry.inbox == message.http_worker_ipc and entry.dp is None:
                self._registry.remove(rid)

    def expire(self, now: float) -> None:
        for entry in self._registry.stale_reservations(now):
            if entry.rid not in self._held:
                self._registry.remove(entry.rid)
                self._count("reservations_expired")
        while self._ended and now - self._ended[0][0] > DELIVERY_S:
            self._ended.popleft()
        self._deaths = {
            key: value for key, value in self._deaths.items() if now - value[1] < QUARANTINE_S
        }

    # ------------------------------------------------------------------ dispatch

    def submit(self, message: m.TokenizedGenerateReqInput) -> None:
        entry = self._registry.entries.get(message.rid)
        if entry is None or entry.inbox != message.http_worker_ipc or entry.dp is not None:
            self._send_end(message, 409, "not_reserved", f"{message.rid!r} holds no reservation")
            return
        entry.accepted_at = time.time()
        entry.prompt_tokens = len(message.input_ids)
        entry.max_new_tokens = message.sampling.max_new_tokens
        entry.fingerprint = hash((tuple(message.input_ids), message.sampling.max_new_tokens))
        if entry.aborted is not None:
            self._refuse(message, None, None, entry.aborted)
        elif self._deaths.get(entry.fingerprint, (0, 0.0))[0] >= DEATHS_BEFORE_QUARANTINE:
            self._refuse(
                message, 503, "quarantined",
                "a rank died twice while it ran this request; it is refused for 10 minutes",
            )  # fmt: skip
        elif self._holding:
            self._held[message.rid] = message
        else:
            self._dispatch(entry, message)

    def _dispatch(self, entry: Entry, message: m.TokenizedGenerateReqInput) -> None:
        loads = {
            dp: sum(self._open_tokens[dp].values())
            for dp in self._state.dispatch_groups()
            if entry.pinned_dp in (None, dp)
        }
        if not loads:
            self._refuse(message, 503, "engine_restarting", "the rank went down; try again")
            return
        dp = self._dispatcher.choose(message.input_ids, message.extra_key, loads)
        if not self._sockets.to_rank(dp, message):
            self._refuse(message, 503, "overloaded", f"rank dp{dp} takes no more messages now")
            return
        entry.dp = dp
        self._open_tokens[dp][entry.rid] = len(message.input_ids) + message.sampling.max_new_tokens
        self._count("dispatched")

    def hold(self) -> None:
        """New submits wait here until ``release_held`` (a pause, or an update that drains)."""
        self._holding = True

    def release_held(self) -> None:
        self._holding = False
        held, self._held = self._held, {}
        for rid, message in held.items():
            self._dispatch(self._registry.entries[rid], message)

    def _refuse(
        self,
        message: m.TokenizedGenerateReqInput,
        status: int | None,
        kind: str | None,
        text: str,
    ) -> None:
        """Ends a reserved request that no rank has seen. An abort that somebody asked for has no
        ``status``, as where a rank makes it: it is an answer without tokens and no failure."""
        self._registry.remove(message.rid)
        self._send_end(message, status, kind, text)

    def _send_end(
        self,
        message: m.TokenizedGenerateReqInput,
        status: int | None,
        kind: str | None,
        text: str,
    ) -> None:
        """The terminal row of a request that no rank has seen goes straight to its inbox."""
        self._count("refused")
        finish = m.Finish(type="abort", message=text, status_code=status, err_type=kind)
        row = m.row_for(
            message,
            m.StrRow,
            finish=finish,
            provenance=m.Provenance(
                prompt_tokens=len(message.input_ids), cached_tokens=0, dp_rank=-1, queued_s=0.0
            ),
            **m.no_families(message),
        )
        self._sockets.to_inbox(message.http_worker_ipc, m.BatchStrOutput(rows=[row]))

    # ------------------------------------------------------------------ ends

    def ended(self, message: m.RequestEnded) -> None:
        for rid in message.rids:
            entry = self._registry.entries.get(rid)
            if entry is not None and entry.dp == message.dp:
                self._forget(entry)

    def _forget(self, entry: Entry) -> None:
        self._registry.remove(entry.rid)
        self._ended.append((time.time(), entry))
        if entry.dp is not None:
            self._open_tokens[entry.dp].pop(entry.rid, None)

    def abort(self, entries: Iterable[Entry], reason: str) -> None:
        """Final from now on: held ones end here, dispatched ones in their rank, reserved ones
        when they are submitted."""
        dispatched = []
        for entry in entries:
            entry.aborted = entry.aborted or reason
            self._count("aborted")
            held = self._held.pop(entry.rid, None)
            if held is not None:
                self._refuse(held, None, None, reason)
            elif entry.dp is not None:
                dispatched.append(entry)
        self.end_in_ranks(dispatched, reason, silent=False)

    def end_in_ranks(self, entries: Iterable[Entry], reason: str, *, silent: bool) -> None:
        per_rank: dict[int, list[str]] = {}
        for entry in entries:
            if entry.dp is not None:
                per_rank.setdefault(entry.dp, []).append(entry.rid)
        for dp, rids in per_rank.items():
            self._sockets.to_rank(
                dp,
                m.stamped(
                    self._sockets.inbox, m.EndRequests, rids=rids, reason=reason, silent=silent
                ),
            )

    def drop_owner(self, inbox: str, reason: str) -> None:
        """The lease of ``inbox`` is over: nobody reads its answers."""
        orphans = self._registry.drop_lease(inbox)
        for entry in orphans:
            self._held.pop(entry.rid, None)
            if entry.dp is not None:
                self._open_tokens[entry.dp].pop(entry.rid, None)
        self._count("orphaned_requests", len(orphans))
        self.end_in_ranks(orphans, reason, silent=True)

    def slow_consumers(self, rids: Iterable[str]) -> None:
        """The detokenizer has answered these already; free their slots."""
        slow = [self._registry.entries[rid] for rid in rids if rid in self._registry.entries]
        self._count("slow_consumers", len(slow))
        self.end_in_ranks(slow, "slow_consumer", silent=True)

    def rank_down(self, message: m.ProcessDown) -> None:
        """Every request of the group ends, through its detokenizer, so that order holds."""
        dp, now = message.index, time.time()
        self._dispatcher.forget(dp)
        finish = m.Finish(
            type="abort", status_code=503, err_type="engine_restarting",
            message=f"rank dp{dp} tp{message.tp} died ({message.reason}); it restarts, try again",
        )  # fmt: skip
        for entry in self._registry.of_rank(dp):
            deaths, _ = self._deaths.get(entry.fingerprint, (0, 0.0))
            self._deaths[entry.fingerprint] = (deaths + 1, now)
            self._forget(entry)
            row = m.row_for(entry, m.TokenIDRow, finish=finish)
            self._sockets.to_detokenizer(
                detokenizer_of(entry.rid, self._config.detokenizers),
                m.BatchTokenIDOutput(rows=[row]),
            )
        self._count("rank_deaths")

    def detokenizer_down(self, message: m.ProcessDown) -> None:
        """Its state is lost: those requests end straight to their inboxes.

        So do those that have ended a moment ago: their last rows may have died with it. Whoever
        had them takes no second end.
        """
        finish = m.Finish(
            type="abort",
            status_code=503,
            err_type="engine_restarting",
            message="the detokenizer died; it restarts, please try again",
        )
        lost = [
            entry for entry in self._registry.entries.values()
            if entry.dp is not None
            and detokenizer_of(entry.rid, self._config.detokenizers) == message.index
        ]  # fmt: skip
        under_way = [
            entry for _, entry in self._ended
            if detokenizer_of(entry.rid, self._config.detokenizers) == message.index
            and entry.rid not in self._registry.entries
        ]  # fmt: skip
        self.end_in_ranks(lost, "its detokenizer died", silent=True)
        for entry in lost:
            self._forget(entry)
        for entry in (*lost, *under_way):
            row = m.row_for(entry, m.StrRow, finish=finish)
            self._sockets.to_inbox(entry.http_worker_ipc, m.BatchStrOutput(rows=[row]))
        self._count("detokenizer_deaths")

    # ------------------------------------------------------------------ views

    def live(self, groups: list[int]) -> list[Entry]:
        """Requests that ranks of these groups run or queue."""
        return [entry for entry in self._registry.entries.values() if entry.dp in groups]

    def table(self) -> list[dict[str, Any]]:
        """One map per request, for the Requests page."""
        workers = {inbox: holder.lease for inbox, holder in self._registry.leases.items()}
        return [
            {
                "rid": entry.rid,
                "parent": entry.parent,
                "worker": workers[entry.inbox].worker_id if entry.inbox in workers else None,
                "rank": entry.dp,
                "phase": "held" if entry.rid in self._held else
                         "queued" if entry.dp is not None else "reserved",
                "priority": entry.priority,
                "since": entry.reserved_at,
                "prompt_tokens": entry.prompt_tokens,
                "max_new_tokens": entry.max_new_tokens,
                "actor": entry.actor,
                "aborted": entry.aborted,
            }
            for entry in self._registry.entries.values()
        ]  # fmt: skip


def _refusal(status: int, kind: str, text: str, retry_after_s: int = 0) -> dict[str, Any]:
    return {"status_code": status, "err_type": kind, "message": text,
            "retry_after_s": retry_after_s}  # fmt: skip
