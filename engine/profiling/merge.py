"""Merges the traces of all ranks into one document: ``merged-<id>.trace.json.gz``.

Path: capture.py on every rank -> manifests -> here (a job of its own, or by hand) -> a viewer.

    python -m engine.profiling.merge DIR PROFILE_ID [--wait-s 30]

prints the result as JSON and progress as lines of JSON on stderr. One child per rank (``part.py``)
rewrites that rank's events into a piece of one deflate stream, a few children at a time;
``document.py`` lines the pieces up behind the metadata events, so memory does not grow with the
traces. The file appears under its name by a rename, whole or not at all. A merge that lacks
something says so: ``partial`` and ``label``; there is no plain success without all ranks.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import msgspec

from engine.errors import QuarterdeckError
from engine.profiling.clock import Aligned, ClockReport, align
from engine.profiling.document import Piece, atomic_output, write_document
from engine.profiling.manifest import Found, Problem, Source, find, merged_path
from engine.profiling.part import PartJob, PartProgress, PartResult, PartSegment

MAX_CHILDREN = 4  # each needs about 25 MB, and this process as much
POLL_S = 0.2

Progress = Callable[[dict[str, object]], None]


class MergeResult(msgspec.Struct, kw_only=True):
    """``merged`` is None if no trace was written; ``label`` is the sentence to show."""

    profile_id: str
    merged: str | None
    partial: bool
    label: str
    ranks_found: list[str] = []
    ranks_expected: list[str] | None = None
    missing: list[str] = []
    unfinished: list[str] = []  # ranks that died, or still capture
    silent: list[str] = []  # ranks that reported and had no step to record
    files: list[str] = []
    errors: list[Problem] = []
    warnings: list[str] = []
    clock: ClockReport | None = None
    events: int = 0
    bytes: int = 0
    seconds: float = 0.0


@dataclass(kw_only=True)
class Share:
    """What one child does: the segments of one rank. ``result`` is None until it has ended well;
    a rank without segments needs no child."""

    source: Source
    job: PartJob
    files: list[str]
    out: BinaryIO | None = None
    result: PartResult | None = None

    @property
    def name(self) -> str:
        return self.source.rank.name

    @property
    def silent(self) -> bool:
        """The rank reported, and it had no step to record."""
        return not self.source.segments

    @property
    def arrived(self) -> bool:
        return self.silent or bool(self.result and self.result.taken)

    @property
    def unfinished(self) -> bool:
        return self.source.manifest is not None and not self.source.manifest.complete


def merge(
    directory: Path, profile_id: str, *, wait_s: float = 0.0, progress: Progress = lambda _: None
) -> MergeResult:
    """Merges what there is of ``profile_id`` once all expected ranks reported or time is up.

    BadRequest for an impossible id, Conflict while the same profile is being merged, OSError if
    the directory cannot be read or written.
    """
    started = time.monotonic()
    found = wait_for_ranks(directory, profile_id, wait_s, progress)
    aligned = align(found)
    shares = plan_shares(aligned)
    merged: Path | None = None
    with ExitStack() as stack:
        for share in shares:
            share.out = stack.enter_context(tempfile.TemporaryFile(dir=directory))
        run_shares(shares, aligned.problems, progress)
        result = describe(found, shares, aligned)
        if pieces := [piece for share in shares if (piece := _piece(share, aligned))]:
            progress({"phase": "writing"})
            merged = merged_path(directory, profile_id)
            with atomic_output(merged) as out:
                write_document(out, pieces, msgspec.to_builtins(result))
    if merged:
        result.merged, result.bytes = str(merged), merged.stat().st_size
    result.seconds = round(time.monotonic() - started, 3)
    return result


def wait_for_ranks(
    directory: Path, profile_id: str, wait_s: float, progress: Progress = lambda _: None
) -> Found:
    """The profile's files once every expected rank is complete, at the latest in ``wait_s``."""
    deadline = time.monotonic() + wait_s
    said: list[str] | None = None
    while True:
        found = find(directory, profile_id)
        late = found.waiting_for
        done = found.sources and not late
        if done or time.monotonic() >= deadline:
            return found
        if late != said:
            progress({"phase": "waiting", "for": late})
            said = late
        time.sleep(POLL_S)


def plan_shares(aligned: Aligned) -> list[Share]:
    """Jobs for the children, in display order of the ranks."""
    shares, namespace = [], 0
    for ordinal, (source, segments) in enumerate(aligned.ranks, start=1):
        parts = []
        for timed in segments:
            parts.append(
                PartSegment(
                    path=str(timed.path),
                    sha256=timed.segment.sha256,
                    events=timed.segment.events,
                    namespace=namespace,
                    shift_ns=timed.shift_ns,
                )
            )
            namespace += 1
        job = PartJob(ordinal=ordinal, start_ns=aligned.start_ns, segments=parts)
        files = [timed.segment.path for timed in segments]
        result = None if source.segments else PartResult()
        shares.append(Share(source=source, job=job, files=files, result=result))
    return shares


def run_shares(shares: list[Share], problems: list[Problem], progress: Progress) -> None:
    """Runs the children; fills in each share's result, or a problem for the whole rank."""
    events = dict.fromkeys(range(len(shares)), 0)

    def run(index: int) -> None:
        def count(done: int) -> None:
            events[index] = done
            progress({"phase": "merging", "events": sum(events.values()), "ranks": len(shares)})

        share = shares[index]
        outcome = run_child(share, count)
        if isinstance(outcome, str):
            problems.append(Problem(rank=share.name, file="", error=outcome))
            return
        share.result = outcome
        for at, error in outcome.errors.items():
            problems.append(Problem(rank=share.name, file=share.files[at], error=error))

    with ThreadPoolExecutor(max(1, min(MAX_CHILDREN, os.cpu_count() or 1))) as pool:
        todo = [index for index, share in enumerate(shares) if share.result is None]
        for done in [pool.submit(run, index) for index in todo]:
            done.result()


def run_child(share: Share, count: Callable[[int], None]) -> PartResult | str:
    """One rank in a process of its own; its result, or the sentence with which it failed."""
    root = str(Path(__file__).resolve().parents[2])
    child = subprocess.Popen(
        [sys.executable, "-m", "engine.profiling.part"],
        stdin=subprocess.PIPE,
        stdout=share.out,
        stderr=subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": os.pathsep.join([root, os.environ.get("PYTHONPATH", "")])},
    )
    with child:
        assert child.stdin and child.stderr
        child.stdin.write(msgspec.json.encode(share.job))
        child.stdin.close()
        last = ""
        for line in child.stderr:
            last = line.decode(errors="replace").strip()
            if line.startswith(b'{"type":"PartProgress"'):
                count(msgspec.json.decode(line, type=PartProgress).events)
    if child.returncode == 0:
        return msgspec.json.decode(last, type=PartResult)
    return last or f"its merging process ended with code {child.returncode}"


def _piece(share: Share, aligned: Aligned) -> Piece | None:
    if share.result is None or not share.result.taken:
        return None
    assert share.out
    rank = share.source.rank
    note = " (clock not aligned)" if rank.name in aligned.clock.uncalibrated else ""
    return Piece(
        rank=rank, note=note, start_ns=share.job.start_ns, out=share.out, result=share.result
    )


def describe(found: Found, shares: list[Share], aligned: Aligned) -> MergeResult:
    """Everything about the merge but where it is."""
    here = [share for share in shares if share.arrived]
    results = [share.result for share in here if share.result]
    names = [share.name for share in here]
    expected = None if found.expected is None else [rank.name for rank in found.expected]
    missing = [name for name in expected or [] if name not in names]
    unfinished = [share.name for share in here if share.unfinished]
    result = MergeResult(
        profile_id=found.profile_id,
        merged=None,
        partial=bool(missing or unfinished or aligned.problems),
        label="",
        ranks_found=names,
        ranks_expected=expected,
        missing=missing,
        unfinished=unfinished,
        silent=[share.name for share in here if share.silent],
        files=[share.files[at] for share in here if share.result for at in share.result.taken],
        errors=aligned.problems,
        warnings=[warning for one in results for warning in one.warnings],
        clock=aligned.clock,
        events=sum(one.events for one in results),
    )
    result.label = label_of(result)
    return result


def label_of(result: MergeResult) -> str:
    """For example ``5 of 6, missing dp1-tp1``."""
    count = len(result.ranks_found)
    if result.ranks_expected is None:
        parts = [f"{count} ranks, the expected ranks are not written down"]
    else:
        parts = [f"{count} of {len(result.ranks_expected)}"]
    if result.missing:
        parts.append("missing " + " ".join(result.missing))
    if result.unfinished:
        parts.append("unfinished " + " ".join(result.unfinished))
    if result.silent:
        parts.append("no step recorded by " + " ".join(result.silent))
    if left_out := sum(1 for problem in result.errors if problem.file):
        parts.append(f"{left_out} {'file' if left_out == 1 else 'files'} left out")
    if result.clock and result.clock.uncalibrated:
        parts.append("clocks not aligned: " + " ".join(result.clock.uncalibrated))
    return ", ".join(parts)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m engine.profiling.merge")
    parser.add_argument("directory", type=Path)
    parser.add_argument("profile_id")
    parser.add_argument("--wait-s", type=float, default=0.0, help="for ranks that are late")
    options = parser.parse_args(arguments)
    try:
        result = merge(options.directory, options.profile_id, wait_s=options.wait_s, progress=_say)
    except (QuarterdeckError, OSError) as error:
        result = MergeResult(
            profile_id=options.profile_id,
            merged=None,
            partial=False,
            label=f"not merged: {error}",
            errors=[Problem(rank="", file="", error=str(error))],
        )
    print(msgspec.json.format(msgspec.json.encode(result)).decode())
    return 0 if result.merged else 1


def _say(progress: dict[str, object]) -> None:
    print(msgspec.json.encode(progress).decode(), file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
