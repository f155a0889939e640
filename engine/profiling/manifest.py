"""What a profile's directory says about itself: expected ranks, and one manifest per rank.

Path: capture.py writes manifests -> here -> merge.py and summary.py read them.

Files of the profile ``ID`` (several profiles may share a directory):

* ``ID.profile.json``           the ranks that were asked to capture (``ProfileFile``)
* ``ID-dp0-tp1.manifest.json``  what one rank wrote (``RankManifest``), rewritten per segment
* ``ID-dp0-tp1-s000.trace.json.gz``  one segment, named in the manifest
* ``ID-TP-1-DP-0[-EXTEND].trace.json.gz``  the same from an SGLang server, without a manifest
* ``merged-ID.trace.json.gz``, ``summary-ID.json``  what merge.py and summary.py write
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import msgspec

from engine.artifacts import Rank, check_id, write_atomically

Stage = Literal["", "prefill", "decode"]

_MANIFEST = re.compile(r"-(dp\d+-tp\d+(?:-pp\d+)?(?:-ep\d+)?)\.manifest\.json")
_FOREIGN = re.compile(r"((?:-(?:TP|DP|PP|EP)-\d+)+)(?:-([A-Z_]+))?\.trace\.json(?:\.gz)?")
_AXIS = re.compile(r"-(TP|DP|PP|EP)-(\d+)")


class Anchor(msgspec.Struct, frozen=True, kw_only=True):
    """One reading of two clocks, nanoseconds.

    The capture read the monotonic clock, wrote a marker event into the trace, and read the
    monotonic clock again; so the marker, whose trace times are known, lies between the readings.
    """

    monotonic_before_ns: int
    monotonic_after_ns: int
    trace_start_ns: int
    trace_end_ns: int


class Segment(msgspec.Struct, frozen=True, kw_only=True):
    """One trace file of a rank. ``path`` is relative to the profile's directory."""

    path: str
    bytes: int
    sha256: str
    events: int
    stage: Stage = ""
    anchors: tuple[Anchor, ...] = ()


class StepMark(msgspec.Struct, frozen=True, kw_only=True):
    """One forward step as the runner saw it; monotonic nanoseconds.

    ``pause_ns`` is what the capture did on the step thread before it (starting, stopping and
    exporting): a running row waited ``pause_ns`` plus the step for its next token.
    """

    step: int
    stage: Stage
    rows: int
    tokens: int
    start_ns: int
    end_ns: int
    pause_ns: int = 0
    recorded: bool = True


class RankManifest(msgspec.Struct, kw_only=True):
    """What one rank captured. ``complete`` is false while it captures, and after it died."""

    profile_id: str
    rank: Rank
    complete: bool = False
    reason: str = ""  # why it ended
    errors: list[str] = []  # segments that could not be written
    activities: tuple[str, ...] = ()
    host: str = ""
    boot_id: str = ""  # ranks of one boot share one monotonic clock
    pid: int = 0
    wall_minus_monotonic_ns: int = 0
    armed_ns: int = 0  # monotonic, when the capture was armed
    final_pause_ns: int = 0  # as StepMark.pause_ns, after the last step
    segments: list[Segment] = []
    steps: list[StepMark] = []


class ProfileFile(msgspec.Struct, frozen=True, kw_only=True):
    """Written when a profile starts: which ranks must report."""

    profile_id: str
    ranks: list[Rank]
    created_at: float = 0.0  # seconds since the Unix epoch


class Problem(msgspec.Struct, frozen=True, kw_only=True):
    """Something that could not be used, and why. "" where no rank or no file can be named."""

    rank: str
    file: str
    error: str


@dataclass(kw_only=True)
class Source:
    """Trace files of one rank. ``manifest`` is None for files of another engine."""

    rank: Rank
    manifest: RankManifest | None
    segments: list[Segment] = field(default_factory=list)


@dataclass(kw_only=True)
class Found:
    """What a directory holds of one profile. ``expected`` is None if nobody wrote it down."""

    directory: Path
    profile_id: str
    expected: list[Rank] | None
    sources: list[Source]
    problems: list[Problem]

    @property
    def missing(self) -> list[str]:
        found = {source.rank.name for source in self.sources}
        return [rank.name for rank in self.expected or [] if rank.name not in found]

    @property
    def waiting_for(self) -> list[str]:
        """Ranks that have not reported or still capture."""
        late = [s.rank.name for s in self.sources if s.manifest and not s.manifest.complete]
        return self.missing + late


def merged_path(directory: Path, profile_id: str) -> Path:
    return directory / f"merged-{profile_id}.trace.json.gz"


def summary_path(directory: Path, profile_id: str) -> Path:
    return directory / f"summary-{profile_id}.json"


def write_profile(directory: Path, profile: ProfileFile) -> Path:
    """Says which ranks are expected; written by whoever starts the profile, before they start."""
    path = directory / f"{check_id(profile.profile_id)}.profile.json"
    write_atomically(path, msgspec.json.format(msgspec.json.encode(profile)))
    return path


def write_manifest(directory: Path, manifest: RankManifest) -> Path:
    path = directory / f"{manifest.profile_id}-{manifest.rank.name}.manifest.json"
    write_atomically(path, msgspec.json.encode(manifest))
    return path


def find(directory: Path, profile_id: str) -> Found:
    """Everything the directory holds of exactly this profile. OSError if it cannot be listed."""
    check_id(profile_id)
    found = Found(
        directory=directory, profile_id=profile_id, expected=None, sources=[], problems=[]
    )
    names = sorted(entry.name for entry in os.scandir(directory) if entry.is_file())
    if f"{profile_id}.profile.json" in names:
        found.expected = _read_expected(found, f"{profile_id}.profile.json")
    rest = [name[len(profile_id) :] for name in names if name.startswith(profile_id)]
    for suffix in rest:
        if _MANIFEST.fullmatch(suffix):
            _add_manifest(found, profile_id + suffix)
    if not found.sources:
        _add_foreign(found, rest)
    found.sources.sort(key=lambda source: source.rank.order)
    return found


def _read_expected(found: Found, name: str) -> list[Rank] | None:
    try:
        profile = msgspec.json.decode((found.directory / name).read_bytes(), type=ProfileFile)
    except msgspec.DecodeError as error:
        found.problems.append(Problem(rank="", file=name, error=f"not a profile file: {error}"))
        return None
    return sorted(profile.ranks, key=lambda rank: rank.order)


def _add_manifest(found: Found, name: str) -> None:
    try:
        manifest = msgspec.json.decode((found.directory / name).read_bytes(), type=RankManifest)
    except msgspec.DecodeError as error:
        found.problems.append(Problem(rank="", file=name, error=f"not a manifest: {error}"))
        return
    if name != f"{found.profile_id}-{manifest.rank.name}.manifest.json":
        sentence = "the manifest belongs to another profile or rank"
        found.problems.append(Problem(rank="", file=name, error=sentence))
        return
    found.sources.append(
        Source(rank=manifest.rank, manifest=manifest, segments=list(manifest.segments))
    )


def _add_foreign(found: Found, suffixes: Iterable[str]) -> None:
    """Trace files named as SGLang names them; one rank may have one per stage."""
    by_rank: dict[Rank, Source] = {}
    for suffix in suffixes:
        match = _FOREIGN.fullmatch(suffix)
        if match is None:
            continue
        axes = {axis.lower(): int(at) for axis, at in _AXIS.findall(match[1])}
        rank = Rank(**axes)
        source = by_rank.setdefault(rank, Source(rank=rank, manifest=None))
        size = (found.directory / (found.profile_id + suffix)).stat().st_size
        source.segments.append(
            Segment(path=found.profile_id + suffix, bytes=size, sha256="", events=-1)
        )
    found.sources.extend(by_rank.values())
