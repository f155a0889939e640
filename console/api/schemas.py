"""Bodies of the HTTP surface, typed; validated by msgspec. Unknown fields are let through.

``decode`` turns a mismatch into a 400 that names the field. Fields of features that are not built
are known here, so that using one is refused by name and not silently ignored.
"""

from __future__ import annotations

from typing import Annotated, Any, TypeVar

from django.core.exceptions import RequestDataTooBig
from django.http import HttpRequest
from msgspec import UNSET, Meta, Struct, UnsetType

from console.api.errors import NotSupported
from console.fields import MOST, BadField, Count, Int, Positive, read_json
from engine.client import SamplingDefaults
from engine.errors import BadRequest
from engine.messages import SamplingParams

T = TypeVar("T")

MAX_FLOAT32 = 3.4e38
Temperature = Annotated[float, Meta(ge=0, le=MAX_FLOAT32)]
Probability = Annotated[float, Meta(ge=0, le=1)]
TopP = Annotated[float, Meta(gt=0, le=1)]
TopK = Annotated[int, Meta(ge=-1, le=MOST)]
Penalty = Annotated[float, Meta(ge=-2, le=2)]
Bias = Annotated[float, Meta(ge=-MAX_FLOAT32, le=MAX_FLOAT32)]
TopLogprobs = Annotated[int, Meta(ge=0, le=20)]
Rid = Annotated[str, Meta(min_length=1, max_length=128)]


def decode(request: HttpRequest, kind: type[T]) -> T:
    """The JSON body as ``kind``."""
    try:
        content = request.body
    except RequestDataTooBig as error:
        raise BadRequest(str(error), status_code=413, err_type="body_too_large") from None
    return read_json(content, kind)


def refuse_fields(body: Struct, names: tuple[str, ...]) -> None:
    """501 for a field that asks for what is not built."""
    for name in names:
        if getattr(body, name) not in (None, [], {}, False):
            raise NotSupported(f"{name} is not supported by this server")


# ---------------------------------------------------------------- OpenAI


class ContentPart(Struct, kw_only=True):
    type: str
    text: str = ""


class ChatMessage(Struct, kw_only=True):
    role: str
    content: str | list[ContentPart] | None = None

    def plain(self, index: int) -> dict[str, Any]:
        """As chat templates take it; text parts are joined."""
        if isinstance(self.content, list):
            for part in self.content:
                if part.type != "text":
                    raise BadField(
                        f"messages[{index}]: this model takes text, not {part.type}",
                        param=f"messages[{index}].content",
                    )
            return {"role": self.role, "content": "\n".join(p.text for p in self.content)}
        return {"role": self.role, "content": self.content or ""}


class StreamOptions(Struct, kw_only=True):
    include_usage: bool = False


class OpenAIBody(Struct, kw_only=True):
    """What chat and text completions share."""

    model: str = "default"
    temperature: Temperature | None = None
    top_p: TopP | None = None
    n: Annotated[int, Meta(ge=1, le=64)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    stop: str | list[str] | None = None
    seed: Int | None = None
    frequency_penalty: Penalty | None = None
    presence_penalty: Penalty | None = None
    logit_bias: dict[Int, Bias] | None = None
    # beyond OpenAI, as SGLang takes them
    rid: Rid | None = None
    top_k: TopK | None = None
    min_p: Probability | None = None
    repetition_penalty: Annotated[float, Meta(gt=0, le=2)] | None = None
    min_tokens: Count | None = None
    stop_token_ids: list[Int] | None = None
    stop_regex: str | list[str] | None = None
    ignore_eos: bool = False
    no_stop_trim: bool = False
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    priority: Int = 0
    extra_key: str | None = None
    cache_salt: str | None = None
    data_parallel_rank: Count | None = None
    logprobs_raw: bool = False
    # known, not built
    response_format: dict[str, Any] | None = None
    regex: str | None = None
    ebnf: str | None = None
    json_schema: str | dict[str, Any] | None = None
    lora_path: str | None = None
    session_params: dict[str, Any] | None = None

    def check(self) -> None:
        refuse_fields(self, ("regex", "ebnf", "json_schema", "lora_path", "session_params"))
        if (self.response_format or {}).get("type", "text") != "text":
            raise NotSupported("response_format other than text is not supported by this server")

    def sampling(self, max_tokens: int, defaults: SamplingDefaults) -> SamplingParams:
        """``defaults``: the model's own, for what the request does not say (as SGLang and vLLM)."""
        return SamplingParams(
            max_new_tokens=max_tokens,
            min_new_tokens=min(self.min_tokens or 0, max_tokens),
            temperature=_or(self.temperature, defaults.temperature),
            top_p=_or(self.top_p, defaults.top_p),
            top_k=_or(self.top_k, defaults.top_k) or -1,
            min_p=_or(self.min_p, 0.0),
            frequency_penalty=_or(self.frequency_penalty, 0.0),
            presence_penalty=_or(self.presence_penalty, 0.0),
            repetition_penalty=_or(self.repetition_penalty, defaults.repetition_penalty),
            logit_bias=self.logit_bias or {},
            stop=_as_tuple(self.stop),
            stop_token_ids=tuple(self.stop_token_ids or ()),
            stop_regex=_as_tuple(self.stop_regex),
            ignore_eos=self.ignore_eos,
            no_stop_trim=self.no_stop_trim,
            skip_special_tokens=self.skip_special_tokens,
            spaces_between_special_tokens=self.spaces_between_special_tokens,
            seed=self.seed,
        )


class ChatCompletionBody(OpenAIBody, kw_only=True):
    messages: Annotated[list[ChatMessage], Meta(min_length=1)]
    max_tokens: Positive | None = None
    max_completion_tokens: Positive | None = None
    logprobs: bool | None = None
    top_logprobs: TopLogprobs | None = None
    tools: list[dict[str, Any]] | None = None


class CompletionBody(OpenAIBody, kw_only=True):
    prompt: str | list[str | Int | list[Int]]
    max_tokens: Positive | None = 16
    logprobs: TopLogprobs | None = None
    echo: bool = False
    suffix: str | None = None


# ---------------------------------------------------------------- native


class NativeSampling(Struct, kw_only=True):
    """``sampling_params`` of ``/generate``, SGLang's names and defaults."""

    n: Annotated[int, Meta(ge=1, le=64)] = 1
    max_new_tokens: Count | None = 128
    min_new_tokens: Count = 0
    temperature: Temperature = 1.0
    top_p: TopP = 1.0
    top_k: TopK = -1
    min_p: Probability = 0.0
    frequency_penalty: Penalty = 0.0
    presence_penalty: Penalty = 0.0
    repetition_penalty: Annotated[float, Meta(gt=0, le=2)] = 1.0
    logit_bias: dict[Int, Bias] | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[Int] | None = None
    stop_regex: str | list[str] | None = None
    ignore_eos: bool = False
    no_stop_trim: bool = False
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    sampling_seed: Int | None = None
    json_schema: str | dict[str, Any] | None = None
    regex: str | None = None
    ebnf: str | None = None
    structural_tag: str | None = None

    def sampling(self, longest: int) -> SamplingParams:
        refuse_fields(self, ("json_schema", "regex", "ebnf", "structural_tag"))
        max_new_tokens = _or(self.max_new_tokens, longest)
        if self.min_new_tokens > max_new_tokens:
            raise BadField(
                "min_new_tokens is larger than max_new_tokens",
                param="sampling_params.min_new_tokens",
            )
        return SamplingParams(
            max_new_tokens=max_new_tokens,
            min_new_tokens=self.min_new_tokens,
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k or -1,
            min_p=self.min_p,
            frequency_penalty=self.frequency_penalty,
            presence_penalty=self.presence_penalty,
            repetition_penalty=self.repetition_penalty,
            logit_bias=self.logit_bias or {},
            stop=_as_tuple(self.stop),
            stop_token_ids=tuple(self.stop_token_ids or ()),
            stop_regex=_as_tuple(self.stop_regex),
            ignore_eos=self.ignore_eos,
            no_stop_trim=self.no_stop_trim,
            skip_special_tokens=self.skip_special_tokens,
            spaces_between_special_tokens=self.spaces_between_special_tokens,
            seed=self.sampling_seed,
        )


NOT_BUILT = (
    "input_embeds",
    "image_data",
    "video_data",
    "audio_data",
    "lora_path",
    "session_params",
    "custom_logit_processor",
)


class GenerateBody(Struct, kw_only=True):
    """``/generate``: one prompt, or a batch when ``text`` or ``input_ids`` is a list of prompts.

    In a batch every per-request field may be one value for all or a list with one for each.
    """

    text: str | list[str] | None = None
    input_ids: list[Int | list[Int]] | None = None
    sampling_params: NativeSampling | list[NativeSampling] | None = None
    rid: Rid | list[Rid] | None = None
    stream: bool = False
    stream_output: bool = False  # deltas of text and of every list, not cumulative values
    return_logprob: bool | list[bool] | None = None
    logprob_start_len: Int | list[Int] | None = None
    top_logprobs_num: TopLogprobs | list[TopLogprobs] | None = None
    token_ids_logprob: list[Int | list[Int] | None] | None = None
    return_text_in_logprobs: bool = False
    logprobs_raw: bool = False
    return_hidden_states: bool | list[bool] = False
    return_entropy: bool = False
    return_bytes: bool = False
    no_logs: bool = False
    priority: Int | None = None
    extra_key: str | list[str] | None = None
    cache_salt: str | list[str] | None = None
    data_parallel_rank: Count | None = None
    # known, not built
    input_embeds: list[Any] | None = None
    image_data: Any = None
    video_data: Any = None
    audio_data: Any = None
    lora_path: str | list[str | None] | None = None
    session_params: dict[str, Any] | list[Any] | None = None
    custom_logit_processor: str | list[str | None] | None = None

    def check(self) -> None:
        refuse_fields(self, NOT_BUILT)
        if (self.text is None) == (self.input_ids is None):
            raise BadField("give exactly one of text and input_ids", param="text")


class TokenizeBody(Struct, kw_only=True):
    prompt: str
    model: str = "default"
    add_special_tokens: bool = True


class DetokenizeBody(Struct, kw_only=True):
    tokens: Annotated[list[Int], Meta(max_length=2**18)]
    model: str = "default"
    skip_special_tokens: bool = True


# ---------------------------------------------------------------- console


class ConversationBody(Struct, kw_only=True):
    title: Annotated[str, Meta(min_length=1, max_length=200)] | UnsetType = UNSET
    pinned: bool | UnsetType = UNSET


def _or(value: T | None, default: T) -> T:
    return default if value is None else value


def _as_tuple(value: str | list[str] | None) -> tuple[str, ...]:
    if value is None:
        return ()
    return (value,) if isinstance(value, str) else tuple(value)
