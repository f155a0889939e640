"""Profiles and dumps of a serving engine: two dp groups of two tensor-parallel ranks."""

from __future__ import annotations

import asyncio
import resource
import shutil
import time
from collections import defaultdict
from itertools import pairwise
from pathlib import Path

import msgspec
import psutil
import pytest
import torch
from safetensors.torch import load_file, save_file

from engine import messages as m
from engine.dumps.compare import compare
from engine.dumps.store import Dump, TensorStore, read_dump
from engine.profiling.manifest import merged_path
from engine.profiling.merge import merge
from engine.profiling.rules import check_trace
from engine.profiling.summary import summarize
from tests.e2e.engines import answer, ask, eventually, running_engine
from tests.e2e.recordings import call, load, start_dump, start_profile, tiny_config, wait_for
from tests.engine.model.inside import forward_hooks

pytestmark = pytest.mark.e2e

RANKS = ["dp0-tp0", "dp0-tp1", "dp1-tp0", "dp1-tp1"]
PROMPT = "a request among others"
ATOL = 2e-4  # fp32; sums over ranks run in another order


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    return tmp_path_factory.mktemp("recordings")


@pytest.fixture(scope="module")
def config(home):
    return tiny_config(home)


async def generate(client, rid: str, text: str = PROMPT, tokens: int = 6, **more) -> m.StrRow:
    sampling = {"max_new_tokens": tokens, "ignore_eos": True}
    return await answer(client, ask(text, rid=rid, sampling=sampling, **more))


def tensors(dump: Dump) -> dict[tuple[str, str], torch.Tensor]:
    """Rows of all steps, with the shards of all ranks side by side."""
    store = TensorStore(dump.directory)
    shards: dict[tuple[str, str], list[torch.Tensor]] = {}
    for manifest in dump.manifests:
        parts: dict[tuple[str, str], list] = defaultdict(list)
        for record in manifest.records:
            parts[record.name, record.kind].append((record, torch.tensor(store.read(record))))
        for point, found in parts.items():
            rows = torch.cat([tensor for _, tensor in found])
            dim = found[0][0].shard_dim
            if dim is None:
                shards[point] = [rows]
            else:
                shards.setdefault(point, []).append(rows)
    return {
        point: torch.cat(found, dim=1) if len(found) > 1 else found[0]
        for point, found in shards.items()
    }


# ---------------------------------------------------------------- one engine, many recordings


async def test_recordings_of_a_serving_engine(config, home):
    """One engine for all that harms nobody: starting it takes longer than each of these."""
    async with running_engine(config) as tree:
        await a_profile_under_load_holds_every_rank(tree, home / "profiles")
        await a_stop_under_load_holds_no_answer_up(tree, home / "stopped")
        await two_captures_in_one_folder_do_not_mix(tree, home / "profiles")
        await a_capture_ends_by_itself_when_nothing_runs(tree, home / "idle")
        await a_dump_of_one_request_among_eight_holds_only_its_rows(tree, config, home / "dumps")
        await two_weight_epochs_differ_from_the_first_changed_module(tree, config, home)
        await what_cannot_be_recorded_is_refused_and_serving_goes_on(tree, home / "refused")
        await a_full_disk_fails_the_dump_and_nothing_else(tree, home / "full")


async def a_profile_under_load_holds_every_rank(tree, directory):
    async with load(tree.clients[0]):
        began = await start_profile(tree, "load", directory, num_steps="8")
        assert (began.success, began.result["open"], began.result["ranks"]) == (True, True, RANKS)
        second = await start_profile(tree, "other", directory)
        assert (second.status_code, second.err_type) == (409, "conflict")
        ended = await wait_for(tree, "profile", "load")
    assert ended.success, ended
    assert {said["steps"] for said in ended.result["recorded"].values()} == {8}
    merged = merge(directory, "load")
    assert (merged.label, merged.partial, merged.missing) == ("4 of 4", False, [])
    assert check_trace(merged_path(directory, "load")).ok
    summary = summarize(directory, "load")
    assert summary.largest_gap_us is not None and summary.median_step_us is not None
    print(f"gap {summary.largest_gap_us / 1e3:.1f} ms, step {summary.median_step_us / 1e3:.1f} ms")
    assert summary.communication_share > 0


async def a_stop_under_load_holds_no_answer_up(tree, directory):
    """C11, E47: traces are written off the step thread, and complete when stop returns."""
    client = tree.clients[0]
    arrivals: list[float] = []
    stop = asyncio.Event()

    async def watch(dp_rank: int) -> None:
        sampling = {"max_new_tokens": 200, "ignore_eos": True}
        while not stop.is_set():
            async for _ in client.generate(ask(PROMPT, dp_rank=dp_rank, sampling=sampling)):
                arrivals.append(time.monotonic())

    async with load(client):
        watching = asyncio.create_task(watch(0))
        await start_profile(tree, "busy", directory)
        await eventually(lambda: len(arrivals) > 100, 20)
        began = time.monotonic()
        stopped = await call(tree, m.StopRecordingReqInput, recording="profile")
        took = time.monotonic() - began
        assert stopped.success, stopped
        assert merge(directory, "busy").label == "4 of 4"
        stop.set()
        await watching
    during = [began, *(at for at in arrivals if began <= at <= began + took), began + took]
    gap = max(later - earlier for earlier, later in pairwise(during))
    print(f"stop took {took:.2f} s, the longest wait for a token in it was {gap:.2f} s")
    assert gap < 1.0


async def two_captures_in_one_folder_do_not_mix(tree, directory):
    async with load(tree.clients[0]):
        await start_profile(tree, "load2", directory, num_steps=2, profile_by_stage=True)
        assert (await wait_for(tree, "profile", "load2")).success
    before, after = merge(directory, "load"), merge(directory, "load2")
    assert all(name.startswith("load-") for name in before.files)
    assert all(name.startswith("load2-") for name in after.files)
    assert not set(before.files) & set(after.files)


async def a_capture_ends_by_itself_when_nothing_runs(tree, directory):
    began = time.monotonic()
    await start_profile(tree, "idle", directory, max_seconds=0.5)
    ended = await wait_for(tree, "profile", "idle")
    assert ended.success and time.monotonic() - began < 5
    await start_profile(tree, "stopped", directory)
    stopped = await call(tree, m.StopRecordingReqInput, recording="profile")
    assert stopped.success and stopped.result["profile_id"] == "stopped"
    again = await call(tree, m.StopRecordingReqInput, recording="profile")
    assert again.status_code == 409


async def a_dump_of_one_request_among_eight_holds_only_its_rows(tree, config, directory):
    client = tree.clients[0]
    asked = {"layers": "0-1", "kinds": ["input", "output"], "rids": ["r3"], "max_steps": 100}
    assert (await start_dump(tree, "one", directory, **asked)).success
    rows = await asyncio.gather(*(generate(client, f"r{i}", f"{i} {PROMPT}") for i in range(8)))
    ended = await wait_for(tree, "dump", "one")
    assert ended.success, ended
    dump = read_dump(directory, "one")
    assert {record.rid for man in dump.manifests for record in man.records} == {"r3"}
    prompt = client.tokenizer.encode(f"3 {PROMPT}")
    inside = forward_hooks(config.model_path, (prompt + rows[3].output_ids)[:-1])
    found = tensors(dump)
    assert len(found) > 40
    for (name, kind), tensor in found.items():
        truth = inside[name, kind]
        assert torch.allclose(tensor, truth, atol=ATOL, rtol=1e-3), (name, kind)


async def two_weight_epochs_differ_from_the_first_changed_module(tree, config, home):
    """An update that changes one module of the second layer, and nothing before it."""
    changed = "model.layers.1.self_attn.o_proj"
    path = changed_checkpoint(config, home / "models" / "changed", f"{changed}.weight")
    directory, client = home / "epochs", tree.clients[0]
    for name in ("before", "after"):
        asked = {"kinds": ["output", "weight", "logits"], "rids": [name], "max_steps": 100}
        assert (await start_dump(tree, name, directory, **asked)).success
        await generate(client, name, "one prompt, two epochs", tokens=1, dp_rank=0)
        assert (await wait_for(tree, "dump", name)).success
        if name == "before":
            assert (await call(tree, m.UpdateWeightFromDiskReqInput, model_path=path)).success
    found = compare(read_dump(directory, "before"), read_dump(directory, "after"))
    first = found.first_divergence
    assert first is not None and (first.name, first.kind) == (changed, "weight"), found.label
    assert first.epochs == (1, 2)
    at = found.pairs.index(first)
    assert at > 20 and all(pair.equal for pair in found.pairs[:at])
    after = {pair.name for pair in found.pairs[at:] if pair.kind == "output" and pair.diverges}
    assert {changed, "model.layers.1.self_attn", "model.layers.1", "model.norm"} <= after
    assert found.pairs[-1].kind == "logits" and found.pairs[-1].diverges
    assert not found.problems and not found.only_in_a and not found.only_in_b


def changed_checkpoint(config, path: Path, name: str) -> str:
    """The served model with one weight scaled."""
    shutil.copytree(config.model_path, path)
    tensors = load_file(path / "model.safetensors")
    tensors[name] = tensors[name] * 1.5
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    return str(path)


async def what_cannot_be_recorded_is_refused_and_serving_goes_on(tree, directory):
    nothing = await start_dump(tree, "bad", directory, modules=["model.layers.*.mlq"])
    assert nothing.status_code == 400 and "no dump point matches" in nothing.message
    assert not directory.exists()
    beyond = await start_dump(tree, "bad", directory, layers=[7])
    assert beyond.status_code == 400 and "the model has no layer 7" in beyond.message
    assert (await generate(tree.clients[0], "after")).finish.type == "length"


async def a_full_disk_fails_the_dump_and_nothing_else(tree, directory):
    """A limit on the size of the ranks' files stands for the disk: the same OSError."""
    ranks = [tree.process(f"rank dp{dp} tp{tp}") for dp in range(2) for tp in range(2)]
    for rank in ranks:
        rank.rlimit(psutil.RLIMIT_FSIZE, (4096, resource.RLIM_INFINITY))
    asked = {"rids": ["full"], "max_steps": 100}
    assert (await start_dump(tree, "full", directory, **asked)).success
    await generate(tree.clients[0], "full")
    ended = await wait_for(tree, "dump", "full")
    for rank in ranks:
        rank.rlimit(psutil.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    assert "cannot write" in ended.message, ended
    assert (await generate(tree.clients[0], "afterwards")).finish.type == "length"


# ---------------------------------------------------------------- ranks that are late or die


async def test_a_late_rank_is_merged_and_a_killed_one_is_named(config, home):
    """E45, C10."""
    async with running_engine(config) as tree:
        directory = home / "late"
        async with load(tree.clients[0]):
            late = tree.process("rank dp1 tp1")
            await start_profile(tree, "late", directory, num_steps=4)
            late.suspend()
            await asyncio.sleep(3)
            late.resume()
            assert (await wait_for(tree, "profile", "late")).success
        assert merge(directory, "late", wait_s=10).label == "4 of 4"
        await start_profile(tree, "killed", directory, max_seconds=20)
        tree.kill("rank dp1 tp0")
        await eventually(lambda: serves_alone(tree), 20, "dp1 is gone")
        await call(tree, m.StopRecordingReqInput, recording="profile")
        ended = await wait_for(tree, "profile", "killed")
        assert sorted(ended.result["missing"]) == ["dp1-tp0", "dp1-tp1"]
        merged = merge(directory, "killed")
        assert merged.partial and "dp1-tp0" in merged.label
        assert (await generate(tree.clients[0], "on", dp_rank=0)).finish.type == "length"


async def serves_alone(tree) -> bool:
    fleet = await tree.clients[0].fleet()
    return any(rank.dp == 1 and rank.state != "running" for rank in fleet.ranks)


# ---------------------------------------------------------------- two precisions


async def test_two_precisions_name_the_first_point_that_diverges(config, home):
    directory = home / "precision"
    for dtype in ("fp32", "bf16"):
        changed = msgspec.structs.replace(config, dtype=dtype, dp=1, tp=1)
        async with running_engine(changed) as tree:
            asked = {"rids": [dtype], "kinds": ["output", "logits"], "max_steps": 100}
            assert (await start_dump(tree, dtype, directory, **asked)).success
            await generate(tree.clients[0], dtype, tokens=1)
            assert (await wait_for(tree, "dump", dtype)).success
    found = compare(read_dump(directory, "fp32"), read_dump(directory, "bf16"), tolerance=1e-4)
    assert found.first_divergence is not None
    assert found.first_divergence.name == "model.embed_tokens", found.label
    assert not compare(read_dump(directory, "fp32"), read_dump(directory, "fp32")).first_divergence
