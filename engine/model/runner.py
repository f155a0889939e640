"""Runs step plans on a model: the scheduler's one door to torch.

Path: scheduler/process.py -> here -> inputs.py -> native.py | hf.py -> sampler.py -> StepResult.
Each rank of a tp group runs every plan in order; rank 0 alone samples, and its tokens reach the
others in the next plan.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from engine.config import EngineConfig
from engine.errors import ConfigError
from engine.messages import SamplingParams
from engine.model.instrument import Instrument
from engine.model.loader import ModelDirectory, open_directory
from engine.model.weights import WeightHolder
from engine.scheduler.plan import ModelInfo, PlanRow, SlotBegin, StepPlan, StepResult

if TYPE_CHECKING:
    from engine.dumps.capture import Tap
    from engine.scheduler.ranks import Group

WARM_UP_TOKENS = 32


class ModelRunner(Protocol):
    """One rank's model. ``epoch`` is that of the weights in use; it is set by who restores it."""

    info: ModelInfo
    epoch: int

    @property
    def instrument(self) -> Instrument:
        """What tensor dumps need of the model."""
        ...

    @property
    def weights(self) -> WeightHolder:
        """The live weights by their Hugging Face names."""
        ...

    def forward(self, step: StepPlan, tap: Tap | None = None) -> StepResult:
        """Applies ends and begins, then computes the rows; rows answer in plan order. With a
        ``tap`` the instrumented forward computes them."""
        ...

    def release(self, tag: str) -> None:
        """Gives the memory of ``weights`` or ``kv_cache`` back to the system, with its content."""
        ...

    def restore(self, tag: str) -> None:
        """Takes released memory again; its content is zeros."""
        ...

    def trim(self) -> None:
        """Gives memory that nobody uses and the allocator keeps back to the device."""
        ...

    def close(self) -> None:
        """Frees what the process would otherwise hold."""
        ...


def make_runner(
    config: EngineConfig, *, dp: int, tp: int, group: Group | None, epoch: int = 0
) -> ModelRunner:
    """The runner that ``config`` asks for; a model that cannot be served is a ConfigError."""
    directory = open_directory(Path(config.model_path))
    if config.backend == "scripted":
        from engine.model.scripted import ScriptedRunner

        return ScriptedRunner(config, directory, tp=tp, epoch=epoch)
    from engine.model.torch_runner import TorchRunner

    return TorchRunner(config, directory, dp=dp, tp=tp, group=group, epoch=epoch)


def warm_up(runner: ModelRunner) -> None:
    """A prefill and a decode step, so that the first request does not pay for starting threads,
    the allocator's first memory and, on a GPU, the kernels' compilation.

    Every rank of a tp group calls it. What it writes stays in blocks that nobody has yet.
    """
    info = runner.info
    room = min(info.max_context, info.num_blocks * info.block_size)
    ids = [0] * min(WARM_UP_TOKENS, room - 1)
    blocks = list(range(-(-(len(ids) + 1) // info.block_size)))
    sampling = SamplingParams(temperature=0.0)
    begin = SlotBegin(slot=0, rid="warm-up", sampling=sampling, prompt_ids=ids)
    prefill = PlanRow(slot=0, start=0, token_ids=ids, new_blocks=blocks)
    decode = PlanRow(slot=0, start=len(ids), token_ids=[0])
    runner.forward(StepPlan(step=0, begins=[begin], rows=[prefill]))
    runner.forward(StepPlan(step=0, rows=[decode]))
    runner.forward(StepPlan(step=0, ends=[0]))


def model_info(
    config: EngineConfig,
    directory: ModelDirectory,
    *,
    backend: str,
    weight_form: str,
    parameter_bytes: int,
) -> ModelInfo:
    """What the scheduler must know, with the limits of ``config`` applied."""
    limits = config.limits
    if limits.max_context > directory.max_context:
        raise ConfigError(
            f"max_context is {limits.max_context}; {directory.architecture} at {directory.path} "
            f"reaches {directory.max_context}"
        )
    return ModelInfo(
        model_path=str(directory.path),
        architecture=directory.architecture,
        backend=backend,
        dtype=config.dtype,
        weight_form=weight_form,
        vocab_size=directory.vocab_size,
        max_context=limits.max_context or directory.max_context,
        eos_token_ids=directory.eos_token_ids,
        num_blocks=limits.kv_tokens // limits.block_tokens,
        block_size=limits.block_tokens,
        parameter_bytes=parameter_bytes,
    )
