"""The live weights of the native backend: checkpoint tensors go to their targets, part by part.

Path: native.py loads -> here; weights/update.py stages and commits -> here -> targets.py.
"""

from __future__ import annotations

from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor

import torch

from engine.model.layout import Read
from engine.model.targets import Target
from engine.model.weights import Staging, as_torch, check_spec
from engine.weights.checkpoint import NamedTensor, TensorSpec, WeightError

OUTPUT_LAYER = "lm_head.weight"  # checkpoints of tied models may carry it as well


class TargetStaging:
    """Parts of checkpoint tensors in the form of their storages."""

    def __init__(self, holder: TargetWeights) -> None:
        self._holder = holder
        self.parts: dict[str, list[torch.Tensor]] = {}

    def add(self, tensor: NamedTensor) -> None:
        name = tensor.spec.name
        targets = self._holder.targets.get(name, ())
        whole = as_torch(tensor) if targets else None
        if whole is not None:
            self.parts[name] = [
                target.stage(target.source.take(lambda _: whole)) for target in targets
            ]

    def seal(self) -> None:
        """Every tensor was packed when it came: rows of a matrix do not depend on others."""


class TargetWeights:
    """``WeightHolder`` over the targets of one rank, by checkpoint name."""

    def __init__(self, targets: list[Target]) -> None:
        self.targets: dict[str, list[Target]] = defaultdict(list)
        for target in targets:
            self.targets[target.source.name].append(target)
        self.required = frozenset(self.targets)

    def load(self, read: Read, threads: int) -> None:
        """Brings every tensor in; torch and the packing release the GIL."""

        def bring(target: Target) -> None:
            target.commit(target.stage(target.source.take(read)))

        every = [target for targets in self.targets.values() for target in targets]
        with ThreadPoolExecutor(threads) as pool:
            for _ in pool.map(bring, every):
                pass

    def check(self, spec: TensorSpec) -> None:
        if spec.name in self.targets:
            check_spec(spec, self.targets[spec.name][0].source.shape)
        elif spec.name != OUTPUT_LAYER and not spec.name.endswith("rotary_emb.inv_freq"):
            raise WeightError(f"the model has no parameter {spec.name}")

    def begin(self) -> TargetStaging:
        return TargetStaging(self)

    def commit(self, staging: Staging) -> None:
        assert isinstance(staging, TargetStaging)
        for name, parts in staging.parts.items():
            for target, part in zip(self.targets[name], parts, strict=True):
                target.commit(part)

    def read(self, name: str, count: int) -> list[float]:
        if name not in self.targets:
            raise WeightError(f"the model has no parameter {name}", err_type="not_found")
        return self.targets[name][0].read(count)
