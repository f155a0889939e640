"""Settings of the engine: read from the environment here and nowhere else, passed on frozen.

Children get their copy as a JSON file in the private run directory (``to_json``/``from_json``).
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

import msgspec

from engine.errors import ConfigError

PREFIX = "QUARTERDECK_"
NOT_FROM_ENV = frozenset(
    (
        "home",
        "model_path",
        "limits",
        "epoch",
        "weight_paths",
        "weight_checksum",
        "run_dir",
        "generation",
    )
)
CHECKOUT = Path(__file__).resolve().parent.parent


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """Bounds of one dp rank unless the name says otherwise; tokens unless it says otherwise."""

    max_running: int = 64  # requests with a slot
    max_waiting: int = 512  # requests admitted and not running, over the whole engine
    max_step_tokens: int = 2048  # tokens of one forward
    chunk_tokens: int = 512  # prefill chunk of one request
    block_tokens: int = 16
    kv_tokens: int = 32_768
    max_context: int = 0  # 0: the model's own

    def __post_init__(self) -> None:
        for name in (
            "max_running",
            "max_waiting",
            "max_step_tokens",
            "chunk_tokens",
            "block_tokens",
            "kv_tokens",
        ):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.kv_tokens % self.block_tokens:
            raise ConfigError(
                f"kv_tokens ({self.kv_tokens}) must be a multiple of block_tokens "
                f"({self.block_tokens})"
            )


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True):
    """One engine: ``dp`` groups of ``tp`` ranks and ``detokenizers`` detokenizers."""

    home: str
    model_path: str
    # auto: native where it covers the model, else hf; eager: native's decoder in torch operators
    backend: Literal["auto", "hf", "native", "eager", "scripted"] = "auto"
    device: Literal["cpu", "cuda"] = "cpu"
    dtype: Literal["bf16", "fp32"] = "bf16"
    weights: Literal["plain", "int4", "auto"] = "plain"
    deterministic: bool = False
    threads: int = 0  # 0: max(1, cores // ranks)
    dp: int = 1
    tp: int = 1
    detokenizers: int = 1
    limits: Limits = Limits()
    collective_timeout_s: float = 600.0
    pause_lease_s: float = 1800.0
    session_idle_s: float = 60.0  # a weight session that nobody touches is dropped after this
    restore: bool = True  # a start serves the last committed weights and keeps their pause
    scripted_step_s: float = 0.0  # scripted backend: seconds per step
    epoch: int = 1  # of the weights to start with; set by the launcher, like all below
    weight_paths: tuple[str, ...] = ()  # where they are, later files win; (): ``model_path``
    weight_checksum: str = ""  # what they must read as; "": not known
    run_dir: str = ""
    generation: int = 0  # grows with each engine start

    def __post_init__(self) -> None:
        for name in ("dp", "tp", "detokenizers"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, got {getattr(self, name)}")

    @property
    def rank_threads(self) -> int:
        return self.threads or max(1, (os.cpu_count() or 1) // (self.dp * self.tp))

    @property
    def router_address(self) -> str:
        """Requests and leases go here."""
        return f"ipc://{self.run_dir}/router-{self.generation}"

    @property
    def router_reply_address(self) -> str:
        """Reports of ranks, detokenizers and the launcher go here."""
        return f"ipc://{self.run_dir}/router-reply-{self.generation}"

    def detokenizer_address(self, index: int) -> str:
        return f"ipc://{self.run_dir}/detok-{self.generation}-{index}"

    def scheduler_address(self, dp: int, start: int) -> str:
        """``start`` counts the starts of that group, so a dead rank's socket is never reused."""
        return f"ipc://{self.run_dir}/sched-{self.generation}-{dp}-{start}"

    def plan_address(self, dp: int, tp: int, start: int) -> str:
        """Step plans from tp rank 0 to follower ``tp``."""
        return f"ipc://{self.run_dir}/plan-{self.generation}-{dp}-{tp}-{start}"

    def to_json(self) -> bytes:
        return msgspec.json.encode(self)

    @staticmethod
    def from_json(data: bytes) -> EngineConfig:
        return msgspec.json.decode(data, type=EngineConfig)


def home_from_env(env: Mapping[str, str]) -> Path:
    return Path(env.get(PREFIX + "HOME") or CHECKOUT / "var").resolve()


def bench_peers_from_env(env: Mapping[str, str]) -> Path:
    """Where the environments of the benchmark's peers are."""
    given = env.get(PREFIX + "BENCH_PEERS")
    return Path(given).resolve() if given else home_from_env(env) / "bench" / "peers"


def from_env(env: Mapping[str, str]) -> EngineConfig:
    """The settings out of ``QUARTERDECK_*``; a bad value stops the start with a sentence."""
    home = home_from_env(env)
    raw: dict[str, object] = {
        "home": str(home),
        "model_path": env.get(PREFIX + "MODEL") or str(home / "models" / "SmolLM2-135M-Instruct"),
        "limits": _fields(env, Limits, PREFIX),
        **_fields(env, EngineConfig, PREFIX, skip=NOT_FROM_ENV),
    }
    try:
        return msgspec.convert(raw, EngineConfig, strict=False)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{PREFIX}* environment: {error}") from error


def _fields(
    env: Mapping[str, str],
    kind: type[msgspec.Struct],
    prefix: str,
    skip: frozenset[str] = frozenset(),
) -> dict[str, object]:
    """``prefix + FIELD`` for each field of ``kind`` that is set; "" counts as not set."""
    return {
        name: value
        for name in kind.__struct_fields__
        if name not in skip and (value := env.get(prefix + name.upper(), ""))
    }
