"""Paths from users stay under configured roots; roots and paths are both resolved first."""

from __future__ import annotations

from pathlib import Path

from django.conf import settings

from console.fields import BadField

NAME_MAX = 255  # bytes of one name, on every file system we meet
PATH_MAX = 2048  # characters; the base comes before it


def weight_roots() -> list[Path]:
    """``QUARTERDECK_HOME/models``, the configured ones, and the served model's own directory."""
    roots = [settings.QUARTERDECK_HOME / "models", *settings.QUARTERDECK_WEIGHT_ROOTS]
    return [root.resolve() for root in (*roots, Path(settings.QUARTERDECK_ENGINE.model_path))]


def inside(path: Path, roots: list[Path]) -> bool:
    return any(path == root or root in path.parents for root in roots)


def resolved(base: Path, given: str, *, param: str) -> Path:
    """``given`` from ``base`` on; an absolute path ignores the base. ``BadField`` for no path."""
    names = given.encode(errors="surrogatepass").split(b"/")
    if "\0" in given or len(given) > PATH_MAX or any(len(name) > NAME_MAX for name in names):
        raise BadField(f"{given[:80]!r} is no path", param=param)
    return (base / given).resolve()


def weight_path(given: str, *, param: str = "model_path") -> Path:
    """The resolved path of weights that exist under a root.

    A relative path is looked for under ``QUARTERDECK_HOME``, then under each root. Raises
    ``BadField``; what lies outside is called so whether it exists or not.
    """
    roots = weight_roots()
    bases = [settings.QUARTERDECK_HOME, *roots]
    candidates = [resolved(base, given, param=param) for base in bases]
    allowed = [path for path in candidates if inside(path, roots)]
    if not given.strip() or not allowed:
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
