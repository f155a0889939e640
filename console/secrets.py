"""Secrets that are made once and kept in files that only their owner can read."""

from __future__ import annotations

import os
import secrets
import tempfile
from pathlib import Path


def persistent_secret(path: Path) -> str:
    """The secret in ``path``; made (64 random bytes, mode 0600) when there is none.

    Two processes that start together agree: the file appears whole, and the first one wins.
    """
    try:
        return path.read_text()
    except FileNotFoundError:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    descriptor, draft = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}-")  # mode 0600
    try:
        with os.fdopen(descriptor, "w") as file:
            file.write(secrets.token_urlsafe(64))
        os.link(draft, path)
    except FileExistsError:
        pass  # another process was first; its secret counts
    finally:
        os.unlink(draft)
    return path.read_text()
