"""llama.cpp through its C interface: one sequence per prompt, greedy. GGUF THREADS.

The same calls as its own batched example: all prompts in one decode, then a row per sequence.
"""

import sys
from collections.abc import Iterable

import llama_cpp
import numpy
from line_protocol import serve, take_stdout, timed

CONTEXT_TOKENS = 8192
BATCH_TOKENS = 2048
MOST_SEQUENCES = 64


class Greedy:
    """One context whose cache is emptied before each batch of prompts."""

    def __init__(self, path: str, threads: int) -> None:
        llama_cpp.llama_backend_init()
        model = llama_cpp.llama_model_load_from_file(
            path.encode(), llama_cpp.llama_model_default_params()
        )
        params = llama_cpp.llama_context_default_params()
        params.n_ctx, params.n_batch = CONTEXT_TOKENS, BATCH_TOKENS
        params.n_seq_max, params.kv_unified = MOST_SEQUENCES, True
        params.n_threads = params.n_threads_batch = threads
        self._context = llama_cpp.llama_init_from_model(model, params)
        self._batch = llama_cpp.llama_batch_init(BATCH_TOKENS, 0, 1)
        self._width = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(model))

    def generate(self, prompts: list[list[int]], new_tokens: int) -> list[int]:
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(self._context), True)
        newest = self._decode(
            (token, position, sequence, position == len(ids) - 1)
            for sequence, ids in enumerate(prompts)
            for position, token in enumerate(ids)
        )
        lengths = [len(ids) for ids in prompts]
        for step in range(new_tokens - 1):
            newest = self._decode(
                (token, lengths[sequence] + step, sequence, True)
                for sequence, token in enumerate(newest)
            )
        return [new_tokens] * len(newest)

    def _decode(self, tokens: Iterable[tuple[int, int, int, bool]]) -> list[int]:
        """Rows (token, position, sequence, wants logits) -> greedy tokens of those that want."""
        batch, wanted = self._batch, []
        batch.n_tokens = 0
        for row, (token, position, sequence, wants) in enumerate(tokens):
            batch.token[row], batch.pos[row] = token, position
            batch.n_seq_id[row], batch.seq_id[row][0] = 1, sequence
            batch.logits[row] = wants
            batch.n_tokens = row + 1
            if wants:
                wanted.append(row)
        if code := llama_cpp.llama_decode(self._context, batch):
            raise RuntimeError(f"llama_decode returned {code}")
        return [self._best(row) for row in wanted]

    def _best(self, row: int) -> int:
        logits = llama_cpp.llama_get_logits_ith(self._context, row)
        return int(numpy.ctypeslib.as_array(logits, (self._width,)).argmax())


def main() -> None:
    replies = take_stdout()
    greedy = Greedy(sys.argv[1], int(sys.argv[2]))
    serve(timed(greedy.generate), {"llama-cpp-python": llama_cpp.__version__}, replies)


main()
