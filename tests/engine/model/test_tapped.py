"""Dumps of every backend: one list of names, and what plain transformers computes inside."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from engine.artifacts import Rank
from engine.dumps.capture import DumpCapture
from engine.dumps.points import KINDS, parse_spec
from engine.dumps.store import Dump, TensorStore, read_dump
from engine.model.runner import ModelRunner, make_runner
from tests.engine.model import tiny
from tests.engine.model.conftest import engine_config
from tests.engine.model.driver import GREEDY, Driver, Job
from tests.engine.model.inside import forward_hooks

ATOL = 2e-4  # fp32; our kernels and their references sum in another order
RID, REQUESTS = "r3", 8


def dump_one_of_many(runner: ModelRunner, directory: Path, **asked: object) -> tuple[Dump, Job]:
    """Eight requests in chunks of 7; all that ``asked`` names of one of them, to its end."""
    runner.instrument.prepare(())
    capture = DumpCapture(Rank(), runner.instrument.points(), runner.instrument.form)
    raw = {"dump_id": "d", "directory": str(directory), "rids": [RID], "max_steps": 100}
    capture.arm(parse_spec(raw | {"kinds": list(KINDS)} | asked))
    driver = Driver(runner, chunk=7)
    source = random.Random(5)
    jobs = [
        driver.begin(
            Job(
                prompt_ids=[source.randrange(3, tiny.VOCAB_SIZE) for _ in range(6 + 3 * i)],
                sampling=GREEDY.__class__(temperature=0.0, max_new_tokens=4, ignore_eos=True),
            )
        )
        for i in range(REQUESTS)
    ]
    step = 0
    while driver.running:
        step += 1
        with capture.step(step, epoch=1) as driver.tap:
            driver.step()
    capture.close()
    runner.instrument.drop()
    return read_dump(directory, "d"), jobs[int(RID[1:])]


def tensors_by_point(dump: Dump) -> dict[tuple[str, str], torch.Tensor]:
    """Rows of all steps, joined; a cache is that of the last step."""
    store = TensorStore(dump.directory)
    parts: dict[tuple[str, str], list[torch.Tensor]] = defaultdict(list)
    for record in dump.manifests[0].records:
        assert record.rid in (RID, ""), record
        parts[record.name, record.kind].append(torch.from_numpy(store.read(record).copy()))
    return {
        point: found[-1] if point[1] in ("kv", "weight") else torch.cat(found)
        for point, found in parts.items()
    }


@pytest.mark.parametrize("backend", ["hf", "native"])
@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_a_dump_of_one_request_is_what_plain_transformers_computes(
    tiny_model: Callable[[str], Path], tmp_path: Path, family: str, backend: str
) -> None:
    runner = make_runner(engine_config(tiny_model(family), backend=backend), dp=0, tp=0, group=None)
    dump, job = dump_one_of_many(runner, tmp_path)
    inside = forward_hooks(tiny_model(family), job.ids[:-1])
    found = tensors_by_point(dump)
    named = {(point.name, kind) for point in runner.instrument.points() for kind in point.shard_dim}
    assert found.keys() == named
    for (name, kind), tensor in found.items():
        if kind in ("kv", "weight"):
            continue
        truth = inside[name, kind]
        truth = truth[-len(tensor) :] if name == "lm_head" else truth
        assert tensor.shape == truth.shape, (name, kind)
        assert torch.allclose(tensor, truth, atol=ATOL, rtol=1e-3), (name, kind)


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_all_backends_publish_one_ordered_list_of_names(
    tiny_model: Callable[[str], Path], family: str
) -> None:
    lists = []
    for backend in ("hf", "native"):
        config = engine_config(tiny_model(family), backend=backend)
        points = make_runner(config, dp=0, tp=0, group=None).instrument.points()
        lists.append([(point.name, point.layer, sorted(point.shard_dim)) for point in points])
    assert lists[0] == lists[1]
