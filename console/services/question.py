"""What a person asks in the Playground: the fields of a ``start`` frame."""

from __future__ import annotations

from typing import Annotated

import msgspec

from console.fields import MOST, Count, Int, Positive
from engine.errors import BadRequest

StreamId = Annotated[str, msgspec.Meta(min_length=1, max_length=64)]


class ChatParams(msgspec.Struct, frozen=True, kw_only=True):
    """None means the model's own default; ``system`` "" is the model's own prompt."""

    temperature: Annotated[float, msgspec.Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, msgspec.Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, msgspec.Meta(ge=-1, le=MOST)] | None = None
    max_new_tokens: Positive = 512
    seed: Int | None = None
    stop: list[str] = []
    system: str = ""
    logprobs: bool = False
    entropy: bool = False


class Question(msgspec.Struct, frozen=True, kw_only=True):
    """``stream`` is the client's name for the answer.

    ``parent``: continue behind this message; None: behind the newest; 0: a branch from the very
    start. Answers that are asked for
    with one ``turn`` share one question and one conversation; ``compare`` marks them as shown side
    by side.
    """

    stream: StreamId
    text: str
    conversation: Int | None = None
    parent: Count | None = None
    route: Annotated[str, msgspec.Meta(max_length=64)] = "auto"
    params: ChatParams = ChatParams()
    turn: Annotated[str, msgspec.Meta(max_length=64)] = ""
    compare: bool = False


def parse_route(route: str) -> tuple[str, int | None]:
    """``auto``, ``worker:ID`` or ``rank:DP`` -> (worker id or "", dp rank or None)."""
    kind, _, name = route.partition(":")
    if route == "auto":
        return "", None
    if kind == "worker" and name:
        return name, None
    if kind == "rank" and name.isdecimal() and len(name) < 10:
        return "", int(name)
    raise BadRequest(f"route must be auto, worker:ID or rank:DP, got {route!r}")
