"""Merge and summary of a profile as one program, for who wants one line of JSON about both.

Path: the console's file job runs ``python -m engine.profiling.report DIR ID`` -> here -> merge.py,
summary.py. The line is ``{"merge": ..., "summary": ...}`` or ``{"error": sentence}``.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import msgspec

from engine.errors import QuarterdeckError
from engine.profiling.merge import merge
from engine.profiling.summary import summarize

BRIEF = ("median_step_us", "largest_gap_us", "busy_share", "communication_share", "stragglers")


def report(directory: Path, profile_id: str, wait_s: float) -> dict[str, Any]:
    """Both, without the long lists; those are in the summary's file."""
    merged = msgspec.to_builtins(merge(directory, profile_id, wait_s=wait_s))
    summary = msgspec.to_builtins(summarize(directory, profile_id))
    del merged["files"]
    return {"merge": merged, "summary": {name: summary[name] for name in BRIEF}}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m engine.profiling.report")
    parser.add_argument("directory", type=Path)
    parser.add_argument("profile_id")
    parser.add_argument("--wait-s", type=float, default=0.0, help="for ranks that are late")
    options = parser.parse_args()
    try:
        said = report(options.directory, options.profile_id, options.wait_s)
    except (QuarterdeckError, OSError) as error:
        said = {"error": f"not merged: {error}"}
    print(msgspec.json.encode(said).decode())
    return 1 if "error" in said else 0


if __name__ == "__main__":
    sys.exit(main())
