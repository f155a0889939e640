"""A scripted model behind the runner's interface: given tokens, given step times, no torch.

Path: runner.make_runner -> here, when ``backend`` is ``scripted``. It is for transport, load and
failure tests: the processes are real, only the arithmetic is missing. A model directory with
config.json and tokenizer.json is enough.

Every token is a function of the prompt, the output position and the weights (scripted_weights.py),
so a retracted or repeated request makes the same text again. Without a directive an answer is words
without end. Directives stand anywhere in the prompt's text; of several of one kind the last counts:

``[[say TEXT]]``  the tokens of TEXT, then the end token
``[[echo]]``      the prompt's own tokens, then the end token
``[[eos N]]``     words, and the end token at output position N
``[[sleep S]]``   every step that holds this request takes at least S seconds
``[[fail N]]``    the step that would make output position N raises RuntimeError
"""

from __future__ import annotations

import re
import struct
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tokenizers import Tokenizer

from engine.config import EngineConfig
from engine.errors import ConfigError
from engine.messages import InputLogprobs, TopLogprobs
from engine.model.instrument import NoInstrument
from engine.model.loader import ModelDirectory
from engine.model.noise import mix
from engine.model.runner import model_info
from engine.model.scripted_weights import ScriptedWeights
from engine.model.slots import Slot, SlotTable
from engine.scheduler.plan import PlanRow, SampledRow, SlotBegin, StepPlan, StepResult
from engine.weights.checkpoint import SINGLE

if TYPE_CHECKING:
    from engine.dumps.capture import Tap

HIDDEN_WIDTH = 4
_DIRECTIVE = re.compile(r"\[\[(say|echo|eos|sleep|fail)(?: ([^\]]*))?\]\]")
_MOST_WORDS = 4096  # words that an endless answer draws from


@dataclass(frozen=True, slots=True)
class _Script:
    """What one request will say: ``given`` and then the end, or words until ``end_at``."""

    salt: int
    given: list[int] | None = None
    end_at: int | None = None
    fail_at: int | None = None
    sleep_s: float = 0.0


class ScriptedRunner:
    """``ModelRunner`` without a model."""

    def __init__(
        self, config: EngineConfig, directory: ModelDirectory, *, tp: int, epoch: int
    ) -> None:
        self.info = model_info(
            config, directory, backend="scripted", weight_form="plain", parameter_bytes=0
        )
        self.epoch = epoch
        self.instrument = NoInstrument()
        self._leads = tp == 0
        self._step_s = config.scripted_step_s
        self._tokenizer = _load_tokenizer(directory)
        self._words = _printable_words(self._tokenizer, self.info.vocab_size)
        self.weights = ScriptedWeights(self.info.vocab_size)
        if (directory.path / SINGLE).exists():
            self.weights.load(directory.path)
        self._slots = SlotTable()
        self._scripts: dict[int, _Script] = {}

    def forward(self, step: StepPlan, tap: Tap | None = None) -> StepResult:
        began = time.perf_counter()
        for number in step.ends:
            self._slots.end(number)
            del self._scripts[number]
        for begin in step.begins:
            self._slots.begin(begin)
            self._scripts[begin.slot] = self._script(begin)
        rows = [self._row(row) for row in step.rows]
        self._take_time(step.rows, began)
        return StepResult(epoch=self.epoch, rows=rows, seconds=time.perf_counter() - began)

    def release(self, tag: str) -> None:
        """There is no memory to speak of."""

    def restore(self, tag: str) -> None:
        """As it was."""

    def trim(self) -> None:
        """Nothing is kept."""

    def close(self) -> None:
        """Nothing is held beyond the process."""

    def _script(self, begin: SlotBegin) -> _Script:
        text = self._tokenizer.decode(begin.prompt_ids, skip_special_tokens=False)
        found: dict[str, str] = dict(_DIRECTIVE.findall(text))
        given = None
        if "say" in found:
            given = self._tokenizer.encode(found["say"], add_special_tokens=False).ids
        elif "echo" in found:
            given = list(begin.prompt_ids)
        salt = 0
        for token_id in begin.prompt_ids:
            salt = mix(salt ^ token_id)
        return _Script(
            salt=salt,
            given=given,
            end_at=_number(found.get("eos")) if given is None else len(given),
            fail_at=_number(found.get("fail")),
            sleep_s=float(found.get("sleep") or 0.0),
        )

    def _row(self, row: PlanRow) -> SampledRow:
        slot, script = self._slots[row.slot], self._scripts[row.slot]
        slot.see(row)
        result = SampledRow(slot=row.slot)
        if not self._leads:
            return result
        if row.sample:
            self._sample(slot, script, result)
        if slot.reports_prompt(row.start, len(row.token_ids)):
            result.input_logprobs = _input_logprobs(slot, row)
        if slot.return_hidden_states:
            floats = [float(t % 251) for t in row.token_ids for _ in range(HIDDEN_WIDTH)]
            result.hidden = struct.pack(f"<{len(floats)}f", *floats)
            result.hidden_width = HIDDEN_WIDTH
        return result

    def _sample(self, slot: Slot, script: _Script, result: SampledRow) -> None:
        position = len(slot.output_ids)
        if script.fail_at == position:
            raise RuntimeError(f"the script of {slot.rid} fails at output position {position}")
        result.token_id = self._token(slot, script, position)
        if slot.logprob is not None:
            result.logprob, top, chosen = _logprobs(slot, result.token_id)
            result.top = top if slot.logprob.top_num else None
            result.token_logprobs = chosen if slot.logprob.token_ids is not None else None
        if slot.return_entropy:
            result.entropy = (result.token_id % 97) / 8

    def _token(self, slot: Slot, script: _Script, position: int) -> int:
        """Nothing ends an answer before ``min_new_tokens`` or with ``ignore_eos``."""
        ends = script.end_at is not None and position >= script.end_at
        sampling = slot.sampling
        may_end = not sampling.ignore_eos and position >= sampling.min_new_tokens
        if ends and may_end and self.info.eos_token_ids:
            return self.info.eos_token_ids[0]
        if script.given is not None and position < len(script.given):
            return script.given[position]
        words = self.weights.favourites(position) or self._words
        return words[mix(script.salt ^ position) % len(words)]

    def _take_time(self, rows: list[PlanRow], began: float) -> None:
        wanted_s = max((self._scripts[row.slot].sleep_s for row in rows), default=0.0)
        left_s = began + max(self._step_s, wanted_s) - time.perf_counter()
        if rows and left_s > 0:
            time.sleep(left_s)


def _load_tokenizer(directory: ModelDirectory) -> Tokenizer:
    path = directory.path / "tokenizer.json"
    if not path.exists():
        raise ConfigError(f"the model directory {directory.path} has no tokenizer.json")
    return Tokenizer.from_file(str(path))


def _printable_words(tokenizer: Tokenizer, vocab_size: int) -> list[int]:
    """Ids whose text is a space and letters, or letters where no token has a space."""
    size = min(vocab_size, tokenizer.get_vocab_size())
    texts = {i: tokenizer.decode([i]) for i in range(size)}
    words = [i for i, text in texts.items() if text[:1] == " " and _is_word(text[1:])]
    found = (words or [i for i, text in texts.items() if _is_word(text)])[:_MOST_WORDS]
    if not found:
        raise ConfigError("the tokenizer has no token that is a word: nothing can be scripted")
    return found


def _is_word(text: str) -> bool:
    return text.isascii() and text.isalpha()


def _number(text: str | None) -> int | None:
    return int(text) if text else None


def _logprobs(
    slot: Slot, token_id: int
) -> tuple[float, tuple[list[int], list[float]], tuple[list[int], list[float]]]:
    """Logprob of a token, its neighbours as candidates, and the ids that were asked for."""
    wanted = slot.logprob
    assert wanted is not None
    top = [token_id + i for i in range(wanted.top_num)]
    asked = list(wanted.token_ids or ())
    return (
        _logprob(token_id),
        (top, [_logprob(token_id) - i for i in range(len(top))]),
        (asked, [_logprob(i) for i in asked]),
    )


def _logprob(token_id: int) -> float:
    return -(1 + token_id % 31) / 8


def _input_logprobs(slot: Slot, row: PlanRow) -> InputLogprobs:
    wanted = slot.logprob
    assert wanted is not None
    first = [wanted.start_len] if row.start <= wanted.start_len else []
    known = slot.input_logprob_range(row.start, len(row.token_ids))
    tokens = [slot.prompt_ids[p] for p in (*first, *(p + 1 for p in known))]
    described = [_logprobs(slot, token_id) for token_id in tokens[len(first) :]]
    values: list[float | None] = [None for _ in first]
    result = InputLogprobs(ids=tokens, values=values + [value for value, _, _ in described])
    none: list[tuple[list[int], list[float]]] = [([], []) for _ in first]
    if wanted.top_num:
        result.top = _columns(none + [top for _, top, _ in described])
    if wanted.token_ids is not None:
        result.token_ids = _columns(none + [asked for _, _, asked in described])
    return result


def _columns(candidates: list[tuple[list[int], list[float]]]) -> TopLogprobs:
    return TopLogprobs(ids=[ids for ids, _ in candidates], values=[v for _, v in candidates])
