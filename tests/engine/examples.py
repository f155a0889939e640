"""Random valid messages of any type, built from the types themselves: a new type needs no edit."""

from __future__ import annotations

import random
import string
from typing import Any

import msgspec
from msgspec import inspect

LETTERS = string.ascii_letters + string.digits + " /:.-é世🙂\x00"


def example(kind: type, chance: random.Random) -> Any:
    """A message of ``kind``; optional fields are left out half of the time."""
    return _struct(inspect.type_info(kind), chance)


def _struct(info: Any, chance: random.Random) -> Any:
    fields = {
        field.name: _value(field.type, chance)
        for field in info.fields
        if field.required or chance.random() < 0.5
    }
    return info.cls(**fields)


def _value(info: Any, chance: random.Random) -> Any:
    match info:
        case inspect.Metadata():
            return _value(info.type, chance)
        case inspect.StructType():
            return _struct(info, chance)
        case inspect.UnionType():
            return _value(chance.choice(info.types), chance)
        case inspect.LiteralType():
            return chance.choice(info.values)
        case inspect.ListType() | inspect.VarTupleType():
            values = [_value(info.item_type, chance) for _ in range(chance.randrange(4))]
            return values if isinstance(info, inspect.ListType) else tuple(values)
        case inspect.FrozenSetType():
            return frozenset(_value(info.item_type, chance) for _ in range(chance.randrange(4)))
        case inspect.TupleType():
            return tuple(_value(item, chance) for item in info.item_types)
        case inspect.DictType():
            return {
                _value(info.key_type, chance): _value(info.value_type, chance)
                for _ in range(chance.randrange(3))
            }
        case _:
            return _scalar(info, chance)


def _scalar(info: Any, chance: random.Random) -> Any:
    match info:
        case inspect.StrType():
            return "".join(chance.choice(LETTERS) for _ in range(chance.randrange(8)))
        case inspect.BytesType():
            return chance.randbytes(chance.randrange(8))
        case inspect.BoolType():
            return chance.random() < 0.5
        case inspect.IntType():
            return chance.choice([0, 1, -1, 255, 2**31, 2**62]) + chance.randrange(100)
        case inspect.FloatType():
            return chance.choice([0.0, -1.5, 1e300, chance.random()])
        case inspect.NoneType():
            return None
        case inspect.AnyType():
            return chance.choice([None, 1, "x", 2.5, [1, "y"], {"key": [True]}])
    raise TypeError(f"no example for {info}")


def encoded_size(message: msgspec.Struct) -> int:
    return len(msgspec.msgpack.encode(message))
