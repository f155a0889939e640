"""The weights of the scripted model: the tokens it likes, so that a token proves its epoch.

Path: weights/update.py -> here -> scripted.py. Two parameters, ``even.tokens`` and ``odd.tokens``,
int64 [n]: what is said at even and at odd output positions, so half an update would show in one
answer. No torch.
"""

from __future__ import annotations

from array import array
from pathlib import Path

from engine.model.weights import Staging
from engine.weights.checkpoint import Checkpoint, NamedTensor, TensorSpec, WeightError

NAMES = ("even.tokens", "odd.tokens")


class ScriptedStaging:
    """Token lists by name."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self.tokens: dict[str, list[int]] = {}

    def add(self, tensor: NamedTensor) -> None:
        tokens = array("q", bytes(tensor.data)).tolist()
        if not all(0 <= token < self._vocab_size for token in tokens):
            raise WeightError(f"{tensor.spec.name} has token ids outside 0..{self._vocab_size - 1}")
        self.tokens[tensor.spec.name] = tokens

    def seal(self) -> None:
        """Each list is whole by itself."""


class ScriptedWeights:
    """``WeightHolder`` of the scripted model; empty lists mean any word."""

    required = frozenset(NAMES)

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self.live: dict[str, list[int]] = {name: [] for name in NAMES}

    def favourites(self, position: int) -> list[int]:
        """What may be said at this output position; [] for any word."""
        return self.live[NAMES[position % 2]]

    def check(self, spec: TensorSpec) -> None:
        if spec.name not in self.live:
            raise WeightError(f"the model has no parameter {spec.name}")
        if spec.dtype != "I64":
            raise WeightError(
                f"{spec.name} has dtype {spec.dtype}, the model takes I64",
                err_type="dtype_mismatch",
            )
        if len(spec.shape) != 1 or not spec.shape[0]:
            raise WeightError(
                f"{spec.name} has shape {list(spec.shape)}, the model's is [n], n > 0",
                err_type="shape_mismatch",
            )

    def load(self, path: Path) -> None:
        """At the start; a fault of the file is a WeightError."""
        staging = self.begin()
        for tensor in Checkpoint(path).tensors():
            self.check(tensor.spec)
            staging.add(tensor)
        self.commit(staging)

    def begin(self) -> ScriptedStaging:
        return ScriptedStaging(self._vocab_size)

    def commit(self, staging: Staging) -> None:
        assert isinstance(staging, ScriptedStaging)
        self.live.update(staging.tokens)

    def read(self, name: str, count: int) -> list[float]:
        if name not in self.live:
            raise WeightError(f"the model has no parameter {name}", err_type="not_found")
        return [float(token) for token in self.live[name][:count]]
