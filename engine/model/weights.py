"""The live weights of one rank, seen by their Hugging Face names: how an update gets in.

Path: scheduler/control.py -> weights/update.py -> here -> the storages that the forward reads.

``WeightHolder`` is what every backend offers. ``ModuleWeights`` is the one of hf.py: a torch
module whose parameters are stored as they are named. A backend that packs (several tensors in one
matrix, quantised, sharded) does so in ``Staging``, off the step thread; a commit only copies, into
the storages that exist, so packed views and captured graphs stay valid. Staging the same weights
twice gives the same storages as staging them once.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Protocol

from engine.weights.checkpoint import NamedTensor, TensorSpec, WeightError

if TYPE_CHECKING:
    import torch

INTEGERS = {1: "U8", 2: "I16", 4: "I32", 8: "I64"}  # by size in bytes


class Staging(Protocol):
    """New weights on their way in; nothing of it is seen by a forward. One thread at a time."""

    def add(self, tensor: NamedTensor) -> None:
        """Takes a checked tensor (and its bytes): shards, converts, packs. A later one of the same
        name wins."""
        ...

    def seal(self) -> None:
        """No more tensors: packs what waited for others. Raises WeightError for half a group."""
        ...


class WeightHolder(Protocol):
    """The weights that the forward reads."""

    required: frozenset[str]  # every parameter of the model, under full Hugging Face names

    def check(self, spec: TensorSpec) -> None:
        """Raises WeightError unless a tensor of this name, whole shape and dtype can be taken."""
        ...

    def begin(self) -> Staging: ...

    def commit(self, staging: Staging) -> None:
        """Copies a sealed staging into the live storages. On the step thread, between forwards."""
        ...

    def read(self, name: str, count: int) -> list[float]:
        """The first ``count`` values of this rank's share of a parameter. Raises WeightError."""
        ...


class ModuleStaging:
    """Tensors in the model's dtype, by name."""

    def __init__(self, holder: ModuleWeights) -> None:
        self._holder = holder
        self.tensors: dict[str, torch.Tensor] = {}

    def add(self, tensor: NamedTensor) -> None:
        live = self._holder.live.get(tensor.spec.name)
        if live is not None:
            self.tensors[tensor.spec.name] = as_torch(tensor).to(live.device, live.dtype)

    def seal(self) -> None:
        """Each tensor is whole by itself."""


class ModuleWeights:
    """Parameters and persistent buffers of a torch module.

    ``ignored``: names that checkpoints of this model carry and the module has no use for.
    """

    def __init__(self, module: torch.nn.Module, *, ignored: Iterable[str] = ()) -> None:
        state = module.state_dict()
        self.live: dict[str, torch.Tensor] = {}
        seen: set[int] = set()
        for name, tensor in state.items():
            if not tensor.numel() or tensor.data_ptr() not in seen:  # else tied to one before it
                self.live[name] = tensor
            seen.add(tensor.data_ptr())
        self.required = frozenset(self.live)
        self._tied = {name: tuple(state[name].shape) for name in state if name not in self.live}
        self._ignored = frozenset(ignored)

    def check(self, spec: TensorSpec) -> None:
        shape = self._tied.get(spec.name)
        if spec.name in self.live:
            shape = tuple(self.live[spec.name].shape)
        if shape is None:
            if spec.name in self._ignored:
                return
            raise WeightError(f"the model has no parameter {spec.name}")
        check_spec(spec, shape)

    def begin(self) -> ModuleStaging:
        return ModuleStaging(self)

    def commit(self, staging: Staging) -> None:
        assert isinstance(staging, ModuleStaging)
        for name, tensor in staging.tensors.items():
            overwrite(self.live[name], tensor)

    def read(self, name: str, count: int) -> list[float]:
        if name not in self.live:
            raise WeightError(f"the model has no parameter {name}", err_type="not_found")
        values: list[float] = self.live[name].flatten()[:count].float().tolist()
        return values


def overwrite(live: torch.Tensor, new: torch.Tensor) -> None:
    """``live``, maybe a view, gets the values of ``new``: same shape, dtype and device.

    On CPU by one thread: torch's own threads meet at a barrier for each tensor, and where another
    process has the second core that made 270 MB take 900 ms instead of 90 (measured on 2 cores).
    """
    if live.device.type != "cpu":
        live.copy_(new)
        return
    import numpy

    bits = torch_dtypes()[INTEGERS[live.element_size()]]  # numpy has no bf16
    numpy.copyto(live.detach().view(bits).numpy(), new.detach().view(bits).numpy())


def check_spec(spec: TensorSpec, shape: tuple[int, ...]) -> None:
    """Raises WeightError unless ``spec`` is a floating tensor of this shape."""
    if spec.shape != shape:
        raise WeightError(
            f"{spec.name} has shape {list(spec.shape)}, the model's is {list(shape)}",
            err_type="shape_mismatch",
        )
    if spec.dtype not in ("F32", "F16", "BF16", "F64"):
        raise WeightError(
            f"{spec.name} has dtype {spec.dtype}, the model takes F32, F16, BF16 or F64",
            err_type="dtype_mismatch",
        )


def as_torch(tensor: NamedTensor) -> torch.Tensor:
    """The tensor itself, or one over the same bytes."""
    import torch

    if tensor.tensor is not None:
        found: torch.Tensor = tensor.tensor
        return found
    spec = tensor.spec
    dtype = torch_dtypes()[spec.dtype]
    if not spec.nbytes:
        return torch.empty(spec.shape, dtype=dtype)
    return torch.frombuffer(tensor.data, dtype=dtype).view(spec.shape)


def torch_dtypes() -> Mapping[str, torch.dtype]:
    """torch's dtype for each of safetensors' names."""
    import torch

    return {
        "BOOL": torch.bool, "U8": torch.uint8, "I8": torch.int8, "I16": torch.int16,
        "I32": torch.int32, "I64": torch.int64, "F16": torch.float16, "BF16": torch.bfloat16,
        "F32": torch.float32, "F64": torch.float64, "F8_E4M3": torch.float8_e4m3fn,
        "F8_E5M2": torch.float8_e5m2, "U16": torch.uint16, "U32": torch.uint32,
        "U64": torch.uint64,
    }  # fmt: skip
