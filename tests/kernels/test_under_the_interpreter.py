"""Runs tests/kernels/interpreted in a process that has TRITON_INTERPRET=1 from its start.

Triton decides at decoration whether a kernel is interpreted, and its own library at its import, so
one process has either interpreted kernels or compiled ones.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

ROOT = Path(__file__).parents[2]
INTERPRETED = Path(__file__).with_name("interpreted")
FILES = sorted(path.stem for path in INTERPRETED.glob("test_*.py"))


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str | None]]:
    """File -> what each of its tests said: None for passed, else the failure."""
    report = tmp_path_factory.mktemp("interpreted") / "report.xml"
    run = subprocess.run(
        [sys.executable, "-m", "pytest", str(INTERPRETED), "-q", "--tb=short"]
        + ["-p", "no:cacheprovider", f"--junitxml={report}"],
        cwd=ROOT,
        env=os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert report.exists(), run.stdout + run.stderr
    said: dict[str, list[str | None]] = {name: [] for name in FILES}
    for case in ElementTree.parse(report).iter("testcase"):
        name = (case.get("classname") or case.get("name") or "").rpartition(".")[2]
        bad = [child for kind in ("failure", "error", "skipped") for child in case.iter(kind)]
        said.setdefault(name, []).append(f"{case.get('name')}\n{bad[0].text}" if bad else None)
    return said


@pytest.mark.parametrize("file", FILES)
def test_the_kernels_agree_with_their_references(file: str, outcomes: dict[str, list[str | None]]):
    assert outcomes[file], f"no test of {file} ran"
    failures = [failure for failure in outcomes[file] if failure]
    assert not failures, "\n".join(failures)


def test_nothing_else_went_wrong(outcomes: dict[str, list[str | None]]):
    assert set(outcomes) == set(FILES), {
        name: outcomes[name] for name in set(outcomes) - set(FILES)
    }
