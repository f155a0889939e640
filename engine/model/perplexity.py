"""Perplexity of a model on a text: what a dtype or a weight form costs.

``python -m engine.model.perplexity TEXT_FILE`` prints one line per form of QUARTERDECK_MODEL:
fp32, bf16 and int4, each with its ratio to fp32.
"""

from __future__ import annotations

import math
import os
import sys
from pathlib import Path

import msgspec

from engine.config import EngineConfig, from_env
from engine.messages import LogprobParams, SamplingParams
from engine.model.runner import make_runner
from engine.scheduler.plan import PlanRow, SlotBegin, StepPlan
from engine.tokenizer import Tokenizer

CONTEXT = 1024  # tokens that are judged at once; the first of them is not judged
FORMS = (("fp32", "plain"), ("bf16", "plain"), ("bf16", "int4"))


def perplexity(config: EngineConfig, token_ids: list[int]) -> float:
    """exp of the mean negative logprob, windows of CONTEXT tokens without overlap."""
    runner = make_runner(config, dp=0, tp=0, group=None)
    size = runner.info.block_size
    blocks = list(range(-(-CONTEXT // size)))
    total, count = 0.0, 0
    for step, first in enumerate(range(0, len(token_ids), CONTEXT)):
        window = token_ids[first : first + CONTEXT]
        begin = SlotBegin(
            slot=0,
            rid=str(step),
            sampling=SamplingParams(temperature=0.0),
            prompt_ids=window,
            logprob=LogprobParams(start_len=0),
        )
        row = PlanRow(slot=0, start=0, token_ids=window, new_blocks=blocks, sample=False)
        ends = [0] if step else []
        result = runner.forward(StepPlan(step=step, ends=ends, begins=[begin], rows=[row]))
        told = result.rows[0].input_logprobs
        assert told is not None
        known = [value for value in told.values if value is not None]
        total, count = total - sum(known), count + len(known)
    runner.close()
    return math.exp(total / count)


def main(arguments: list[str]) -> int:
    if len(arguments) != 1:
        print("usage: python -m engine.model.perplexity TEXT_FILE", file=sys.stderr)
        return 2
    config = from_env(os.environ)
    token_ids = Tokenizer.load(Path(config.model_path)).encode(Path(arguments[0]).read_text())
    baseline = None
    for dtype, weights in FORMS:
        form = msgspec.structs.replace(config, dtype=dtype, weights=weights)
        found = perplexity(form, token_ids)
        baseline = baseline or found
        print(f"{dtype} {weights}: {found:.4f}, {found / baseline:.4f} of fp32", flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
