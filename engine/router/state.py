"""The engine's state, as its one owner (the router) knows it. Pure.

Epoch and version are per dp group; the engine's are those of all groups or ``mixed``.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from engine.messages import EngineView, Histogram, RankLoad, RankView
from engine.router.weights import EpochRecord, Ledger

FRESH_S = 10.0  # a rank whose heartbeat is older is not counted as able to serve


@dataclass(slots=True)
class RankState:
    """One rank: where it listens, and its newest heartbeat."""

    dp: int
    tp: int
    address: str = ""
    generation: int = 0
    pid: int = 0
    up: bool = False
    started_on: int = 0  # the epoch of the weights that it came up with
    load: RankLoad | None = None


@dataclass(slots=True)
class EngineState:
    """All ranks, the epochs that were ever committed here, and the state's name."""

    dp: int
    tp: int
    model: str
    generation: int
    ledger: Ledger
    control: str = "running"  # running | pausing | paused | updating
    ranks: dict[tuple[int, int], RankState] = field(default_factory=dict)
    drained: set[int] = field(default_factory=set)  # up, but no new requests by an operator's word
    resyncing: set[int] = field(default_factory=set)  # up, but on other weights than they should
    released: set[str] = field(default_factory=set)  # memory that was given back
    reason: str = ""
    seq: int = 0

    def __post_init__(self) -> None:
        self.ranks = {(dp, tp): RankState(dp, tp) for dp in range(self.dp) for tp in range(self.tp)}

    # ------------------------------------------------------------------ ranks

    def group_up(self, dp: int) -> bool:
        return all(self.ranks[dp, tp].up for tp in range(self.tp))

    def serving_groups(self) -> list[int]:
        return [dp for dp in range(self.dp) if self.group_up(dp)]

    def dispatch_groups(self) -> list[int]:
        """Groups that take new requests. While groups differ during a commit, the newest ones."""
        out = self.drained | self.resyncing
        return [dp for dp in self.serving_groups() if dp not in out]

    def group_down(self, dp: int) -> None:
        for tp in range(self.tp):
            rank = self.ranks[dp, tp]
            rank.up, rank.load = False, None

    def stale_ranks(self, now: float) -> list[RankState]:
        """Ranks that are down or silent."""
        return [
            rank
            for rank in self.ranks.values()
            if not rank.up or rank.load is None or now - rank.load.at > FRESH_S
        ]

    # ------------------------------------------------------------------ views

    @property
    def name(self) -> str:
        """starting | running | degraded | mixed | whatever control says."""
        serving = self.serving_groups()
        if not serving:
            return "starting"
        if self.control != "running":
            return self.control
        if len({self.epoch_of(dp) for dp in serving}) > 1:
            return "mixed"
        whole = len(serving) == self.dp and not self.resyncing and not self.ledger.lost
        return "running" if whole else "degraded"

    def epoch_of(self, dp: int) -> int | None:
        """Of the weights that the group has now; None when it is down."""
        rank = self.ranks[dp, 0]
        if rank.load is not None:
            return rank.load.epoch
        return rank.started_on if rank.up else None

    def version_of(self, epoch: int | None) -> EpochRecord:
        known = self.ledger.epochs.get(epoch or 0)
        return known or EpochRecord(epoch=epoch or 0, weight_version="unknown")

    def engine_view(self) -> EngineView:
        epochs = {self.epoch_of(dp) for dp in self.serving_groups()} - {None}
        one = self.version_of(epochs.pop()) if len(epochs) == 1 else None
        return EngineView(
            state=self.name,
            epoch=one.epoch if one else None,
            weight_version=one.weight_version if one else None,
            token_step=one.token_step if one else None,
            model=self.model,
            generation=self.generation,
            reason=self.ledger.lost or self.reason,
        )

    def rank_views(self) -> list[RankView]:
        return [self._rank_view(rank) for rank in self.ranks.values()]

    def _rank_state(self, rank: RankState) -> str:
        if not rank.up or rank.load is None:
            return "starting"
        if rank.dp in self.resyncing:
            return "resyncing"
        return "draining" if rank.dp in self.drained else rank.load.state

    def _rank_view(self, rank: RankState) -> RankView:
        load = rank.load
        weights = self.version_of(load.epoch if load else None)
        return RankView(
            dp=rank.dp,
            tp=rank.tp,
            pid=rank.pid,
            state=self._rank_state(rank),
            epoch=weights.epoch,
            weight_version=weights.weight_version,
            token_step=weights.token_step,
            running=load.running if load else 0,
            waiting=load.waiting if load else 0,
            kv_used=load.kv_used if load else 0,
            kv_total=load.kv_total if load else 0,
            tokens_per_s=load.tokens_per_s if load else 0.0,
            step_s=load.step_s if load else 0.0,
            rss_bytes=load.rss_bytes if load else 0,
            seen_at=load.at if load else 0.0,
            cached_tokens=load.cached_tokens if load else 0,
            prompt_tokens=load.prompt_tokens if load else 0,
            output_tokens=load.output_tokens if load else 0,
            retractions=load.retractions if load else 0,
            ttft=load.ttft if load else Histogram(),
            itl=load.itl if load else Histogram(),
        )
