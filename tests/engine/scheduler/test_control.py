"""The rank's end of control calls: nothing goes unanswered, nothing ends the rank."""

from __future__ import annotations

import threading
from typing import get_args

import pytest

from engine import messages as m
from engine.scheduler.control import Jobs
from tests.engine.router.rig import Rig


@pytest.fixture
def rig(tmp_path) -> Rig:
    return Rig(tmp_path, dp=1, tp=2)


@pytest.mark.parametrize("tp", [0, 1])
def test_every_op_that_a_router_can_send_has_its_place(rig, tp):
    control = rig.ranks[0, tp].control
    tables = (control._now, control._on_thread, control._in_band)
    handled = {kind for table in tables for kind in table} | {m.CommitWeights, m.WaitRecording}
    assert handled >= set(get_args(m.RankOps))


def test_a_call_that_breaks_is_an_answer_with_an_incident(rig):
    """C19."""

    def breaks(op):
        raise RuntimeError("bug")

    control = rig.ranks[0, 0].control
    control._now[m.FreezeGC] = breaks
    control.handle(m.RankCall(http_worker_ipc="r", call_id="c1", op=m.FreezeGC()))
    (reply,) = rig.take_replies()
    assert not reply.answer.success and "internal error" in reply.answer.message


def test_the_leader_s_refusal_of_a_commit_is_the_answer_of_its_whole_group(rig):
    op = m.CommitWeights(staging_id="unknown", epoch=9)
    rig.ranks[0, 0].control.handle(m.RankCall(http_worker_ipc="r", call_id="c1", op=op))
    answers = [reply.answer for reply in rig.take_replies()]
    assert [(a.tp, a.success) for a in answers] == [(0, False), (1, False)]
    assert "no such weights" in answers[0].message
    assert rig.epochs() == {1} and not rig.ranks[0, 0].control.take_commands()


def test_a_commit_that_breaks_half_way_ends_the_rank(rig):
    def breaks(staging):
        raise MemoryError

    stager = rig.ranks[0, 0].stager
    stager.stage("s", [rig.checkpoint(1)])
    rig.ranks[0, 1].stager.stage("s", [rig.checkpoint(1)])
    rig.ranks[0, 0].runner.weights.commit = breaks
    op = m.CommitWeights(staging_id="s", epoch=2)
    rig.ranks[0, 0].control.handle(m.RankCall(http_worker_ipc="r", call_id="c1", op=op))
    with pytest.raises(MemoryError):
        rig.turn()


def test_a_call_that_wants_no_answer_gets_none(rig):
    call = m.RankCall(http_worker_ipc="r", call_id="", op=m.PauseRank(mode="in_place"))
    rig.ranks[0, 0].control.handle(call)
    assert rig.ranks[0, 0].core.paused and not rig.take_replies()


def test_jobs_run_beside_the_step_thread_and_report_on_it():
    jobs, gate, told = Jobs(), threading.Event(), []

    def work() -> dict:
        gate.wait(5)
        return {"thread": threading.get_ident()}

    def fails() -> dict:
        raise ValueError("no")

    jobs.start(work, lambda done: told.append(done.result()["thread"]))
    jobs.start(fails, lambda done: told.append(done.exception()))
    assert jobs.open == 2
    while not told:
        jobs.collect()
    assert isinstance(told[0], ValueError) and jobs.open == 1
    gate.set()
    while jobs.open:
        jobs.collect()
    assert told[1] != threading.get_ident()
