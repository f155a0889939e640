"""Plain transformers: ``generate`` in bf16, its default attention and cache. MODEL THREADS."""

import sys

from line_protocol import serve, take_stdout, timed


def main() -> None:
    replies = take_stdout()
    import torch
    import transformers

    torch.set_num_threads(int(sys.argv[2]))
    model = transformers.AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.bfloat16)
    model.train(False)

    def generate(prompts: list[list[int]], new_tokens: int) -> list[int]:
        ids = torch.tensor(prompts)
        with torch.inference_mode():
            output = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                do_sample=False,
                temperature=None,
                top_p=None,
                min_new_tokens=new_tokens,
                max_new_tokens=new_tokens,
            )
        return [output.shape[1] - ids.shape[1]] * len(prompts)

    serve(timed(generate), {"transformers": transformers.__version__}, replies)


main()
