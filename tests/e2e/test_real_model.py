"""The embedded model behind everything: two web workers, two ranks, fp32, HTTP."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor

import openai
import pytest

from tests.console.tree import Tree, running_tree
from tests.engine.model.conftest import EMBEDDED

pytestmark = [pytest.mark.e2e, pytest.mark.model]
STREAMS = 64


@pytest.fixture(scope="module")
def tree(tmp_path_factory, embedded_model):
    home = tmp_path_factory.mktemp("real")
    with running_tree(
        home,
        QUARTERDECK_BACKEND="auto",
        QUARTERDECK_MODEL=str(EMBEDDED.resolve()),
        QUARTERDECK_DTYPE="fp32",
        QUARTERDECK_KV_TOKENS="16384",
        QUARTERDECK_THREADS="1",
    ) as running:
        yield running


def test_the_capital_of_france_by_the_openai_package(tree: Tree):
    with openai.OpenAI(base_url=f"{tree.url}/v1", api_key=tree.key, max_retries=0) as client:
        parts = client.chat.completions.create(
            model="default",
            messages=[{"role": "user", "content": "What is the capital of France?"}],
            stream=True,
            temperature=0,
        )
        text = "".join(part.choices[0].delta.content or "" for part in parts if part.choices)
    assert "Paris" in text


def stream(tree: Tree, number: int) -> tuple[str, str]:
    """(worker, the ids of the answer) of one streamed greedy request."""
    body = {
        "text": f"Story number {number}: once upon a time there",
        "stream": True,
        "sampling_params": {"temperature": 0, "max_new_tokens": 16, "ignore_eos": True},
    }
    ids = ""
    with tree.stream("/generate", body) as response:
        for line in response.iter_lines():
            if line.startswith("data: {"):
                ids = str(json.loads(line[6:])["output_ids"])
    return response.headers["x-quarterdeck-worker"], ids


def test_64_concurrent_streams_over_two_workers_equal_their_single_runs(tree: Tree):
    with ThreadPoolExecutor(STREAMS) as pool:
        together = list(pool.map(lambda number: stream(tree, number), range(STREAMS)))
    assert {worker for worker, _ in together} == {"1", "2"}
    tree.post("/flush_cache", {})
    alone = [stream(tree, number)[1] for number in range(STREAMS)]
    assert [ids for _, ids in together] == alone
    assert tree.running() == 0
