"""What weight epochs are called. An epoch never changes its weights, but its label may."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from engine.messages import EpochLabel, FleetSnapshot

UNNAMED = EpochLabel(weight_version="")


class Lineage:
    """Labels of the epochs that this worker has heard of."""

    def __init__(self) -> None:
        self._labels: dict[int, EpochLabel] = {}

    def note(self, snapshot: FleetSnapshot) -> None:
        self._labels.update(snapshot.epochs)

    async def labels(
        self, epochs: set[int], read: Callable[[], Awaitable[FleetSnapshot]]
    ) -> dict[int, EpochLabel]:
        """Labels of ``epochs``; ``read`` is asked once when one of them is new here."""
        if not epochs <= self._labels.keys():
            self.note(await read())
        return {epoch: self._labels.get(epoch, UNNAMED) for epoch in epochs}
