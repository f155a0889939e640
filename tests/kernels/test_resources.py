"""Every kernel compiles for sm_80 and sm_90, spills nothing and stays within its recorded size."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kernels.resources import RECORD

ROOT = Path(__file__).parents[2]
MORE_REGISTERS = 8  # the step in which they are allotted; below it nothing changes on the device
MORE_SHARED_BYTES = 0
# 255 registers are all a thread can have; 99 KiB is what a program can have on sm_86 and sm_89, the
# least of the architectures from sm_80 on
MOST_REGISTERS = 255
MOST_SHARED_BYTES = 99 * 1024

# a kernel with fewer registers than it needs, as ptxas sees it
SPILLING = """
from dataclasses import asdict, replace
import json
from kernels.resources import cases, measure, recorded_launches
with recorded_launches() as launches:
    cases()["decode 9/3 heads of 64"]()
tight = replace(launches[0], options=launches[0].options | {"maxnreg": 32})
compiled = tight.compile(90)
print(json.dumps(asdict(measure("tight", tight, 90)) | {"ptx": compiled.asm["ptx"][:400]}))
"""


def run_python(*arguments: str) -> str:
    """Compiling leaves Triton without a real driver, so it has a process of its own."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    return subprocess.run(
        [sys.executable, "-W", "error", *arguments],
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
        timeout=280,
        check=True,
    ).stdout


def rows_of(text: str) -> dict[tuple[str, str, int], dict[str, Any]]:
    return {(row["case"], row["kernel"], row["sm"]): row for row in json.loads(text)["rows"]}


@pytest.fixture(scope="module")
def measured() -> dict[tuple[str, str, int], dict[str, Any]]:
    return rows_of(run_python("-m", "kernels.resources"))


RECORDED = rows_of(RECORD.read_text())


def test_the_record_has_every_kernel_on_both_architectures(
    measured: dict[tuple[str, str, int], dict[str, Any]],
):
    assert set(measured) == set(RECORDED), "run python -m kernels.resources --write"
    kernels = {(kernel, sm) for _, kernel, sm in RECORDED}
    names = {
        line.removeprefix("def ").partition("(")[0]
        for path in RECORD.parent.glob("*.py")
        for line in path.read_text().splitlines()
        if line.startswith("def _") and line.partition("(")[0].endswith("_kernel")
    }
    assert kernels == {(name, sm) for name in names for sm in (80, 90)}


@pytest.mark.parametrize("key", RECORDED, ids=str)
def test_a_kernel_takes_no_more_than_recorded(
    key: tuple[str, str, int], measured: dict[tuple[str, str, int], dict[str, Any]]
):
    now, then = measured[key], RECORDED[key]
    assert now["spill_bytes"] == then["spill_bytes"] == 0
    assert now["registers"] <= min(then["registers"] + MORE_REGISTERS, MOST_REGISTERS)
    assert now["shared_bytes"] <= min(then["shared_bytes"] + MORE_SHARED_BYTES, MOST_SHARED_BYTES)


def test_a_kernel_that_spills_is_seen_to_spill():
    row = json.loads(run_python("-c", SPILLING))
    assert row["registers"] <= 32
    assert row["spill_bytes"] > 0
    assert ".target sm_90" in row["ptx"]
