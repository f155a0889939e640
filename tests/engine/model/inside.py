"""What plain transformers computes inside: the truth that dumps are held against."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from engine.dumps.hooks import LOGITS, first_tensor

Inside = dict[tuple[str, str], torch.Tensor]


@torch.inference_mode()
def forward_hooks(
    directory: Path, token_ids: list[int], *, dtype: torch.dtype = torch.float32
) -> Inside:
    """(module name, input | output | logits) -> [tokens, ...] of one sequence."""
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=dtype).eval()
    seen: Inside = {}

    def note(name: str):
        def hook(_module, given, named, made):
            for kind, tensor in (
                ("input", first_tensor((*given, *named.values()))),
                ("logits" if name == LOGITS else "output", first_tensor(made)),
            ):
                if tensor is not None and tensor.dim() > 1:
                    seen[name, kind] = by_token(tensor[0], len(token_ids))

        return hook

    for name, module in model.named_modules():
        module.register_forward_hook(note(name), with_kwargs=True)
    model(input_ids=torch.tensor([token_ids]), use_cache=False)
    return seen


def by_token(tensor: torch.Tensor, tokens: int) -> torch.Tensor:
    """Gemma norms queries as [heads, tokens, width]."""
    if tensor.dim() == 3 and tensor.shape[0] != tokens:
        return tensor.transpose(0, 1)
    return tensor
