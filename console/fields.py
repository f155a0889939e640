"""Fields that came from outside, as typed structs; a mismatch becomes a sentence with its place.

Numbers and truth values may come as strings, as some trainers send them; unknown fields are let
through. Every number has bounds that wire, database and JSON can hold: ``Int``, ``Number`` or
tighter ones.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from typing import Annotated, Any, TypeVar

import msgspec

from engine.errors import BadRequest

T = TypeVar("T")

MOST = 2**63 - 1  # of a whole number in MessagePack, in a database and in a tensor
Int = Annotated[int, msgspec.Meta(ge=-MOST, le=MOST)]
Count = Annotated[int, msgspec.Meta(ge=0, le=MOST)]
Positive = Annotated[int, msgspec.Meta(ge=1, le=MOST)]
Number = Annotated[float, msgspec.Meta(ge=-sys.float_info.max, le=sys.float_info.max)]
Seconds = Annotated[float, msgspec.Meta(ge=0, le=1e9)]

NESTED = "the body nests too deeply"
_PATH = re.compile(r"^(?P<what>.*) - at `\$\.?(?P<path>.*)`$", re.DOTALL)
_MISSING = re.compile(r"missing required field `(?P<name>\w+)`")


class BadField(BadRequest):
    """A field of the request is wrong; ``param`` is its path, for example ``messages[0].role``."""

    def __init__(self, message: str, *, param: str) -> None:
        super().__init__(message)
        self.param = param


def read_json(content: bytes, kind: type[T]) -> T:
    """A JSON body as ``kind``; an empty one counts as ``{}``."""
    try:
        return msgspec.json.decode(content or b"{}", type=kind, strict=False)
    except msgspec.ValidationError as error:
        raise _bad_field(str(error)) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise BadRequest(f"the body is not JSON: {error}") from None
    except RecursionError:
        raise BadRequest(NESTED) from None


def read_fields(given: Mapping[str, Any], kind: type[T]) -> T:
    """Plain data as ``kind``."""
    try:
        return msgspec.convert(given, kind, strict=False)
    except msgspec.ValidationError as error:
        raise _bad_field(str(error)) from None
    except RecursionError:
        raise BadRequest(NESTED) from None


def read_number(name: str, text: str) -> int:
    """A count out of a query string."""
    if not text.isdecimal() or len(text) > 18:
        raise BadField(f"{name} must be a number of at most 18 digits", param=name)
    return int(text)


def _bad_field(sentence: str) -> BadField:
    found = _PATH.match(sentence)
    what, path = (found["what"], found["path"]) if found else (sentence, "")
    missing = _MISSING.search(what)
    if missing:
        path = f"{path}.{missing['name']}" if path else missing["name"]
    return BadField(f"{path}: {what}" if path else what, param=path)
