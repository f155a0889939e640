"""llama.cpp through its C interface: one sequence per prompt, greedy. GGUF THREADS.

The same calls as its own batched example: all prompts in one decode, then a row per sequence.
"""

import sys
from collections.abc import Iterable

from line_protocol import serve, take_stdout, timed

CONTEXT_TOKENS = 8192
MOST_SEQUENCES = 64


def main() -> None:
    replies = take_stdout()
    import llama_cpp
    import numpy

    llama_cpp.llama_backend_init()
    model = llama_cpp.llama_model_load_from_file(
        sys.argv[1].encode(), llama_cpp.llama_model_default_params()
    )
    params = llama_cpp.llama_context_default_params()
    params.n_ctx, params.n_batch, params.n_seq_max = CONTEXT_TOKENS, 2048, MOST_SEQUENCES
    params.n_threads = params.n_threads_batch = int(sys.argv[2])
    params.kv_unified = True
    context = llama_cpp.llama_init_from_model(model, params)
    batch = llama_cpp.llama_batch_init(params.n_batch, 0, 1)
    vocabulary = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(model))

    def decode(tokens: Iterable[tuple[int, int, int, bool]]) -> list[int]:
        """Rows (token, position, sequence, wants logits) -> greedy tokens of those that want."""
        wanted = []
        batch.n_tokens = 0
        for row, (token, position, sequence, wants) in enumerate(tokens):
            batch.token[row], batch.pos[row] = token, position
            batch.n_seq_id[row], batch.seq_id[row][0] = 1, sequence
            batch.logits[row] = wants
            batch.n_tokens = row + 1
            if wants:
                wanted.append(row)
        if code := llama_cpp.llama_decode(context, batch):
            raise RuntimeError(f"llama_decode returned {code}")
        logits = (llama_cpp.llama_get_logits_ith(context, row) for row in wanted)
        return [int(numpy.ctypeslib.as_array(one, (vocabulary,)).argmax()) for one in logits]

    def generate(prompts: list[list[int]], new_tokens: int) -> list[int]:
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(context), True)
        newest = decode(
            (token, position, sequence, position == len(ids) - 1)
            for sequence, ids in enumerate(prompts)
            for position, token in enumerate(ids)
        )
        lengths = [len(ids) for ids in prompts]
        for step in range(new_tokens - 1):
            newest = decode(
                (token, lengths[sequence] + step, sequence, True)
                for sequence, token in enumerate(newest)
            )
        return [new_tokens] * len(newest)

    serve(timed(generate), {"llama-cpp-python": llama_cpp.__version__}, replies)


main()
