"""``python -m engine.bench``: runs the wanted suites one after the other, prints, writes the JSON.

Path: console/management/commands/bench.py -> here -> decode.py, fan_out.py, merging.py, startup.py,
streaming.py -> table.py.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
from collections.abc import Collection, Sequence
from datetime import UTC, datetime
from pathlib import Path

import msgspec

from engine.bench import decode, recipes
from engine.bench.fan_out import fan_out_rows
from engine.bench.machine import commit, describe_machine, our_versions
from engine.bench.merging import merge_rows
from engine.bench.peer import Peer
from engine.bench.recipes import NotMade, Recipe
from engine.bench.startup import startup_rows
from engine.bench.streaming import streaming_rows
from engine.bench.table import Document, Row, render
from engine.config import EngineConfig, bench_peers_from_env, from_env
from engine.errors import ConfigError

ROUNDS = 5
DECODE_KEYS = tuple(dict.fromkeys(line.key for line in decode.LINES))
KEYS = (*DECODE_KEYS, "fan-out", "merge", "start", "streaming")
GENERATORS = (recipes.TRANSFORMERS, recipes.VLLM, recipes.OPENVINO, recipes.LLAMA_CPP)


class Bench:
    """One run: what it found, and who is missing from it."""

    def __init__(self, config: EngineConfig, peers: Path, only: Collection[str], rounds: int):
        self._config, self._peers, self._only, self._rounds = config, peers, only, rounds
        self._work = Path(config.home) / "bench" / "work"
        self._work.mkdir(parents=True, exist_ok=True)
        self._missing: dict[str, str] = {}
        self._document = Document(
            machine=describe_machine(),
            versions=our_versions(),
            commit=commit(),
            rows=[],
            missing=self._missing,
        )

    async def run(self) -> Document:
        rows, config = self._document.rows, self._config
        if "fan-out" in self._only:
            say("fan-out")
            sglang = self._peer(recipes.SGLANG)
            rows += await fan_out_rows(sglang, self._rounds, self._missing)
        if "merge" in self._only:
            say("merge")
            rows += merge_rows(self._peers, self._work, self._rounds, self._missing)
        if "start" in self._only or set(DECODE_KEYS) & set(self._only):
            rows += await self._generation()
        if "streaming" in self._only:
            say("streaming")
            rows += await streaming_rows(config, self._work, self._missing)
        return self._document

    async def _generation(self) -> list[Row]:
        """The rows that need peers with a model."""
        peers = [peer for recipe in GENERATORS if (peer := self._peer(recipe))]
        rows = []
        if "start" in self._only:
            say("start")
            rows += await startup_rows(self._config, peers, self._work, self._rounds, self._missing)
        lines = [line for line in decode.LINES if line.key in self._only]
        if lines:
            rows += await self._decode(lines, peers)
        for peer in peers:
            self._document.versions |= peer.versions
        return rows

    async def _decode(self, lines: Sequence[decode.Line], peers: Sequence[Peer]) -> list[Row]:
        forms = dict.fromkeys(form for line in lines for form in line.forms)
        able = [peer for peer in peers if peer.name not in self._missing]
        say(f"loading: {', '.join([*forms, *(peer.name for peer in able)])}")
        field = decode.field(self._config, forms, able, self._work, self._missing)
        async with field as contestants:
            speeds = await decode.measure(
                contestants, decode.cases_of(lines), self._rounds, self._missing, say
            )
        return decode.rows(lines, speeds)

    def _peer(self, recipe: Recipe) -> Peer | None:
        """None, and its reason in ``missing``, when it cannot run here."""
        try:
            python = recipes.interpreter(self._peers, recipe)
            model = self._model_for(recipe)
        except NotMade as reason:
            self._missing[recipe.name] = str(reason)
            return None
        driver, threads = recipes.DRIVERS / recipe.driver, str(self._config.rank_threads)
        return Peer(
            recipe.name,
            [str(python), str(driver), str(model), threads],
            self._work / f"{recipe.name}.log",
            {"OMP_NUM_THREADS": threads, **recipes.driver_environment(self._peers, recipe)},
        )

    def _model_for(self, recipe: Recipe) -> Path:
        """The same weights for all: the GGUF file is that of which the embedded model was made."""
        model, gguf = Path(self._config.model_path), self._peers / recipes.GGUF
        if not recipe.reads_gguf:
            return model
        if not gguf.exists():
            raise NotMade(f"{gguf} is missing; 'manage.py bench --make-peers' fetches it")
        if not (model / "quarterdeck.json").exists():
            raise NotMade(f"it reads {recipes.GGUF} and the model measured is {model.name}")
        return gguf


def say(line: str) -> None:
    print(f"bench: {line}", file=sys.stderr, flush=True)


def write(document: Document, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(msgspec.json.format(msgspec.json.encode(document)) + b"\n")


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="manage.py bench")
    parser.add_argument("--only", action="append", choices=KEYS, help="rows; may be given again")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--json", type=Path, help="default: QUARTERDECK_HOME/bench/bench-TIME.json")
    parser.add_argument("--make-peers", action="store_true", help="make their venvs and stop")
    return parser.parse_args(arguments)


def main(arguments: list[str]) -> int:
    options = parse(arguments)
    peers = bench_peers_from_env(os.environ)
    if options.make_peers:
        for line in recipes.make_peers(peers):
            say(line)
        return 0
    try:
        config = from_env(os.environ)
    except ConfigError as error:
        say(error.message)
        return 2
    if not Path(config.model_path).is_dir():
        say(f"there is no model in {config.model_path}; run 'manage.py model pull'")
        return 2
    document = asyncio.run(Bench(config, peers, options.only or KEYS, options.rounds).run())
    path = options.json or _default_path(config)
    write(document, path)
    print(render(document), end="")
    print(f"written to {path}")
    return 0


def _default_path(config: EngineConfig) -> Path:
    return Path(config.home) / "bench" / f"bench-{datetime.now(UTC):%Y%m%dT%H%M%SZ}.json"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
