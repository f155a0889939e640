"""Detokenizer process: token rows in, text rows out, one message per web worker and drain.

Path: scheduler/process.py -> here -> client.py in the worker that asked. Ends that the router makes
come the same way, so that text that was held back goes out before them.

Run as ``python -m engine.detokenizer.process CONFIG.json INDEX``.
"""

from __future__ import annotations

import logging
import sys
import time
import uuid
from collections import defaultdict, deque
from pathlib import Path
from typing import Any

from engine import messages as m
from engine.config import EngineConfig
from engine.detokenizer.incremental import Detokenizer
from engine.detokenizer.outbox import Outbox
from engine.errors import QuarterdeckError
from engine.process_guard import StopFlag, die_with_parent, report_ready, set_up_logging
from engine.tokenizer import Tokenizer
from engine.wire import PullSocket, PushSocket, SocketMapping, terminate

log = logging.getLogger(__name__)

IDLE_WAIT_S = 0.2
RETRY_WAIT_S = 0.005  # while a worker takes nothing
DRAIN_MESSAGES = 256
LOG_EVERY_S = 60.0
GOODBYE_S = 1.0  # for what is pending at SIGTERM
QUIET_S = 0.1  # no message for so long: nothing is on its way


class DetokenizerProcess:
    """startup, main_loop, shutdown of detokenizer ``index``."""

    def __init__(self, config: EngineConfig, index: int, stop: StopFlag) -> None:
        self._config = config
        self._index = index
        self._stop = stop
        self._core = Detokenizer(Tokenizer.load(Path(config.model_path)))
        self._sockets = SocketMapping()
        self._outbox = Outbox(self._sockets.send_frame)
        self._failed: list[m.StrRow] = []
        self._reports: deque[m.RowsUndelivered] = deque()
        self._counters = {"messages": 0, "unexpected": 0, "internal_errors": 0}
        self._logged: dict[str, int] = {}
        self._logged_at = time.monotonic()

    def startup(self) -> None:
        """Binds; the path of a dead predecessor is taken over."""
        self._inbox = PullSocket(self._config.detokenizer_address(self._index))
        self._router = PushSocket(self._config.router_reply_address)

    def main_loop(self) -> None:
        while not self._stop.requested:
            self._inbox.wait(RETRY_WAIT_S if self._outbox.blocked else IDLE_WAIT_S)
            self.turn(time.monotonic())

    def turn(self, now: float) -> None:
        """One drain: decode, group by inbox, send; then what has waited."""
        rows: list[m.StrRow] = []
        for message in self._inbox.drain(DRAIN_MESSAGES):
            self._counters["messages"] += 1
            rows += self._handle(message)
        self._outbox.deliver(rows, now)
        for inbox in self._outbox.retry(now):
            log.warning("inbox %s took nothing for too long: evicted", inbox)
            self._report(inbox, self._give_up(inbox), evict=True)
        self._report_ended()
        while self._reports and self._router.send(self._reports[0]):
            self._reports.popleft()
        if now - self._logged_at >= LOG_EVERY_S:
            self._log_counters(now)

    def shutdown(self) -> None:
        """What was sent before the signal still goes out, within ``GOODBYE_S``."""
        deadline = time.monotonic() + GOODBYE_S
        while time.monotonic() < deadline:
            more = self._inbox.wait(QUIET_S)
            self.turn(time.monotonic())
            if not (more or self._outbox.blocked):
                break
        self._log_counters(time.monotonic())
        self._sockets.close()
        self._router.close()
        self._inbox.close()

    @property
    def counters(self) -> dict[str, int]:
        return {
            **self._counters,
            **self._core.counters,
            **self._outbox.counters,
            "malformed": self._inbox.malformed,
            "live": len(self._core),
            "sockets": len(self._sockets),
        }

    # ------------------------------------------------------------------ messages

    def _handle(self, message: Any) -> list[m.StrRow]:
        match message:
            case m.BatchTokenIDOutput() | m.BatchStrOutput():
                return [text for row in message.rows if (text := self._text_row(row)) is not None]
            case m.InboxGone():
                self._give_up(message.inbox)
            case _:
                self._counters["unexpected"] += 1
        return []

    def _text_row(self, row: m.TokenIDRow | m.StrRow) -> m.StrRow | None:
        try:
            return self._core.accept(row)
        except QuarterdeckError as error:
            return self._end(row, error.status_code, error.err_type, error.message)
        except Exception:  # noqa: BLE001 - the boundary around one request's row
            incident = uuid.uuid4().hex[:8]
            log.exception("internal_error %s in a row of request %s", incident, row.rid)
            self._counters["internal_errors"] += 1
            text = f"internal error {incident}; the detokenizer's log has the details"
            return self._end(row, 500, "internal_error", text)

    def _end(self, row: m.TokenIDRow | m.StrRow, status: int, kind: str, text: str) -> m.StrRow:
        self._core.forget(row.rid)
        finish = m.Finish(type="abort", status_code=status, err_type=kind, message=text)
        end = m.row_for(row, m.StrRow, finish=finish)
        if row.finish is None:
            self._failed.append(end)
        return end

    # ------------------------------------------------------------------ ends that are made here

    def _give_up(self, inbox: str) -> list[str]:
        """Nobody reads ``inbox``: its requests' rids, all forgotten."""
        self._outbox.forget(inbox)
        self._sockets.evict(inbox)
        return self._core.forget_inbox(inbox)

    def _report_ended(self) -> None:
        """Tells the router to free requests that ended here and still run in a rank."""
        by_inbox: dict[str, list[str]] = defaultdict(list)
        for row in (*self._outbox.take_slow(), *self._failed):
            self._core.forget(row.rid)
            by_inbox[row.http_worker_ipc].append(row.rid)
        self._failed.clear()
        for inbox, rids in by_inbox.items():
            self._report(inbox, rids, evict=False)

    def _report(self, inbox: str, rids: list[str], *, evict: bool) -> None:
        self._reports.append(m.RowsUndelivered(inbox=inbox, rids=rids, evict=evict))

    def _log_counters(self, now: float) -> None:
        counters = self.counters
        if counters != self._logged:
            log.info("counters: %s", " ".join(f"{k}={v}" for k, v in counters.items() if v))
        self._logged, self._logged_at = counters, now


def main(config_path: str, index: int) -> None:
    config = EngineConfig.from_json(Path(config_path).read_bytes())
    die_with_parent(f"detokenizer {index}")
    set_up_logging(f"detokenizer-{index}")
    process = DetokenizerProcess(config, index, StopFlag())
    process.startup()
    report_ready({"index": index, "address": config.detokenizer_address(index)})
    process.main_loop()
    process.shutdown()
    terminate()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
