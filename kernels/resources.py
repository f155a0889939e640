"""Compiles every kernel without a device and reads what it takes: registers, spills, shared memory.

Path: ``python -m kernels.resources [--write]`` -> kernels/resources.json, which
tests/kernels/test_resources.py guards. What is compiled is what the launchers launch: each case
calls an operator on CPU tensors with the Triton path forced and a driver that only names a target;
Triton's cache hook takes the specialised kernel and stops the launch.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime import driver

from kernels.attention_tile import PagedContext, Scores
from kernels.dispatch import LAUNCH_OPTIONS, forced
from kernels.gated_activation import gelu_tanh_and_mul, silu_and_mul
from kernels.paged_attention import paged_attention
from kernels.paged_prefill import paged_prefill
from kernels.rms_norm import add_rms_norm, rms_norm
from kernels.rotary import rotary
from kernels.sample import sample
from kernels.store_kv import store_kv

ARCHITECTURES = (80, 90)  # A100; H100 and H200
RECORD = Path(__file__).with_name("resources.json")
PLAIN = Scores(0.125)
CAPPED = Scores(0.0625, window=4096, soft_cap=50.0)  # Gemma 2's
USAGE = re.compile(r"REG:(\d+) STACK:(\d+) SHARED:\d+ LOCAL:(\d+)")


@dataclass(frozen=True, slots=True)
class Usage:
    """One kernel, as one case launches it, on one architecture."""

    case: str
    kernel: str
    sm: int
    warps: int
    registers: int  # per thread
    spill_bytes: int  # per thread: stack and local memory
    shared_bytes: int  # per program, static and dynamic


@dataclass(frozen=True, slots=True)
class Launch:
    """A kernel specialised for its arguments, not compiled yet."""

    kernel: Any  # triton.runtime.JITFunction
    signature: dict[str, str]
    constants: dict[Any, Any]
    attributes: dict[Any, Any]
    options: dict[str, Any]

    def compile(self, sm: int) -> Any:
        """Triton's CompiledKernel for ``sm``, with its PTX and cubin in ``asm``."""
        source = ASTSource(self.kernel, self.signature, self.constants, self.attributes)
        return triton.compile(source, target=GPUTarget("cuda", sm, 32), options=self.options)


class _NoDevice:
    """The part of a Triton driver that is asked before anything is compiled."""

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", ARCHITECTURES[-1], 32)


@contextmanager
def recorded_launches() -> Iterator[list[Launch]]:
    """Operators called inside launch nothing; what they would launch is appended to the list.

    Leaves Triton without a real driver: for a process of its own.
    """
    launches: list[Launch] = []

    def take(*, fn: Any, compile: dict[str, Any], **_: Any) -> bool:
        options = {name: compile[name] for name in ("num_warps", "num_stages")}
        launches.append(
            Launch(
                fn.jit_function,
                compile["signature"],
                compile["constants"],
                compile["configs"][0],
                options | LAUNCH_OPTIONS,
            )
        )
        return True

    driver.set_active(_NoDevice())
    with triton.knobs.runtime.scope(), forced("triton"):
        triton.knobs.runtime.jit_cache_hook = take
        yield launches


def _empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype)


def _cache(kv_heads: int, dim: int, dtype: torch.dtype) -> PagedContext:
    return PagedContext(
        key=_empty(1024, kv_heads, dim, dtype=dtype),
        value=_empty(1024, kv_heads, dim, dtype=dtype),
        block_tables=torch.zeros((8, 64), dtype=torch.int32),
        lengths=torch.zeros(8, dtype=torch.int32),
        block_size=16,
    )


def _decode(
    heads: int,
    kv_heads: int,
    dim: int,
    scores: Scores = PLAIN,
    *,
    split: int = 1024,
    dtype: torch.dtype = torch.bfloat16,
) -> None:
    q, cache = _empty(8, heads, dim, dtype=dtype), _cache(kv_heads, dim, dtype)
    paged_attention(q, cache, scores, split_tokens=split)


def _prefill(
    heads: int,
    kv_heads: int,
    dim: int,
    scores: Scores = PLAIN,
    *,
    dtype: torch.dtype = torch.bfloat16,
) -> None:
    q, cache = _empty(512, heads, dim, dtype=dtype), _cache(kv_heads, dim, dtype)
    starts = torch.zeros(9, dtype=torch.int32)
    paged_prefill(q, starts, cache, scores, longest_chunk=512)


def cases() -> dict[str, Callable[[], object]]:
    """Name -> one call with the shapes of a real model: SmolLM2-135M, Llama 3 8B, Gemma 2 or 3."""
    norm, wide, head = _empty(4096), _empty(64, 4096), _empty(64, 32, 128)
    gate = _empty(64, 28_672)
    rows = torch.zeros(32)
    return {
        "rms_norm 4096": lambda: rms_norm(wide, norm, 1e-5),
        "add_rms_norm 4096": lambda: add_rms_norm(wide, wide.clone(), norm, 1e-5),
        "rms_norm 32 heads of 128": lambda: rms_norm(head, _empty(128), 1e-6, weight_offset=1.0),
        "rotary 32+8 heads of 128": lambda: rotary(
            head, head[:, :8], torch.arange(64), _empty(1024, 128, dtype=torch.float32)
        ),
        "store_kv 8 heads of 128": lambda: store_kv(
            head[:, :8], head[:, :8], _empty(1024, 8, 128), _empty(1024, 8, 128), torch.arange(64)
        ),
        "silu_and_mul 14336": lambda: silu_and_mul(*gate.chunk(2, dim=1)),
        "gelu_tanh_and_mul 14336": lambda: gelu_tanh_and_mul(*gate.chunk(2, dim=1)),
        "decode 9/3 heads of 64": lambda: _decode(9, 3, 64),
        "decode 32/8 heads of 128": lambda: _decode(32, 8, 128),
        "decode 32/8 heads of 128, split": lambda: _decode(32, 8, 128, split=256),
        "decode 32/8 heads of 128, fp32": lambda: _decode(32, 8, 128, dtype=torch.float32),
        "decode 8/4 heads of 256, capped": lambda: _decode(8, 4, 256, CAPPED),
        "prefill 9/3 heads of 64": lambda: _prefill(9, 3, 64),
        "prefill 32/8 heads of 128": lambda: _prefill(32, 8, 128),
        "prefill 32/8 heads of 128, fp32": lambda: _prefill(32, 8, 128, dtype=torch.float32),
        "prefill 8/4 heads of 256, capped": lambda: _prefill(8, 4, 256, CAPPED),
        "sample 128256": lambda: sample(_empty(32, 128_256), rows, rows),
    }


def measure(case: str, launch: Launch, sm: int) -> Usage:
    """Compiles and asks cuobjdump; RuntimeError if it does not answer as expected."""
    compiled = launch.compile(sm)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        command = [triton.knobs.nvidia.cuobjdump.path, "-res-usage", file.name]
        answer = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = USAGE.search(answer)
    if found is None:
        raise RuntimeError(f"cuobjdump did not tell the registers of {case}: {answer}")
    registers, stack, local = map(int, found.groups())
    return Usage(
        case=case,
        kernel=launch.kernel.__name__,
        sm=sm,
        warps=compiled.metadata.num_warps,
        registers=registers,
        spill_bytes=stack + local,
        shared_bytes=compiled.metadata.shared,
    )


def measure_all() -> list[Usage]:
    """Every launch of every case on every architecture; about a second each."""
    table: list[Usage] = []
    for case, call in cases().items():
        with recorded_launches() as launches:
            call()
        table += [measure(case, launch, sm) for launch in launches for sm in ARCHITECTURES]
    return table


def render(table: list[Usage]) -> str:
    """One row a line, so that a change shows as a line in a diff."""
    rows = ",\n  ".join(json.dumps(asdict(usage)) for usage in table)
    return f'{{"triton": "{triton.__version__}", "rows": [\n  {rows}\n]}}\n'


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--write", action="store_true", help=f"write {RECORD.name}")
    arguments = parser.parse_args()
    text = render(measure_all())
    if arguments.write:
        RECORD.write_text(text)
    else:
        print(text, end="")


if __name__ == "__main__":
    main()
