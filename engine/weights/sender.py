"""The trainer's end of a weight update: safetensors bytes over HTTP, or a distributed group.

Path: a training loop -> here -> console/api -> engine/client.py -> router -> every rank.

Both senders push a stream of (name, tensor) pairs in buckets within one weight session, so a model
of any size becomes exactly one epoch, and a trainer that dies half way changes nothing.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from types import TracebackType
from typing import Any, Self

import httpx
import torch
from safetensors.torch import save
from torch import distributed

from engine.model.weights import torch_dtypes
from engine.weights.checkpoint import TensorSpec, WeightError, checksum_of
from engine.weights.transfer import POLL_S, TRAINER, bytes_of, join_group, leave_group

BUCKET_BYTES = 256 * 2**20
TIMEOUT_S = 600.0
GROUP_NAME = "weight_update_group"
SPELLING = {dtype: name for name, dtype in torch_dtypes().items()}

NamedTensors = Iterable[tuple[str, torch.Tensor]]
Bucket = list[tuple[str, torch.Tensor]]


def buckets(tensors: NamedTensors, bucket_bytes: int = BUCKET_BYTES) -> Iterator[Bucket]:
    """Consecutive tensors of at most ``bucket_bytes`` together; a larger one goes alone."""
    bucket: Bucket = []
    size = 0
    for name, tensor in tensors:
        if bucket and size + tensor.nbytes > bucket_bytes:
            yield bucket
            bucket, size = [], 0
        bucket.append((name, tensor.detach()))
        size += tensor.nbytes
    if bucket:
        yield bucket


def spec_of(name: str, tensor: torch.Tensor) -> TensorSpec:
    return TensorSpec(name, SPELLING[tensor.dtype], tuple(tensor.shape))


class Engine:
    """The HTTP control surface of one engine, as a trainer uses it."""

    def __init__(
        self, url: str, api_key: str, *, transport: httpx.BaseTransport | None = None
    ) -> None:
        headers = {"Authorization": f"Bearer {api_key}"}
        self._http = httpx.Client(
            base_url=url, headers=headers, timeout=TIMEOUT_S, transport=transport
        )

    def post(self, route: str, **fields: Any) -> dict[str, Any]:
        """Raises WeightError with the engine's own sentence when it refuses."""
        return self._checked(self._http.post(route, json=fields))

    def post_bytes(self, route: str, content: bytes, **fields: Any) -> dict[str, Any]:
        """Bytes as the body, ``fields`` in the query string."""
        headers = {"Content-Type": "application/octet-stream"}
        return self._checked(
            self._http.post(route, content=content, params=fields, headers=headers)
        )

    def close(self) -> None:
        self._http.close()

    @staticmethod
    def _checked(response: httpx.Response) -> dict[str, Any]:
        if response.is_success:
            answer: dict[str, Any] = response.json()
            if answer.get("success", True):
                return answer
        raise WeightError(f"the engine refused: {response.text}", status_code=response.status_code)


class WeightSession:
    """One update as a context: leaving it normally commits, leaving it by an error drops."""

    def __init__(self, engine: Engine, **terms: Any) -> None:
        """``terms``: token_step, weight_version, in_flight, target ... of the update."""
        self._engine, self._terms = engine, terms
        self._digests: dict[str, tuple[TensorSpec, str]] = {}
        self.id = ""
        self.result: dict[str, Any] = {}

    def __enter__(self) -> Self:
        self.id = self._engine.post("/begin_weight_update", **self._terms)["session_id"]
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: object, trace: TracebackType | None
    ) -> None:
        end = {"session_id": self.id}
        if kind is not None:
            self._engine.post("/end_weight_update", drop=True, **end)
            return
        checksum = checksum_of(dict(self._digests.values()))
        self.result = self._engine.post("/end_weight_update", checksum=checksum, **end)

    def note(self, bucket: Bucket) -> None:
        """Counts a bucket into the checksum that the engine must arrive at."""
        for name, tensor in bucket:
            digest = hashlib.sha256(bytes_of(tensor)).hexdigest()
            self._digests[name] = (spec_of(name, tensor), digest)


def push_tensors(
    engine: Engine, tensors: NamedTensors, *, bucket_bytes: int = BUCKET_BYTES, **terms: Any
) -> dict[str, Any]:
    """One update out of safetensors bytes; the engine's answer to its end."""
    with WeightSession(engine, **terms) as session:
        for bucket in buckets(tensors, bucket_bytes):
            session.note(bucket)
            content = save({name: tensor.contiguous().cpu() for name, tensor in bucket})
            engine.post_bytes("/update_weights_from_tensor", content, session_id=session.id)
    return session.result


class WeightGroup:
    """A distributed group with every rank of an engine; this process is rank 0."""

    def __init__(
        self,
        engine: Engine,
        *,
        engine_ranks: int,
        address: str,
        port: int,
        name: str = GROUP_NAME,
        backend: str = "gloo",
        timeout_s: float = 60.0,
    ) -> None:
        """Returns when all ``engine_ranks`` (dp * tp) are in. The store is here: address:port."""
        self._engine = engine
        self.name = name
        self._calls = ThreadPoolExecutor(max_workers=1, thread_name_prefix="weight-call")
        world = {"world_size": 1 + engine_ranks, "backend": backend}
        place = {"master_address": address, "master_port": port}
        answer = self._calls.submit(
            engine.post, "/init_weights_update_group",
            rank_offset=1, group_name=name, **place, **world,
        )  # fmt: skip
        self.group = join_group(
            address=address, port=port, rank=TRAINER, name=name, timeout_s=timeout_s,
            world_size=1 + engine_ranks, backend=backend,
        )  # fmt: skip
        answer.result()

    def push(
        self, tensors: NamedTensors, *, bucket_bytes: int = BUCKET_BYTES, **terms: Any
    ) -> dict[str, Any]:
        """One update by broadcasts; the engine's answer to its end."""
        with WeightSession(self._engine, **terms) as session:
            for bucket in buckets(tensors, bucket_bytes):
                session.note(bucket)
                answer = self._calls.submit(
                    self._engine.post, "/update_weights_from_distributed",
                    session_id=session.id, group_name=self.name, **described(bucket),
                )  # fmt: skip
                try:
                    broadcast(self.group, bucket, failed=partial(_failed, answer))
                except RuntimeError:
                    answer.result()  # the engine's reason, where it has one
                    raise
                answer.result()
        return session.result

    def close(self) -> None:
        self._engine.post("/destroy_weights_update_group", group_name=self.name)
        leave_group(self.group)
        self._calls.shutdown()


def described(bucket: Bucket) -> dict[str, Any]:
    """``names``, ``dtypes`` and ``shapes`` as the engine's routes take them."""
    return {
        "names": [name for name, _ in bucket],
        "dtypes": [str(tensor.dtype).removeprefix("torch.") for _, tensor in bucket],
        "shapes": [list(tensor.shape) for _, tensor in bucket],
    }


def broadcast(group: Any, bucket: Bucket, failed: Callable[[], bool] = lambda: False) -> None:
    """Sends the bucket's tensors in order; gives up as soon as ``failed()``."""
    options = distributed.BroadcastOptions()
    options.rootRank = TRAINER
    options.rootTensor = 0
    for _, tensor in bucket:
        work = group.broadcast([tensor.contiguous()], options)
        while not work.is_completed():
            if failed():
                return  # the call's own error says why
            time.sleep(POLL_S)
        work.wait()


def _failed(answer: Future[Any]) -> bool:
    return answer.done() and answer.exception() is not None
