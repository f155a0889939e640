"""Weight updates of the native backend: whole entries are packed again, then copied over.

Path: weights/update.py -> here -> the storages of native_ops.py or eager_decoder.py. An entry (a
fused matrix, a norm) is packed when all its checkpoint tensors are staged; C++ keeps its pointers,
since a commit only copies into what they point to.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from engine.model.layout import Layout, Read
from engine.model.weights import Staging, as_torch, check_spec
from engine.weights.checkpoint import NamedTensor, TensorSpec, WeightError

SHOWN_VALUES = 256  # of each parameter, kept for who asks what is loaded


class PackedStaging:
    """Checkpoint tensors until ``seal`` packs them."""

    def __init__(self, holder: PackedWeights) -> None:
        self._holder = holder
        self._raw: dict[str, torch.Tensor] = {}
        self.shown: dict[str, list[float]] = {}
        self.packed: dict[str, list[torch.Tensor]] = {}

    def add(self, tensor: NamedTensor) -> None:
        name = tensor.spec.name
        if name in self._holder.required:
            self._raw[name] = as_torch(tensor).clone()
            self.shown[name] = self._raw[name].flatten()[:SHOWN_VALUES].float().tolist()

    def seal(self) -> None:
        """Packs every touched entry. Raises WeightError for half a group."""
        for key, names in self._holder.sources.items():
            given = [name for name in names if name in self._raw]
            if not given:
                continue
            if len(given) < len(names):
                missing = sorted(set(names) - set(given))
                raise WeightError(
                    f"{given[0]} is stored together with {', '.join(missing)}: send them in one "
                    "update",
                    err_type="partial_group",
                )
            self.packed[key] = self._holder.pack(key, self._raw.__getitem__)
        self._raw.clear()


class PackedWeights:
    """The live entries of one rank, and how each is packed from checkpoint tensors."""

    def __init__(
        self,
        parts: Layout,
        entries: Mapping[str, tuple[str, ...]],
        live: Mapping[str, list[torch.Tensor]],
        *,
        pack: Callable[[str, Read], list[torch.Tensor]],
    ) -> None:
        """``entries``: the layout entries that each live entry is made of."""
        self.pack = pack
        self.live = live
        self.sources: dict[str, tuple[str, ...]] = {}
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._shown: dict[str, list[float]] = {}
        for key, names in entries.items():
            sources = [source for name in names for source in parts[name]]
            self.sources[key] = tuple(dict.fromkeys(source.name for source in sources))
            self._shapes |= {source.name: source.shape for source in sources}
        self.required = frozenset(self._shapes)

    def check(self, spec: TensorSpec) -> None:
        if spec.name in self._shapes:
            check_spec(spec, self._shapes[spec.name])
        elif spec.name != "lm_head.weight" and not spec.name.endswith("rotary_emb.inv_freq"):
            raise WeightError(f"the model has no parameter {spec.name}")

    def begin(self) -> PackedStaging:
        return PackedStaging(self)

    def commit(self, staging: Staging) -> None:
        assert isinstance(staging, PackedStaging)
        for key, tensors in staging.packed.items():
            for live, new in zip(self.live[key], tensors, strict=True):
                live.copy_(new)
        self._shown |= staging.shown

    def show(self, read: Read) -> None:
        """Notes the first values of what was loaded at the start."""
        for name in self.required:
            self._shown[name] = read(name).flatten()[:SHOWN_VALUES].float().tolist()

    def read(self, name: str, count: int) -> list[float]:
        """As loaded, before packing; at most ``SHOWN_VALUES``."""
        if name not in self._shown:
            raise WeightError(f"the model has no parameter {name}", err_type="not_found")
        return self._shown[name][:count]
