"""A small RL loop against a live engine: rollouts over HTTP, weights pushed three ways.

    python docs/examples/rl_loop.py --url http://127.0.0.1:8000 --key $KEY --model DIR

REINFORCE in plain torch, with a reward that can be checked by looking: the share of an answer's
tokens that are in a set of favourites. Each step asks the engine for rollouts with logprobs, takes
one gradient step on its own copy of the model, and pushes the new weights: from disk, as
safetensors bytes, or by a torch.distributed group, in turn.

The loop is off-policy by one step, on purpose: rollouts of a step run while the weights of the step
before are pushed, so some tokens are sampled by older weights. ``token_steps`` in each answer says
which weights sampled each token, so staleness is counted and not guessed, and the gradient is
corrected by importance weights. With ``--policy retract`` the engine recomputes the KV cache at a
swap, so the logprob of every token can be reproduced here from the weights of its own step.
"""

from __future__ import annotations

import argparse
import json
import socket
import sys
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from engine.weights.sender import Engine, WeightGroup, push_tensors

CLIP = 2.0  # bound of an importance weight
KEPT_STEPS = 3  # rollouts are at most one step behind


@dataclass(frozen=True, kw_only=True)
class Settings:
    """``policy``: what happens to requests that run while weights are swapped."""

    url: str
    key: str
    model: Path
    checkpoints: Path
    steps: int = 20
    prompts: int = 8
    samples: int = 8
    new_tokens: int = 32
    favourites: int = 64  # token ids below it are rewarded
    learning_rate: float = 1e-2
    seed: int = 0
    push: tuple[str, ...] = ("disk", "tensor", "distributed")
    policy: str = "retract"
    overlap: bool = True


@dataclass(frozen=True)
class Rollout:
    """One answer. ``token_steps[i]`` is the trainer's step whose weights sampled token ``i``."""

    prompt: list[int]
    tokens: list[int]
    logprobs: list[float]
    token_steps: list[int]
    reward: float


@dataclass
class StepReport:
    """What a step of the loop saw.

    ``gap``: the largest difference between a token's logprob in the engine and here, under the
    weights of its own step; ``unlabelled_gap``: the same if all were taken for the newest weights.
    """

    step: int
    reward: float
    push: str
    epoch: int
    staleness: dict[int, int] = field(default_factory=dict)  # steps behind -> tokens
    gap: float = 0.0
    unlabelled_gap: float = 0.0

    def line(self) -> str:
        stale = ", ".join(f"{age}: {count}" for age, count in sorted(self.staleness.items()))
        return (
            f"step {self.step:3d}  reward {self.reward:.3f}  epoch {self.epoch}  by {self.push:12s}"
            f"  tokens by staleness {{{stale}}}  logprob gap {self.gap:.0e}"
            f" ({self.unlabelled_gap:.0e} without the labels)"
        )


# ---------------------------------------------------------------- rollouts


class Sampler:
    """Asks the engine; answers come in the order of the questions."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        headers = {"Authorization": f"Bearer {settings.key}"}
        self._http = httpx.Client(base_url=settings.url, headers=headers, timeout=300)
        self._random = torch.Generator().manual_seed(settings.seed)

    def prompts(self) -> list[list[int]]:
        """Random prompts, each repeated once per sample."""
        settings = self._settings
        shape = (settings.prompts, 4)
        ids = torch.randint(3, settings.favourites * 2, shape, generator=self._random)
        return [prompt for prompt in ids.tolist() for _ in range(settings.samples)]

    def rollouts(self, prompts: list[list[int]], step: int) -> list[Rollout]:
        """The seed of a sample depends on the step and its place alone."""
        settings = self._settings
        sampling = [
            {
                "temperature": 1.0,
                "max_new_tokens": settings.new_tokens,
                "ignore_eos": True,
                "sampling_seed": settings.seed + 1000 * step + place,
            }
            for place in range(len(prompts))
        ]
        body = {"input_ids": prompts, "sampling_params": sampling, "return_logprob": True}
        response = self._http.post("/generate", json=body)
        response.raise_for_status()
        answers = response.json()
        return [self._read(*pair) for pair in zip(prompts, answers, strict=True)]

    def _read(self, prompt: list[int], answer: dict) -> Rollout:
        info, tokens = answer["meta_info"], answer["output_ids"]
        good = sum(token < self._settings.favourites for token in tokens)
        return Rollout(
            prompt=prompt,
            tokens=tokens,
            logprobs=[value for value, *_ in info["output_token_logprobs"]],
            token_steps=[step or 0 for step in info["token_steps"]],
            reward=good / len(tokens),
        )

    def close(self) -> None:
        self._http.close()


# ---------------------------------------------------------------- the policy


def token_logprobs(model: PreTrainedModel, rollouts: list[Rollout]) -> Tensor:
    """[rollouts, new tokens]: log-probabilities of the sampled tokens under ``model``."""
    ids = torch.tensor([rollout.prompt + rollout.tokens for rollout in rollouts])
    new = len(rollouts[0].tokens)
    logits = model(ids[:, :-1]).logits[:, -new:]
    return logits.log_softmax(-1).gather(-1, ids[:, -new:, None]).squeeze(-1)


class Policy:
    """The trainer's own copy of the model, and what its weights were at earlier steps."""

    def __init__(self, settings: Settings) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(settings.model, dtype=torch.float32)
        self.model.eval()
        self._optimizer = torch.optim.Adam(self.model.parameters(), lr=settings.learning_rate)
        self._history: dict[int, dict[str, Tensor]] = {}
        self.remember(0)

    def named_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """What is pushed: every parameter once, also where two names share one."""
        for name, parameter in self.model.named_parameters():
            yield name, parameter.detach()

    def remember(self, step: int) -> None:
        """The weights of ``step``; those that no rollout can name any more are dropped."""
        self._history[step] = {n: t.clone() for n, t in self.model.state_dict().items()}
        for old in sorted(self._history)[:-KEPT_STEPS]:
            del self._history[old]

    def learn(self, rollouts: list[Rollout]) -> None:
        """REINFORCE with a mean baseline; old tokens are weighted by new over old probability."""
        rewards = torch.tensor([rollout.reward for rollout in rollouts])
        advantage = ((rewards - rewards.mean()) / (rewards.std() + 1e-6))[:, None]
        logprobs = token_logprobs(self.model, rollouts)
        sampled = torch.tensor([rollout.logprobs for rollout in rollouts])
        weight = (logprobs.detach() - sampled).exp().clamp(max=CLIP)
        loss = -(weight * advantage * logprobs).mean()
        self._optimizer.zero_grad()
        loss.backward()
        self._optimizer.step()

    @torch.no_grad()
    def gaps(self, rollouts: list[Rollout]) -> tuple[float, float]:
        """Largest |engine - trainer| of a token's logprob: under the weights of its own step, and
        under the present ones."""
        present = {name: tensor.clone() for name, tensor in self.model.state_dict().items()}
        sampled = torch.tensor([rollout.logprobs for rollout in rollouts])
        steps = torch.tensor([rollout.token_steps for rollout in rollouts])
        newest = (token_logprobs(self.model, rollouts) - sampled).abs()
        labelled = torch.zeros_like(sampled)
        for step in steps.unique().tolist():
            self.model.load_state_dict(self._history[step])
            gap = (token_logprobs(self.model, rollouts) - sampled).abs()
            labelled = torch.where(steps == step, gap, labelled)
        self.model.load_state_dict(present)
        return float(labelled.max()), float(newest.max())


# ---------------------------------------------------------------- pushing weights


class Pusher:
    """New weights to the engine, each time as one epoch with the trainer's step as its label."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._engine = Engine(settings.url, settings.key)
        self._group: WeightGroup | None = None

    def push(self, how: str, policy: Policy, step: int) -> int:
        """The epoch that the engine made of it."""
        terms = {
            "token_step": step,
            "weight_version": f"step-{step}",
            "in_flight": self._settings.policy,
        }
        if how == "disk":
            answer = self._engine.post(
                "/update_weights_from_disk", model_path=self._saved(policy, step), **terms
            )
        elif how == "tensor":
            answer = push_tensors(self._engine, policy.named_tensors(), **terms)
        else:
            answer = self._joined().push(policy.named_tensors(), **terms)
        return int(answer["epoch"])

    def _saved(self, policy: Policy, step: int) -> str:
        """A safetensors file under one of the engine's weight roots."""
        directory = self._settings.checkpoints / f"step-{step}"
        directory.mkdir(parents=True, exist_ok=True)
        save_file(dict(policy.named_tensors()), directory / "model.safetensors")
        return str(directory)

    def _joined(self) -> WeightGroup:
        """The group is made at its first use: serving goes on while the ranks join."""
        if self._group is None:
            info = httpx.get(
                f"{self._settings.url}/get_server_info",
                headers={"Authorization": f"Bearer {self._settings.key}"},
            ).json()
            self._group = WeightGroup(
                self._engine,
                engine_ranks=info["dp_size"] * info["tp_size"],
                address="127.0.0.1",
                port=free_port(),
            )
        return self._group

    def close(self) -> None:
        if self._group is not None:
            self._group.close()
        self._engine.close()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


# ---------------------------------------------------------------- the loop


def train(settings: Settings) -> Iterator[StepReport]:
    """One report per step."""
    torch.manual_seed(settings.seed)
    policy, sampler, pusher = Policy(settings), Sampler(settings), Pusher(settings)
    pool = ThreadPoolExecutor(max_workers=1)
    try:
        pusher.push("disk", policy, 0)
        for step in range(1, settings.steps + 1):
            how = settings.push[step % len(settings.push)]
            asked: Future[list[Rollout]] | None = None
            if settings.overlap:
                asked = pool.submit(sampler.rollouts, sampler.prompts(), step)
            epoch = pusher.push(how, policy, step)
            policy.remember(step)
            rollouts = asked.result() if asked else sampler.rollouts(sampler.prompts(), step)
            yield report(step, how, epoch, policy, rollouts)
            policy.learn(rollouts)
    finally:
        pool.shutdown()
        pusher.close()
        sampler.close()


def report(step: int, how: str, epoch: int, policy: Policy, rollouts: list[Rollout]) -> StepReport:
    staleness: dict[int, int] = {}
    for rollout in rollouts:
        for token_step in rollout.token_steps:
            staleness[step - token_step] = staleness.get(step - token_step, 0) + 1
    reward = sum(rollout.reward for rollout in rollouts) / len(rollouts)
    return StepReport(step, reward, how, epoch, staleness, *policy.gaps(rollouts))


def parse_arguments(arguments: list[str]) -> Settings:
    parser = argparse.ArgumentParser(description="REINFORCE against a live engine")
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--key", required=True, help="API key with both scopes")
    parser.add_argument("--model", type=Path, required=True, help="the served model's directory")
    parser.add_argument(
        "--checkpoints", type=Path, required=True, help="a directory under a weights root"
    )
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--push", nargs="+", default=["disk", "tensor", "distributed"])
    parser.add_argument("--policy", default="retract")
    parser.add_argument("--no-overlap", dest="overlap", action="store_false")
    given = vars(parser.parse_args(arguments))
    return Settings(**{**given, "push": tuple(given["push"])})


def main() -> None:
    reports = []
    for found in train(parse_arguments(sys.argv[1:])):
        reports.append(found)
        print(found.line(), flush=True)
    rewards = [found.reward for found in reports]
    told = {"first": sum(rewards[:5]) / 5, "last": sum(rewards[-5:]) / 5}
    print(json.dumps({name: round(value, 3) for name, value in told.items()}))


if __name__ == "__main__":
    main()
