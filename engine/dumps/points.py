"""What can be dumped, and what a dump asks for. No torch: the router checks requests with this.

Path: a backend publishes points; HTTP body or form -> ``parse_spec`` -> the step plan's command ->
capture.py on every rank.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any, Literal, get_args

import msgspec

from engine.artifacts import check_id
from engine.errors import BadRequest

Kind = Literal["input", "output", "weight", "logits", "kv"]

KINDS: tuple[Kind, ...] = get_args(Kind)
MAX_STEPS = 10_000
MAX_SECONDS = 600.0
MAX_BYTES = 8 << 30


class DumpPoint(msgspec.Struct, frozen=True, kw_only=True):
    """A place of the model with its Hugging Face module name, for example
    ``model.layers.3.self_attn.q_proj``.

    ``layer`` is None outside of the layers. ``shard_dim`` says, for each kind the point can give,
    along which dimension tensor parallel ranks hold slices; None: every rank holds the whole.
    """

    name: str
    layer: int | None = None
    shard_dim: dict[Kind, int | None]


class DumpSpec(msgspec.Struct, frozen=True, kw_only=True):
    """One dump. It ends at the first of its bounds.

    ``modules`` are globs over point names; with ``layers`` only points of those layers count.
    ``ranks`` are names like ``dp0-tp1`` and ``rids`` are exact; empty means all. ``max_steps``
    counts steps that hold a wanted request, ``max_seconds`` runs from arming, ``max_bytes`` bounds
    the tensors that one rank keeps: older ones give way, their statistics stay.
    """

    dump_id: str
    directory: str
    modules: tuple[str, ...] = ("*",)
    layers: frozenset[int] | None = None
    kinds: frozenset[Kind] = frozenset({"output", "logits"})
    ranks: tuple[str, ...] = ()
    rids: frozenset[str] = frozenset()
    max_steps: int = 1
    max_seconds: float = 60.0
    max_bytes: int = 256 << 20


def parse_spec(raw: Mapping[str, Any]) -> DumpSpec:
    """The spec in ``raw``; BadRequest with a sentence if it makes no sense.

    ``layers`` may be a list or a text like ``0-3,7``, ``kinds`` may be plural, and ``num_steps`` is
    another word for ``max_steps``.
    """
    names = DumpSpec.__struct_fields__
    fields = {name: raw[name] for name in names if raw.get(name) is not None}
    if raw.get("num_steps") is not None:
        fields.setdefault("max_steps", raw["num_steps"])
    if isinstance(fields.get("layers"), str):
        fields["layers"] = parse_layers(fields["layers"])
    if "kinds" in fields:
        fields["kinds"] = [_kind(kind) for kind in _listed("kinds", fields["kinds"])]
    try:
        spec = msgspec.convert(fields, DumpSpec, strict=False)
    except msgspec.ValidationError as error:
        raise BadRequest(f"dump: {error}") from error
    check_id(spec.dump_id)
    if not spec.modules or not spec.kinds:
        raise BadRequest("a dump needs at least one module glob and one kind")
    for name, value, most in (
        ("max_steps", spec.max_steps, MAX_STEPS),
        ("max_seconds", spec.max_seconds, MAX_SECONDS),
        ("max_bytes", spec.max_bytes, MAX_BYTES),
    ):
        if not 0 < value <= most:
            raise BadRequest(f"{name} must be above 0 and at most {most:g}, got {value:g}")
    return spec


def parse_layers(text: str) -> list[int]:
    """``0-3,7`` -> [0, 1, 2, 3, 7]."""
    layers: set[int] = set()
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        if not first.isdigit() or (dash and not last.isdigit()) or len(first + last) > 8:
            raise BadRequest(f"layers {text!r} is not a list like 0-3,7")
        end = int(last) if dash else int(first)
        if not int(first) <= end < 10_000:
            raise BadRequest(f"layers {text!r} counts down or beyond 10,000")
        layers.update(range(int(first), end + 1))
    return sorted(layers)


def _listed(name: str, value: Any) -> Collection[Any]:
    if isinstance(value, str):
        return [part.strip() for part in value.split(",")]
    if not isinstance(value, list | tuple | set | frozenset):
        raise BadRequest(f"{name} must be a list")
    return value


def _kind(word: Any) -> Kind:
    """A kind in singular or plural."""
    for kind in KINDS:
        if word in (kind, kind + "s"):
            return kind
    raise BadRequest(f"kind {word!r} is not one of {', '.join(KINDS)}")


def select(points: Sequence[DumpPoint], spec: DumpSpec) -> dict[str, set[Kind]]:
    """Point name -> wanted kinds, in the points' order.

    BadRequest for a glob or a layer that nothing matches, and if no point gives a wanted kind: the
    sentence names what is nearest.
    """
    known = {point.layer for point in points}
    if beyond := sorted((spec.layers or frozenset()) - known):
        raise BadRequest(f"the model has no layer {beyond[0]}")
    inside = [point for point in points if _in_layers(point, spec.layers)]
    for glob in spec.modules:
        if not any(fnmatchcase(point.name, glob) for point in inside):
            raise BadRequest(_no_match(glob, points, inside))
    chosen = {
        point.name: kinds
        for point in inside
        if any(fnmatchcase(point.name, glob) for glob in spec.modules)
        and (kinds := spec.kinds & point.shard_dim.keys())
    }
    if not chosen:
        offered = sorted({kind for point in inside for kind in point.shard_dim})
        raise BadRequest(f"these points give {', '.join(offered)} and none of the wanted kinds")
    return {name: set(kinds) for name, kinds in chosen.items()}


def _in_layers(point: DumpPoint, layers: frozenset[int] | None) -> bool:
    return layers is None or point.layer in layers


def _no_match(glob: str, points: Sequence[DumpPoint], inside: Sequence[DumpPoint]) -> str:
    if len(inside) < len(points) and any(fnmatchcase(point.name, glob) for point in points):
        return f"{glob!r} matches points of other layers only"
    near = difflib.get_close_matches(glob, [point.name for point in points], n=3, cutoff=0.3)
    hint = f"; near it: {', '.join(near)}" if near else ""
    return f"no dump point matches {glob!r}{hint}"
