"""Weight update calls as generators: which session they belong to, what they stage, when to commit.

Path: operations.py -> here -> sessions.py (prepare) and commits.py. Pure.
"""

from __future__ import annotations

from typing import Any

import msgspec

from engine import messages as m
from engine.router.commits import Commits
from engine.router.control import Operation, Outcome, at_once, refusal, refused
from engine.router.front import Front
from engine.router.sessions import Sessions, in_progress
from engine.router.weights import merged_terms


class Updates:
    """Makes the generator of each update call."""

    def __init__(self, front: Front) -> None:
        self._front = front
        self.sessions = Sessions(front)
        self.commits = Commits(front, self.sessions)

    def begin(self, message: m.BeginWeightUpdateReqInput) -> Operation:
        def open_session() -> Outcome:
            session = self.sessions.open(message, implicit=False)
            return Outcome(result={"session_id": session.id, "groups": session.groups})

        return at_once(open_session)

    def end(self, message: m.EndWeightUpdateReqInput) -> Operation:
        session = self.sessions.find(message.session_id)
        if message.drop:
            self.sessions.drop(session)
            return Outcome(message="dropped; the old weights serve on")
        if not session.sources:
            self.sessions.drop(session)
            return refused(400, "empty_session", "no weights were staged in this session")
        session.terms = merged_terms(session.terms, message)
        outcome = yield from self.commits.commit(session, message.call)
        return outcome

    def from_disk(self, message: m.UpdateWeightFromDiskReqInput) -> Operation:
        front = self._front
        if message.from_epoch is not None:
            outcome = yield from self._roll_back(message, message.from_epoch)
            return outcome
        source = m.WeightSource(
            kind="disk",
            path=message.model_path,
            load_format=message.load_format,
            spool_path=front.spool.new_path() if message.spool else "",
        )
        outcome = yield from self._one_call(message, source)
        return outcome

    def from_tensor(self, message: m.UpdateWeightsFromTensorReqInput) -> Operation:
        source = m.WeightSource(kind="tensor", path=message.path, load_format=message.load_format)
        outcome = yield from self._one_call(message, source)
        return outcome

    def from_distributed(self, message: m.UpdateWeightsFromDistributedReqInput) -> Operation:
        source = m.WeightSource(
            kind="distributed",
            names=tuple(message.names),
            dtypes=tuple(message.dtypes),
            shapes=tuple(map(tuple, message.shapes)),
            group_name=message.group_name,
            spool_path=self._front.spool.new_path(),
        )
        outcome = yield from self._one_call(message, source)
        return outcome

    def conflict(self, message: Any) -> Outcome | None:
        """Why this call must not even wait for its turn: another update is open."""
        front = self._front
        if not isinstance(message, m.WeightUpdate) or message.session_id is not None:
            return None
        if self.sessions.joins_pause(message):
            return None
        if front.session is not None:
            return in_progress(front.session)
        job = front.open_update()
        if job is not None:
            return refused(409, "update_in_progress", f"update {job} is open", job=job)
        return None

    def drop_idle(self) -> None:
        """A session that nobody touched for too long: its sender is gone."""
        front, session = self._front, self._front.session
        idle_s = front.config.session_idle_s
        if session is not None and session.idle(front.now(), idle_s):
            self.sessions.fail(session, f"nobody touched it for {idle_s:g} s")

    def _one_call(self, message: m.WeightUpdate, source: m.WeightSource) -> Operation:
        """One bucket: an update of its own, or a part of an open one."""
        session = self.sessions.session_for(message)
        alone = session.terms is message and not session.implicit
        if not alone:
            part = msgspec.structs.replace(message, checksum=None)  # that of a part says nothing
            session.terms = merged_terms(session.terms, part)
        yield from self.sessions.stage(session, source, message.call, complete=alone)
        if alone or (session.implicit and message.flush_cache):
            outcome = yield from self.commits.commit(session, message.call)
            return outcome
        return Outcome(
            message="staged",
            result={"session_id": session.id, "staged": len(session.sources),
                    "missing": session.missing},
        )  # fmt: skip

    def _roll_back(self, message: m.UpdateWeightFromDiskReqInput, epoch: int) -> Operation:
        """The weights of an earlier epoch as a new one, under its label unless the call has one."""
        record = self._front.ledger.epochs.get(epoch)
        if record is None:
            raise refusal(404, "not_found", f"epoch {epoch} never existed here")
        terms = msgspec.structs.replace(
            message,
            weight_version=message.weight_version or record.weight_version,
            token_step=record.token_step if message.token_step is None else message.token_step,
            checksum=message.checksum or self._front.ledger.checksum_of(epoch) or None,
        )
        session = self.sessions.open(terms, implicit=False)
        for path in record.paths:
            source = m.WeightSource(kind="disk", path=path)
            yield from self.sessions.stage(session, source, message.call, complete=False)
        outcome = yield from self.commits.commit(session, message.call)
        return outcome
