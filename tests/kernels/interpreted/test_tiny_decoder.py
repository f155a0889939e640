"""The kernels together: a decoder of them, interpreted, against the same one of references."""

from __future__ import annotations

import torch

from kernels.dispatch import forced
from tests.kernels.tiny_decoder import TinyDecoder, batch_of

TABLES = [[5, 2], [7, 1, 3]]


def test_prefill_and_decode_give_the_logits_of_the_references():
    prompts = [[3, 1, 4], [9, 2, 6, 5, 3]]
    steps = [
        batch_of(prompts, [0, 0], TABLES, block_size=4),
        batch_of([[11], [22]], [3, 5], TABLES, block_size=4),
        batch_of([[12, 13], [23]], [4, 6], TABLES, block_size=4),
    ]
    logits = {}
    for implementation in ("triton", "reference"):
        decoder = TinyDecoder(slots=32, dtype=torch.float32, device="cpu")
        with forced(implementation):
            logits[implementation] = [decoder(step) for step in steps]
    for actual, expected in zip(logits["triton"], logits["reference"], strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)
