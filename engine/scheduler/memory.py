"""Which parts of a rank's memory are there: the states behind release and resume. Pure.

Path: control.py -> here -> model/runner.py. Both moves are idempotent. Memory comes back empty: a
KV cache may be, weights may not, so weights count as absent until they were loaded again.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal, Protocol

from engine.errors import BadRequest

KV_CACHE, WEIGHTS = "kv_cache", "weights"
TAGS = (KV_CACHE, WEIGHTS)
State = Literal["resident", "released", "empty"]


class Storages(Protocol):
    """What a runner can do with its memory."""

    def release(self, tag: str) -> None: ...
    def restore(self, tag: str) -> None: ...


class Memory:
    """The states of one rank's memory by tag."""

    def __init__(self, storages: Storages) -> None:
        self._storages = storages
        self._states: dict[str, State] = dict.fromkeys(TAGS, "resident")

    @property
    def absent(self) -> list[str]:
        """Tags without usable content: nothing can be computed while there is one."""
        return [tag for tag, state in self._states.items() if state != "resident"]

    def release(self, tags: Iterable[str]) -> None:
        """Raises BadRequest for an unknown tag, before anything is done."""
        for tag in _checked(tags):
            if self._states[tag] != "released":
                self._storages.release(tag)
                self._states[tag] = "released"

    def restore(self, tags: Iterable[str]) -> bool:
        """True when the weights now need to be loaded."""
        wanted = _checked(tags)
        for tag in wanted:
            if self._states[tag] == "released":
                self._storages.restore(tag)
                self._states[tag] = "empty" if tag == WEIGHTS else "resident"
        return WEIGHTS in wanted and self._states[WEIGHTS] == "empty"

    def takes_weights(self, complete: bool) -> bool:
        """Whether weights may be committed; a part of them only onto the rest."""
        state = self._states[WEIGHTS]
        return state == "resident" or (state == "empty" and complete)

    def loaded(self) -> None:
        """Every weight has been written."""
        self._states[WEIGHTS] = "resident"


def _checked(tags: Iterable[str]) -> list[str]:
    wanted = list(tags)
    for tag in wanted:
        if tag not in TAGS:
            raise BadRequest(f"unknown memory tag {tag!r}, known are {' and '.join(TAGS)}")
    return wanted
