"""The runner of real models: slots, batch, backend, sampler.

Path: runner.make_runner -> here. ``Backend`` is the small interface that native.py and hf.py share.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Protocol

import torch

from engine.config import EngineConfig
from engine.dumps.capture import Tap, View
from engine.dumps.hooks import kept_spans, row_spans
from engine.errors import ConfigError
from engine.messages import InputLogprobs, TopLogprobs
from engine.model.inputs import Batch, build
from engine.model.instrument import Instrument
from engine.model.loader import ModelDirectory
from engine.model.memory import Storages
from engine.model.native import NativeBackend
from engine.model.runner import model_info
from engine.model.sampler import DrawRequest, DrawResult, Sampler, best, chosen
from engine.model.slots import Slot, SlotTable
from engine.model.spec import cover
from engine.model.weights import WeightHolder
from engine.scheduler.plan import PlanRow, SampledRow, StepPlan, StepResult
from engine.scheduler.ranks import Group

_DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
_LOGITS_AT_ONCE = 256  # positions of prompt logprobs in fp32 at a time: 50 MB for 49,152 tokens


class Backend(Protocol):
    """A model over the paged cache."""

    name: str
    weight_form: str
    parameter_bytes: int

    @property
    def weights(self) -> WeightHolder: ...

    def memory(self, tag: str) -> list[torch.Tensor]:
        """Tensors whose storages make up ``weights`` or ``kv_cache``; what cannot be loaded or
        computed again is not among them."""
        ...

    def forward(
        self, batch: Batch, keep: torch.Tensor, want_hidden: bool
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Logits [keep, vocab] of the tokens ``keep`` (int64), hidden [tokens, width] if wanted."""
        ...

    @property
    def instrument(self) -> Instrument: ...

    def forward_tapped(
        self, batch: Batch, keep: torch.Tensor, want_hidden: bool, view: View
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """As ``forward``, in the instrumented form; ``instrument.prepare`` was called."""
        ...

    def draw(self, logits: torch.Tensor, requests: list[DrawRequest]) -> list[DrawResult]:
        """See ``sampler.draw_rows``."""
        ...

    def close(self) -> None: ...


@dataclass(slots=True)
class _Kept:
    """Which tokens' logits a step needs: of sampled rows, then of rows with prompt logprobs."""

    indices: list[int]
    sampled: list[int]  # row numbers
    prompts: list[tuple[int, range]]  # row number, positions


class TorchRunner:
    """``ModelRunner`` for hf and native backends."""

    def __init__(
        self,
        config: EngineConfig,
        directory: ModelDirectory,
        *,
        dp: int,
        tp: int,
        group: Group | None,
        epoch: int,
    ) -> None:
        torch.set_num_threads(config.rank_threads)
        if config.device == "cuda":
            torch.cuda.set_device(dp * config.tp + tp)
        self._backend = _make_backend(config, directory, group)
        self.info = model_info(
            config,
            directory,
            backend=self._backend.name,
            weight_form=self._backend.weight_form,
            parameter_bytes=self._backend.parameter_bytes,
        )
        self.epoch = epoch
        self.weights = self._backend.weights
        self.instrument = self._backend.instrument
        self._memory: dict[str, Storages] = {}
        self._leads = tp == 0
        self._slots = SlotTable()
        self._sampler = Sampler(self.info.eos_token_ids, self._backend.draw)

    @torch.inference_mode()
    def forward(self, step: StepPlan, tap: Tap | None = None) -> StepResult:
        began = time.perf_counter()
        for number in step.ends:
            self._slots.end(number)
        for begin in step.begins:
            self._slots.begin(begin)
        results = [SampledRow(slot=row.slot) for row in step.rows]
        if step.rows:
            self._compute(step.rows, results, tap)
        seconds = time.perf_counter() - began
        return StepResult(epoch=self.epoch, rows=results, seconds=seconds)

    def release(self, tag: str) -> None:
        self._memory[tag] = Storages(self._backend.memory(tag))
        self._memory[tag].release()

    def restore(self, tag: str) -> None:
        self._memory.pop(tag).restore()

    def trim(self) -> None:
        """Staged weights were on the device; on CPU such memory goes back by itself."""
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            torch.cuda.empty_cache()

    def close(self) -> None:
        self._backend.close()

    def _compute(self, rows: list[PlanRow], results: list[SampledRow], tap: Tap | None) -> None:
        slots = [self._slots[row.slot] for row in rows]
        for slot, row in zip(slots, rows, strict=True):
            slot.see(row)
        batch = build(rows, self._slots, self.info.block_size)
        kept = _kept(rows, slots, batch.query_starts.tolist())
        want_hidden = any(slot.return_hidden_states for slot in slots)
        keep = torch.tensor(kept.indices, dtype=torch.int64)
        if tap is None:
            logits, hidden = self._backend.forward(batch, keep, want_hidden)
        else:
            view = _view(tap, rows, slots, kept, batch.query_starts.tolist())
            logits, hidden = self._backend.forward_tapped(batch, keep, want_hidden, view)
        if not self._leads:
            return
        sampled = len(kept.sampled)
        if sampled:
            self._sampler.sample(
                logits[:sampled].float(),
                [slots[r] for r in kept.sampled],
                [results[r] for r in kept.sampled],
            )
        for r, positions in kept.prompts:
            own = logits[sampled : sampled + len(positions)]
            results[r].input_logprobs = _input_logprobs(own, positions, slots[r], rows[r])
            sampled += len(positions)
        if hidden is not None:
            _give_hidden(hidden, batch.query_starts.tolist(), slots, results)


def _make_backend(config: EngineConfig, directory: ModelDirectory, group: Group | None) -> Backend:
    spec = None if config.backend == "hf" else cover(directory)
    dtype = _DTYPES[config.dtype]
    if spec is not None:
        return NativeBackend(config, directory, spec, dtype=dtype, group=group)
    if config.backend in ("native", "eager"):
        raise ConfigError(f"the native backend does not cover {directory.architecture}")
    if group is not None or config.weights != "plain":
        raise ConfigError(
            f"{directory.architecture} runs on the hf backend, which knows neither tp > 1 nor "
            f"weights other than plain (tp is {config.tp}, weights {config.weights})"
        )
    from engine.model.hf import HfBackend  # transformers takes 3 s to import

    limits = config.limits
    return HfBackend(
        directory,
        dtype=dtype,
        device=torch.device(config.device),
        num_blocks=limits.kv_tokens // limits.block_tokens,
        block_size=limits.block_tokens,
    )


def _kept(rows: list[PlanRow], slots: list[Slot], query_starts: list[int]) -> _Kept:
    kept = _Kept([], [], [])
    for r, row in enumerate(rows):
        if row.sample:
            kept.sampled.append(r)
            kept.indices.append(query_starts[r + 1] - 1)
    for r, (row, slot) in enumerate(zip(rows, slots, strict=True)):
        if slot.reports_prompt(row.start, len(row.token_ids)):
            positions = slot.input_logprob_range(row.start, len(row.token_ids))
            kept.prompts.append((r, positions))
            kept.indices.extend(query_starts[r] + p - row.start for p in positions)
    return kept


def _view(
    tap: Tap, rows: list[PlanRow], slots: list[Slot], kept: _Kept, query_starts: list[int]
) -> View:
    spans = row_spans([slot.rid for slot in slots], query_starts, [row.start for row in rows])
    return View(tap, spans, kept_spans(spans, kept.indices))


def _input_logprobs(
    logits: torch.Tensor, positions: range, slot: Slot, row: PlanRow
) -> InputLogprobs:
    """The prompt logprobs that one chunk can tell, of the model's own distribution.

    The token at ``start_len`` comes first in the row that holds it, with None and no candidates.
    """
    wanted = slot.logprob
    assert wanted is not None
    first = [wanted.start_len] if row.start <= wanted.start_len else []
    tokens = [slot.prompt_ids[p] for p in (*first, *(p + 1 for p in positions))]
    result = InputLogprobs(ids=tokens, values=[None for _ in first])
    result.top = TopLogprobs(ids=[[] for _ in first], values=[[] for _ in first])
    result.token_ids = TopLogprobs(ids=[[] for _ in first], values=[[] for _ in first])
    targets = torch.tensor(tokens[len(first) :], dtype=torch.int64, device=logits.device)
    for begin in range(0, len(positions), _LOGITS_AT_ONCE):
        logprobs = logits[begin : begin + _LOGITS_AT_ONCE].float().log_softmax(-1)
        own = targets[begin : begin + _LOGITS_AT_ONCE, None]
        result.values.extend(logprobs.gather(1, own)[:, 0].tolist())
        for line in logprobs if wanted.top_num or wanted.token_ids is not None else ():
            _add(result.top, best(line, wanted.top_num))
            _add(result.token_ids, chosen(line, wanted.token_ids or ()))
    result.top = result.top if wanted.top_num else None
    result.token_ids = result.token_ids if wanted.token_ids is not None else None
    return result


def _add(lists: TopLogprobs, candidates: tuple[list[int], list[float]]) -> None:
    lists.ids.append(candidates[0])
    lists.values.append(candidates[1])


def _give_hidden(
    hidden: torch.Tensor, query_starts: list[int], slots: list[Slot], results: list[SampledRow]
) -> None:
    for r, (slot, result) in enumerate(zip(slots, results, strict=True)):
        if slot.return_hidden_states:
            own = hidden[query_starts[r] : query_starts[r + 1]].float().cpu().contiguous()
            result.hidden = own.numpy().tobytes()
            result.hidden_width = own.shape[1]
