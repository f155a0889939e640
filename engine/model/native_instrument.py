"""Dumps of the native backend: its points, and the tapped decoder while a dump is armed.

Path: native.py -> here -> tapped_decoder.py. The C++ decoder packs its weights, so a dump reads
them again, from where the present epoch has them; the eager decoder's are used as they are.
"""

from __future__ import annotations

from collections.abc import Callable

from engine.dumps.points import DumpPoint
from engine.model.tapped_decoder import TappedDecoder


class NativeInstrument:
    """``make(paths)`` builds the tapped decoder; see ``instrument.Instrument``."""

    def __init__(
        self,
        points: list[DumpPoint],
        make: Callable[[tuple[str, ...]], TappedDecoder],
        *,
        form: str,
        is_live: bool,
    ) -> None:
        self.form, self.is_live = form, is_live
        self._points, self._make = points, make
        self._decoder: TappedDecoder | None = None

    @property
    def decoder(self) -> TappedDecoder:
        assert self._decoder is not None, "prepare was not called"
        return self._decoder

    def points(self) -> list[DumpPoint]:
        return self._points

    def prepare(self, paths: tuple[str, ...]) -> None:
        self._decoder = self._make(paths)

    def drop(self) -> None:
        self._decoder = None
