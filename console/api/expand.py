"""``/generate``'s body to requests: one request is one prompt, whatever shape the body had.

n samples of a prompt are n requests; a batch of b prompts with n samples is b * n requests, the
samples of a prompt side by side.
"""

from __future__ import annotations

import uuid
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import msgspec

from console.api.schemas import GenerateBody, NativeSampling
from console.fields import BadField
from engine.client import GenerateReqInput
from engine.messages import LogprobParams, SamplingParams

T = TypeVar("T")

MAX_REQUESTS = 4096  # of one body


@dataclass(frozen=True, slots=True)
class Expanded:
    """``many``: the answer is a list. ``parent`` names all requests for an abort."""

    requests: list[GenerateReqInput]
    many: bool
    parent: str


def expand(body: GenerateBody, *, max_context: int) -> Expanded:
    body.check()
    prompts, is_batch = _prompts(body)
    samplings = _each("sampling_params", body.sampling_params, NativeSampling(), len(prompts))
    samples = samplings[0].n
    if any(sampling.n != samples for sampling in samplings):
        raise BadField("n must be the same for the whole batch", param="sampling_params.n")
    count = len(prompts) * samples
    if count > MAX_REQUESTS:
        raise BadField(f"{count} requests in one body, the limit is {MAX_REQUESTS}", param="text")
    many = is_batch or samples > 1
    parent, rids = _rids(body, len(prompts), samples)
    requests = [
        _request(
            body, prompts, samplings[at // samples], divmod(at, samples), rids[at], max_context
        )
        for at in range(count)
    ]
    return Expanded(requests, many, parent)


def _prompts(body: GenerateBody) -> tuple[list[str] | list[list[int]], bool]:
    if isinstance(body.text, str):
        return [body.text], False
    if body.text is not None:
        return _not_empty("text", body.text), True
    ids = body.input_ids or []
    if ids and all(isinstance(token, int) for token in ids):
        return [cast("list[int]", ids)], False
    if not all(isinstance(prompt, list) for prompt in ids):
        raise BadField("input_ids is a list of ids or a list of such lists", param="input_ids")
    return _not_empty("input_ids", cast("list[list[int]]", ids)), True


def _not_empty(name: str, values: list[T]) -> list[T]:
    if not values:
        raise BadField(f"{name} is an empty list", param=name)
    return values


def _each(name: str, value: Any, default: T, count: int) -> list[T]:
    """One value for all, or a list with one for each."""
    if not isinstance(value, list):
        return [default if value is None else value] * count
    if len(value) != count:
        raise BadField(f"{name} has {len(value)} entries for {count} prompts", param=name)
    return value


def _rids(body: GenerateBody, prompts: int, samples: int) -> tuple[str, list[str]]:
    """The parent's id and each request's; ids that the client chose are kept."""
    if not isinstance(body.rid, list):
        parent = body.rid or uuid.uuid4().hex
        count = prompts * samples
        return parent, [parent] if count == 1 else [f"{parent}-{at}" for at in range(count)]
    given = _each("rid", body.rid, "", prompts)
    if len(set(given)) != len(given):
        raise BadField("rid has the same id twice", param="rid")
    if samples == 1:
        return uuid.uuid4().hex, given
    return uuid.uuid4().hex, [f"{rid}-{at}" for rid in given for at in range(samples)]


def _request(
    body: GenerateBody,
    prompts: list[str] | list[list[int]],
    sampling: NativeSampling,
    place: tuple[int, int],
    rid: str,
    max_context: int,
) -> GenerateReqInput:
    """``place``: number of the prompt, and of the sample of that prompt."""
    index, sample = place
    count = len(prompts)
    prompt = prompts[index]
    salts = _each("cache_salt", body.cache_salt, "", count)
    keys = _each("extra_key", body.extra_key, "", count)
    return GenerateReqInput(
        text=prompt if isinstance(prompt, str) else None,
        input_ids=prompt if isinstance(prompt, list) else None,
        sampling=for_sample(sampling.sampling(max_context), sample),
        rid=rid,
        stream=body.stream,
        logprob=_logprob(body, index, count),
        return_text_in_logprobs=body.return_text_in_logprobs,
        return_entropy=body.return_entropy,
        return_hidden_states=_each("return_hidden_states", body.return_hidden_states, False, count)[
            index
        ],
        return_bytes=body.return_bytes,
        priority=body.priority or 0,
        extra_key=(salts[index] + keys[index]) or None,
        dp_rank=body.data_parallel_rank,
        no_logs=body.no_logs,
    )


def for_sample(sampling: SamplingParams, sample: int) -> SamplingParams:
    """Samples of one seeded prompt differ from each other and repeat from call to call."""
    if sampling.seed is None or sample == 0:
        return sampling
    return msgspec.structs.replace(sampling, seed=sampling.seed + sample)


def _logprob(body: GenerateBody, index: int, count: int) -> LogprobParams | None:
    if not _each("return_logprob", body.return_logprob, False, count)[index]:
        return None
    start = _each("logprob_start_len", body.logprob_start_len, -1, count)[index]
    top = _each("top_logprobs_num", body.top_logprobs_num, 0, count)[index]
    return LogprobParams(
        start_len=start,
        top_num=top,
        token_ids=_token_ids(body, index, count),
        raw=body.logprobs_raw,
    )


def _token_ids(body: GenerateBody, index: int, count: int) -> tuple[int, ...] | None:
    """``token_ids_logprob`` is one list for all, or a list of lists."""
    given = body.token_ids_logprob
    if not given:
        return None
    if all(isinstance(token, int) for token in given):
        return tuple(cast("list[int]", given))
    chosen = _each("token_ids_logprob", given, None, count)[index]
    if isinstance(chosen, int):
        raise BadField("token_ids_logprob mixes ids and lists", param="token_ids_logprob")
    return tuple(chosen) if chosen else None
