"""Paths from users stay under configured roots; roots and paths are both resolved first."""

from __future__ import annotations

from pathlib import Path

from django.conf import settings

from console.fields import BadField


def weight_roots() -> list[Path]:
    """``QUARTERDECK_HOME/models``, the configured ones, and the served model's own directory."""
    roots = [settings.QUARTERDECK_HOME / "models", *settings.QUARTERDECK_WEIGHT_ROOTS]
    return [root.resolve() for root in (*roots, Path(settings.QUARTERDECK_ENGINE.model_path))]


def inside(path: Path, roots: list[Path]) -> bool:
    return any(path == root or root in path.parents for root in roots)


def weight_path(given: str, *, param: str = "model_path") -> Path:
    """The resolved path of weights that exist under a root.

    A relative path is looked for under ``QUARTERDECK_HOME``, then under each root. Raises
    ``BadField``; what lies outside is called so whether it exists or not.
    """
    roots = weight_roots()
    bases = [settings.QUARTERDECK_HOME, *roots]
    candidates = [(base / given).resolve() for base in bases]  # an absolute path ignores the base
    allowed = [path for path in candidates if inside(path, roots)]
    if not given.strip() or "\0" in given or not allowed:
        names = ", ".join(str(root) for root in roots)
        raise BadField(f"{given!r} is not under a weights root ({names})", param=param)
    for path in allowed:
        if path.exists():
            return path
    raise BadField(f"there are no weights at {allowed[0]}", param=param)


def shown(path: str) -> str:
    """A path as people read it: relative to the home where it lies below."""
    home = str(settings.QUARTERDECK_HOME) + "/"
    return path.removeprefix(home)
