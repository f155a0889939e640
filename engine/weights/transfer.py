"""Groups of torch.distributed that ranks share with a trainer: join, receive, leave.

Path: groups.py keeps an engine rank's end of them; sender.py is the trainer's end.

The rendezvous is that of SGLang's, slime's and AReaL's ``init_custom_process_group``: a TCPStore at
the trainer's address, a prefix of the group's name, then torch's own group builder, beside (never
instead of) the default group. So trainers that know SGLang join as they are. Rank 0 is the trainer;
it broadcasts the tensors in the order in which the request names them. Gloo on CPU, NCCL on CUDA.
Everything here blocks and belongs on a thread beside serving.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
from torch import distributed
from torch.distributed import distributed_c10d as c10d
from torch.distributed.rendezvous import rendezvous

from engine.model.weights import torch_dtypes
from engine.weights.checkpoint import NamedTensor, TensorSpec, WeightError

TRAINER = 0
POLL_S = 0.001
RETRY_S = 0.2


def join_group(
    *,
    address: str,
    port: int,
    rank: int,
    world_size: int,
    name: str,
    backend: str,
    timeout_s: float,
) -> Any:
    """A process group of ``world_size`` in which this process is ``rank``; blocks until all are in.

    The trainer (rank 0) owns the store at ``address:port``. Raises WeightError when the others do
    not come within ``timeout_s``.
    """
    deadline = time.monotonic() + timeout_s
    try:
        if rank != TRAINER:
            _await_listener(address, port, deadline)
        left = timedelta(seconds=max(1.0, deadline - time.monotonic()))
        store, rank, world_size = next(
            rendezvous(f"tcp://{address}:{port}", rank, world_size, timeout=left)
        )
        store.set_timeout(left)
        group, _ = c10d._new_process_group_helper(
            world_size,
            rank,
            [],
            c10d.Backend(backend),
            c10d.PrefixStore(name, store),
            group_name=c10d.GroupName(name),
            timeout=left,
        )
    except (RuntimeError, ValueError, OSError) as error:  # RuntimeError: torch's network errors
        raise WeightError(
            f"group {name!r} at {address}:{port} did not come together: {_first_line(error)}",
            err_type="group_failed",
        ) from error
    c10d._world.pg_group_ranks[group] = {i: i for i in range(world_size)}
    return group


def leave_group(group: Any) -> None:
    """Ends the group here; peers that wait for this process get an error."""
    group.abort()
    distributed.destroy_process_group(group)


def _await_listener(address: str, port: int, deadline: float) -> None:
    """torch's own client retries loudly and for longer than it was told."""
    while True:
        try:
            socket.create_connection((address, port), timeout=2.0).close()
            return
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(RETRY_S)


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]


def receive(group: Any, spec: TensorSpec, device: str, stopped: Callable[[], bool]) -> NamedTensor:
    """The trainer's next broadcast, which must be ``spec``. Raises WeightError, also when
    ``stopped()`` while it waits."""
    dtype = torch_dtypes()[spec.dtype]
    tensor = torch.empty(spec.shape, dtype=dtype, device=torch.device(device))
    options = distributed.BroadcastOptions()
    options.rootRank = TRAINER
    options.rootTensor = 0
    try:
        work = group.broadcast([tensor], options)
        while not work.is_completed():
            if stopped():
                raise WeightError("the update was dropped meanwhile", err_type="dropped")
            time.sleep(POLL_S)
        work.wait()
    except RuntimeError as error:
        raise WeightError(
            f"the trainer's broadcast failed: {_first_line(error)}", err_type="group_failed"
        ) from error
    return NamedTensor(spec, bytes_of(tensor), tensor)


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """The tensor's bytes in host memory; shared with it on CPU."""
    flat: Any = tensor.cpu().contiguous().flatten().view(torch.uint8).numpy()
    return memoryview(flat)
