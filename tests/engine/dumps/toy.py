"""A small decoder that can be dumped, as one rank or as two: what a backend must offer."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path

import torch

from engine.artifacts import Rank
from engine.dumps.capture import DumpCapture, RowSpan, Tap
from engine.dumps.points import DumpPoint, parse_spec
from engine.dumps.store import Dump, DumpManifest, read_dump

WIDTH = 8
LAYERS = 4


class ToyModel(torch.nn.Module):
    """Layers of two linears; with ``tp`` 2 a rank holds half of the first one's outputs."""

    def __init__(self, *, dtype: torch.dtype = torch.float32, tp: int = 1, rank: int = 0) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.tp, self.rank = tp, rank
        self.ups = [torch.randn(16, WIDTH) / 3 for _ in range(LAYERS)]
        self.downs = [torch.randn(WIDTH, 16) / 3 for _ in range(LAYERS)]
        self.head = torch.randn(32, WIDTH)
        self.dtype = dtype

    def dump_points(self) -> list[DumpPoint]:
        points = []
        for layer in range(LAYERS):
            shards = {"input": None, "output": 1, "weight": 0}
            points.append(DumpPoint(name=f"model.layers.{layer}.up", layer=layer, shard_dim=shards))
            down = f"model.layers.{layer}.down"
            points.append(DumpPoint(name=down, layer=layer, shard_dim={"output": None}))
        return [*points, DumpPoint(name="lm_head", shard_dim={"logits": None})]

    def forward(self, x: torch.Tensor, tap: Tap | None = None, rows=()) -> torch.Tensor:
        x = x.to(self.dtype)
        for layer, (up, down) in enumerate(zip(self.ups, self.downs, strict=True)):
            name = f"model.layers.{layer}"
            up, down = up.to(self.dtype), down.to(self.dtype)
            size = 16 // self.tp
            mine = slice(self.rank * size, (self.rank + 1) * size)
            if tap:
                tap(f"{name}.up", "input", x, rows)
                tap(f"{name}.up", "weight", up[mine], None)
            wide = torch.nn.functional.silu(x @ up.T)
            if tap:
                tap(f"{name}.up", "output", wide[:, mine], rows)
            x = x + wide @ down.T
            if tap:
                tap(f"{name}.down", "output", x, rows)
        logits = x @ self.head.to(self.dtype).T
        if tap:
            tap("lm_head", "logits", logits, rows)
        return logits


def token_rows(rid: str, start: int, count: int) -> torch.Tensor:
    """Inputs that depend on the request and the position alone."""
    seed = int.from_bytes(hashlib.sha256(rid.encode()).digest()[:4], "little")
    return torch.stack(
        [
            torch.randn(WIDTH, generator=torch.Generator().manual_seed(seed + at))
            for at in range(start, start + count)
        ]
    )


class ToyRank:
    """One rank with its model, driven step by step as a runner would."""

    def __init__(self, model: ToyModel, rank: Rank | None = None, form: str = "toy fp32") -> None:
        self.model = model
        rank = rank or Rank(tp=model.rank)
        self.capture = DumpCapture(rank, model.dump_points(), form)
        self.steps = 0
        self.tapped = 0
        self.epoch = 1

    def arm(self, directory: Path, dump_id: str = "d", **raw: object) -> None:
        self.capture.arm(parse_spec({"dump_id": dump_id, "directory": str(directory)} | raw))

    def step(self, batch: Sequence[tuple[str, int, int]]) -> torch.Tensor:
        """``batch``: (rid, first position, number of tokens) of each row group."""
        self.steps += 1
        x = torch.cat([token_rows(*group) for group in batch])
        if not (self.capture.armed and self.capture.wants([rid for rid, _, _ in batch])):
            return self.model(x)
        self.tapped += 1
        spans, at = [], 0
        for rid, position, count in batch:
            spans.append(RowSpan(rid, at, at + count, position))
            at += count
        with self.capture.step(self.steps, epoch=self.epoch) as tap:
            return self.model(x, tap, spans)

    def manifest(self) -> DumpManifest:
        session = self.capture._session
        assert session and session.written.wait(20)
        manifest = self.capture.take_manifest()
        assert manifest
        return manifest


def dump_of(directory: Path, dump_id: str, ranks: Sequence[ToyRank], batches, **raw) -> Dump:
    """Runs the batches on all ranks with a dump armed before the first."""
    for rank in ranks:
        rank.arm(directory, dump_id, **({"max_steps": len(batches)} | raw))
        for batch in batches:
            rank.step(batch)
        rank.manifest()
    return read_dump(directory, dump_id)
