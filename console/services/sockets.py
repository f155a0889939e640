"""Open websockets of this worker, and why they close: logout, revocation, lost rights.

A hint closes them at once; a sweep closes them within ``SWEEP_S`` when the hint was lost. The sweep
asks the database once for all sockets of an account.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable

from console import auth

SWEEP_S = 5.0
CLOSE_SIGNED_OUT = 4401
CLOSE_FORBIDDEN = 4403


class Sockets:
    """Closers of the open sockets, by what they were opened with."""

    def __init__(self) -> None:
        self._open: dict[auth.Principal, set[Callable[[], None]]] = defaultdict(set)

    def __len__(self) -> int:
        return sum(len(closers) for closers in self._open.values())

    def add(self, principal: auth.Principal, close: Callable[[], None]) -> Callable[[], None]:
        """``close`` is called once the account may not go on; the result takes it off the list."""
        self._open[principal].add(close)
        return lambda: self._remove(principal, close)

    def _remove(self, principal: auth.Principal, close: Callable[[], None]) -> None:
        closers = self._open.get(principal)
        if closers is not None:
            closers.discard(close)
            if not closers:
                del self._open[principal]

    def end_session(self, digest: str) -> None:
        self._end(lambda p: bool(p.session_key) and auth.session_digest(p.session_key) == digest)

    def end_key(self, key_id: int) -> None:
        self._end(lambda p: p.key_id == key_id)

    def _end(self, ends: Callable[[auth.Principal], bool]) -> None:
        for principal in [p for p in self._open if ends(p)]:
            for close in list(self._open[principal]):
                close()

    async def sweep(self) -> None:
        """Runs until cancelled."""
        while True:
            await asyncio.sleep(SWEEP_S)
            for principal in list(self._open):
                again = await auth.check_again(principal)
                if again.permissions != principal.permissions:
                    self._end(lambda p, gone=principal: p == gone)  # type: ignore[misc]
