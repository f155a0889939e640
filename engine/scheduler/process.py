"""Scheduler rank process: the pure core, the model, and the sockets around them.

Path: router/process.py -> here -> detokenizer/process.py. TP rank 0 of a dp group plans each step
and sends the plan to its followers over ipc; every rank of the group runs it.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import sys
import time
import uuid
from collections import defaultdict, deque
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import psutil

from engine import messages as m
from engine.config import EngineConfig
from engine.detokenizer.stops import StopChecker
from engine.errors import QuarterdeckError
from engine.latency import Delays
from engine.model.runner import ModelRunner, make_runner, warm_up
from engine.process_guard import StopFlag, die_with_parent, report_ready, set_up_logging
from engine.router.dispatch import detokenizer_of
from engine.scheduler.control import Place, RankControl, Requests
from engine.scheduler.core import SchedulerCore
from engine.scheduler.plan import StepPlan
from engine.scheduler.ranks import make_group
from engine.tokenizer import Tokenizer
from engine.weights.checkpoint import WeightError
from engine.weights.groups import Groups
from engine.weights.update import Stager
from engine.wire import Codec, PullSocket, PushSocket

log = logging.getLogger(__name__)

REPORT_S = 0.5
CHANGE_REPORT_S = 0.02
IDLE_WAIT_S = 0.25
BUSY_WAIT_S = 0.005  # while a thread of a control call works: its answer is not kept waiting
BACKLOG = 1_000  # batches that no detokenizer took; beyond it the rank stops planning
PLANS = Codec([StepPlan, m.RankCall])
NO_EPOCH = 0  # the model's own weights, where those of the epoch could not be loaded


class Meter:
    """Tokens per second over the last reports, and the newest step's duration."""

    def __init__(self) -> None:
        self.step_s = 0.0
        self._marks: deque[tuple[float, int]] = deque(maxlen=6)

    def rate(self, now: float, total_tokens: int) -> float:
        self._marks.append((now, total_tokens))
        (first_at, first), (last_at, last) = self._marks[0], self._marks[-1]
        return (last - first) / (last_at - first_at) if last_at > first_at else 0.0


class Reporter:
    """Publishes this rank's heartbeat and load to the router."""

    def __init__(self, socket: PushSocket, *, dp: int, tp: int, start: int) -> None:
        self._socket = socket
        self._identity: dict[str, Any] = {
            "dp": dp,
            "tp": tp,
            "generation": start,
            "pid": os.getpid(),
        }
        self._process = psutil.Process()
        self._sent_at = 0.0
        self._busy = 0

    def wait_s(self, now: float, busy: int) -> float:
        """Seconds until the next report. ``busy``: requests here; a change of it is told soon."""
        rhythm_s = REPORT_S if busy == self._busy else CHANGE_REPORT_S
        return max(0.0, self._sent_at + rhythm_s - now)

    def due(self, now: float, busy: int) -> bool:
        return self.wait_s(now, busy) == 0.0

    def send(self, now: float, busy: int = 0, **load: Any) -> None:
        self._sent_at, self._busy = now, busy
        rss = self._process.memory_info().rss
        self._socket.send(m.RankLoad(**self._identity, at=now, rss_bytes=rss, **load))


class Leader:
    """TP rank 0 of one dp group."""

    def __init__(self, config: EngineConfig, runner: ModelRunner, *, dp: int, start: int) -> None:
        self.config, self.runner, self.dp = config, runner, dp
        self._tokenizer = Tokenizer.load(Path(config.model_path))
        self.core = SchedulerCore(
            config.limits,
            runner.info,
            dp=dp,
            stop_checker=self._stop_checker,
            epoch=runner.epoch,
        )
        self._inbox = PullSocket(config.scheduler_address(dp, start))
        self._router = PushSocket(config.router_reply_address)
        self._detokenizers = [
            PushSocket(config.detokenizer_address(i)) for i in range(config.detokenizers)
        ]
        self._followers = [
            PushSocket(config.plan_address(dp, tp, start)) for tp in range(1, config.tp)
        ]
        self._backlog: list[deque[m.BatchTokenIDOutput]] = [deque() for _ in self._detokenizers]
        self._reporter = Reporter(self._router, dp=dp, tp=0, start=start)
        self._control = _control(
            config, runner, Place(dp, 0, config.tp), self._router, self._report, self.core,
            forward=self._to_followers,
        )  # fmt: skip
        self._meter = Meter()
        self._steps = 0
        self._strange: set[type] = set()  # messages for somebody else, each named once in the log

    def _stop_checker(self, sampling: m.SamplingParams) -> StopChecker | None:
        if not sampling.stop and not sampling.stop_regex:
            return None
        return StopChecker(sampling, self._tokenizer)

    # ------------------------------------------------------------------ the loop

    def run(self, stop: StopFlag) -> None:
        while not stop.requested:
            if self.core.idle:
                wait_s = self._reporter.wait_s(time.time(), self._busy)
                self._inbox.wait(BUSY_WAIT_S if self._control.busy else wait_s)
            for message in self._inbox.drain():
                self._handle(message)
            self._control.collect()
            self._step()
            self._send()
            if self._reporter.due(time.time(), self._busy):
                self._report()

    def _step(self) -> None:
        if max(map(len, self._backlog)) > BACKLOG:
            time.sleep(0.01)  # the detokenizer is behind or restarting: make nothing more
            return
        commands = self._control.take_commands()
        plan = self.core.plan(time.time())
        if plan is None:
            if not commands:
                return
            plan = self.core.bare_plan()
        plan.commands = commands
        plan.tapped = self._control.recorder.taps(plan)
        self._to_followers(plan)
        self._control.before_forward(plan)
        result = self._control.recorder.forward(plan)
        self._meter.step_s = result.seconds
        self._steps = plan.step
        self.core.commit(plan, result, time.time())

    def close(self) -> None:
        self._control.recorder.close()

    def _to_followers(self, message: StepPlan | m.RankCall) -> None:
        for follower in self._followers:
            follower.send(message)

    def _send(self) -> None:
        """Ends go out before their rows: whoever has its answer may reuse the rid at once."""
        if ended := self.core.take_ended():
            self._control.recorder.requests_ended(ended)
            self._router.send(m.RequestEnded(rids=ended, dp=self.dp))
        batches: dict[int, list[m.TokenIDRow]] = defaultdict(list)
        for row in self.core.take_rows():
            batches[detokenizer_of(row.rid, len(self._detokenizers))].append(row)
        for index, rows in batches.items():
            self._backlog[index].append(m.BatchTokenIDOutput(rows=rows))
        for socket, backlog in zip(self._detokenizers, self._backlog, strict=True):
            while backlog and socket.send(backlog[0]):
                backlog.popleft()

    @property
    def _busy(self) -> int:
        load = self.core.load()
        return load.running + load.waiting

    def _report(self) -> None:
        now = time.time()
        load = self.core.load()
        self._reporter.send(
            now,
            busy=load.running + load.waiting,
            state="paused" if self.core.paused else "running",
            epoch=self.runner.epoch,
            tokens_per_s=self._meter.rate(now, load.output_tokens),
            step=self._steps,
            step_s=self._meter.step_s,
            ttft=_histogram(self.core.ttft),
            itl=_histogram(self.core.itl),
            **dataclasses.asdict(load),
        )

    # ------------------------------------------------------------------ messages

    def _handle(self, message: Any) -> None:
        try:
            match message:
                case m.TokenizedGenerateReqInput():
                    self.core.accept(message, time.time())
                case m.EndRequests():
                    self.core.abort(
                        message.rids, message.reason, now=time.time(), silent=message.silent
                    )
                case m.RankCall():
                    self._control.handle(message)
                case _ if type(message) not in self._strange:
                    self._strange.add(type(message))
                    log.warning("a rank does not take %s", type(message).__name__)
        except QuarterdeckError as error:
            self._end(message, error.status_code, error.err_type, error.message)
        except Exception:  # noqa: BLE001 - the boundary around the work of one request
            incident = uuid.uuid4().hex[:8]
            log.exception("internal_error %s while handling %s", incident, type(message).__name__)
            text = f"internal error {incident}; the rank's log has the details"
            self._end(message, 500, "internal_error", text)

    def _end(self, message: Any, status: int, kind: str, text: str) -> None:
        """The terminal row of a request that the core did not take."""
        if not isinstance(message, m.TokenizedGenerateReqInput):
            return
        finish = m.Finish(type="abort", status_code=status, err_type=kind, message=text)
        row = m.row_for(message, m.TokenIDRow, finish=finish)
        self._router.send(m.RequestEnded(rids=[message.rid], dp=self.dp))
        index = detokenizer_of(message.rid, len(self._detokenizers))
        self._backlog[index].append(m.BatchTokenIDOutput(rows=[row]))


def _histogram(delays: Delays) -> m.Histogram:
    return m.Histogram(counts=list(delays.counts), sum_s=delays.sum_s)


class Follower:
    """TP rank > 0: runs the leader's plans and control calls in their order."""

    def __init__(
        self, config: EngineConfig, runner: ModelRunner, *, dp: int, tp: int, start: int
    ) -> None:
        self._runner = runner
        self._plans = PullSocket(config.plan_address(dp, tp, start), codec=PLANS)
        self._router = PushSocket(config.router_reply_address)
        self._reporter = Reporter(self._router, dp=dp, tp=tp, start=start)
        self._control = _control(
            config, runner, Place(dp, tp, config.tp), self._router, self._report, None,
            forward=lambda call: None,
        )  # fmt: skip

    def run(self, stop: StopFlag) -> None:
        while not stop.requested:
            self._plans.wait(BUSY_WAIT_S if self._control.busy else IDLE_WAIT_S)
            for message in self._plans.drain():
                if isinstance(message, StepPlan):
                    self._control.before_forward(message)
                    self._control.recorder.forward(message)
                else:
                    self._control.handle(message)
            self._control.collect()
            if self._reporter.due(time.time(), 0):
                self._report()

    def close(self) -> None:
        self._control.recorder.close()

    def _report(self) -> None:
        self._reporter.send(time.time(), state="running", epoch=self._runner.epoch)


def _control(
    config: EngineConfig,
    runner: ModelRunner,
    place: Place,
    router: PushSocket,
    report: Callable[[], None],
    core: SchedulerCore | None,
    *,
    forward: Callable[[m.RankCall], None],
) -> RankControl:
    """The control side of one rank; ``core`` is None on followers."""
    groups = Groups(config.device)
    return RankControl(
        place,
        runner,
        Stager(runner.weights, groups, spools=place.tp == 0, dp=place.dp),
        groups,
        requests=None if core is None else Requests(core),
        reply=router.send,
        report=report,
        forward=forward,
    )


class Rank(Protocol):
    def run(self, stop: StopFlag) -> None: ...
    def close(self) -> None: ...


def main(config_path: str, dp: int, tp: int, start: int) -> None:
    config = EngineConfig.from_json(Path(config_path).read_bytes())
    die_with_parent(f"rank dp{dp} tp{tp}")
    set_up_logging(f"rank-dp{dp}-tp{tp}")
    stop = StopFlag()
    scripted = config.backend == "scripted"  # its ranks have nothing to tell each other
    group = None if scripted else make_group(config, dp=dp, tp=tp, start=start)
    runner = make_runner(config, dp=dp, tp=tp, group=group, epoch=config.epoch)
    _load_weights(config, runner)
    if not scripted:
        warm_up(runner)
    rank: Rank
    if tp == 0:
        rank = Leader(config, runner, dp=dp, start=start)
    else:
        rank = Follower(config, runner, dp=dp, tp=tp, start=start)
    report_ready(
        {
            "epoch": runner.epoch,
            "max_context": runner.info.max_context,
            "vocab_size": runner.info.vocab_size,
            "architecture": runner.info.architecture,
            "backend": runner.info.backend,
            "dtype": runner.info.dtype,
            "weight_form": runner.info.weight_form,
            "eos_token_ids": list(runner.info.eos_token_ids),
            "parameter_bytes": runner.info.parameter_bytes,
            "kv_tokens": runner.info.num_blocks * runner.info.block_size,
        }
    )
    rank.run(stop)
    rank.close()
    runner.close()


def _load_weights(config: EngineConfig, runner: ModelRunner) -> None:
    """The weights of this start's epoch, where they are not the model's own.

    When they cannot be loaded the rank says so with its epoch; the router then decides.
    """
    if config.weight_paths in ((), (config.model_path,)):
        return
    stager = Stager(runner.weights, Groups(config.device), spools=False, dp=0)
    try:
        read = stager.stage("start", config.weight_paths)["checksum"]
        if config.weight_checksum not in ("", read):
            raise WeightError(f"they read as {read}, not {config.weight_checksum}")
    except WeightError as error:
        log.error("the weights of epoch %d cannot be loaded: %s", config.epoch, error.message)
        runner.epoch = NO_EPOCH
        return
    stager.commit("start")


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:5]))
