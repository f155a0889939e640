"""The tensor-parallel group of one dp rank: sums and gathers inside a forward.

Path: scheduler/process.py joins -> model/runner.py -> native.py. Gloo on CPU, NCCL on CUDA, tensors
only (object collectives would pickle). Ranks meet through a file in the private run directory and
gloo listens on the loopback interface.
"""

from __future__ import annotations

import os
from datetime import timedelta
from pathlib import Path

import torch
from torch import distributed

from engine.config import EngineConfig


class Group:
    """A joined group. A collective that takes longer than the timeout, or a dead peer, raises
    RuntimeError, which ends the rank; the launcher then restarts its dp group."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank = rank
        self.size = size

    def all_reduce(self, tensor: torch.Tensor) -> None:
        """``tensor`` becomes the sum over the ranks, in place."""
        distributed.all_reduce(tensor)

    def gather_columns(self, tensor: torch.Tensor) -> torch.Tensor:
        """[rows, n] of each rank side by side, in the order of the ranks: [rows, size * n]."""
        parts = [torch.empty_like(tensor) for _ in range(self.size)]
        distributed.all_gather(parts, tensor)
        return torch.cat(parts, dim=1)

    def leave(self) -> None:
        distributed.destroy_process_group()


def make_group(config: EngineConfig, *, dp: int, tp: int, start: int) -> Group | None:
    """Blocks until all ranks of the dp group are there; None for a group of one.

    ``start`` counts the starts of the dp group, so that a restart meets at a file of its own.
    """
    if config.tp == 1:
        return None
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"  # gloo has no other way to be told
    meeting = Path(config.run_dir) / f"tp-{config.generation}-{dp}-{start}"
    distributed.init_process_group(
        "nccl" if config.device == "cuda" else "gloo",
        init_method=f"file://{meeting}",
        rank=tp,
        world_size=config.tp,
        timeout=timedelta(seconds=config.collective_timeout_s),
    )
    return Group(tp, config.tp)
