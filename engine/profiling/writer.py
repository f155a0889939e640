"""The rank's end of pack.py: sends raw segments to it, keeps the manifest on disk up to date.

Path: capture.py -> here -> pack.py (child) -> here -> the manifest file.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
from pathlib import Path

import msgspec

from engine.profiling.manifest import RankManifest, write_manifest
from engine.profiling.pack import PackJob, PackResult


class Writer:
    """Packs segments in a child and collects its answers on a thread.

    The step thread only writes a short line per segment; no file is awaited there. ``error`` says
    why no more segments can be written, and ``done`` that the final manifest is in place.
    """

    def __init__(self, directory: Path, manifest: RankManifest) -> None:
        self._directory = directory
        self._manifest = manifest
        self._sent = 0  # counted by the step thread
        self._answered = 0  # counted by the writer's thread
        self._finished = threading.Event()
        self.error = ""
        self.done = False
        root = str(Path(__file__).resolve().parents[2])
        self._child = subprocess.Popen(
            [sys.executable, "-m", "engine.profiling.pack"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=os.environ | {"PYTHONPATH": root},
            process_group=0,  # it ends when the rank does, not by the terminal's interrupt
        )
        self._thread = threading.Thread(target=self._collect, daemon=True)
        self._thread.start()

    def send(self, job: PackJob) -> None:
        """Hands over one exported segment."""
        assert self._child.stdin
        self._sent += 1
        try:
            self._child.stdin.write(msgspec.json.encode(job) + b"\n")
            self._child.stdin.flush()
        except BrokenPipeError:
            Path(job.raw).unlink(missing_ok=True)

    def finish(self) -> None:
        """No more segments will come. ``done`` follows when the sent ones are packed."""
        assert self._child.stdin
        with contextlib.suppress(BrokenPipeError):  # the thread has seen that and says so
            self._child.stdin.close()
        self._finished.set()

    def close(self) -> None:
        """Waits for what was sent."""
        self._thread.join()

    def _collect(self) -> None:
        manifest = self._manifest
        assert self._child.stdout
        with self._child.stdout as answers:
            for line in answers:
                self._answered += 1
                result = msgspec.json.decode(line, type=PackResult)
                if result.segment is not None:
                    manifest.segments.append(result.segment)
                else:
                    self._fail(result.error)
                self._write()
        code = self._child.wait()
        if not self._finished.is_set():
            self._fail(f"the packing process ended with code {code}")
        self._finished.wait()
        if self._answered < self._sent:
            self._fail(f"{self._sent - self._answered} segments were not packed")
        manifest.complete = True
        self._write()
        self.done = True

    def _fail(self, error: str) -> None:
        self.error = error
        self._manifest.errors.append(error)

    def _write(self) -> None:
        try:
            write_manifest(self._directory, self._manifest)
        except OSError as error:
            self.error = f"cannot write the manifest: {error}"
