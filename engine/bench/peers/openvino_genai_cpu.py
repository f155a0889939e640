"""OpenVINO GenAI on the GGUF file, prompts of equal length as one batch of ids. GGUF THREADS."""

import sys
from importlib.metadata import version

from line_protocol import serve, take_stdout, timed


def main() -> None:
    replies = take_stdout()
    import numpy
    import openvino
    import openvino_genai

    pipeline = openvino_genai.LLMPipeline(
        sys.argv[1], "CPU", INFERENCE_NUM_THREADS=int(sys.argv[2]), PERFORMANCE_HINT="LATENCY"
    )

    def generate(prompts: list[list[int]], new_tokens: int) -> list[int]:
        ids = numpy.array(prompts, dtype=numpy.int64)
        inputs = openvino_genai.TokenizedInputs(
            openvino.Tensor(ids), openvino.Tensor(numpy.ones_like(ids))
        )
        config = openvino_genai.GenerationConfig()
        config.max_new_tokens = new_tokens
        config.ignore_eos = True
        config.do_sample = False
        return [len(tokens) for tokens in pipeline.generate(inputs, config).tokens]

    serve(timed(generate), {"openvino-genai": version("openvino-genai")}, replies)


main()
