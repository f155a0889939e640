"""Streams under which weights are swapped, and what they must prove."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path

from engine import messages as m
from engine.client import EngineClient
from engine.config import EngineConfig
from tests.e2e.engines import EngineTree, answer, ask, scripted_config
from tests.engine.weights.checkpoints import disagreements, scripted_checkpoint

FIRST_EPOCH = 1


def weighted_config(home: Path, **changes) -> EngineConfig:
    """A scripted engine whose model is checkpoint 0."""
    config = scripted_config(home, **{"scripted_step_s": 0.002, **changes})
    scripted_checkpoint(Path(config.model_path) / "model.safetensors", 0)
    return config


def checkpoint(config: EngineConfig, index: int, **changes) -> str:
    path = Path(config.home) / "models" / f"ckpt-{index}"
    path.mkdir(exist_ok=True)
    return str(scripted_checkpoint(path / "model.safetensors", index, **changes))


@dataclass
class Swaps:
    """Streams, and which checkpoint each epoch stands for.

    ``wrong`` lists tokens that their label does not explain; ``lost`` answers that are not whole.
    """

    tree: EngineTree
    tokens: int = 40
    judge: Callable[..., list] = disagreements
    index_of: dict[int, int] = field(default_factory=lambda: {FIRST_EPOCH: 0})
    wrong: list[tuple[int, int]] = field(default_factory=list)
    lost: list[m.StrRow] = field(default_factory=list)
    answers: int = 0
    several: int = 0  # answers that more than one epoch made
    rows: list[m.StrRow] = field(default_factory=list)

    @contextlib.asynccontextmanager
    async def streams(self, count: int, **request) -> AsyncIterator[None]:
        """``count`` endless loops of requests over all clients; judged at the end."""
        stop = asyncio.Event()
        clients = self.tree.clients
        tasks = [
            asyncio.create_task(self._loop(clients[i % len(clients)], i, stop, request))
            for i in range(count)
        ]
        try:
            yield
        finally:
            stop.set()
            await asyncio.wait_for(asyncio.gather(*tasks), 60)
            self._judge()

    async def _loop(
        self, client: EngineClient, number: int, stop: asyncio.Event, request: dict
    ) -> None:
        turn = 0
        while not stop.is_set():
            turn += 1
            sampling = {"max_new_tokens": self.tokens, "ignore_eos": True}
            text = f"stream {number} turn {turn}"
            self.rows.append(await answer(client, ask(text, sampling=sampling, **request)))

    def _judge(self) -> None:
        for row in self.rows:
            self.answers += 1
            self.several += len(row.epochs) > 1
            self.wrong += self.judge(row.output_ids, row.epochs, self.index_of)
            whole = row.finish.type == "length" and len(row.output_ids) == self.tokens
            if not whole:
                self.lost.append(row)

    async def swap(self, index: int, path: str, **fields) -> m.ControlReply:
        """One update; every client then says the new epoch."""
        client = self.tree.clients[0]
        reply = await client.call(
            m.UpdateWeightFromDiskReqInput, deadline_s=60.0, actor="test", model_path=path, **fields
        )
        assert reply.success, reply.message
        epoch = reply.result["epoch"]
        self.index_of[epoch] = index
        for other in self.tree.clients:
            snapshot = await other.fleet()
            assert snapshot.engine.epoch == epoch, snapshot.engine
            assert {rank.epoch for rank in snapshot.ranks if rank.tp == 0} == {epoch}
        return reply
