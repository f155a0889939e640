"""Tiny random models of every family, for tests: a few thousand parameters, made in milliseconds.

``make_tokenizer(path)`` writes a byte-level tokenizer with a chat template and no torch;
``make_scripted_dir(path)`` adds a config.json, enough for the scripted backend;
``make_model(path, family)`` writes a whole Hugging Face directory with random fp32 weights.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

FAMILIES = ("llama", "qwen2", "qwen3", "mistral", "gemma", "gemma2", "gemma3")
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
EOS_ID = 2
VOCAB_SIZE = 320
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_WORDS = ["the", "of", "and", "to", "in", "is", "that", "it", "was", "for", "on", "are", "as"]
_WORDS += ["with", "his", "they", "at", "be", "this", "from", "have"]


def make_tokenizer(path: Path) -> Tokenizer:
    """tokenizer.json and tokenizer_config.json in ``path``: three specials, bytes, a few words."""
    path.mkdir(parents=True, exist_ok=True)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: i for i, token in enumerate((*SPECIAL, *alphabet))}
    merges: list[tuple[str, str]] = []
    for word in ("Ġ" + word for word in _WORDS):
        for end in range(2, len(word) + 1):
            if word[:end] not in vocabulary and len(vocabulary) < VOCAB_SIZE:
                merges.append((word[: end - 1], word[end - 1]))
                vocabulary[word[:end]] = len(vocabulary)
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL])
    tokenizer.save(str(path / "tokenizer.json"))
    _write(
        path / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": SPECIAL[1],
            "eos_token": SPECIAL[2],
            "pad_token": SPECIAL[2],
            "unk_token": SPECIAL[0],
            "chat_template": CHAT_TEMPLATE,
            "clean_up_tokenization_spaces": False,
        },
    )
    return tokenizer


def make_scripted_dir(path: Path, *, max_context: int = 8192) -> Path:
    """A directory that the scripted backend and the tokenizer can open; it has no weights."""
    make_tokenizer(path)
    _write(
        path / "config.json",
        {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "vocab_size": VOCAB_SIZE,
            "max_position_embeddings": max_context,
            "eos_token_id": EOS_ID,
        },
    )
    return path


def make_model(path: Path, family: str, *, seed: int = 0, **overrides: Any) -> Path:
    """A random model of ``family`` (one of FAMILIES) with a tokenizer; deterministic in ``seed``.

    ``overrides`` go into the config. The weights are large enough (std 0.3) that greedy choices
    are no near-ties.
    """
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    config = family_config(family, **overrides)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        for name, parameter in model.named_parameters():
            if name.endswith("norm.weight") or name.endswith("bias"):
                torch.nn.init.normal_(parameter, mean=0.5, std=0.2)
            if name.endswith("embed_tokens.weight") and config.tie_word_embeddings:
                parameter.data *= 0.2  # or the token itself would always be the next one
    model.generation_config.eos_token_id = EOS_ID
    model.generation_config.pad_token_id = EOS_ID
    make_tokenizer(path)
    model.save_pretrained(path)
    return path


def family_config(family: str, **overrides: Any) -> Any:
    """The config of a tiny model: 2 to 4 layers, 4 query and 2 KV heads of width 16."""
    from transformers import AutoConfig

    settings: dict[str, Any] = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 64,
        "intermediate_size": 112,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 1024,
        "initializer_range": 0.3,
        "bos_token_id": 1,
        "eos_token_id": EOS_ID,
        "pad_token_id": EOS_ID,
        "tie_word_embeddings": family.startswith("gemma"),
        **_FAMILY_SETTINGS[family],
        **overrides,
    }
    model_type = "gemma3_text" if family == "gemma3" else family
    return AutoConfig.for_model(model_type, **settings)


_FAMILY_SETTINGS: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {"tie_word_embeddings": True},
    "qwen3": {},
    "mistral": {"sliding_window": 24},
    "gemma": {"num_key_value_heads": 1},
    "gemma2": {
        "tie_word_embeddings": False,
        "sliding_window": 24,
        "query_pre_attn_scalar": 32,
        "attn_logit_softcapping": 3.0,
        "final_logit_softcapping": 5.0,
    },
    "gemma3": {
        "num_hidden_layers": 4,
        "sliding_window": 24,
        "query_pre_attn_scalar": 32,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2,
    },
}
_FAMILY_SETTINGS["gemma3"]["layer_types"] = _FAMILY_SETTINGS["gemma3"]["layer_types"][:4]


def _write(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n")
