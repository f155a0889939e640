"""Checks every kernel on a CUDA device and measures it. Run it as ``tests/gpu/check``.

Per operator and dtype: the largest error against the reference on the same device, whether a
captured graph replays the same bits, and the time of one call with a cold cache. Prints JSON; the
exit code is 0 if all is right, 1 if a kernel is wrong, 2 without a device.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import triton
import triton.testing

from kernels.dispatch import forced
from tests.gpu.cases import Case, Outputs, Place, cases
from tests.kernels.inputs import TOLERANCE, relative_error

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
FULL = Place("cuda", tokens=8192, context=4096)
COPIED_BYTES = 2**30


@dataclass(frozen=True)
class Outcome:
    """``error`` and ``tolerance`` as in tests/kernels/inputs.py; speed is absent when not asked."""

    name: str
    dtype: str
    error: float
    tolerance: float
    replays: bool
    microseconds: float | None = None
    gigabytes_per_second: float | None = None
    teraflops: float | None = None

    @property
    def right(self) -> bool:
        return self.replays and self.error <= self.tolerance


def largest_error(actual: Outputs, expected: Outputs) -> float:
    """Of any output; indices that differ count as infinite."""
    errors = [0.0]
    for mine, right in zip(actual, expected, strict=True):
        if mine.dtype in TOLERANCE:
            errors.append(relative_error(mine, right))
        elif not torch.equal(mine, right):
            errors.append(float("inf"))
    return max(errors)


def replays_the_same(case: Case, eager: Outputs) -> bool:
    """Captures one call into a graph; its replay must give the bits of the eager call."""
    warm = case.copies()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        case.run(*warm)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    static = case.copies()
    with torch.cuda.graph(graph):
        captured = case.run(*static)
    graph.replay()
    torch.cuda.synchronize()
    return all(_same_bits(a, b) for a, b in zip(captured, eager, strict=True))


def _same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return bool(((a == b) | (a.isnan() & b.isnan())).all())


def check(case: Case, dtype: torch.dtype, *, timed: bool) -> Outcome:
    with forced("triton"):
        eager = case.run(*case.copies())
        error = largest_error(eager, case.reference(*case.copies()))
        outcome = {
            "name": case.name,
            "dtype": str(dtype).removeprefix("torch."),
            "error": error,
            "tolerance": TOLERANCE[dtype] * case.roundings,
            "replays": replays_the_same(case, eager),
        }
        if not timed:
            return Outcome(**outcome)  # type: ignore[arg-type]
        tensors = case.copies()
        seconds = triton.testing.do_bench(lambda: case.run(*tensors), return_mode="median") / 1e3
    return Outcome(
        **outcome,  # type: ignore[arg-type]
        microseconds=seconds * 1e6,
        gigabytes_per_second=case.bytes_moved / seconds / 1e9,
        teraflops=case.flops / seconds / 1e12 if case.flops else None,
    )


def copy_bandwidth() -> float:
    """GB/s, read and written, of a device-to-device copy of 1 GiB: what a kernel can hope for."""
    source = torch.randn(COPIED_BYTES // 4, device="cuda")
    target = torch.empty_like(source)
    milliseconds = triton.testing.do_bench(lambda: target.copy_(source), return_mode="median")
    return float(2 * COPIED_BYTES / milliseconds / 1e6)


def check_graphs(dtype: torch.dtype) -> Outcome:
    """Decode steps of a whole tiny decoder through engine/model/cuda_graphs.py."""
    # the engine needs more packages than torch: --kernels-only works without them
    from tests.gpu.graph_check import largest_graph_error

    error = largest_graph_error(dtype)
    name = str(dtype).removeprefix("torch.")
    # a padded batch takes other matrix products: their roundings pass two layers
    return Outcome("decode graphs", name, error, 8 * TOLERANCE[dtype], replays=True)


def report(*, timed: bool, kernels_only: bool) -> dict[str, Any]:
    outcomes = []
    for dtype in DTYPES:
        for case in cases(FULL, dtype):
            outcomes.append(check(case, dtype, timed=timed))
            print(f"{outcomes[-1]}", file=sys.stderr, flush=True)
        if not kernels_only:
            outcomes.append(check_graphs(dtype))
        torch.cuda.empty_cache()
    return {
        "device": torch.cuda.get_device_name(),
        "versions": {"torch": torch.__version__, "triton": triton.__version__},
        "copy_gigabytes_per_second": copy_bandwidth() if timed else None,
        "right": all(outcome.right for outcome in outcomes),
        "rows": [asdict(outcome) | {"right": outcome.right} for outcome in outcomes],
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, help="also write the JSON to this file")
    parser.add_argument("--no-speed", action="store_true", help="correctness and capture alone")
    parser.add_argument("--kernels-only", action="store_true", help="leave the engine out")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        print(
            f"this check needs a CUDA device; torch {torch.__version__} sees none", file=sys.stderr
        )
        return 2
    result = report(timed=not arguments.no_speed, kernels_only=arguments.kernels_only)
    text = json.dumps(result, indent=1)
    print(text)
    if arguments.out:
        arguments.out.write_text(text + "\n")
    return 0 if result["right"] else 1


if __name__ == "__main__":
    sys.exit(main())
