"""What weight epochs are called. An epoch never changes its weights, but its label may."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from engine.messages import FleetSnapshot

Name = tuple[str, int | None]  # weight_version, token_step


class Lineage:
    """Names of the epochs that this worker has seen in snapshots."""

    def __init__(self) -> None:
        self._names: dict[int, Name] = {}

    def note(self, snapshot: FleetSnapshot) -> None:
        for rank in snapshot.ranks:
            self._names[rank.epoch] = (rank.weight_version, rank.token_step)

    async def names(
        self, epochs: set[int], read: Callable[[], Awaitable[FleetSnapshot]]
    ) -> dict[int, Name]:
        """Names of ``epochs``; ``read`` is asked once when one of them is new here."""
        if not epochs <= self._names.keys():
            self.note(await read())
        return {epoch: self._names.get(epoch, ("", None)) for epoch in epochs}
