"""File jobs: a program in a process of its own, under a memory limit and the job's lease.

Path: ``console.run_job`` (tasks.py) -> here -> ``python -m engine...``. The program writes to a
temporary name and renames, so a job that lost its process runs again from the start. It dies with
the Celery process that started it.
"""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import tempfile
import time
from typing import IO, Any

from django.conf import settings

from console.models import Job
from console.models.jobs import RENEW_S
from console.services import catalogue, jobs
from console.services.file_actions import FileAction
from console.services.sending import Outcome, failed
from engine.process_guard import PARENT_PID

log = logging.getLogger(__name__)

ATTEMPTS = 3
TICK_S = 0.1
SHOWN_CHARACTERS = 2000  # of what a program said before it failed


def run(job_id: int) -> None:
    """Takes the job, if it is free, and brings it to its end."""
    job = jobs.take(job_id)
    if job is None:
        return
    kind = catalogue.find(job.kind)
    assert issubclass(kind, FileAction), kind
    if job.attempt > ATTEMPTS:
        outcome: Outcome | None = failed(
            "process_lost", f"its process was lost {ATTEMPTS} times; it is not tried again"
        )
    else:
        job.note(f"attempt {job.attempt} on worker {job.owner}")
        outcome = _run_program(job, kind.read(job.args))
    if outcome is not None:
        _end(job, outcome)


def _end(job: Job, outcome: Outcome) -> None:
    job.state, job.message, job.result = outcome.state, outcome.message, outcome.result
    job.status_code = outcome.status_code
    job.note(f"{job.state}: {job.message}" if job.message else job.state)
    jobs.finish(job)


def _run_program(job: Job, action: FileAction) -> Outcome | None:
    """None when another owner took the job meanwhile."""
    command = [sys.executable, "-m", "console.guarded", "--memory", str(action.memory_bytes),
               f"job {job.pk}", *action.command()]  # fmt: skip
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        process = subprocess.Popen(
            command, cwd=settings.BASE_DIR, env={**os.environ, PARENT_PID: str(os.getpid())},
            stdin=subprocess.DEVNULL, stdout=out, stderr=err,
        )  # fmt: skip
        try:
            ours = _wait(job, process, time.monotonic() + action.deadline_s)
        finally:
            process.kill()
            process.wait()
        return _outcome(process.returncode, _text(out), _text(err)) if ours else None


def _wait(job: Job, process: subprocess.Popen[bytes], deadline: float) -> bool:
    """Until it ends; False as soon as the job is not ours. Past the deadline it is killed."""
    renew_at = time.monotonic() + RENEW_S
    while process.poll() is None and time.monotonic() < deadline:
        time.sleep(TICK_S)
        if time.monotonic() >= renew_at:
            renew_at = time.monotonic() + RENEW_S
            if not jobs.renew(job):
                log.warning("job %s has another owner now", job.pk)
                return False
    return True


def _text(file: IO[str]) -> str:
    file.seek(0)
    return file.read()


def _outcome(code: int, out: str, err: str) -> Outcome:
    """The last line on stdout is the result, or ``{"error": sentence}``."""
    try:
        result: dict[str, Any] = json.loads(out.splitlines()[-1])
    except (IndexError, ValueError):
        said = (err or out)[-SHOWN_CHARACTERS:].strip()
        why = f"was killed by signal {-code}" if code < 0 else f"ended with code {code}"
        return failed("program_failed", f"the program {why}: {said}" if said else
                      f"the program {why}", status_code=500)  # fmt: skip
    if "error" in result:
        return failed("refused", str(result["error"]), status_code=400)
    return Outcome(success=True, result=result)
