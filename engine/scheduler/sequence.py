"""One generation request inside the scheduler: its tokens, its place in KV, the rows it sends.

Path: core.py owns a ``Sequence`` from accept to the terminal row. Pure bookkeeping: tokens are
only ever appended, and everything done per step costs the same however long the context is.

Lengths, the same words everywhere: ``prompt_tokens`` were given, ``output_tokens`` were sampled,
``computed`` positions have KV, ``pending`` tokens have none yet (1 for a decoding sequence).
"""

from __future__ import annotations

from dataclasses import InitVar, dataclass, field
from itertools import chain
from typing import Protocol, TypeVar

import msgspec

from engine.errors import BadRequest
from engine.messages import (
    DecodeParams,
    Finish,
    Hidden,
    InputLogprobs,
    LogprobParams,
    OutputLogprobs,
    Provenance,
    SamplingParams,
    TokenIDRow,
    TokenizedGenerateReqInput,
    TopLogprobs,
    join_runs,
    merge,
    no_input_logprobs,
    no_output_logprobs,
    row_for,
)
from engine.scheduler.plan import ModelInfo, SampledRow, SlotBegin
from engine.scheduler.radix import Content, Namespace, Node, Runs

PROMPT_TAIL_TOKENS = 8  # context for the first characters: a character has at most 4 byte tokens
FLOAT_BYTES = 4
LENGTH = Finish(type="length")


class StopChecker(Protocol):
    """Watches the text of one request (engine/detokenizer/stops.py)."""

    def push(self, token_id: int) -> str | None:
        """The stop string or regex source that this token completes; BadRequest ends it too."""


@dataclass(frozen=True, slots=True)
class RequestView:
    """One live request as the table of requests shows it."""

    rid: str
    phase: str  # waiting | prefill | decode
    prompt_tokens: int
    output_tokens: int
    computed_tokens: int
    priority: int
    received_at: float
    slot: int | None
    epochs: list[tuple[int, int]]  # runs (count, epoch) over the output tokens
    retractions: int


def check_request(
    request: TokenizedGenerateReqInput, info: ModelInfo, context: int, kv_tokens: int
) -> None:
    """BadRequest for a request that can never run within ``context`` and ``kv_tokens``."""
    prompt, new = len(request.input_ids), request.sampling.max_new_tokens
    if not prompt:
        raise BadRequest("the prompt has no tokens")
    if new < 0:
        raise BadRequest(f"max_new_tokens is {new}, it must be at least 0")
    longest = min(context, kv_tokens)
    if prompt + min(new, 1) > longest:
        bound = "the model's context" if context <= kv_tokens else "a rank's KV pool"
        room = " and one new token do" if new else " does"
        raise BadRequest(f"the prompt of {prompt} tokens{room} not fit {bound} of {longest} tokens")
    for name, ids in (
        ("the prompt", request.input_ids),
        ("stop_token_ids", request.sampling.stop_token_ids),
        ("logit_bias", request.sampling.logit_bias),
        ("token_ids_logprob", (request.logprob and request.logprob.token_ids) or ()),
    ):
        if ids and not 0 <= min(ids) <= max(ids) < info.vocab_size:
            raise BadRequest(f"{name} has token ids outside 0 .. {info.vocab_size - 1}")
    start = -1 if request.logprob is None else request.logprob.start_len
    if start >= prompt:
        raise BadRequest(
            f"logprob_start_len is {start}, it must be below the prompt's {prompt} tokens"
        )


def abort_for(error: BadRequest) -> Finish:
    """The end of a request by its own mistake."""
    return Finish(
        type="abort",
        message=error.message,
        status_code=error.status_code,
        err_type=error.err_type,
    )


@dataclass(slots=True, eq=False, kw_only=True)
class Sequence:
    """State of one request. ``slot`` is None while it waits; then it holds no KV either."""

    request: TokenizedGenerateReqInput
    sampling: SamplingParams  # with a seed, so that a retracted row repeats itself
    arrival: int  # counts accepted requests
    received_at: float
    info: InitVar[ModelInfo]
    longest: InitVar[int]  # tokens that context and KV pool allow
    stop_checker: StopChecker | None = None

    order: tuple[int, int] = field(init=False)  # the smaller runs first and is retracted last
    block_size: int = field(init=False)
    limit: int = field(init=False)  # prompt and output tokens together
    stop_ids: frozenset[int] = field(init=False)
    tokens: list[int] = field(init=False)
    prompt_tokens: int = field(init=False)
    namespace: Namespace = field(init=False)

    slot: int | None = None
    table: list[int] = field(default_factory=list)  # block i holds positions i * block_size ..
    sent_blocks: int = 0  # of the table, those that a plan has told the runner
    computed: int = 0
    node: Node | None = None  # end of the cached chain that this sequence locks
    waits_for: tuple[Sequence, int] | None = None  # who computes a prefix for us, its tokens
    room_seen: int | None = None  # blocks that the core had for it when it last did not fit

    block_runs: list[Runs] = field(default_factory=list)  # epochs that wrote each full block
    open_runs: list[tuple[int, int]] = field(default_factory=list)  # and the slots behind them
    open_slots: int = 0
    token_runs: list[tuple[int, int]] = field(default_factory=list)  # epochs of the output tokens

    scheduled_at: float | None = None
    cached_tokens: int = 0
    retractions: int = 0
    opened: bool = False  # the first row is out
    made_at: float = 0.0
    input_logprobs: InputLogprobs | None = None
    hidden: bytearray = field(default_factory=bytearray)  # of computed positions, not yet sent
    hidden_width: int = 0
    hidden_end: int = 0  # positions before it are sent or in ``hidden``

    def __post_init__(self, info: ModelInfo, longest: int) -> None:
        self.order = (-self.request.priority, self.arrival)
        self.block_size = info.block_size
        self.tokens = list(self.request.input_ids)
        self.prompt_tokens = len(self.tokens)
        self.namespace = Namespace(self.request.extra_key)
        self.limit = min(self.prompt_tokens + self.sampling.max_new_tokens, longest)
        own_ids = () if self.sampling.ignore_eos else info.eos_token_ids
        self.stop_ids = frozenset((*self.sampling.stop_token_ids, *own_ids))

    @property
    def pending(self) -> int:
        return len(self.tokens) - self.computed

    @property
    def output_tokens(self) -> int:
        return len(self.tokens) - self.prompt_tokens

    @property
    def blocks_needed(self) -> int:
        """Blocks that hold every token known now."""
        return -(-len(self.tokens) // self.block_size)

    @property
    def phase(self) -> str:
        if self.slot is None:
            return "waiting"
        return "prefill" if self.pending > 1 else "decode"

    @property
    def input_logprob_start(self) -> int:
        """First prompt index whose logprob is still wanted; -1: none."""
        logprob = self.request.logprob
        return -1 if logprob is None or self.opened else logprob.start_len

    def reusable_blocks(self) -> int:
        """How many full blocks may come from the cache.

        The last token is always computed, for its logits. Wanted logprobs and hidden states of
        prompt positions need those positions computed too.
        """
        tokens = len(self.tokens) - 1
        if self.input_logprob_start >= 0:
            tokens = min(tokens, self.input_logprob_start)
        if self.request.return_hidden_states:
            tokens = min(tokens, self.hidden_end)
        return tokens // self.block_size

    def content(self, index: int) -> Content:
        """The tokens of full block ``index``."""
        return tuple(self.tokens[index * self.block_size : (index + 1) * self.block_size])

    def common_prefix(self, other: Sequence) -> int:
        """Tokens of the leading full blocks that both have and this one may reuse."""
        blocks = min(self.reusable_blocks(), len(other.tokens) // self.block_size)
        for index in range(blocks):
            if self.content(index) != other.content(index):
                return index * self.block_size
        return blocks * self.block_size

    @property
    def waits_for_prefix(self) -> bool:
        """Whether somebody still computes the prefix that this one would reuse."""
        if self.waits_for is None:
            return False
        other, tokens = self.waits_for
        return other.slot is not None and other.pending > 1 and other.computed < tokens

    @property
    def place(self) -> Node:
        """End of the cached chain that a running sequence locks."""
        assert self.node is not None, "only running sequences have KV"
        return self.node

    def take_place(self, slot: int, node: Node, table: list[int], runs: list[Runs]) -> None:
        """Begin in ``slot``; the first ``node.depth`` blocks of ``table`` are full, by ``runs``."""
        self.slot, self.node, self.table, self.block_runs = slot, node, table, runs
        self.computed = node.depth * self.block_size
        self.waits_for = self.room_seen = None

    def leave_place(self) -> None:
        """Forget slot and KV (the caller gives the blocks back); tokens and their runs stay."""
        self.slot = self.node = None
        self.table, self.block_runs, self.open_runs = [], [], []
        self.sent_blocks = self.computed = self.open_slots = 0
        if not self.opened:
            self.input_logprobs = None  # will be computed again from their start

    def wrote(self, count: int, epoch: int) -> None:
        """The next ``count`` positions got their KV from a forward under ``epoch``."""
        self.computed += count
        while count:
            part = min(count, self.block_size - self.open_slots)
            if self.open_runs and self.open_runs[-1][1] == epoch:
                self.open_runs[-1] = (self.open_runs[-1][0] + part, epoch)
            else:
                self.open_runs.append((part, epoch))
            self.open_slots += part
            if self.open_slots == self.block_size:
                self.block_runs.append(tuple(self.open_runs))
                self.open_runs = []
                self.open_slots = 0
            count -= part

    def kv_epochs(self) -> list[tuple[int, int]]:
        """Runs (count, epoch) over all computed positions: whose weights wrote their KV."""
        return join_runs(chain(chain.from_iterable(self.block_runs), self.open_runs))

    def kv_epoch_set(self) -> frozenset[int]:
        """All epochs in its KV, read off the cached chain and the open block."""
        return self.place.epochs.union(epoch for _, epoch in self.open_runs)

    def gather(self, start: int, count: int, sampled: SampledRow) -> None:
        """Keep what positions ``start .. start + count`` gave until the next row goes out."""
        if self.input_logprob_start >= 0 and sampled.input_logprobs is not None:
            got, more = self.input_logprobs, sampled.input_logprobs
            self.input_logprobs = more if got is None else merge(got, more)
        if self.request.return_hidden_states and sampled.hidden is not None:
            fresh = start + count - self.hidden_end  # less than count after a retraction
            if fresh > 0:
                self.hidden += sampled.hidden[-fresh * sampled.hidden_width * FLOAT_BYTES :]
                self.hidden_width = sampled.hidden_width
                self.hidden_end += fresh

    def add_token(self, token_id: int, epoch: int, now: float) -> Finish | None:
        """Append a sampled token; the end of the request if this token is it.

        A stop wins over the length limit, and counts only from ``min_new_tokens`` on.
        """
        self.tokens.append(token_id)
        self.made_at = now
        if self.token_runs and self.token_runs[-1][1] == epoch:
            self.token_runs[-1] = (self.token_runs[-1][0] + 1, epoch)
        else:
            self.token_runs.append((1, epoch))
        matched: int | str | None = token_id if token_id in self.stop_ids else None
        if matched is None and self.stop_checker is not None:
            try:
                matched = self.stop_checker.push(token_id)
            except BadRequest as error:  # a regex that takes too long
                return abort_for(error)
        if matched is not None and self.output_tokens >= self.sampling.min_new_tokens:
            return Finish(type="stop", matched=matched)
        return LENGTH if len(self.tokens) >= self.limit else None

    def slot_begin(self) -> SlotBegin:
        """What the runner must know of this tenant of a slot."""
        assert self.slot is not None
        logprob = self.request.logprob
        if logprob is not None and logprob.start_len >= 0 and self.opened:
            logprob = msgspec.structs.replace(logprob, start_len=-1)  # sent before a retraction
        return SlotBegin(
            slot=self.slot,
            rid=self.request.rid,
            sampling=self.sampling,
            prompt_ids=self.request.input_ids,
            history_ids=self.tokens[self.prompt_tokens :],
            logprob=logprob,
            return_entropy=self.request.return_entropy,
            return_hidden_states=self.request.return_hidden_states,
        )

    def view(self) -> RequestView:
        return RequestView(
            rid=self.request.rid,
            phase=self.phase,
            prompt_tokens=self.prompt_tokens,
            output_tokens=self.output_tokens,
            computed_tokens=self.computed,
            priority=self.request.priority,
            received_at=self.received_at,
            slot=self.slot,
            epochs=list(self.token_runs),
            retractions=self.retractions,
        )

    def row(self, sampled: SampledRow | None, epoch: int) -> TokenIDRow:
        """News for the client: one token, or (``sampled`` None) none; lists of equal length."""
        row = row_for(self.request, TokenIDRow, made_at=self.made_at, retractions=self.retractions)
        if sampled is not None and sampled.token_id is not None:
            row.output_ids = [sampled.token_id]
            row.epochs = [(1, epoch)]
        if self.request.logprob is not None:
            row.output_logprobs = _output_logprobs(self.request.logprob, sampled)
        if self.request.return_entropy:
            row.entropy = [] if sampled is None else [_asked(sampled.entropy)]
        if self.request.return_hidden_states:
            row.hidden = Hidden(width=self.hidden_width, data=bytes(self.hidden))
            self.hidden.clear()
        return row

    def open(self, row: TokenIDRow, now: float, dp_rank: int, weight_form: str) -> None:
        """Make ``row`` the first one: add what is told once, input logprobs included."""
        request, sampling = self.request, self.sampling
        if request.logprob is not None and request.logprob.start_len >= 0:
            row.input_logprobs = self.input_logprobs or no_input_logprobs(request.logprob)
            self.input_logprobs = None
        scheduled_at = now if self.scheduled_at is None else self.scheduled_at
        row.provenance = Provenance(
            prompt_tokens=self.prompt_tokens,
            cached_tokens=self.cached_tokens,
            dp_rank=dp_rank,
            queued_s=max(0.0, scheduled_at - self.received_at),
            weight_form=weight_form,
        )
        row.decode = DecodeParams(
            prompt_tail=request.input_ids[-PROMPT_TAIL_TOKENS:],
            skip_special_tokens=sampling.skip_special_tokens,
            spaces_between_special_tokens=sampling.spaces_between_special_tokens,
            no_stop_trim=sampling.no_stop_trim,
            stop=sampling.stop,
            stop_regex=sampling.stop_regex,
            return_bytes=request.return_bytes,
            logprob_text=request.return_text_in_logprobs,
        )
        self.opened = True


ValueT = TypeVar("ValueT")


def _asked(value: ValueT | None) -> ValueT:
    assert value is not None, "the runner left out a value that the request asked for"
    return value


def _candidates(of: tuple[list[int], list[float]] | None) -> TopLogprobs:
    ids, values = _asked(of)
    return TopLogprobs(ids=[ids], values=[values])


def _output_logprobs(asked: LogprobParams, sampled: SampledRow | None) -> OutputLogprobs:
    """The families that were asked for, with one position, or none without a sample."""
    if sampled is None:
        return no_output_logprobs(asked)
    return OutputLogprobs(
        values=[_asked(sampled.logprob)],
        top=_candidates(sampled.top) if asked.top_num else None,
        token_ids=_candidates(sampled.token_logprobs) if asked.token_ids is not None else None,
    )
