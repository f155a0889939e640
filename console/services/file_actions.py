"""Actions on files: work that Celery does in a process of its own, from the start if it must."""

from __future__ import annotations

import sys
from typing import Annotated, ClassVar, Self

import msgspec

from console.fields import Int
from console.services import roots
from console.services.actions import Action
from console.services.load import Load


class FileAction(Action, frozen=True, kw_only=True):
    """``command``: what runs; its last line on stdout is the result as JSON."""

    memory_bytes: ClassVar[int] = 2 * 2**30  # of address space
    deadline_s: ClassVar[float] = 3600.0

    def command(self) -> list[str]:
        raise NotImplementedError

    def impact(self, load: Load) -> str:
        return "No request is touched."

    def refusal(self, load: Load) -> str:
        return ""


class RegisterCheckpoint(FileAction, frozen=True, kw_only=True):
    """``path`` under a weights root; ``token_step``, ``run`` and ``note`` are the trainer's."""

    name = "register_checkpoint"
    route = "/api/checkpoints"

    path: Annotated[str, msgspec.Meta(min_length=1, max_length=500)]
    token_step: Int | None = None
    run: Annotated[str, msgspec.Meta(max_length=200)] = ""
    note: Annotated[str, msgspec.Meta(max_length=500)] = ""

    @property
    def title(self) -> str:
        return f"Register checkpoint {roots.shown(self.path)}"

    @property
    def aim(self) -> str:
        return roots.shown(self.path)

    def checked(self) -> Self:
        return msgspec.structs.replace(self, path=str(roots.weight_path(self.path, param="path")))

    def will(self) -> list[str]:
        return ["The files are read once, off the engine, for their checksum."]

    def command(self) -> list[str]:
        return [sys.executable, "-m", "engine.weights.checkpoint", self.path]


class TidyDisk(FileAction, frozen=True, kw_only=True):
    """Brings ``QUARTERDECK_HOME`` below its quota: the oldest that nobody pinned goes first."""

    name = "tidy_disk"

    @property
    def title(self) -> str:
        return "Tidy the disk"

    @property
    def aim(self) -> str:
        return "disk"

    def will(self) -> list[str]:
        return ["Spools, traces and dumps over the quota are deleted, oldest first; pins stay."]

    def command(self) -> list[str]:
        return [sys.executable, "manage.py", "disk", "tidy"]
