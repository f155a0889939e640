"""Checkpoints of the scripted model with disjoint favourite tokens: a token proves its weights."""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from pathlib import Path

from engine.weights.checkpoint import NamedTensor, TensorSpec, TensorWriter, describe

FIRST_TOKEN = 10  # ids below are specials and control characters
PER_EPOCH = 8  # favourite tokens of one scripted checkpoint


def favourites(index: int) -> set[int]:
    """Tokens that only scripted checkpoint ``index`` ever says."""
    first = FIRST_TOKEN + PER_EPOCH * index
    return set(range(first, first + PER_EPOCH))


def scripted_checkpoint(path: Path, index: int, *, names=("even.tokens", "odd.tokens")) -> Path:
    """A safetensors file with the favourites of ``index``: half of them for each parameter."""
    tokens = sorted(favourites(index))
    halves = {"even.tokens": tokens[::2], "odd.tokens": tokens[1::2]}
    write_tensors(path, {name: halves[name] for name in names})
    return path


def write_tensors(path: Path, values: dict[str, list[int]], *, shape=None, dtype="I64") -> None:
    specs = [TensorSpec(name, dtype, shape or (len(v),)) for name, v in values.items()]
    with TensorWriter(path, specs) as writer:
        for spec in specs:
            data = bytearray(array("q" if dtype == "I64" else "f", values[spec.name]).tobytes())
            writer.write(NamedTensor(spec, memoryview(data)))


def checksum_of(path: str) -> str:
    return describe(path)["checksum"]


def corrupt(path: str, at: int = -8) -> None:
    """Flips one byte."""
    data = bytearray(Path(path).read_bytes())
    data[at] ^= 1
    Path(path).write_bytes(data)


def disagreements(
    token_ids: Iterable[int], runs: Iterable[tuple[int, int]], index_of: dict[int, int]
) -> list[tuple[int, int]]:
    """(token, epoch) wherever a token is none of the favourites of the checkpoint that its epoch
    stands for."""
    labels = [epoch for count, epoch in runs for _ in range(count)]
    pairs = list(zip(token_ids, labels, strict=True))
    return [(token, epoch) for token, epoch in pairs if token not in favourites(index_of[epoch])]
