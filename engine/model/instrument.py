"""What a backend offers to tensor dumps: names of its points, and a forward that can be tapped.

Path: scheduler/recording.py -> here -> hf.py | tapped_decoder.py -> dumps/capture.py.
"""

from __future__ import annotations

from typing import Protocol

from engine.dumps.points import DumpPoint


class Instrument(Protocol):
    """``form`` names the numeric form that a tapped step runs, for example ``native eager bf16``.

    ``is_live``: the tapped forward reads the very tensors that updates write into. Else it has
    copies of them, made by ``prepare`` and freed by ``drop``.
    """

    form: str
    is_live: bool

    def points(self) -> list[DumpPoint]:
        """In execution order."""
        ...

    def prepare(self, paths: tuple[str, ...]) -> None:
        """Makes the tapped forward ready, on any thread. ``paths`` hold the live weights."""
        ...

    def drop(self) -> None: ...


class NoInstrument:
    """Of a model without tensors: there is no point to dump."""

    form = "scripted"
    is_live = True

    def points(self) -> list[DumpPoint]:
        return []

    def prepare(self, paths: tuple[str, ...]) -> None:
        """Nothing to make ready."""

    def drop(self) -> None:
        """Nothing was made."""
