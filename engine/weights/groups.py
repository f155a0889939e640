"""The groups that one rank shares with trainers, by name. No torch until the first one is joined.

Path: scheduler/control.py joins and leaves; update.py receives; transfer.py is torch's side.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Generator, Iterable
from typing import Any

from engine.messages import JoinGroup
from engine.weights.checkpoint import NamedTensor, TensorSpec, WeightError


class Groups:
    """``device`` is where received tensors live. ``join`` and ``receive`` block."""

    def __init__(self, device: str) -> None:
        self._device = device
        self._groups: dict[str, Any] = {}
        self._joining: set[str] = set()
        self._lock = threading.Lock()

    def join(self, op: JoinGroup, rank: int) -> None:
        """Raises WeightError for a name in use, a rank outside the world, an absent trainer."""
        deadline = time.monotonic() + op.timeout_s
        from engine.weights.transfer import join_group

        if not 0 < rank < op.world_size:
            raise WeightError(
                f"this rank would be {rank} in a world of {op.world_size} with the trainer as 0: "
                "world_size must be 1 + the number of engine ranks, and rank_offset 1"
            )
        with self._lock:
            if op.group_name in self._groups or op.group_name in self._joining:
                raise WeightError(
                    f"group {op.group_name!r} exists already; destroy it first",
                    status_code=409,
                    err_type="conflict",
                )
            self._joining.add(op.group_name)
        try:
            self._groups[op.group_name] = join_group(
                address=op.master_address,
                port=op.master_port,
                rank=rank,
                world_size=op.world_size,
                name=op.group_name,
                backend=op.backend,
                timeout_s=deadline - time.monotonic(),
            )
        finally:
            self._joining.discard(op.group_name)

    def leave(self, name: str) -> None:
        """Raises WeightError for an unknown name."""
        if not self.abandon(name):
            raise WeightError(
                f"there is no group {name!r} here", status_code=404, err_type="not_found"
            )

    def abandon(self, name: str) -> bool:
        """Leaves the group in whatever state it is; False when there is none."""
        group = self._groups.pop(name, None)
        if group is None:
            return False
        from engine.weights.transfer import leave_group

        leave_group(group)
        return True

    def receive(
        self, name: str, specs: Iterable[TensorSpec], stopped: Callable[[], bool]
    ) -> Generator[NamedTensor]:
        """The tensors of ``specs`` as the trainer broadcasts them. Whoever stops before the last
        one must ``abandon`` the group: its peers would wait for this rank."""
        group = self._groups.get(name)
        if group is None:
            raise WeightError(
                f"there is no group {name!r} here (a rank that restarted must join again): "
                "call init_weights_update_group"
            )
        from engine.weights.transfer import receive

        for spec in specs:
            yield receive(group, spec, self._device, stopped)
