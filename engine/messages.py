"""Every message that crosses a process border of the engine.

Path: client.py -> router/process.py -> scheduler/process.py -> detokenizer/process.py -> client.py.

Four kinds, four bases (docs/decisions/0001-rows-not-columns.md):

* ``Request``  carries a required ``http_worker_ipc``; built only by ``client.SenderWrapper``.
* ``Reply`` and ``Row``  go back to one inbox; built only by ``reply_to`` and ``row_for``, which
  copy the address from the request, so it cannot be forgotten. A ``Batch`` is a list of rows.
* ``Broadcast``  goes to every live lease.
* ``Report``  goes to one fixed socket (the router's, but for ``InboxGone``).

``Part`` and ``Value`` are structs inside a message. A tagged type of no kind fails at import, and
so does a field of a row without a merge rule. Names follow SGLang's ``io_struct``. Times are
seconds since the Unix epoch unless a name says otherwise.
"""

from __future__ import annotations

import functools
import itertools
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Annotated, Any, Literal, TypeVar, get_type_hints

import msgspec

from engine.dumps import points as dump_points
from engine.profiling import spec as profile_spec

# How two consecutive rows of one request become one: see ``merge``.
APPEND = "append"  # lists, strings, bytes and parts: the later one goes behind the earlier one
RUNS = "runs"  # lists of (count, value): appended, neighbours of equal value joined
LATEST = "latest"  # the later one wins unless it is None
GREATEST = "greatest"  # numbers that never fall; a row without news has the default
ONCE = "once"  # appears in one row of a stream; kept from whichever row has it
MERGE_RULES = frozenset({APPEND, RUNS, LATEST, GREATEST, ONCE})


class Part(msgspec.Struct, kw_only=True, omit_defaults=True):
    """A struct inside a message; never sent alone."""


class Value(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A part that never changes once it is built."""


class Request(msgspec.Struct, kw_only=True, tag=True, omit_defaults=True):
    """Asks for something. ``http_worker_ipc`` is the inbox that gets every answer."""

    http_worker_ipc: str


class Reply(msgspec.Struct, kw_only=True, tag=True, omit_defaults=True):
    """Answers one control request."""

    http_worker_ipc: str


class Row(msgspec.Struct, kw_only=True, tag=True, omit_defaults=True):
    """News of one generation request. ``seq`` style ordering is by arrival: one path per rid."""

    rid: Annotated[str, ONCE]
    http_worker_ipc: Annotated[str, ONCE]


class Batch(msgspec.Struct, kw_only=True, tag=True, omit_defaults=True):
    """A list of rows. It has no address of its own; its rows have."""


class Broadcast(msgspec.Struct, kw_only=True, tag=True, omit_defaults=True):
    """Goes to every live lease."""


class Report(msgspec.Struct, kw_only=True, tag=True, omit_defaults=True):
    """Goes to one fixed socket; nobody answers it."""


# --------------------------------------------------------------------------- parts


class SamplingParams(Value, frozen=True):
    """One request's sampling. Defaults are SGLang's; ``-1`` for ``top_k`` means all tokens."""

    max_new_tokens: int = 128
    min_new_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] = {}
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    stop_regex: tuple[str, ...] = ()
    ignore_eos: bool = False
    no_stop_trim: bool = False
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    seed: int | None = None  # None: the scheduler draws one, so a retracted row repeats itself


class LogprobParams(Value, frozen=True):
    """Which logprobs to return. ``start_len`` is a prompt index; -1 means output tokens only.

    ``raw``: of the model's own distribution; else after temperature and penalties and before
    top-k, top-p and min-p.
    """

    start_len: int = -1
    top_num: int = 0
    token_ids: tuple[int, ...] | None = None
    raw: bool = False


class Call(Value, frozen=True):
    """Identity of a control call: answers are matched by ``id``; ``key`` makes it idempotent."""

    id: str
    deadline: float
    key: str | None = None
    actor: str = ""


class WeightSource(Value, frozen=True):
    """Where a bucket of weights comes from: a path, or a distributed group."""

    kind: Literal["disk", "tensor", "distributed"]
    path: str = ""
    load_format: str = "auto"
    names: tuple[str, ...] = ()
    dtypes: tuple[str, ...] = ()
    shapes: tuple[tuple[int, ...], ...] = ()
    group_name: str = ""
    spool_path: str = ""  # where the coordinator rank writes what it received
    spool_by: int = 0  # the dp group whose tp rank 0 is the coordinator


class RankOp(Value, frozen=True, tag=True):
    """One thing that a rank does on the router's word."""


class PauseRank(RankOp, frozen=True):
    mode: Literal["abort", "retract", "in_place"]


class ResumeRank(RankOp, frozen=True):
    pass


class FlushRank(RankOp, frozen=True):
    pass


class ListRequests(RankOp, frozen=True):
    pass


class PrepareWeights(RankOp, frozen=True):
    """Read, check, shard and pack into staging, on a thread. Answer: checksum, names, bytes."""

    staging_id: str
    source: WeightSource
    complete: bool = False  # True: refuse a source that lacks a parameter


class SealWeights(RankOp, frozen=True):
    """No more buckets: check the staged weights as a whole. Answer: as for ``PrepareWeights``."""

    staging_id: str


class CommitWeights(RankOp, frozen=True):
    """Copy the staging into the live storages at the next step border."""

    staging_id: str
    epoch: int
    retract: bool = False
    flush: bool = False
    empty_cache: bool = False  # then give memory that the allocator keeps back to the device


class DropWeights(RankOp, frozen=True):
    staging_id: str


class JoinGroup(RankOp, frozen=True):
    master_address: str
    master_port: int
    rank_offset: int
    world_size: int
    group_name: str
    backend: str
    timeout_s: float = 60.0


class LeaveGroup(RankOp, frozen=True):
    group_name: str


class ReadWeights(RankOp, frozen=True):
    name: str
    truncate_size: int


class ReleaseMemory(RankOp, frozen=True):
    tags: tuple[str, ...]


class ResumeMemory(RankOp, frozen=True):
    """``paths``: where the weights of the present epoch are; memory comes back without content."""

    tags: tuple[str, ...]
    paths: tuple[str, ...] = ()


class SlowDown(RankOp, frozen=True):
    seconds: float


class FreezeGC(RankOp, frozen=True):
    pass


class SetLogging(RankOp, frozen=True):
    level: str


RecordingKind = Literal["profile", "dump"]


class StartProfile(RankOp, frozen=True):
    """Arms a capture before the next step; in band."""

    spec: profile_spec.CaptureSpec


class PrepareDump(RankOp, frozen=True):
    """Make the instrumented forward ready, on a thread. ``paths`` hold ``epoch``'s weights."""

    epoch: int
    paths: tuple[str, ...] = ()


class ArmDump(RankOp, frozen=True):
    """In band, after ``PrepareDump``; refused when another epoch was committed between them."""

    spec: dump_points.DumpSpec


class StopRecording(RankOp, frozen=True):
    """In band. No error where no such recording runs: it may have ended by itself."""

    kind: RecordingKind
    id: str
    reason: str


class WaitRecording(RankOp, frozen=True):
    """Answered when the recording has ended and all its files are written."""

    kind: RecordingKind
    id: str


class WriteDump(RankOp, frozen=True):
    """Write what the armed dump has kept so far."""


class ListDumpPoints(RankOp, frozen=True):
    pass


RankOps = (
    PauseRank
    | ResumeRank
    | FlushRank
    | ListRequests
    | PrepareWeights
    | SealWeights
    | CommitWeights
    | DropWeights
    | JoinGroup
    | LeaveGroup
    | ReadWeights
    | ReleaseMemory
    | ResumeMemory
    | SlowDown
    | FreezeGC
    | SetLogging
    | StartProfile
    | PrepareDump
    | ArmDump
    | StopRecording
    | WaitRecording
    | WriteDump
    | ListDumpPoints
)


class Finish(Value, frozen=True):
    """Why a request ended. ``stop`` and ``length`` are normal; ``abort`` covers all else."""

    type: Literal["stop", "length", "abort"]
    matched: int | str | None = None
    message: str = ""
    status_code: int | None = None
    err_type: str | None = None


class TopLogprobs(Part):
    """Candidates at each position, best first: ``ids[i]`` and ``values[i]`` have equal length.

    The detokenizer adds ``texts`` (here and below) where ``DecodeParams.logprob_text`` asks for it.
    """

    ids: Annotated[list[list[int]], APPEND]
    values: Annotated[list[list[float]], APPEND]
    texts: Annotated[list[list[str]] | None, APPEND] = None


class OutputLogprobs(Part):
    """Logprobs of the new tokens of one row; every list is as long as the row's ``output_ids``."""

    values: Annotated[list[float], APPEND]
    texts: Annotated[list[str] | None, APPEND] = None
    top: Annotated[TopLogprobs | None, APPEND] = None
    token_ids: Annotated[TopLogprobs | None, APPEND] = None


class InputLogprobs(Part):
    """Logprobs of prompt tokens from ``start_len`` on; the first value is None (no condition)."""

    ids: Annotated[list[int], APPEND]
    values: Annotated[list[float | None], APPEND]
    texts: Annotated[list[str] | None, APPEND] = None
    top: Annotated[TopLogprobs | None, APPEND] = None
    token_ids: Annotated[TopLogprobs | None, APPEND] = None


class Hidden(Part):
    """Hidden states, fp32 little endian: ``data`` is ``rows * width`` floats."""

    width: Annotated[int, LATEST]
    data: Annotated[bytes, APPEND]


class Provenance(Value, frozen=True):
    """What the first row of an answer tells about its start."""

    prompt_tokens: int
    cached_tokens: int
    dp_rank: int
    queued_s: float  # from the router's acceptance to the first forward that held this request
    weight_form: str = "plain"


class DecodeParams(Value, frozen=True):
    """What the detokenizer must know of a request; rides in its first token row."""

    prompt_tail: list[int]  # last prompt ids, context for the first characters
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    no_stop_trim: bool = False
    stop: tuple[str, ...] = ()
    stop_regex: tuple[str, ...] = ()
    return_bytes: bool = False
    logprob_text: bool = False


# --------------------------------------------------------------------------- rows


class OutputRow(Row):
    """Fields that token rows and text rows share."""

    output_ids: Annotated[list[int], APPEND] = []
    epochs: Annotated[list[tuple[int, int]], RUNS] = []  # runs (count, epoch) over output_ids
    finish: Annotated[Finish | None, ONCE] = None  # the terminal row, exactly one per request
    provenance: Annotated[Provenance | None, ONCE] = None
    output_logprobs: Annotated[OutputLogprobs | None, APPEND] = None
    input_logprobs: Annotated[InputLogprobs | None, APPEND] = None
    entropy: Annotated[list[float] | None, APPEND] = None  # nats, one per output id
    hidden: Annotated[Hidden | None, APPEND] = None
    kv_epochs: Annotated[list[tuple[int, int]] | None, LATEST] = None  # runs over the context
    made_at: Annotated[float, GREATEST] = 0.0  # when the newest token was sampled; 0: none yet
    retractions: Annotated[int, GREATEST] = 0


class TokenIDRow(OutputRow):
    """Scheduler to detokenizer. ``decode`` is set in the first row of a request and only there."""

    decode: Annotated[DecodeParams | None, ONCE] = None


class StrRow(OutputRow):
    """Detokenizer (or router, for refusals) to the inbox.

    ``text`` is the new text that may be shown; it may lag behind ``output_ids`` while a character
    is unfinished or a stop may have begun. ``raw_bytes`` are the bytes of exactly this row's
    ``output_ids`` (special tokens left out where ``text`` leaves them out): nothing is held back.
    """

    text: Annotated[str, APPEND] = ""
    raw_bytes: Annotated[bytes | None, APPEND] = None


class BatchTokenIDOutput(Batch):
    rows: list[TokenIDRow]


class BatchStrOutput(Batch):
    rows: list[StrRow]


# --------------------------------------------------------------------------- requests


class Reserve(Request):
    """Asks for places before any tokenizing: answered with ``ReserveReply``.

    ``rids`` are all children of ``parent`` (n samples or a batch); all or none are admitted.
    """

    parent: str
    rids: list[str]
    priority: int = 0
    dp_rank: int | None = None
    deadline: float | None = None
    actor: str = ""  # for people who look at the table of requests


class TokenizedGenerateReqInput(Request):
    """One prompt, one answer. n samples and batches are several of these with one parent."""

    rid: str
    input_ids: list[int]
    sampling: SamplingParams
    stream: bool = True
    logprob: LogprobParams | None = None
    return_text_in_logprobs: bool = False
    return_entropy: bool = False
    return_hidden_states: bool = False
    return_bytes: bool = False
    priority: int = 0
    extra_key: str | None = None
    kv_reuse: Literal["isolate", "group", "share"] = "isolate"
    dp_rank: int | None = None
    received_at: float = 0.0
    no_logs: bool = False


class Release(Request):
    """Gives back reservations that will not be submitted. No answer."""

    rids: list[str]


class ControlReq(Request):
    """A control call: exactly one ``ControlReply`` with the same ``call.id`` answers it."""

    call: Call


class AbortReq(ControlReq):
    """Ends requests by exact rid (``prefix`` only when asked for) or all of them.

    The rid of a parent means all its children. A ``call.id`` of "" wants no answer.
    """

    rid: str = ""
    abort_all: bool = False
    prefix: bool = False
    reason: str = "aborted by the client"


class EndRequests(Request):
    """Router to a rank: these requests lost their owner or their detokenizer; free them."""

    rids: list[str]
    reason: str
    silent: bool = False  # True: the router has already answered, send no row


class GetFleetReqInput(ControlReq):
    """A true read of engine, workers and ranks: one round trip to the router."""


class GetRequestsReqInput(ControlReq):
    """The table of live requests: ``result["requests"]``, one map per request."""


class GetEpochReqInput(ControlReq):
    """What an epoch means, or each of ``epochs`` that is known (neither: all known ones).

    ``result["epochs"]`` are records, ``result["relabels"]`` rows (at, epoch, version).
    """

    epoch: int | None = None
    epochs: list[int] | None = None


class GetOutcomeReqInput(ControlReq):
    """What became of an idempotency key: its reply, ``open`` or ``unknown``."""

    key: str


class PauseGenerationReqInput(ControlReq):
    """No token is made until continue. The pause ends by itself after ``lease_s``."""

    mode: Literal["abort", "retract", "in_place"] = "abort"
    lease_s: float | None = None


class ContinueGenerationReqInput(ControlReq):
    """Ends a pause; commits an implicit weight session that the pause opened."""


class FlushCacheReqInput(ControlReq):
    """Drops cached blocks that no live request holds; waits up to ``timeout_s`` for idleness."""

    timeout_s: float = 0.0


class DrainRankReqInput(ControlReq):
    """Takes a dp group out of dispatch (``drain``) or back in."""

    dp: int
    drain: bool = True


InFlight = Literal["finish", "in_place", "retract", "abort"]


class WeightUpdate(ControlReq):
    """What every weight update may say; SGLang's field names."""

    token_step: int | None = None
    weight_version: str | None = None
    in_flight: InFlight | None = None  # None: "abort" with abort_all_requests, else "finish"
    drain_timeout_s: float = 60.0
    target: list[int] | None = None  # dp groups; None: all (fewer is a canary)
    abort_all_requests: bool = False
    flush_cache: bool | None = None  # not said: flush; while paused only True commits at once
    keep_pause: bool = False  # stay paused after the commit
    torch_empty_cache: bool = False
    dry_run: bool = False
    session_id: str | None = None
    checksum: str | None = None


class BeginWeightUpdateReqInput(WeightUpdate):
    """Opens a session: buckets stage until ``EndWeightUpdateReqInput`` commits or drops all."""


class EndWeightUpdateReqInput(WeightUpdate):
    """Ends a session as one epoch, or drops it."""

    drop: bool = False


class UpdateWeightFromDiskReqInput(WeightUpdate, kw_only=True):
    """A safetensors file or directory under a configured root, or the weights of an epoch."""

    model_path: str = ""
    from_epoch: int | None = None  # roll back: this epoch's weights become a new epoch
    load_format: str = "auto"
    is_async: bool = False  # answer at once; the outcome is known under the call's key or id
    spool: bool = False  # keep a copy, for a source that will be deleted


class UpdateWeightsFromTensorReqInput(WeightUpdate, kw_only=True):
    """Named tensors as safetensors bytes, which the web worker spooled to ``path``."""

    path: str
    load_format: str = "safetensors"


class UpdateWeightsFromDistributedReqInput(WeightUpdate, kw_only=True):
    """Tensors that the trainer broadcasts in a group joined before."""

    names: list[str]
    dtypes: list[str]
    shapes: list[list[int]]
    group_name: str = "weight_update_group"


class InitWeightsUpdateGroupReqInput(ControlReq):
    """Joins a torch.distributed group with a trainer; serving goes on meanwhile."""

    master_address: str
    master_port: int
    rank_offset: int
    world_size: int
    group_name: str = "weight_update_group"
    backend: str = "gloo"


class DestroyWeightsUpdateGroupReqInput(ControlReq):
    group_name: str = "weight_update_group"


class UpdateWeightVersionReqInput(ControlReq):
    """Relabels the present epoch; no request is touched unless asked for."""

    new_version: str
    abort_all_requests: bool = False


class GetWeightsByNameReqInput(ControlReq):
    """The first ``truncate_size`` values of one parameter, from every rank."""

    name: str
    truncate_size: int = 100


class ReleaseMemoryOccupationReqInput(ControlReq):
    """Gives memory back while paused: ``kv_cache`` and ``weights``."""

    tags: list[str] | None = None


class ResumeMemoryOccupationReqInput(ControlReq):
    tags: list[str] | None = None


class SlowDownReqInput(ControlReq):
    """Debugging: every forward sleeps so many seconds first; None or 0 ends it."""

    forward_sleep_time: float | None = None


class FreezeGCReq(ControlReq):
    """Python's garbage collector stops looking at what exists now, in every rank."""


class ConfigureLoggingReq(ControlReq):
    level: Literal["debug", "info", "warning", "error"] = "info"


class ProfileReqInput(ControlReq):
    """Profiles every rank. Answered when all have armed (``result["open"]``); the outcome, known
    under the call's key, comes when all have written: ``result["recorded"]`` says what, by rank.

    409 while another profile runs.
    """

    spec: profile_spec.CaptureSpec


class LazyDumpTensorsReqInput(ControlReq):
    """Dumps tensors of every rank; answered as ``ProfileReqInput``. 409 while one is armed."""

    spec: dump_points.DumpSpec


class StopRecordingReqInput(ControlReq):
    """Ends the profile or dump that runs (``id``: only this one); answered as a wait for it."""

    recording: RecordingKind
    id: str | None = None


class WaitRecordingReqInput(ControlReq):
    """Answered when the recording has ended, with its outcome."""

    recording: RecordingKind
    id: str


class GetRecordingsReqInput(ControlReq):
    """``result["open"]``: what records now, by kind."""


class WriteDumpReqInput(ControlReq):
    """The armed dump writes what it has kept so far."""


class GetDumpPointsReqInput(ControlReq):
    """``result["points"]``: names in execution order, with layer and kinds."""


class RankCall(Request):
    """Router to one dp group: every rank of it answers with ``RankReply``."""

    call_id: str
    op: RankOps


# --------------------------------------------------------------------------- replies


class ReserveReply(Reply):
    """``status_code`` 0 means admitted; else 409, 429 or 503 with a sentence and Retry-After."""

    parent: str
    status_code: int = 0
    err_type: str = ""
    message: str = ""
    retry_after_s: int = 0
    epoch: int = 0


class ControlReply(Reply):
    """The one answer to a control call. ``result`` is JSON-like and named per request type."""

    call_id: str
    success: bool
    status_code: int = 200
    err_type: str = ""
    message: str = ""
    result: dict[str, Any] = {}
    ranks: list[RankAnswer] = []


class RankAnswer(Value, frozen=True):
    """What one rank said to a control call."""

    dp: int
    tp: int
    success: bool
    message: str = ""
    result: dict[str, Any] = {}


# --------------------------------------------------------------------------- reports


class Lease(Report):
    """A client (web worker, Celery process, command) is alive; renewed by a thread of its own."""

    inbox: str
    kind: Literal["web", "job", "command"]
    worker_id: str
    generation: int
    pid: int
    lag_s: float = 0.0  # of the client's event loop
    streams: int = 0
    rss_bytes: int = 0
    since: float = 0.0
    via: str = ""  # unix socket on which other workers reach this one


class LeaseEnd(Report):
    """An orderly goodbye: its requests are aborted at once."""

    inbox: str
    generation: int


class ClientDown(Report):
    """A supervisor saw a client process end: its leases end now, not when they lapse."""

    pid: int


class RequestEnded(Report):
    """These rids hold no slot and no block any more."""

    rids: list[str]
    dp: int


class Histogram(Value, frozen=True):
    """Delays since the rank's start, counted over ``engine/latency.py``'s edges; [] is none."""

    counts: list[int] = []
    sum_s: float = 0.0


class RankLoad(Report):
    """A rank's heartbeat and load, published at least once a second and after every change."""

    dp: int
    tp: int
    pid: int
    generation: int
    state: str
    epoch: int
    running: int = 0
    waiting: int = 0
    kv_used: int = 0  # tokens
    kv_total: int = 0  # tokens
    tokens_per_s: float = 0.0
    step: int = 0
    step_s: float = 0.0  # duration of the newest step
    cached_tokens: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0
    retractions: int = 0
    ttft: Histogram = Histogram()  # from the worker's receipt of a request to its first token
    itl: Histogram = Histogram()  # between two tokens of one request
    rss_bytes: int = 0
    address: str = ""
    at: float = 0.0


class RankReply(Report):
    """A rank's answer to a fanned-out control request."""

    call_id: str
    answer: RankAnswer


class RowsUndelivered(Report):
    """The detokenizer ended these requests: free them.

    ``evict``: the inbox took nothing for too long, and these are all its requests. Else each of
    them grew too large undelivered, or failed in the detokenizer.
    """

    inbox: str
    rids: list[str]
    evict: bool


class InboxGone(Report):
    """Router to detokenizers: nobody reads this inbox any more; forget its requests and socket."""

    inbox: str


class ProcessDown(Report):
    """Launcher to router: a child is gone (its exit was seen by the parent)."""

    role: Literal["rank", "detokenizer"]
    index: int  # dp rank, or detokenizer number
    tp: int = 0
    reason: str = ""


class ProcessUp(Report):
    """A child is ready and listens on ``address``."""

    role: Literal["rank", "detokenizer"]
    index: int
    address: str
    generation: int
    pid: int
    tp: int = 0
    info: dict[str, Any] = {}


# --------------------------------------------------------------------------- broadcasts


class WorkerView(Value, frozen=True):
    id: str
    kind: str
    pid: int
    ipc: str
    streams: int
    lag_s: float
    rss_bytes: int
    since: float
    seen_at: float
    via: str = ""
    state: str = "ok"  # ok | lagging


class RankView(Value, frozen=True):
    dp: int
    tp: int
    pid: int
    state: str
    epoch: int
    weight_version: str
    token_step: int | None
    running: int
    waiting: int
    kv_used: int
    kv_total: int
    tokens_per_s: float
    step_s: float
    rss_bytes: int
    seen_at: float
    cached_tokens: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0
    retractions: int = 0
    ttft: Histogram = Histogram()
    itl: Histogram = Histogram()


class EngineView(Value, frozen=True):
    state: str
    epoch: int | None
    weight_version: str | None  # None: the groups differ, ``state`` is mixed
    token_step: int | None
    model: str
    generation: int
    reason: str = ""


class EpochLabel(Value, frozen=True):
    weight_version: str
    token_step: int | None = None
    job: str = ""


class Notice(Value, frozen=True):
    """Something that the engine did by its own rules; ``id`` is never used twice."""

    id: str
    at: float
    kind: str
    text: str


class FleetSnapshot(Broadcast):
    """Once a second, to every inbox: the router's heartbeat and the live picture."""

    seq: int
    at: float
    engine: EngineView
    workers: list[WorkerView]
    ranks: list[RankView]
    epochs: dict[int, EpochLabel] = {}  # the newest ones; older ones by GetEpochReqInput
    pause_until: float | None = None
    session: str | None = None  # the open weight session
    notices: list[Notice] = []  # the newest few
    counters: dict[str, int] = {}


class Rejoin(Broadcast):
    """To one inbox whose lease lapsed or is unknown: join again with a new inbox."""

    inbox: str
    reason: str


# --------------------------------------------------------------------------- building answers

ReplyT = TypeVar("ReplyT", bound=Reply)
RowT = TypeVar("RowT", bound=Row)


RequestT = TypeVar("RequestT", bound=Request)


def stamped(inbox: str, kind: type[RequestT], **fields: Any) -> RequestT:
    """A request whose answers go to ``inbox``: for the owner of an inbox (client, router) only."""
    return kind(http_worker_ipc=inbox, **fields)


def reply_to(request: Request, kind: type[ReplyT], **fields: Any) -> ReplyT:
    """A reply that goes where ``request`` came from."""
    return kind(http_worker_ipc=request.http_worker_ipc, **fields)


def row_for(request: Any, kind: type[RowT], **fields: Any) -> RowT:
    """A row for the owner of ``request`` (anything with ``rid`` and ``http_worker_ipc``)."""
    return kind(rid=request.rid, http_worker_ipc=request.http_worker_ipc, **fields)


def no_output_logprobs(asked: LogprobParams) -> OutputLogprobs:
    """The families that were asked for, of no token."""
    return OutputLogprobs(values=[], **_no_candidates(asked))


def no_input_logprobs(asked: LogprobParams) -> InputLogprobs:
    """The families that were asked for, of no token."""
    return InputLogprobs(ids=[], values=[], **_no_candidates(asked))


def _no_candidates(asked: LogprobParams) -> dict[str, Any]:
    wanted = {"top": asked.top_num > 0, "token_ids": asked.token_ids is not None}
    return {name: TopLogprobs(ids=[], values=[]) for name, wants in wanted.items() if wants}


def no_families(request: TokenizedGenerateReqInput) -> dict[str, Any]:
    """The optional fields that ``request`` asked for, of an answer that no rank has begun."""
    fields: dict[str, Any] = {}
    if request.logprob is not None:
        fields["output_logprobs"] = no_output_logprobs(request.logprob)
        if request.logprob.start_len >= 0:
            fields["input_logprobs"] = no_input_logprobs(request.logprob)
    if request.return_entropy:
        fields["entropy"] = []
    if request.return_hidden_states:
        fields["hidden"] = Hidden(width=0, data=b"")
    return fields


def local_end(rid: str, finish: Finish) -> StrRow:
    """A terminal row that a client makes for its own reader: it never leaves the process."""
    return StrRow(rid=rid, http_worker_ipc="", finish=finish)


def by_inbox(rows: Iterable[RowT]) -> dict[str, list[RowT]]:
    """Rows grouped by the inbox that must get them; knows no field but the address."""
    boxes: dict[str, list[RowT]] = defaultdict(list)
    for row in rows:
        boxes[row.http_worker_ipc].append(row)
    return boxes


# --------------------------------------------------------------------------- merging rows


@functools.cache
def merge_rules(kind: type) -> dict[str, str]:
    """Merge rule of each field of a row type or mergeable part, read from its annotations."""
    rules: dict[str, str] = {}
    hints = get_type_hints(kind, include_extras=True)
    for name in kind.__struct_fields__:  # type: ignore[attr-defined]
        found = [m for m in getattr(hints[name], "__metadata__", ()) if m in MERGE_RULES]
        if len(found) != 1:
            raise TypeError(f"{kind.__name__}.{name} declares no merge rule")
        rules[name] = found[0]
    return rules


StructT = TypeVar("StructT", bound=msgspec.Struct)


def merge(earlier: StructT, later: StructT) -> StructT:
    """One row that says what two consecutive rows of one request said."""
    return merge_all([earlier, later])


def merge_all(rows: Sequence[StructT]) -> StructT:
    """One row that says what these consecutive rows of one request said; linear in their size."""
    kind = type(rows[0])
    if any(type(row) is not kind for row in rows):
        raise TypeError(f"cannot merge {', '.join(sorted({type(row).__name__ for row in rows}))}")
    fields: dict[str, Any] = {}
    for name, rule in merge_rules(kind).items():
        values = [value for row in rows if (value := getattr(row, name)) is not None]
        fields[name] = _merge_values(rule, values) if values else None
    return kind(**fields)


def _merge_values(rule: str, values: list[Any]) -> Any:
    first = values[0]
    if rule == ONCE:
        return first
    if rule == LATEST:
        return values[-1]
    if rule == GREATEST:
        return max(values)
    if isinstance(first, msgspec.Struct):
        return merge_all(values)
    if isinstance(first, str | bytes):
        return first[:0].join(values)
    chained = itertools.chain.from_iterable(values)
    return join_runs(chained) if rule == RUNS else list(chained)


def join_runs(runs: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Runs ``(count, value)`` with neighbours of equal value joined."""
    joined: list[tuple[int, int]] = []
    for count, value in runs:
        if joined and joined[-1][1] == value:
            joined[-1] = (joined[-1][0] + count, value)
        elif count:
            joined.append((count, value))
    return joined


# --------------------------------------------------------------------------- the closed union

MERGED_PARTS = (TopLogprobs, OutputLogprobs, InputLogprobs, Hidden)
KINDS: tuple[type, ...] = (Request, Reply, Row, Batch, Broadcast, Report)


def _leaves(kind: type) -> list[type]:
    below: list[type] = kind.__subclasses__()
    return [kind] if not below else [leaf for child in below for leaf in _leaves(child)]


def _check() -> tuple[type, ...]:
    """Every tagged struct of this module is of exactly one kind; every row field merges."""
    for name, value in list(globals().items()):
        if not (isinstance(value, type) and issubclass(value, msgspec.Struct)):
            continue
        kinds = [kind for kind in (*KINDS, Part, Value) if issubclass(value, kind)]
        if len(kinds) != 1:
            raise TypeError(f"message {name} must have exactly one kind, has {kinds}")
        if issubclass(value, Row) or value in MERGED_PARTS:
            merge_rules(value)
    return tuple(leaf for kind in KINDS for leaf in _leaves(kind))


ALL: tuple[type, ...] = _check()
