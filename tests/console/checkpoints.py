"""Small safetensors checkpoints without torch."""

from __future__ import annotations

import os
import struct
import time
from pathlib import Path

from engine.weights.checkpoint import SINGLE, NamedTensor, TensorSpec, TensorWriter


def make_checkpoint(path: Path, *, value: float = 0.0, tensors: int = 3, age_s: float = 0) -> Path:
    """A directory with one file of ``tensors`` fp32 tensors that all hold ``value``."""
    specs = [TensorSpec(f"layer.{number}", "F32", (4,)) for number in range(tensors)]
    with TensorWriter(path / SINGLE, specs) as writer:
        for spec in specs:
            data = bytearray(struct.pack("<4f", *[value] * 4))
            writer.write(NamedTensor(spec, memoryview(data)))
    moment = time.time() - age_s
    os.utime(path / SINGLE, (moment, moment))
    return path
