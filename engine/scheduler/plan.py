"""What one step computes: the scheduler core writes it, every rank of the group runs it.

Path: core.py -> process.py -> (ipc, to the followers of a TP group) -> model/runner.py -> core.py.

A plan is a list of changes. The runner keeps, per slot, the block table and sampling state that
earlier plans built, so a decode row costs a few bytes; a follower that applied every plan in order
has the leader's state. Changes in ``commands`` (weight commits, armed dumps, profiles) travel in
the plan so that all ranks apply them before the same forward.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec

from engine.messages import (
    ArmDump,
    InputLogprobs,
    LogprobParams,
    Part,
    SamplingParams,
    StartProfile,
    StopRecording,
)


class SlotBegin(Part):
    """A slot gets a new tenant. ``history_ids`` are output ids made before a retraction."""

    slot: int
    rid: str
    sampling: SamplingParams
    prompt_ids: list[int]
    history_ids: list[int] = []
    logprob: LogprobParams | None = None
    return_entropy: bool = False
    return_hidden_states: bool = False


class PlanRow(Part):
    """Run ``token_ids`` at positions ``start..`` of a slot; ``new_blocks`` extend its table.

    ``sample``: the last position's logits are sampled (false for all but the last prefill chunk).
    Decode rows carry the one token that the previous step sampled.
    """

    slot: int
    start: int
    token_ids: list[int]
    new_blocks: list[int] = []
    sample: bool = True


class Command(msgspec.Struct, kw_only=True, tag=True):
    """Something that every rank does before this step's forward; each kind joins ``Commands``."""


class SwitchWeights(Command):
    """The sealed staging becomes live; this forward and later ones run under ``epoch``.

    Each rank answers the router's call ``call_id``.
    """

    call_id: str
    staging_id: str
    epoch: int
    empty_cache: bool = False


class InBand(Command):
    """A profile or dump starts or ends before this step; each rank answers ``call_id``."""

    call_id: str
    op: StartProfile | ArmDump | StopRecording


Commands = SwitchWeights | InBand


class StepPlan(msgspec.Struct, kw_only=True, tag=True):
    """One step of one dp group. Order of use: ends, begins, commands, rows."""

    step: int
    ends: list[int] = []
    begins: list[SlotBegin] = []
    commands: list[Commands] = []
    rows: list[PlanRow] = []
    tapped: bool = False  # an armed dump wants a request of it: every rank runs the tapped forward


@dataclass(slots=True)
class SampledRow:
    """What a row produced. ``token_id`` is None where nothing was sampled.

    Lists of candidates are (ids, values), best first. ``hidden`` is fp32 little endian of
    ``hidden_width`` floats per computed position.
    """

    slot: int
    token_id: int | None = None
    logprob: float | None = None
    top: tuple[list[int], list[float]] | None = None
    token_logprobs: tuple[list[int], list[float]] | None = None
    entropy: float | None = None
    input_logprobs: InputLogprobs | None = None
    hidden: bytes | None = None
    hidden_width: int = 0


@dataclass(slots=True)
class StepResult:
    """Rows in the order of the plan. ``epoch`` is that of the weights this forward used."""

    epoch: int
    rows: list[SampledRow] = field(default_factory=list)
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """What the scheduler must know of the loaded model."""

    model_path: str
    architecture: str
    backend: str  # hf | native | eager | scripted
    dtype: str
    weight_form: str
    vocab_size: int
    max_context: int
    eos_token_ids: tuple[int, ...]
    num_blocks: int
    block_size: int
    parameter_bytes: int
