"""The trainer of ``docs/examples`` against a whole tree: it learns, and every label is right."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from tests.console.tree import ROOT, Tree, running_tree
from tests.engine.model.tiny import make_model

pytestmark = pytest.mark.e2e

SCRIPT = ROOT / "docs" / "examples" / "rl_loop.py"
TOLERANCE = 1e-4  # of logprobs in fp32; a label that is one step off gives 1e-2 and more


@pytest.fixture(scope="module")
def tree(tmp_path_factory):
    home = tmp_path_factory.mktemp("rl")
    model = make_model(home / "models" / "tiny", "llama")
    settings = {"BACKEND": "auto", "MODEL": str(model), "DTYPE": "fp32", "THREADS": "1"}
    changes = {f"QUARTERDECK_{name}": value for name, value in settings.items()}
    with running_tree(home, **changes) as tree:
        yield tree


def example() -> ModuleType:
    spec = importlib.util.spec_from_file_location("rl_loop", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    sys.modules["rl_loop"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def settings_of(module: ModuleType, tree: Tree, **changes):
    return module.Settings(
        url=tree.url,
        key=tree.key,
        model=tree.home / "models" / "tiny",
        checkpoints=tree.home / "models" / "rl",
        **changes,
    )


def test_twenty_steps_earn_more_and_every_token_names_its_weights(tree):
    module = example()
    settings = settings_of(module, tree)
    reports = list(module.train(settings))
    rewards = [report.reward for report in reports]
    assert sum(rewards[-5:]) / 5 >= sum(rewards[:5]) / 5 + 0.1, rewards

    tokens = settings.prompts * settings.samples * settings.new_tokens
    for report in reports:
        assert sum(report.staleness.values()) == tokens
        assert set(report.staleness) <= {0, 1}, "the loop is off-policy by at most one step"
        assert report.gap < TOLERANCE, report
    stale = [report for report in reports if report.staleness.get(1)]
    assert stale, "some rollouts met a push"
    assert all(report.unlabelled_gap > 10 * TOLERANCE for report in stale[3:])

    epochs = [report.epoch for report in reports]
    assert epochs == list(range(epochs[0], epochs[0] + len(reports)))
    assert {report.push for report in reports} == {"disk", "tensor", "distributed"}


def test_each_push_is_a_version_with_its_job_and_step(tree):
    shown = tree.get("/api/weights").json()
    newest = shown["versions"][0]
    assert newest["ended_at"] is None
    job = tree.get(f"/api/jobs/{newest['job']}").json()["job"]
    assert (job["state"], job["actor"]) == ("done", "key:test")
    steps = [version["token_step"] for version in shown["versions"] if version["job"]]
    assert steps == sorted(steps, reverse=True)


@pytest.mark.parametrize("policy", ["in_place", "finish"])
def test_the_script_runs_by_itself_under_other_policies(tree, policy, tmp_path: Path):
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "--url", tree.url, "--key", tree.key,
         "--model", str(tree.home / "models" / "tiny"),
         "--checkpoints", str(tree.home / "models" / "rl"),
         "--steps", "2", "--push", "tensor", "--policy", policy],
        cwd=ROOT, capture_output=True, text=True, check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("by tensor") == 2
