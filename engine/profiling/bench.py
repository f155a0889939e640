"""Bench of the merge: speed and memory against SGLang's ProfileMerger on the same files.

Path: ``make bench`` -> ``bench_merge`` -> rows of the ratio table; or by hand:

    python -m engine.profiling.bench [--events 200000] [--peer PATH/profile_merger.py]

The peer is one file of the ``sglang`` wheel, ``sglang/srt/utils/profile_merger.py``, which imports
nothing but the standard library; ``fetch_peer`` takes it from the package index.
"""

from __future__ import annotations

import argparse
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import psutil
from isal import igzip

from engine.profiling.manifest import merged_path

PEER_WHEEL = "sglang==0.5.4.post1"
PEER_FILE = "sglang/srt/utils/profile_merger.py"
PEER_NAME = "SGLang 0.5.4 ProfileMerger"
PEER_MAIN = (
    "import runpy, sys; m = runpy.run_path(sys.argv[1]); "
    "m['ProfileMerger'](sys.argv[2], sys.argv[3]).merge_chrome_traces()"
)
PROFILE_ID = "bench"
SPEED_TARGET = 6.0
MEMORY_TARGET_MB = 150.0
SAMPLE_S = 0.02

LAYERS = 30
STEP_US = 20_000
BASE_US = 5_170_388_826_145
HEADER = """{
  "schemaVersion": 1,
  "deviceProperties": [
    {"id": 0, "name": "Synthetic", "totalGlobalMem": 85899345920, "numSms": 132}
  ],
  "distributedInfo": {"backend": "nccl", "rank": %d, "world_size": 4},
  "with_stack": 1,
  "displayTimeUnit": "ms",
  "baseTimeNanoseconds": 1790857026000000000,
  "traceEvents": [
"""
NAMES = """  {
    "ph": "M",
    "name": "process_name",
    "ts": 5170388826145.592,
    "pid": %d,
    "tid": 0,
    "args": {
      "name": "python"
    }
  },
"""
CLOSING = b"""  {
    "ph": "i",
    "s": "g",
    "name": "Record Window End",
    "pid": "",
    "tid": "",
    "ts": 5170389071222.767
  }
  ],"traceName": "synthetic.json" }
"""
# torch 2.13's own layout; TS and ID become numbers of the step
SPAN = """  {
    "ph": "X",
    "cat": "%s",
    "name": "%s",
    "pid": %s,
    "tid": %s,
    "ts": TS%d.%03d,
    "dur": %.3f
    ,
    "args": {
      %s
    }
  },
"""
FLOW = """  {
    "ph": "%s", "id": ID%d, "pid": %s, "tid": %s, "ts": TS%d.%03d,
    "cat": "ac2g", "name": "ac2g"%s
  },
"""
CPU_ARGS = '"External id": %d,"Record function id": 0, "Ev Idx": %d'
PYTHON_ARGS = '"Python parent id": %d, "Python id": %d, "Ev Idx": %d'
KERNEL_ARGS = (
    '"External id": %d, "queued": 0, "device": 0, "context": 1, "stream": 7, "correlation": %d, '
    '"grid": [128, 1, 1], "block": [256, 1, 1], "est. achieved occupancy %%": 61'
)


class Run(msgspec.Struct, frozen=True, kw_only=True):
    """One process tree: seconds of wall and CPU, peak of its summed resident memory in MB."""

    wall_s: float
    cpu_s: float
    peak_mb: float


class StepText:
    """The text of one decode step: its events with marks where its time and flow ids go."""

    def __init__(self, pid: int) -> None:
        self._pid = str(pid)
        self._parts: list[str] = []
        self.events = 0
        self.flows = 0
        self._span("user_annotation", "decode[step=7 bs=8 toks=8]", STEP_US - 1)
        for layer in range(LAYERS):
            self._layer(layer)
        self._pieces = re.split(r"(TS|ID)(\d+)", "".join(self._parts))

    def render(self, start_us: int, first_flow: int) -> bytes:
        """The events of a step that starts at ``start_us``."""
        pieces, base = self._pieces.copy(), {"TS": start_us, "ID": first_flow}
        for at in range(1, len(pieces), 3):
            pieces[at], pieces[at + 1] = "", str(base[pieces[at]] + int(pieces[at + 1]))
        return "".join(pieces).encode()

    def _layer(self, layer: int) -> None:
        for frame in range(6):
            args = PYTHON_ARGS % (frame, self.events, self.events)
            name = f"model/native.py({120 + frame}): block_{layer}"
            self._span("python_function", name, 500, args)
        for op in ("linear", "t", "transpose", "as_strided", "addmm", "expand"):
            self._span("cpu_op", f"aten::{op}", 9)
        for kernel in ("gemm_bf16_128x64", "fused_add_rms_norm", "paged_attention_v2"):
            self._span("cuda_runtime", "cudaLaunchKernel", 4)
            self._arrow("s", self._pid, self._pid, "")
            name = f"void {kernel}<float, int, {layer}>(float*, int)"
            args = KERNEL_ARGS % (self.events, self.flows)
            self._span("kernel", name, 11, args, pid="0", tid="7")
            self._arrow("f", "0", "7", ', "bp": "e"')
            self.flows += 1

    def _span(
        self, cat: str, name: str, dur: float, args: str = "", pid: str = "", tid: str = ""
    ) -> None:
        args = args or CPU_ARGS % (self.events, self.events)
        pid, tid = pid or self._pid, tid or self._pid
        self._parts.append(SPAN % (cat, name, pid, tid, *self._when(), dur, args))

    def _arrow(self, phase: str, pid: str, tid: str, more: str) -> None:
        self._parts.append(FLOW % (phase, self.flows, pid, tid, *self._when(), more))

    def _when(self) -> tuple[int, int]:
        self.events += 1
        return divmod(self.events * 1_013, 1000)


def write_synthetic(directory: Path, *, ranks: int, events: int) -> list[Path]:
    """``ranks`` traces of at least ``events`` events as torch writes them and SGLang names them."""
    paths = []
    for rank in range(ranks):
        step, written = StepText(pid=9000 + rank), 0
        path = directory / f"{PROFILE_ID}-TP-{rank % 2}-DP-{rank // 2}.trace.json.gz"
        with igzip.open(path, "wb") as out:  # type: ignore[no-untyped-call]
            out.write((HEADER % rank + NAMES % (9000 + rank)).encode())
            while written < events:
                number = written // step.events
                out.write(step.render(BASE_US + number * STEP_US, number * step.flows))
                written += step.events
            out.write(CLOSING)
        paths.append(path)
    return paths


def measure(command: Sequence[str]) -> Run:
    """Runs a command to its end. RuntimeError with what it wrote if it fails."""
    before, started = os.times(), time.monotonic()
    peak = 0
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE) as child:
        while child.poll() is None:
            peak = max(peak, tree_bytes(child.pid))
            time.sleep(SAMPLE_S)
        wall_s = time.monotonic() - started
        assert child.stderr
        said = child.stderr.read().decode(errors="replace")
    if child.returncode:
        raise RuntimeError(f"{command[0]} ended with {child.returncode}: {said[-2000:]}")
    after = os.times()
    cpu_s = sum(after[2:4]) - sum(before[2:4])
    return Run(wall_s=wall_s, cpu_s=cpu_s, peak_mb=peak / 1e6)


def tree_bytes(pid: int) -> int:
    """Resident bytes of a process and its children; shared pages count in each."""
    try:
        top = psutil.Process(pid)
        return sum(one.memory_info().rss for one in [top, *top.children(recursive=True)])
    except psutil.NoSuchProcess:
        return 0


def fetch_peer(directory: Path) -> Path:
    """SGLang's merger, out of its wheel (downloaded without its dependencies)."""
    pip = [sys.executable, "-m", "pip", "download", "--no-deps", "--quiet"]
    subprocess.run([*pip, "--dest", str(directory), PEER_WHEEL], check=True)
    wheel = next(directory.glob("sglang-*.whl"))
    with zipfile.ZipFile(wheel) as archive:
        return Path(archive.extract(PEER_FILE, directory))


def bench_merge(
    directory: Path, *, peer: Path | None, ranks: int = 4, events: int = 200_000, rounds: int = 3
) -> list[dict[str, Any]]:
    """Rows for the bench table: wall, CPU and memory of one merge, ours and the peer's in turn.

    ``directory`` gets the synthetic traces (about 10 MB per 200,000 events) and both results.
    """
    write_synthetic(directory, ranks=ranks, events=events)
    ours, theirs = [], []
    for _ in range(rounds):
        ours.append(
            measure(
                [sys.executable, "-m", "engine.profiling.merge", str(directory), PROFILE_ID],
            )
        )
        merged_path(directory, PROFILE_ID).unlink()
        if peer:
            command = [sys.executable, "-c", PEER_MAIN, str(peer), str(directory), PROFILE_ID]
            theirs.append(measure(command))
            merged_path(directory, PROFILE_ID).unlink()
    what = f"merge of {ranks} x {events:,} events"
    return [
        _row(f"{what}, wall", "s", "wall_s", ours, theirs, SPEED_TARGET),
        _row(f"{what}, CPU", "s", "cpu_s", ours, theirs, SPEED_TARGET),
        _memory_row(f"{what}, peak memory", ours, theirs),
    ]


def _row(
    name: str, unit: str, field: str, ours: list[Run], theirs: list[Run], target: float
) -> dict[str, Any]:
    """Medians over the rounds; ``ratio`` is how many times less ours needs."""
    mine = [getattr(run, field) for run in ours]
    row = {
        "name": name,
        "unit": unit,
        "ours": round(statistics.median(mine), 3),
        "spread": round(max(mine) - min(mine), 3),
        "peers": {},
        "ratio": None,
        "target": target,
        "met": None,
    }
    if theirs:
        peer = statistics.median(getattr(run, field) for run in theirs)
        ratio = peer / statistics.median(mine)
        row |= {
            "peers": {PEER_NAME: round(peer, 3)},
            "ratio": round(ratio, 2),
            "met": ratio >= target,
        }
    return row


def _memory_row(name: str, ours: list[Run], theirs: list[Run]) -> dict[str, Any]:
    row = _row(name, "MB", "peak_mb", ours, theirs, MEMORY_TARGET_MB)
    return row | {"met": max(run.peak_mb for run in ours) <= MEMORY_TARGET_MB}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m engine.profiling.bench")
    parser.add_argument("--events", type=int, default=200_000, help="of each rank")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--peer", type=Path, help="profile_merger.py of an unpacked sglang wheel")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="quarterdeck-bench-") as directory:
        rows = bench_merge(
            Path(directory),
            peer=options.peer,
            ranks=options.ranks,
            events=options.events,
            rounds=options.rounds,
        )
    print(msgspec.json.format(msgspec.json.encode(rows)).decode())
    return 0


if __name__ == "__main__":
    sys.exit(main())
