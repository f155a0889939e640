"""Control calls on one rank: what the router asks, done between steps or on threads beside them.

Path: router/control.py fans a ``RankCall`` out to tp rank 0 -> here -> over the plan sockets to the
followers, where this runs too. Every rank answers the router with one ``RankReply``. A commit of
weights travels as a command in the next step plan, so all ranks of a group switch before the same
forward. A failure is an answer that names the reason; only a commit that breaks half way ends the
rank, for half-copied weights must not serve.
"""

from __future__ import annotations

import dataclasses
import gc
import logging
import os
import queue
import threading
import time
import uuid
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Any

from engine import messages as m
from engine.artifacts import Rank
from engine.errors import BadRequest, Conflict, QuarterdeckError
from engine.model.runner import ModelRunner
from engine.scheduler.core import SchedulerCore
from engine.scheduler.memory import KV_CACHE, Memory
from engine.scheduler.plan import Commands, InBand, StepPlan, SwitchWeights
from engine.scheduler.recording import Recorder
from engine.weights.groups import Groups
from engine.weights.update import Stager

log = logging.getLogger(__name__)

BACKGROUND_NICE = 5  # staging yields the CPU to the step thread, three to one
MAX_SLOW_DOWN_S = 5.0  # a longer sleep would look like a dead rank
RELOAD = "reload"  # staging id of weights that come back after their memory was released
Answer = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Place:
    """Which rank this is, in a group of ``tensor_ranks``."""

    dp: int
    tp: int
    tensor_ranks: int


class Jobs:
    """Work beside serving, each piece on a daemon thread; results come back to the step thread."""

    def __init__(self) -> None:
        self._done: queue.SimpleQueue[tuple[Future[Answer], Callable[[Future[Answer]], None]]]
        self._done = queue.SimpleQueue()
        self.open = 0

    def start(self, work: Callable[[], Answer], then: Callable[[Future[Answer]], None]) -> None:
        """``then`` runs within ``collect``, with the future of ``work``, which is done."""
        future: Future[Answer] = Future()

        def run() -> None:
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), BACKGROUND_NICE)
            try:
                future.set_result(work())
            except BaseException as error:  # noqa: BLE001 - raised again on the step thread
                future.set_exception(error)
            self._done.put((future, then))

        self.open += 1
        threading.Thread(target=run, name="control-job", daemon=True).start()

    def collect(self) -> None:
        while not self._done.empty():
            future, then = self._done.get()
            self.open -= 1
            then(future)


class Requests:
    """What control calls do to the requests of a dp group; lives on tp rank 0."""

    def __init__(self, core: SchedulerCore) -> None:
        self._core = core

    def pause(self, op: m.PauseRank) -> Answer:
        self._core.pause(op.mode, time.time())
        return self._live()

    def resume(self, op: m.ResumeRank) -> Answer:
        self._core.resume()
        return self._live()

    def flush(self, op: m.FlushRank) -> Answer:
        return dataclasses.asdict(self._core.flush_cache())

    def list(self, op: m.ListRequests) -> Answer:
        return {"requests": [dataclasses.asdict(view) for view in self._core.requests()]}

    def make_ready(self, op: m.CommitWeights) -> None:
        """The next plan runs under ``op.epoch``."""
        if op.retract:
            self._core.retract_all()
        if op.flush:
            self._core.flush_cache()
        self._core.set_epoch(op.epoch)

    def check_release(self, op: m.ReleaseMemory) -> None:
        """Raises Conflict while requests run, or hold KV that is to go. Nothing stays cached."""
        if not self._core.paused:
            raise Conflict("generation is not paused")
        if KV_CACHE not in op.tags:
            return
        if kept := self._core.flush_cache().kept:
            raise Conflict(f"live requests hold {kept} KV blocks: pause with abort or retract")

    def _live(self) -> Answer:
        load = self._core.load()
        return {"running": load.running, "waiting": load.waiting}


class RankControl:
    """One rank's end of control calls; every method runs on the step thread."""

    def __init__(
        self,
        place: Place,
        runner: ModelRunner,
        stager: Stager,
        groups: Groups,
        *,
        requests: Requests | None,
        reply: Callable[[m.RankReply], object],
        report: Callable[[], None],
        forward: Callable[[m.RankCall], None],
    ) -> None:
        """``requests``: None on followers. ``report`` publishes this rank's load at once;
        ``forward`` passes a call on to the followers."""
        self._place, self._runner, self._stager, self._groups = place, runner, stager, groups
        self._requests = requests
        self._reply, self._report, self._forward = reply, report, forward
        self._memory = Memory(runner)
        self._jobs = Jobs()
        self.recorder = Recorder(
            Rank(dp=place.dp, tp=place.tp), runner, leads=place.tp == 0, answer=self._recorded
        )
        self._commands: list[Commands] = []
        self._sleep_s = 0.0
        self._now: dict[type, Callable[[Any], Answer]] = {
            m.DropWeights: self._drop,
            m.ReadWeights: self._read,
            m.ReleaseMemory: self._release,
            m.SlowDown: self._slow_down,
            m.FreezeGC: self._freeze_gc,
            m.SetLogging: self._set_logging,
            m.WriteDump: self.recorder.write_dump,
            m.ListDumpPoints: self.recorder.list_points,
            **_request_calls(requests),
        }
        self._on_thread: dict[type, Callable[[Any], Answer]] = {
            m.PrepareWeights: stager.prepare,
            m.SealWeights: lambda op: stager.seal(op.staging_id),
            m.JoinGroup: self._join,
            m.LeaveGroup: self._leave,
            m.ResumeMemory: self._restore,
            m.PrepareDump: self.recorder.prepare_dump,
        }
        self._in_band: dict[type, Callable[[Any], Answer]] = {
            m.StartProfile: self.recorder.start_profile,
            m.ArmDump: self.recorder.arm_dump,
            m.StopRecording: self.recorder.stop,
        }

    # ------------------------------------------------------------------ the loop's side

    @property
    def busy(self) -> bool:
        """Threads work: ``collect`` soon."""
        return self._jobs.open > 0 or self.recorder.busy

    def collect(self) -> None:
        """Answers for threads and recordings that have finished."""
        self._jobs.collect()
        self._commands += self.recorder.collect()

    def take_commands(self) -> list[Commands]:
        """For the next plan; empty on followers, who find them there."""
        commands, self._commands = self._commands, []
        return commands

    def before_forward(self, plan: StepPlan) -> None:
        """What the plan's commands ask, on every rank of the group alike."""
        if self._sleep_s:
            time.sleep(self._sleep_s)
        for command in plan.commands:
            if isinstance(command, SwitchWeights):
                self._switch(command)
            else:
                self._attempt(command.call_id, partial(self._in_band[type(command.op)], command.op))

    def handle(self, call: m.RankCall) -> None:
        """Answers now or, for what takes time, from a later ``collect``."""
        op = call.op
        if self._requests is not None and (refusal := self._veto(op, self._requests)):
            self._refuse_for_group(call.call_id, refusal)
        elif isinstance(op, m.CommitWeights):
            self._commands.append(
                SwitchWeights(
                    call_id=call.call_id,
                    staging_id=op.staging_id,
                    epoch=op.epoch,
                    empty_cache=op.empty_cache,
                )
            )
        elif isinstance(op, m.StartProfile | m.ArmDump | m.StopRecording):
            self._commands.append(InBand(call_id=call.call_id, op=op))
        else:
            self._forward(call)
            self._run(call.call_id, op)

    def _run(self, call_id: str, op: m.RankOps) -> None:
        if isinstance(op, m.WaitRecording):
            self._wait(call_id, op)
            return
        if type(op) in self._now:
            work = self._now[type(op)]
            self._attempt(call_id, lambda: work(op))
            return
        slow = self._on_thread[type(op)]
        finish = self._become_resident if isinstance(op, m.ResumeMemory) else _result_of
        self._jobs.start(
            lambda: slow(op), lambda done: self._attempt(call_id, lambda: finish(done))
        )

    # ------------------------------------------------------------------ answers

    def _attempt(self, call_id: str, work: Callable[[], Answer]) -> None:
        try:
            result = work()
        except QuarterdeckError as error:
            self._refuse(call_id, error)
        except Exception:  # noqa: BLE001 - the boundary around the work of one control call
            incident = uuid.uuid4().hex[:8]
            log.exception("internal_error %s in a control call", incident)
            text = f"internal error {incident}; the rank's log has the details"
            self._refuse(call_id, QuarterdeckError(text))
        else:
            self._answer(call_id, result=result)

    def _wait(self, call_id: str, op: m.WaitRecording) -> None:
        try:
            self.recorder.wait(op, call_id)
        except QuarterdeckError as error:
            self._refuse(call_id, error)

    def _recorded(self, call_id: str, result: Answer) -> None:
        self._answer(call_id, result=result)

    def _refuse(self, call_id: str, error: QuarterdeckError, tp: int | None = None) -> None:
        told = {"status_code": error.status_code, "err_type": error.err_type}
        self._answer(call_id, success=False, message=error.message, result=told, tp=tp)

    def _answer(
        self,
        call_id: str,
        *,
        result: Answer,
        success: bool = True,
        message: str = "",
        tp: int | None = None,
    ) -> None:
        if not call_id:
            return  # the router wants no answer
        answer = m.RankAnswer(
            dp=self._place.dp,
            tp=self._place.tp if tp is None else tp,
            success=success,
            message=message,
            result=result,
        )
        self._reply(m.RankReply(call_id=call_id, answer=answer))

    def _veto(self, op: m.RankOps, requests: Requests) -> QuarterdeckError | None:
        """Why the group must not do this, as tp rank 0 decides; what it asks of requests is done.

        Followers are not asked: what they hold is what this rank holds.
        """
        try:
            match op:
                case m.CommitWeights():
                    self._check_commit(op)
                    requests.make_ready(op)
                case m.ReleaseMemory():
                    requests.check_release(op)
                case m.ResumeRank() if self._memory.absent:
                    raise Conflict(f"{' and '.join(self._memory.absent)} must be resumed first")
        except QuarterdeckError as error:
            return error
        return None

    def _check_commit(self, op: m.CommitWeights) -> None:
        if not self._stager.is_sealed(op.staging_id):
            raise Conflict("this rank holds no such weights; it may have restarted")
        if not self._memory.takes_weights(self._stager.is_complete(op.staging_id)):
            raise Conflict("the memory of the weights is released: resume it first")

    def _refuse_for_group(self, call_id: str, error: QuarterdeckError) -> None:
        for tp in range(self._place.tensor_ranks):
            self._refuse(call_id, error, tp)

    # ------------------------------------------------------------------ weights

    def _switch(self, command: SwitchWeights) -> None:
        began = time.perf_counter()
        self.recorder.weights_switch(command.epoch)
        if self._stager.commit(command.staging_id):
            self._memory.loaded()
        self._runner.epoch = command.epoch
        if command.empty_cache:
            self._runner.trim()
        seconds = round(time.perf_counter() - began, 4)
        self._report()  # before the answer: whoever has that sees the new epoch everywhere
        self._answer(command.call_id, result={"epoch": command.epoch, "seconds": seconds})

    def _drop(self, op: m.DropWeights) -> Answer:
        self._stager.drop(op.staging_id)
        return {}

    def _read(self, op: m.ReadWeights) -> Answer:
        if self._memory.absent:
            raise Conflict("memory is released: resume it first")
        return {"values": self._runner.weights.read(op.name, op.truncate_size)}

    def _join(self, op: m.JoinGroup) -> Answer:
        rank = op.rank_offset + self._place.dp * self._place.tensor_ranks + self._place.tp
        self._groups.join(op, rank)
        return {"rank": rank}

    def _leave(self, op: m.LeaveGroup) -> Answer:
        self._groups.leave(op.group_name)
        return {}

    # ------------------------------------------------------------------ memory

    def _release(self, op: m.ReleaseMemory) -> Answer:
        self._memory.release(op.tags)
        return {"released": self._memory.absent}

    def _restore(self, op: m.ResumeMemory) -> Answer:
        """On a thread; nothing computes meanwhile, for generation is paused."""
        if self._memory.restore(op.tags):
            return self._stager.stage(RELOAD, op.paths)
        return {}

    def _become_resident(self, done: Future[Answer]) -> Answer:
        if done.result():
            self._stager.commit(RELOAD)
            self._memory.loaded()
        return {"released": self._memory.absent}

    # ------------------------------------------------------------------ small ones

    def _slow_down(self, op: m.SlowDown) -> Answer:
        if not 0 <= op.seconds <= MAX_SLOW_DOWN_S:
            raise BadRequest(f"forward_sleep_time must be in 0 .. {MAX_SLOW_DOWN_S:g} s")
        self._sleep_s = op.seconds
        return {}

    def _freeze_gc(self, op: m.FreezeGC) -> Answer:
        gc.collect()
        gc.freeze()
        return {"objects": gc.get_freeze_count()}

    def _set_logging(self, op: m.SetLogging) -> Answer:
        logging.getLogger().setLevel(op.level.upper())
        return {}


def _result_of(done: Future[Answer]) -> Answer:
    return done.result()


def _request_calls(requests: Requests | None) -> dict[type, Callable[[Any], Answer]]:
    if requests is None:  # tp rank 0 does it for the group
        kinds = (m.PauseRank, m.ResumeRank, m.FlushRank, m.ListRequests)
        return dict.fromkeys(kinds, lambda op: {})
    return {
        m.PauseRank: requests.pause,
        m.ResumeRank: requests.resume,
        m.FlushRank: requests.flush,
        m.ListRequests: requests.list,
    }
