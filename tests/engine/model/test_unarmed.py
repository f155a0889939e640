"""A dump costs nothing while none is armed: the forward is the same object, without a hook."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from torch.nn.modules import module as hooks_of_all

from engine import messages as m
from engine.artifacts import Rank
from engine.config import Limits
from engine.dumps.capture import Tap
from engine.dumps.points import parse_spec
from engine.model.runner import ModelRunner, make_runner
from engine.scheduler.plan import StepPlan, StepResult
from engine.scheduler.recording import Recorder
from tests.engine.model.conftest import engine_config
from tests.engine.model.driver import Driver, Job

STEPS = 200
ROUNDS = 3
MOST = 0.01  # of a step, that a dump may cost once it is over
SAMPLING = m.SamplingParams(temperature=0.0, max_new_tokens=3000, ignore_eos=True)


class Served:
    """A runner behind its recorder, as a rank's loop has it, with one request that runs on."""

    def __init__(self, runner: ModelRunner) -> None:
        self.info, self.runner = runner.info, runner
        self.recorder = Recorder(Rank(), runner, leads=True, answer=lambda call_id, result: None)
        self.tapped = 0
        self._driver = Driver(self)
        self._driver.begin(Job(prompt_ids=[5, 6, 7, 8], sampling=SAMPLING))

    def forward(self, plan: StepPlan, tap: Tap | None = None) -> StepResult:
        plan.tapped = self.recorder.taps(plan)
        self.tapped += plan.tapped
        return self.recorder.forward(plan)

    def step(self) -> float:
        began = time.perf_counter()
        self._driver.step()
        return time.perf_counter() - began

    def dump(self, directory: Path) -> None:
        """Armed, hit once, written and over."""
        self.recorder.prepare_dump(m.PrepareDump(epoch=self.runner.epoch))
        spec = parse_spec({"dump_id": "d", "directory": str(directory)})
        self.recorder.arm_dump(m.ArmDump(spec=spec))
        self.step()
        while self.recorder.busy:
            self.recorder.collect()


def forward_of(runner: ModelRunner) -> list[object]:
    """Every function and object that a step runs through; modules with what they call."""
    backend = runner._backend  # type: ignore[attr-defined]
    found: list[object] = [
        runner.forward.__func__, backend.forward.__func__, getattr(backend, "_decoder", None),
    ]  # fmt: skip
    model = getattr(backend, "model", None)
    for module in model.modules() if model is not None else ():
        found += [module, getattr(module.forward, "__func__", module.forward)]
    return found


def hooks_in(runner: ModelRunner) -> list[object]:
    """Forward hooks of the model's modules, and those of every module of the process."""
    model = getattr(runner._backend, "model", None)  # type: ignore[attr-defined]
    found = [*hooks_of_all._global_forward_hooks, *hooks_of_all._global_forward_pre_hooks]
    for module in model.modules() if model is not None else ():
        found += [*module._forward_hooks, *module._forward_pre_hooks]
    return found


@pytest.mark.parametrize("backend", ["hf", "native", "eager"])
def test_before_and_after_a_dump_the_forward_is_the_same_object_without_hooks(
    tiny_model: Callable[[str], Path], tmp_path: Path, backend: str
) -> None:
    runner = make_runner(
        engine_config(tiny_model("llama"), backend=backend), dp=0, tp=0, group=None
    )
    served = Served(runner)
    before = forward_of(runner)
    served.step()
    assert (served.tapped, hooks_in(runner)) == (0, [])
    served.dump(tmp_path)
    assert (tmp_path / "d-dp0-tp0-000.safetensors").exists()
    served.step()
    assert (served.tapped, hooks_in(runner)) == (1, [])
    after = forward_of(runner)
    assert [id(one) for one in after] == [id(one) for one in before]
    if not runner.instrument.is_live:
        assert runner.instrument._decoder is None  # type: ignore[attr-defined]


def medians(served: tuple[Served, Served]) -> list[float]:
    """Of ``STEPS`` interleaved steps each, in seconds: the best of ``ROUNDS``."""
    found = []
    for _ in range(ROUNDS):
        took: dict[Served, list[float]] = {one: [] for one in served}
        for number in range(STEPS):
            for one in served if number % 2 else served[::-1]:
                took[one].append(one.step())
        found.append([statistics.median(seconds) for seconds in took.values()])
    return [min(one) for one in zip(*found, strict=True)]


@pytest.mark.soak
@pytest.mark.model
@pytest.mark.parametrize("backend", ["native", "hf"])
def test_200_interleaved_steps_cost_the_same_whether_a_dump_was_ever_armed(
    embedded_model: Path,
    tmp_path: Path,
    backend: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Two runners differ by up to a percent from where their weights lie in memory, so what counts
    is how their ratio changes when one of them had a dump."""
    limits = Limits(kv_tokens=8192, block_tokens=16)
    config = engine_config(embedded_model, backend=backend, dtype="bf16", limits=limits)
    never, once = (Served(make_runner(config, dp=0, tp=0, group=None)) for _ in range(2))
    before = medians((never, once))
    once.dump(tmp_path)
    after = medians((never, once))
    cost = (after[1] / after[0]) / (before[1] / before[0]) - 1
    with capsys.disabled():
        told = [f"{1e3 * median:.3f} ms" for median in before + after]
        print(
            f"\n{backend}: neither armed {told[0]}, {told[1]}; one, and over {told[2]}, {told[3]}"
        )
        print(f"so a dump that is over costs {100 * cost:+.2f} %")
    assert abs(cost) <= MOST
