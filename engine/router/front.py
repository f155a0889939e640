"""What an operation may do to the rest of the router."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Protocol

from engine.config import EngineConfig
from engine.messages import RankOp, RecordingKind
from engine.router.control import Operation
from engine.router.registry import Entry
from engine.router.state import EngineState
from engine.router.weights import Ledger, Session


class Spool(Protocol):
    """Files of weights that came over a network (ledger.py)."""

    def new_path(self) -> str: ...
    def discard(self, paths: Iterable[str]) -> None: ...
    def settle(self, ledger: Ledger) -> None: ...


class Front(Protocol):
    """The router as operations.py and updates.py see it."""

    config: EngineConfig
    state: EngineState
    ledger: Ledger
    session: Session | None

    @property
    def spool(self) -> Spool: ...

    def now(self) -> float: ...

    def save_ledger(self) -> None:
        """Never fails: on a full disk it is written later."""
        ...

    def secure_ledger(self) -> None:
        """On disk when it returns; OSError if it cannot be."""
        ...

    def broadcast(self) -> None: ...
    def live(self, groups: list[int]) -> list[Entry]: ...
    def hold(self) -> None: ...
    def release_held(self) -> None: ...
    def abort_entries(self, entries: list[Entry], reason: str) -> None: ...
    def request_table(self) -> list[dict[str, Any]]: ...

    def tell(self, op: RankOp, groups: list[int]) -> None:
        """Sends ``op`` to the groups that are up; no answer is wanted."""
        ...

    def effective_paths(self, paths: tuple[str, ...]) -> tuple[str, ...]:
        """Those that still matter when later ones win, parameter by parameter."""
        ...

    def open_update(self) -> str | None:
        """The job of a weight update that runs or waits for its turn."""
        ...

    def run_beside(self, name: str, operation: Operation, deadline: float) -> None:
        """Runs an operation that nobody called and that changes no state."""
        ...

    def open_recording(self, kind: RecordingKind, directory: str, recording_id: str) -> None:
        """Makes the directory and writes down which ranks must report. OSError if it cannot."""
        ...

    def drop_recording(self, kind: RecordingKind, directory: str, recording_id: str) -> None:
        """Takes back ``open_recording``."""
        ...
