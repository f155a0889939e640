"""Control calls: one at a time where they change state, each with exactly one answer. Pure.

An operation is a generator. It yields what it waits for, a ``FanOut`` to ranks or an ``Until`` a
condition, and returns its ``Outcome``; the desk sends, gathers, watches deadlines and resumes it.
So a whole two-phase update reads from top to bottom, and a test drives it without sockets or
clocks.
"""

from __future__ import annotations

import logging
import uuid
from collections import deque
from collections.abc import Callable, Generator, Iterable
from dataclasses import dataclass, field
from typing import Any

from engine.messages import Call, RankAnswer, RankOp

log = logging.getLogger(__name__)

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


class Refusal(Exception):
    """Raised by an operation: it ends with this outcome."""

    def __init__(self, outcome: Outcome) -> None:
        super().__init__(outcome.message)
        self.outcome = outcome


def refused(status_code: int, err_type: str, message: str, **result: Any) -> Outcome:
    return Outcome(False, status_code, err_type, message, result)


def refusal(status_code: int, err_type: str, message: str, **result: Any) -> Refusal:
    return Refusal(refused(status_code, err_type, message, **result))


@dataclass(frozen=True, slots=True)
class FanOut:
    """Ask every rank of these groups; resumed with one ``RankAnswer`` per rank, in rank order.

    A rank that dies or stays silent until the deadline answers with ``success`` false. With
    ``fail_fast`` the first refusal ends the wait: what the others would say changes nothing.
    """

    op: RankOp
    groups: list[int]
    deadline: float
    fail_fast: bool = False


@dataclass(frozen=True, slots=True)
class Until:
    """Resumed with True as soon as ``holds()``, with False at the deadline."""

    holds: Callable[[], bool]
    deadline: float


@dataclass(frozen=True, slots=True)
class Say:
    """Answers the caller now; the operation goes on, and its outcome is known under its key."""

    outcome: Outcome


Wait = FanOut | Until | Say
Operation = Generator[Wait, Any, Outcome]


def at_once(work: Callable[[], Outcome]) -> Operation:
    """An operation that waits for nothing; ``work`` runs when its turn has come."""
    return work()
    yield  # makes this a generator


@dataclass(slots=True)
class Gathering:
    """Answers to one fan-out."""

    expected: list[tuple[int, int]]
    answers: dict[tuple[int, int], RankAnswer] = field(default_factory=dict)

    @property
    def complete(self) -> bool:
        return len(self.answers) == len(self.expected)

    def take(self, answer: RankAnswer) -> bool:
        """False for an answer that nobody waits for."""
        rank = answer.dp, answer.tp
        if rank not in self.expected or rank in self.answers:
            return False
        self.answers[rank] = answer
        return True

    def ordered(self) -> list[RankAnswer]:
        return [self.answers[rank] for rank in self.expected]

    def fail_open(self, ranks: Iterable[tuple[int, int]], why: str) -> None:
        for dp, tp in ranks:
            self.take(RankAnswer(dp=dp, tp=tp, success=False, message=why))


@dataclass(slots=True)
class Running:
    """An operation, waiting for its turn or under way, and who waits for its outcome."""

    name: str
    call: Call
    operation: Operation
    exclusive: bool
    reply: Callable[[Outcome], None]
    answered: bool = False
    wait: Wait | None = None
    gathering: Gathering | None = None
    call_id: str = ""

    @property
    def job(self) -> str:
        return self.call.key or self.call.id

    def answer(self, outcome: Outcome) -> None:
        if not self.answered:
            self.answered = True
            self.reply(outcome)


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
        on_idle: Callable[[], None] = lambda: None,
    ) -> None:
        """``on_idle`` is called when no state-changing operation is left."""
        self._tp = tensor_ranks
        self._send = send
        self._on_idle = on_idle
        self._queue: deque[Running] = deque()
        self._running: list[Running] = []
        self._by_call: dict[str, Running] = {}
        self._known: dict[str, Known] = {}
        self._calls = 0
        self._starting = False
        self.late_answers = 0

    # ------------------------------------------------------------------ starting

    @property
    def open_exclusive(self) -> Running | None:
        """The state-changing operation that runs now."""
        return next((running for running in self._running if running.exclusive), None)

    def open_of(self, names: Iterable[str]) -> Running | None:
        """An operation of one of these names that runs or waits for its turn."""
        wanted = frozenset(names)
        return next((r for r in (*self._running, *self._queue) if r.name in wanted), None)

    def submit(
        self,
        name: str,
        call: Call,
        operation: Operation,
        reply: Callable[[Outcome], None],
        *,
        exclusive: bool,
        now: float,
        conflict: Outcome | None = None,
    ) -> None:
        """Starts ``operation`` now, or after the exclusive ones before it.

        A key that is known already gets the outcome of its first call; else ``conflict``, if there
        is one, is the answer.
        """
        known = self._known.get(call.key) if call.key else None
        if known is not None:
            operation.close()
            if known.outcome is not None:
                reply(known.outcome)
            else:
                known.waiting.append(reply)
            return
        if conflict is not None:
            operation.close()
            reply(conflict)
            return
        if call.key:
            self._known[call.key] = Known(at=now)
        self._queue_or_start(Running(name, call, operation, exclusive, reply), now)

    def outcome_of(self, key: str) -> Known | None:
        return self._known.get(key)

    def _queue_or_start(self, running: Running, now: float) -> None:
        if not running.exclusive:
            self._start(running, now)
            return
        self._queue.append(running)
        self._start_next(now)

    def _start_next(self, now: float) -> None:
        """Exclusive operations in their order, as long as none of them has to wait."""
        if self._starting:
            return  # the loop below goes on
        self._starting = True
        while self._queue and self.open_exclusive is None:
            running = self._queue.popleft()
            if now >= running.call.deadline:
                self._expire(running, now)
            else:
                self._start(running, now)
        self._starting = False
        if self.open_exclusive is None:
            self._on_idle()

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
            except Refusal as end:
                self._finish(running, end.outcome, now)
                return
            except Exception:  # noqa: BLE001 - the boundary around the work of one call
                self._finish(running, _internal_error(running.name), now)
                return
            running.wait, running.gathering, running.call_id = wait, None, ""
            if isinstance(wait, Say):
                running.answer(wait.outcome)
                value = None
                continue
            if isinstance(wait, FanOut):
                gathering = self._fan_out(running, wait)
                if not gathering.complete:
                    return
                self._by_call.pop(running.call_id, None)
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
                self._end_early(running)
        return gathering

    def _ranks_of(self, dp: int) -> list[tuple[int, int]]:
        return [(dp, tp) for tp in range(self._tp)]

    def _finish(self, running: Running, outcome: Outcome, now: float) -> None:
        self._running.remove(running)
        running.answer(outcome)
        self._remember(running.call.key, outcome, now)
        if running.exclusive:
            self._start_next(now)

    def _remember(self, key: str | None, outcome: Outcome, now: float) -> None:
        if not key:
            return
        known = self._known[key]
        known.outcome, known.at = outcome, now
        for reply in known.waiting:
            reply(outcome)
        known.waiting.clear()

    def _expire(self, running: Running, now: float) -> None:
        """Its turn did not come in time: nothing of it was done, so its key may be used again."""
        running.operation.close()
        before = self.open_exclusive
        text = f"waited too long behind {before.name if before else 'others'}; nothing was done"
        outcome = refused(504, "deadline_exceeded", text)
        running.answer(outcome)
        self._remember(running.call.key, outcome, now)
        self._known.pop(running.call.key or "", None)

    # ------------------------------------------------------------------ events

    def on_answer(self, call_id: str, answer: RankAnswer, now: float) -> None:
        running = self._by_call.get(call_id)
        if running is None or running.gathering is None or not running.gathering.take(answer):
            self.late_answers += 1
            return
        self._end_early(running)
        self._resume_if_complete(running, now)

    def on_group_down(self, dp: int, why: str, now: float) -> None:
        for running in list(self._by_call.values()):
            if running.gathering is not None:
                running.gathering.fail_open(self._ranks_of(dp), why)
                self._end_early(running)
                self._resume_if_complete(running, now)

    def tick(self, now: float) -> None:
        """Deadlines and conditions; call it often."""
        for running in list(self._running):
            self._check_wait(running, now)
        for running in self._running:
            if now >= running.call.deadline and not running.answered:
                text = f"{running.name} goes on after its deadline, as job {running.job}"
                running.answer(refused(504, "deadline_exceeded", text, job=running.job))
        for running in [r for r in self._queue if now >= r.call.deadline]:
            self._queue.remove(running)
            self._expire(running, now)
        for key, known in list(self._known.items()):
            if known.outcome is not None and now - known.at > KEEP_OUTCOMES_S:
                del self._known[key]

    def _check_wait(self, running: Running, now: float) -> None:
        wait, gathering = running.wait, running.gathering
        if isinstance(wait, Until):
            if wait.holds():
                self._resume(running, True, now)
            elif now >= wait.deadline:
                self._resume(running, False, now)
        elif isinstance(wait, FanOut) and gathering is not None and now >= wait.deadline:
            gathering.fail_open(gathering.expected, "no answer before the deadline")
            self._resume_if_complete(running, now)

    @staticmethod
    def _end_early(running: Running) -> None:
        wait, gathering = running.wait, running.gathering
        if not isinstance(wait, FanOut) or gathering is None or not wait.fail_fast:
            return
        if not all(answer.success for answer in gathering.answers.values()):
            gathering.fail_open(gathering.expected, NOT_AWAITED)

    def _resume_if_complete(self, running: Running, now: float) -> None:
        gathering = running.gathering
        if gathering is not None and gathering.complete and running in self._running:
            self._resume(running, gathering.ordered(), now)


NOT_AWAITED = "another rank refused first"


def gathered(answers: list[RankAnswer], **result: Any) -> Outcome:
    """Success when every rank said so; else the first refusal, named by rank."""
    bad = [answer for answer in answers if not answer.success]
    if not bad:
        return Outcome(result=result, ranks=answers)
    first = next((answer for answer in bad if answer.message != NOT_AWAITED), bad[0])
    status = int(first.result.get("status_code", 400))
    return Outcome(
        False, status, str(first.result.get("err_type", "rank_refused")),
        f"rank dp{first.dp} tp{first.tp}: {first.message}", result, answers,
    )  # fmt: skip


def _internal_error(name: str) -> Outcome:
    incident = uuid.uuid4().hex[:8]
    log.exception("internal_error %s in %s", incident, name)
    text = f"internal error {incident}; the router's log has the details"
    return refused(500, "internal_error", text)
