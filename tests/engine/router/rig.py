"""Router and ranks in one process without sockets: real operations, ledger, rank control, scheduler
core and scripted model. A test sets the clock and decides who dies, stalls or loses a message.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable
from pathlib import Path

import msgspec

from engine import messages as m
from engine.config import EngineConfig, Limits
from engine.model.runner import make_runner
from engine.router.control import ControlDesk, Outcome
from engine.router.ledger import LedgerFile, Spool, load_ledger
from engine.router.operations import Operations
from engine.router.recording_files import drop_recording, open_recording
from engine.router.registry import Entry
from engine.router.state import EngineState
from engine.router.weights import Session
from engine.scheduler.control import Place, RankControl, Requests
from engine.scheduler.core import SchedulerCore
from engine.weights.checkpoint import WeightError, effective
from engine.weights.groups import Groups
from engine.weights.update import Stager
from tests.engine.model.tiny import make_scripted_dir
from tests.engine.weights.checkpoints import favourites, scripted_checkpoint


class Rank:
    """One rank process without its sockets."""

    def __init__(self, rig: Rig, dp: int, tp: int) -> None:
        ledger = load_ledger(rig.config)
        epoch = ledger.epoch_of(dp)
        config = msgspec.structs.replace(rig.config, epoch=epoch)
        self.rig, self.place = rig, Place(dp, tp, config.tp)
        self.runner = make_runner(config, dp=dp, tp=tp, group=None, epoch=epoch)
        self._load(ledger.epochs[epoch].paths, ledger.checksum_of(epoch))
        self.core = None
        if tp == 0:
            self.core = SchedulerCore(
                config.limits, self.runner.info, dp=dp, stop_checker=lambda _: None,
                epoch=self.runner.epoch,
            )  # fmt: skip
        self.stager = Stager(self.runner.weights, Groups("cpu"), spools=tp == 0, dp=dp)
        self.control = RankControl(
            self.place, self.runner, self.stager, Groups("cpu"),
            requests=Requests(self.core) if self.core else None,
            reply=self._reply, report=self._report, forward=self._forward,
        )  # fmt: skip
        self.inbox: list[m.RankCall] = []
        self.stopped = False  # SIGSTOP: takes messages, does nothing
        self.rows: list[m.TokenIDRow] = []

    def _load(self, paths, checksum) -> None:
        if paths == (self.rig.config.model_path,):
            return
        stager = Stager(self.runner.weights, Groups("cpu"), spools=False, dp=0)
        try:
            read = stager.stage("start", paths)["checksum"]
            if checksum not in ("", read):
                raise WeightError("changed")
        except WeightError:
            self.runner.epoch = 0
            return
        stager.commit("start")

    def _reply(self, reply: m.RankReply) -> None:
        self.rig.replies.append(reply)

    def _report(self) -> None:
        self.rig.state.ranks[self.place.dp, self.place.tp].load = m.RankLoad(
            dp=self.place.dp, tp=self.place.tp, pid=1, generation=1, state="running",
            epoch=self.runner.epoch, at=self.rig.clock,
        )  # fmt: skip

    def _followers(self) -> list[Rank]:
        if self.place.tp:
            return []
        return [self.rig.ranks[self.place.dp, tp] for tp in range(1, self.place.tensor_ranks)]

    def _forward(self, call: m.RankCall) -> None:
        for follower in self._followers():
            follower.inbox.append(call)

    def turn(self) -> bool:
        """One pass of the rank's loop; True if it did something."""
        if self.stopped:
            return False
        calls, self.inbox = self.inbox, []
        for call in calls:
            self.control.handle(call)
        was_busy = self.control.busy
        self.control.collect()
        if self.core is None or self.rig.threads_work:  # no step is quicker than a thread, here
            return bool(calls) and not was_busy
        worked = self._step() or bool(calls)
        self.rows += self.core.take_rows()
        for rid in self.core.take_ended():
            self.rig.entries.pop(rid, None)
        return worked

    def _step(self) -> bool:
        commands = self.control.take_commands()
        plan = self.core.plan(self.rig.clock)
        if plan is None:
            if not commands:
                return False
            plan = self.core.bare_plan()
        plan.commands = commands
        plan.tapped = self.control.recorder.taps(plan)
        for rank in (*self._followers(), self):
            rank.control.before_forward(plan)
            result = rank.control.recorder.forward(plan)
        self.core.commit(plan, result, self.rig.clock)
        return bool(plan.rows or commands)


class Rig:
    """The router's half, and the ``Front`` that operations see."""

    def __init__(self, home: Path, *, dp: int = 2, tp: int = 1, **settings) -> None:
        model = home / "models" / "scripted"
        if not model.exists():
            make_scripted_dir(model)
            scripted_checkpoint(model / "model.safetensors", 0)
        self.config = EngineConfig(
            home=str(home), model_path=str(model), backend="scripted", dp=dp, tp=tp,
            limits=Limits(max_running=8, kv_tokens=2048), **settings,
        )  # fmt: skip
        self.clock = 1_000.0
        self.start_router()
        self.ranks: dict[tuple[int, int], Rank] = {}
        self.lose: Callable[[m.RankOps, int], bool] = lambda op, dp: False
        for group in range(dp):
            self.start_group(group)

    # ------------------------------------------------------------------ processes

    def start_router(self) -> None:
        self.ledger = load_ledger(self.config)
        self.ledger_file = LedgerFile(self.config)
        self.spool = Spool(self.config)
        self.session: Session | None = None
        self.state = EngineState(
            dp=self.config.dp, tp=self.config.tp, model="m", generation=1, ledger=self.ledger
        )
        self.operations = Operations(self)
        self.desk = ControlDesk(tensor_ranks=self.config.tp, send=self._send)
        self.entries: dict[str, Entry] = {}
        self.held: list[m.TokenizedGenerateReqInput] = []
        self.holding = self.ledger.pause is not None
        if self.ledger.pause is not None:
            self.state.control = "paused"
        self.replies: list[m.RankReply] = []

    def restart(self) -> None:
        """Router and all ranks die and come back."""
        self.start_router()
        for dp in range(self.config.dp):
            self.start_group(dp)

    def start_group(self, dp: int) -> None:
        for tp in range(self.config.tp):
            self.ranks[dp, tp] = Rank(self, dp, tp)
            rank = self.state.ranks[dp, tp]
            rank.up, rank.started_on = True, self.ranks[dp, tp].runner.epoch
        if self.state.epoch_of(dp) != self.ledger.epoch_of(dp):
            self.state.resyncing.add(dp)

    def kill_group(self, dp: int, why: str = "died (signal 9)") -> None:
        for tp in range(self.config.tp):
            del self.ranks[dp, tp]
        self.state.group_down(dp)
        for rid in [rid for rid, entry in self.entries.items() if entry.dp == dp]:
            del self.entries[rid]
        session = self.session
        if session is not None and dp in session.groups and not session.busy:
            session.failed = session.failed or f"dp{dp} {why}"
        self.desk.on_group_down(dp, why, self.clock)

    def resync(self, dp: int) -> Outcome:
        return self.finished(self.start_operation(self.operations.updates.commits.resync(dp)))

    # ------------------------------------------------------------------ the Front

    def now(self) -> float:
        return self.clock

    def save_ledger(self) -> None:
        self.ledger_file.keep(self.ledger)

    def secure_ledger(self) -> None:
        self.ledger_file.write(self.ledger)

    def broadcast(self) -> None:
        pass

    def live(self, groups: list[int]) -> list[Entry]:
        return [entry for entry in self.entries.values() if entry.dp in groups]

    def hold(self) -> None:
        self.holding = True

    def release_held(self) -> None:
        self.holding = False
        held, self.held = self.held, []
        for request in held:
            self._dispatch(request)

    def abort_entries(self, entries: list[Entry], reason: str) -> None:
        for entry in entries:
            self.ranks[entry.dp, 0].core.abort([entry.rid], reason, now=self.clock)

    def request_table(self) -> list[dict]:
        return [{"rid": entry.rid, "rank": entry.dp} for entry in self.entries.values()]

    def effective_paths(self, paths):
        try:
            return effective(paths)
        except WeightError:
            return paths

    def tell(self, op, groups: list[int]) -> None:
        for dp in groups:
            self._send("", op, dp)

    def run_beside(self, name: str, operation, deadline: float) -> None:
        call = m.Call(id="", deadline=deadline)
        self.desk.submit(name, call, operation, lambda _: None, exclusive=False, now=self.clock)

    def open_recording(self, kind, directory: str, recording_id: str) -> None:
        open_recording(self.config, kind, Path(directory), recording_id)

    def drop_recording(self, kind, directory: str, recording_id: str) -> None:
        drop_recording(kind, Path(directory), recording_id)

    def open_update(self) -> str | None:
        kinds = [kind.__name__ for kind in m.WeightUpdate.__subclasses__()]
        running = self.desk.open_of(kinds)
        return running.job if running else None

    # ------------------------------------------------------------------ calls and requests

    def _send(self, call_id: str, op: m.RankOps, dp: int) -> bool:
        if (dp, 0) not in self.ranks or not self.state.group_up(dp):
            return False
        if not self.lose(op, dp):
            call = m.RankCall(http_worker_ipc="router", call_id=call_id, op=op)
            self.ranks[dp, 0].inbox.append(call)
        return True

    def send(self, kind: type, *, deadline_s: float = 60.0, key=None, **fields) -> list[Outcome]:
        """Starts a call; its outcome appears in the list."""
        call = m.Call(
            id=uuid.uuid4().hex, deadline=self.clock + deadline_s, key=key, actor="tester"
        )
        message = kind(http_worker_ipc="in", call=call, **fields)
        outcomes: list[Outcome] = []
        self.desk.submit(
            kind.__name__, call, self.operations.of(message), outcomes.append,
            exclusive=isinstance(message, Operations.EXCLUSIVE), now=self.clock,
            conflict=self.operations.updates.conflict(message),
        )  # fmt: skip
        return outcomes

    def call(self, kind: type, **fields) -> Outcome:
        return self.finished(self.send(kind, **fields))

    def start_operation(self, operation) -> list[Outcome]:
        outcomes: list[Outcome] = []
        call = m.Call(id="", deadline=self.clock + 300)
        self.desk.submit(
            "internal", call, operation, outcomes.append, exclusive=True, now=self.clock
        )
        return outcomes

    def finished(self, outcomes: list[Outcome], timeout_s: float = 5.0) -> Outcome:
        """Runs router and ranks until the call has its outcome."""
        until = time.monotonic() + timeout_s
        while not outcomes:
            assert time.monotonic() < until, "the call does not end"
            self.turn()
        return outcomes[0]

    def until_held(self, timeout_s: float = 5.0) -> None:
        """Until an update that lets run what runs has prepared, and holds what is new."""
        until = time.monotonic() + timeout_s
        while not self.holding:
            assert time.monotonic() < until, "nothing is held"
            self.turn()

    def turn(self, count: int = 1) -> None:
        """Every rank's loop once, then the router's."""
        for _ in range(count):
            worked = [rank.turn() for rank in list(self.ranks.values())]
            for reply in self.take_replies():
                self.desk.on_answer(reply.call_id, reply.answer, self.clock)
            self.desk.tick(self.clock)
            if not any(worked):
                time.sleep(0.0005)

    @property
    def threads_work(self) -> bool:
        return any(rank.control.busy for rank in self.ranks.values())

    def take_replies(self) -> list[m.RankReply]:
        replies, self.replies = self.replies, []
        return replies

    def generate(self, rid: str, dp: int = 0, tokens: int = 40, text: int = 20, **fields) -> None:
        sampling = m.SamplingParams(temperature=0.0, max_new_tokens=tokens, ignore_eos=True)
        ids = list(range(100, 100 + text))
        request = m.TokenizedGenerateReqInput(
            http_worker_ipc="in", rid=rid, input_ids=ids, sampling=sampling, dp_rank=dp, **fields
        )
        if self.holding:
            self.held.append(request)
        else:
            self._dispatch(request)

    def _dispatch(self, request: m.TokenizedGenerateReqInput) -> None:
        dp = request.dp_rank
        self.entries[request.rid] = Entry(
            rid=request.rid, parent=request.rid, inbox="in", reserved_at=self.clock, dp=dp
        )
        self.ranks[dp, 0].core.accept(request, self.clock)

    def answer(self, rid: str) -> m.TokenIDRow:
        """What the request has got so far, as one row."""
        rows = [row for rank in self.ranks.values() for row in rank.rows if row.rid == rid]
        return m.merge_all(rows)

    def drain(self, timeout_s: float = 5.0) -> None:
        until = time.monotonic() + timeout_s
        while self.entries:
            assert time.monotonic() < until, f"requests do not end: {list(self.entries)}"
            self.turn()

    # ------------------------------------------------------------------ what to look at

    def epochs(self) -> set[int]:
        """Of the weights on every rank."""
        return {rank.runner.epoch for rank in self.ranks.values()}

    def words(self) -> set[tuple[int, ...]]:
        """The live weights on every rank, as the set of favourite tokens."""
        live = [rank.runner.weights.live for rank in self.ranks.values()]
        return {tuple(sorted(w["even.tokens"] + w["odd.tokens"])) for w in live}

    def checkpoint(self, index: int, **changes) -> str:
        path = Path(self.config.home) / "models" / f"ckpt-{index}" / "model.safetensors"
        path.parent.mkdir(parents=True, exist_ok=True)
        return str(scripted_checkpoint(path, index, **changes))

    def bucket(self, index: int, name: str) -> str:
        """One parameter of a checkpoint, as a web worker spools a tensor call."""
        path = Path(self.spool.new_path())
        return str(scripted_checkpoint(path, index, names=(name,)))

    def serves(self, index: int, epoch: int) -> None:
        """AssertionError unless exactly this serves everywhere, running, with nothing staged."""
        self.turn(2)
        assert self.words() == {tuple(sorted(favourites(index)))}
        assert self.epochs() == {epoch}
        assert self.ledger.present(self.config.dp) == {epoch}
        assert self.state.control == "running" and not self.holding and self.session is None
        assert not any(rank.stager._staged for rank in self.ranks.values())
        assert not any(rank.core.paused for rank in self.ranks.values() if rank.core)
