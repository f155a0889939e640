"""SGLang's fan-out of one batch output: a copy by index for each row, then its socket's own coding.

The classes and the copying function are those of the installed wheel, unchanged; they are cut out
of their modules, because those import CUDA libraries. ``Loopback`` does what SGLang's sockets do to
an object, without the socket's system calls.
"""

import ast
import sys
import time
import types
import typing
from abc import ABC
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib.metadata import distribution, version
from pathlib import Path
from typing import Any

import zmq
from line_protocol import serve, take_stdout

CLASSES = {
    "BaseReq",
    "BaseBatchReq",
    "BatchTokenIDOutput",
    "BatchStrOutput",
    "BatchMultimodalOutput",
    "BatchEmbeddingOutput",
}
SPLIT = "_handle_output_by_index"


class Loopback(zmq.Socket):  # type: ignore[type-arg]
    """``send_pyobj`` and ``recv_pyobj`` of pyzmq over memory."""

    frame: bytes = b""

    def send(self, data: Any, *args: Any, **options: Any) -> None:  # type: ignore[override]
        self.__dict__["frame"] = data

    def recv(self, *args: Any, **options: Any) -> Any:
        return self.__dict__["frame"]


def cut_out(module: str, names: set[str], **known: Any) -> types.ModuleType:
    """A module with only the definitions ``names`` of the wheel's file."""
    path = Path(str(distribution("sglang").locate_file(module.replace(".", "/") + ".py")))
    tree = ast.parse(path.read_text())
    tree.body = [
        node
        for node in tree.body
        if getattr(node, "name", "") in names
        or (isinstance(node, ast.ImportFrom) and node.module == "__future__")
    ]
    made = types.ModuleType(module)
    made.__dict__.update(known)
    parts = module.split(".")
    for end in range(1, len(parts)):  # the packages above, empty: nothing else of them is run
        package = ".".join(parts[:end])
        sys.modules.setdefault(package, types.ModuleType(package))
    sys.modules[module] = made
    exec(compile(tree, str(path), "exec"), made.__dict__)
    return made


def load() -> tuple[types.ModuleType, Callable[[Any, int], Any]]:
    """The module of the output classes, and the function that copies one row out of them."""
    known = {name: getattr(typing, name) for name in ("Any", "Dict", "List", "Optional", "Union")}
    known |= {"ABC": ABC, "dataclass": dataclass, "field": field, "BaseFinishReason": Any}
    structs = cut_out("sglang.srt.managers.io_struct", CLASSES, **known)
    classes = {name: getattr(structs, name) for name in CLASSES}
    mixin = cut_out("sglang.srt.managers.multi_tokenizer_mixin", {SPLIT}, **classes)
    return structs, getattr(mixin, SPLIT)


def main() -> None:
    replies = take_stdout()
    structs, split = load()
    socket = Loopback(zmq.Context.instance(), zmq.PUSH)

    def answer(columns: dict[str, Any], rows: int, repeats: int) -> dict[str, Any]:
        output = structs.BatchStrOutput(**columns)
        encode_s = decode_s = 0.0
        for _ in range(repeats):
            began = time.perf_counter()
            frames = []
            for index in range(rows):
                socket.send_pyobj(split(output, index))
                frames.append(socket.frame)
            encoded = time.perf_counter()
            for frame in frames:
                socket.send(frame)
                socket.recv_pyobj()
            decode_s += time.perf_counter() - encoded
            encode_s += encoded - began
        per_row_us = 1e6 / rows / repeats
        return {"encode_us": encode_s * per_row_us, "decode_us": decode_s * per_row_us}

    serve(answer, {"sglang": version("sglang")}, replies)


main()
