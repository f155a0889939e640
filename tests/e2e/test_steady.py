"""Nothing grows: memory and descriptors of every process after many requests."""

from __future__ import annotations

import contextlib
import time
from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest

from tests.console.tree import Tree, eventually, running_tree

pytestmark = pytest.mark.e2e
AFTER, TOTAL = 500, 2000


@pytest.fixture
def tree(tmp_path):
    with running_tree(tmp_path, QUARTERDECK_SCRIPTED_STEP_S="0", QUARTERDECK_KV_TOKENS="8192") as t:
        yield t


def ask(tree: Tree, numbers: range) -> None:
    """Requests of differing prompts over keep-alive connections, eight at a time."""

    def some(lane: int) -> None:
        with tree.client() as client:
            for number in numbers[lane::8]:
                body = {"text": f"{number} [[eos 12]]", "sampling_params": {"max_new_tokens": 16}}
                assert client.post("/generate", json=body).status_code == 200

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(some, range(8)))
    eventually(lambda: tree.running() == 0, 5)


def state(tree: Tree) -> dict[str, tuple[int, int]]:
    """(resident bytes, descriptors) of the processes that a request passes, by title."""
    found = {}
    for process in tree.processes():
        with contextlib.suppress(psutil.NoSuchProcess):
            title = " ".join(process.cmdline())
            if any(role in title for role in ("web", "router", "rank", "detokenizer")):
                found[title] = (process.memory_info().rss, process.num_fds())
    return found


def settled(tree: Tree) -> dict[str, tuple[int, int]]:
    """The state once no connection of ours is being closed any more: the same twice in a row."""
    seen = [state(tree)]

    def same() -> bool:
        time.sleep(0.5)
        seen.append(state(tree))
        return [d for _, d in seen[-1].values()] == [d for _, d in seen[-2].values()]

    eventually(same, 15, "descriptors settle")
    return seen[-1]


def test_memory_and_descriptors_stay_after_two_thousand_requests(tree: Tree):
    ask(tree, range(AFTER))
    before = settled(tree)
    ask(tree, range(AFTER, TOTAL))
    after = settled(tree)
    assert before.keys() == after.keys() and len(before) == 6
    for title, (rss, descriptors) in after.items():
        assert rss <= before[title][0] * 1.03, title
        assert descriptors <= before[title][1], title
