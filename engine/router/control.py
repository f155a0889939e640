"""Control calls: one at a time where they change state, each with exactly one answer. Pure.

An operation is a generator. It yields what it waits for, a ``FanOut`` to ranks or an ``Until`` a
condition, and returns its ``Outcome``; the desk sends, gathers, watches deadlines and resumes it.
So a whole two-phase update reads from top to bottom, and a test drives it without sockets or
clocks.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterable
from dataclasses import dataclass, field
from typing import Any

from engine.messages import Call, RankAnswer, RankOp

KEEP_OUTCOMES_S = 3600.0


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a call ended; becomes its ``ControlReply``."""

    success: bool = True
    status_code: int = 200
    err_type: str = ""
    message: str = ""
    result: dict[str, Any] = field(default_factory=dict)
    ranks: list[RankAnswer] = field(default_factory=list)


def refused(status_code: int, err_type: str, message: str, **result: Any) -> Outcome:
    return Outcome(False, status_code, err_type, message, result)


@dataclass(frozen=True, slots=True)
class FanOut:
    """Ask every rank of these groups; resumed with one ``RankAnswer`` per rank, in rank order.

    A rank that dies or stays silent until the deadline answers with ``success`` false.
    """

    op: RankOp
    groups: list[int]
    deadline: float


@dataclass(frozen=True, slots=True)
class Until:
    """Resumed with True as soon as ``holds()``, with False at the deadline."""

    holds: Callable[[], bool]
    deadline: float


Wait = FanOut | Until
Operation = Generator[Wait, Any, Outcome]


@dataclass(slots=True)
class Gathering:
    """Answers to one fan-out."""

    expected: list[tuple[int, int]]
    answers: dict[tuple[int, int], RankAnswer] = field(default_factory=dict)

    @property
    def complete(self) -> bool:
        return len(self.answers) == len(self.expected)

    def ordered(self) -> list[RankAnswer]:
        return [self.answers[rank] for rank in self.expected]

    def fail_open(self, ranks: Iterable[tuple[int, int]], why: str) -> None:
        for dp, tp in ranks:
            if (dp, tp) in self.expected and (dp, tp) not in self.answers:
                self.answers[dp, tp] = RankAnswer(dp=dp, tp=tp, success=False, message=why)


@dataclass(slots=True)
class Running:
    """An operation under way and everybody who waits for its outcome."""

    name: str
    operation: Operation
    exclusive: bool
    started_at: float
    deadline: float
    key: str | None
    job: str
    reply: Callable[[Outcome], None]
    wait: Wait | None = None
    gathering: Gathering | None = None
    call_id: str = ""


@dataclass(slots=True)
class Known:
    """What an idempotency key stands for: ``outcome`` is None while it runs."""

    at: float
    outcome: Outcome | None = None
    waiting: list[Callable[[Outcome], None]] = field(default_factory=list)


class ControlDesk:
    """Runs operations. ``send`` delivers an op to one group: (call id, op, dp) -> delivered."""

    def __init__(
        self,
        *,
        tensor_ranks: int,
        send: Callable[[str, RankOp, int], bool],
        on_change: Callable[[], None] = lambda: None,
    ) -> None:
        self._tp = tensor_ranks
        self._send = send
        self._on_change = on_change
        self._queue: deque[Running] = deque()
        self._running: list[Running] = []
        self._by_call: dict[str, Running] = {}
        self._known: dict[str, Known] = {}
        self._calls = 0
        self.late_answers = 0

    # ------------------------------------------------------------------ starting

    @property
    def open_exclusive(self) -> Running | None:
        """The state-changing operation that runs now."""
        return next((running for running in self._running if running.exclusive), None)

    def submit(
        self,
        name: str,
        call: Call,
        operation: Operation,
        reply: Callable[[Outcome], None],
        *,
        exclusive: bool,
        now: float,
    ) -> None:
        """Starts ``operation`` now, or after the exclusive ones before it."""
        if call.key:
            known = self._known.get(call.key)
            if known is not None:
                operation.close()
                if known.outcome is not None:
                    reply(known.outcome)
                else:
                    known.waiting.append(reply)
                return
            self._known[call.key] = Known(at=now)
        running = Running(name, operation, exclusive, now, call.deadline, call.key, call.id, reply)
        if exclusive and (self._queue or self.open_exclusive):
            self._queue.append(running)
        else:
            self._start(running, now)

    def outcome_of(self, key: str) -> Known | None:
        return self._known.get(key)

    def _start(self, running: Running, now: float) -> None:
        self._running.append(running)
        self._resume(running, None, now)

    # ------------------------------------------------------------------ resuming

    def _resume(self, running: Running, value: Any, now: float) -> None:
        """Runs the operation until it waits for something that is not there yet."""
        self._by_call.pop(running.call_id, None)
        while True:
            try:
                wait = running.operation.send(value)
            except StopIteration as end:
                self._finish(running, end.value, now)
                return
            running.wait, running.gathering, running.call_id = wait, None, ""
            if isinstance(wait, FanOut):
                gathering = self._fan_out(running, wait)
                if not gathering.complete:
                    return
                value = gathering.ordered()
            elif wait.holds():
                value = True
            else:
                return

    def _fan_out(self, running: Running, wait: FanOut) -> Gathering:
        self._calls += 1
        running.call_id = f"c{self._calls}"
        gathering = Gathering([(dp, tp) for dp in wait.groups for tp in range(self._tp)])
        running.gathering = gathering
        self._by_call[running.call_id] = running
        for dp in wait.groups:
            if not self._send(running.call_id, wait.op, dp):
                gathering.fail_open(self._ranks_of(dp), "the rank is down or takes no messages")
        return gathering

    def _ranks_of(self, dp: int) -> list[tuple[int, int]]:
        return [(dp, tp) for tp in range(self._tp)]

    def _finish(self, running: Running, outcome: Outcome, now: float) -> None:
        self._running.remove(running)
        running.reply(outcome)
        if running.key:
            known = self._known[running.key]
            known.outcome, known.at = outcome, now
            for reply in known.waiting:
                reply(outcome)
            known.waiting.clear()
        self._on_change()
        if running.exclusive and self._queue and self.open_exclusive is None:
            self._start(self._queue.popleft(), now)

    # ------------------------------------------------------------------ events

    def on_answer(self, call_id: str, answer: RankAnswer, now: float) -> None:
        running = self._by_call.get(call_id)
        if running is None or running.gathering is None:
            self.late_answers += 1
            return
        running.gathering.answers[answer.dp, answer.tp] = answer
        self._resume_if_complete(running, now)

    def on_group_down(self, dp: int, why: str, now: float) -> None:
        for running in list(self._by_call.values()):
            if running.gathering is not None:
                running.gathering.fail_open(self._ranks_of(dp), why)
                self._resume_if_complete(running, now)

    def tick(self, now: float) -> None:
        """Deadlines and conditions; call it often."""
        for running in list(self._running):
            wait = running.wait
            if isinstance(wait, Until):
                if wait.holds():
                    self._resume(running, True, now)
                elif now >= wait.deadline:
                    self._resume(running, False, now)
            elif isinstance(wait, FanOut) and running.gathering and now >= wait.deadline:
                running.gathering.fail_open(
                    running.gathering.expected, "no answer before the deadline"
                )
                self._resume_if_complete(running, now)
        for key in [
            k
            for k, known in self._known.items()
            if known.outcome is not None and now - known.at > KEEP_OUTCOMES_S
        ]:
            del self._known[key]

    def _resume_if_complete(self, running: Running, now: float) -> None:
        gathering = running.gathering
        if gathering is not None and gathering.complete and running in self._running:
            self._resume(running, gathering.ordered(), now)
