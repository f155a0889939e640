"""A small engine inside this process: the real router on a thread, and ranks that only say yes.

The fakes stand at the edge, where ranks would be: they take ``RankCall`` and report loads.
"""

from __future__ import annotations

import contextlib
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from engine import messages as m
from engine.config import EngineConfig
from engine.router.process import Router, RouterSockets
from engine.runfile import RunFile, run_file_path, write_run_file
from engine.wire import PullSocket, PushSocket
from tests.engine.model.tiny import make_scripted_dir

MODEL = {"max_context": 4096, "vocab_size": 258}


class Stop:
    requested = False


class FakeRanks:
    """Every rank of an engine. ``answer`` may be replaced; ``calls`` is what they were asked."""

    def __init__(self, config: EngineConfig) -> None:
        self.config = config
        self.calls: list[tuple[int, m.RankOp]] = []
        self.epoch = dict.fromkeys(range(config.dp), 1)
        self.silent = False
        self.answer: Callable[[int, int, m.RankOp], m.RankAnswer] = self.agree

    def agree(self, dp: int, tp: int, op: m.RankOp) -> m.RankAnswer:
        if isinstance(op, m.CommitWeights):
            self.epoch[dp] = op.epoch
        result: dict[str, Any] = {}
        if isinstance(op, m.ReadWeights):
            result = {"values": [0.5] * min(3, op.truncate_size)}
        elif isinstance(op, m.ListRequests):
            result = {"requests": []}
        elif isinstance(op, m.WaitRecording):
            result = {"reason": "recorded 2 steps", "error": "", "steps": 2, "tensors": 3}
        elif not isinstance(op, m.PauseRank | m.ResumeRank):
            result = {"checksum": "sha", "bytes": 10, "names": 1, "complete": True}
        return m.RankAnswer(dp=dp, tp=tp, success=True, result=result)

    def refuse(self, dp: int, tp: int, op: m.RankOp) -> m.RankAnswer:
        return m.RankAnswer(dp=dp, tp=tp, success=False, message="shape of lm_head differs")

    def run(self, stop: Stop) -> None:
        router = PushSocket(self.config.router_reply_address)
        inboxes = {dp: PullSocket(self.config.scheduler_address(dp, 1))
                   for dp in range(self.config.dp)}  # fmt: skip
        for dp in inboxes:
            for tp in range(self.config.tp):
                router.send(self._up(dp, tp))
        reported = 0.0
        while not stop.requested:
            for dp, inbox in inboxes.items():
                inbox.wait(0.002)
                for message in inbox.drain():
                    if isinstance(message, m.RankCall) and not self.silent:
                        self._reply(router, dp, message)
            if time.monotonic() - reported > 0.2:
                reported = time.monotonic()
                for dp in inboxes:
                    for tp in range(self.config.tp):
                        router.send(self._load(dp, tp))
        for inbox in inboxes.values():
            inbox.close()
        router.close()

    def _up(self, dp: int, tp: int) -> m.ProcessUp:
        address = self.config.scheduler_address(dp, 1)
        return m.ProcessUp(role="rank", index=dp, tp=tp, address=address, generation=1,
                           pid=1000 + dp, info={"epoch": self.epoch[dp]})  # fmt: skip

    def _load(self, dp: int, tp: int) -> m.RankLoad:
        return m.RankLoad(dp=dp, tp=tp, pid=1000 + dp, generation=1, state="running",
                          epoch=self.epoch[dp], running=3 - dp if tp == 0 else 0,
                          kv_total=1000, at=time.time())  # fmt: skip

    def _reply(self, router: PushSocket, dp: int, message: m.RankCall) -> None:
        self.calls.append((dp, message.op))
        for tp in range(self.config.tp):
            answer = self.answer(dp, tp, message.op)
            router.send(self._load(dp, tp))
            router.send(m.RankReply(call_id=message.call_id, answer=answer))


class InProcessEngine:
    """``run_file`` is what clients connect with."""

    def __init__(self, config: EngineConfig, ranks: FakeRanks) -> None:
        self.config = config
        self.ranks = ranks
        self.run_file = run_file_path(Path(config.home))
        self.router: Router | None = None
        self.worker: Any = None  # set by the fixture

    def wait_for_ranks(self, timeout_s: float = 10) -> None:
        """Until every rank has reported: who joins then learns it at once."""
        assert self.router is not None
        until = time.monotonic() + timeout_s
        while {view.state for view in self.router.state.rank_views()} != {"running"}:
            assert time.monotonic() < until
            time.sleep(0.005)


def _close(sockets: RouterSockets) -> None:
    """A router's process ends with its sockets; this one is a thread."""
    for inbox in list(sockets.outbox._sockets):
        sockets.outbox.forget(inbox)
    for dp in list(sockets._ranks):
        sockets.disconnect_rank(dp)
    for socket in (*sockets._detokenizers, sockets.requests, sockets.reports):
        socket.close()


@contextlib.contextmanager
def in_process_engine(home: Path, *, dp: int = 2, tp: int = 1) -> Iterator[InProcessEngine]:
    with tempfile.TemporaryDirectory(prefix="qd") as run_dir:
        config = EngineConfig(
            home=str(home),
            model_path=str(make_scripted_dir(home / "models" / "scripted")),
            backend="scripted",
            dp=dp,
            tp=tp,
            run_dir=run_dir,
            generation=1,
        )
        ranks = FakeRanks(config)
        engine = InProcessEngine(config, ranks)
        stop, ready = Stop(), threading.Event()

        def route() -> None:
            engine.router = Router(config)
            ready.set()
            engine.router.run(stop)
            _close(engine.router.sockets)

        threads = [threading.Thread(target=route), threading.Thread(target=ranks.run, args=[stop])]
        threads[0].start()
        ready.wait(10)
        threads[1].start()
        write_run_file(
            engine.run_file,
            RunFile(state="up", generation=1, pid=1, config=config, model=MODEL),
        )
        try:
            engine.wait_for_ranks()
            yield engine
        finally:
            stop.requested = True
            for thread in threads:
                thread.join(10)
