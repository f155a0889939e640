"""Dumps of the native backend: its points, and the tapped decoder while a dump is armed.

Path: native.py -> here -> tapped_decoder.py. The C++ decoder packs its weights, so a dump reads
them again, from where the present epoch has them; the eager decoder's are used as they are.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from engine.dumps.points import DumpPoint
from engine.model.loader import Checkpoint
from engine.model.tapped_decoder import TappedDecoder
from engine.model.target_weights import TargetWeights


class NativeInstrument:
    """See ``instrument.Instrument``. ``live`` is the decoder itself where it can be tapped; else
    ``make`` builds one, whose weights are read from the epoch's paths or from ``model_path``."""

    def __init__(
        self,
        points: list[DumpPoint],
        live: TappedDecoder | None,
        make: Callable[[], TappedDecoder],
        model_path: Path,
        *,
        form: str,
    ) -> None:
        self.form, self.is_live = form, live is not None
        self._points, self._live, self._make = points, live, make
        self._model_path = model_path
        self._decoder = live

    @property
    def decoder(self) -> TappedDecoder:
        assert self._decoder is not None, "prepare was not called"
        return self._decoder

    def points(self) -> list[DumpPoint]:
        return self._points

    def prepare(self, paths: tuple[str, ...]) -> None:
        if self._live is None:
            decoder = self._make()
            read = Checkpoint(*(map(Path, paths) if paths else [self._model_path])).read
            TargetWeights(decoder.targets).load(read, threads=1)
            self._decoder = decoder

    def drop(self) -> None:
        self._decoder = self._live
