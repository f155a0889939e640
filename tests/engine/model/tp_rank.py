"""One rank of a tp group that replays recorded plans: ``python -m tests.engine.model.tp_rank``.

Arguments: a file of plans, the tp rank, and any number of engine configs as JSON files. Rank 0
prints one JSON line per config: its results, [[token id, logprob] or null per row] per step.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import msgspec

from engine.config import EngineConfig
from engine.model.runner import make_runner
from engine.scheduler.plan import StepPlan
from engine.scheduler.ranks import make_group


def main(plans_path: str, rank: int, idle_s: float, config_paths: list[str]) -> None:
    group = None
    for path in config_paths:
        config = EngineConfig.from_json(Path(path).read_bytes())
        group = group or make_group(config, dp=0, tp=rank, start=0)
        plans = msgspec.json.decode(
            Path(f"{plans_path}-{Path(path).stem}").read_bytes(), type=list[StepPlan]
        )
        runner = make_runner(config, dp=0, tp=rank, group=group)
        time.sleep(idle_s)
        results = [runner.forward(plan).rows for plan in plans]
        if rank == 0:
            told = [[(row.token_id, row.logprob) for row in rows] for rows in results]
            print(json.dumps(told), flush=True)
        elif any(row.token_id is not None for rows in results for row in rows):
            raise SystemExit("a follower sampled")
    assert group is not None
    group.leave()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), float(sys.argv[3]), sys.argv[4:])
