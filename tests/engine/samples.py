"""Small tokenizers of each kind, written as model directories, so that most tests need no model."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

from tokenizers import (
    AddedToken,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

from engine.config import home_from_env

EMBEDDED = "SmolLM2-135M-Instruct"
CORPUS = [
    "The quick brown fox jumps over the lazy dog. 0123456789",
    "Stop here ### and say no more, please! (really)",
    "Привет, мир! Grüße aus Köln, ça va?",
    "世界你好。日本語のテキスト",
    "smile 🙂 family 👨‍👩‍👧 flag 🇩🇪 end",
    "def add(a, b):\n    return a + b\n\n\nprint(add(1, 2))\n",
]
SPECIAL = ["<s>", "</s>", "<|user|>", "<|assistant|>"]
TEMPLATE = (
    "{% for message in messages %}{{ '<|' + message['role'] + '|>' }}\n"
    "{{ message['content'] + eos_token }}\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)


def byte_level() -> Tokenizer:
    """GPT-2, Llama 3, Qwen, SmolLM: the alphabet of bytes, no unknown characters."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=600,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_tokens([AddedToken("<｜tool｜>", normalized=False)])
    return tokenizer


def _sentence_piece(decoder: list[Any], **options: Any) -> Tokenizer:
    """BPE over "▁"-joined words with a token for each byte, as SentencePiece trains it."""
    trained = Tokenizer(models.BPE(unk_token="<unk>"))
    trained.normalizer = normalizers.Replace(" ", "▁")
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=["<unk>"], limit_alphabet=40, show_progress=False
    )
    trained.train_from_iterator(["▁" + line for line in CORPUS], trainer)
    model = json.loads(trained.to_str())["model"]
    pieces = [token for token in model["vocab"] if token != "<unk>"]
    tokens = ["<unk>", *SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256)), *pieces]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    tokenizer = Tokenizer(
        models.BPE(
            vocab=vocabulary,
            merges=[tuple(merge) for merge in model["merges"]],
            unk_token="<unk>",
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    for name, value in options.items():
        setattr(tokenizer, name, value)
    tokenizer.decoder = decoders.Sequence(decoder)
    tokenizer.add_special_tokens(["<unk>", *SPECIAL])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", vocabulary["<s>"])]
    )
    return tokenizer


def llama() -> Tokenizer:
    """Llama 2, Mistral: a space in front of the text, dropped again by the decoder."""
    return _sentence_piece(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ],
        normalizer=normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]),
    )


def gemma() -> Tokenizer:
    """Gemma: no space in front."""
    return _sentence_piece(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()],
        normalizer=normalizers.Replace(" ", "▁"),
    )


def unigram() -> Tokenizer:
    """XGLM, T5: pieces only, the Metaspace decoder."""
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=200, special_tokens=["<unk>", *SPECIAL], unk_token="<unk>", show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


def words() -> Tokenizer:
    """Whole words and no decoder: tokens are joined with spaces."""
    tokenizer = Tokenizer(models.WordLevel(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    trainer = trainers.WordLevelTrainer(special_tokens=["<unk>", *SPECIAL], show_progress=False)
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


def reversing() -> Tokenizer:
    """A decoder that fits no table: doubled letters are one letter, also across tokens."""
    tokenizer = byte_level()
    tokenizer.decoder = decoders.Sequence(
        [decoders.ByteLevel(), decoders.Fuse(), decoders.Replace("oo", "u")]
    )
    return tokenizer


KINDS: dict[str, Callable[[], Tokenizer]] = {
    "byte_level": byte_level,
    "llama": llama,
    "gemma": gemma,
    "unigram": unigram,
    "words": words,
}


@cache
def _serialized(kind: str) -> str:
    return {**KINDS, "reversing": reversing}[kind]().to_str()


def write_model_dir(
    directory: Path, kind: str = "byte_level", *, template: str | None = TEMPLATE, **config: Any
) -> Path:
    """A model directory with the files that ``Tokenizer.load`` reads."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "tokenizer.json").write_text(_serialized(kind), encoding="utf-8")
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": "</s>",
        **config,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    if template is not None:
        (directory / "chat_template.jinja").write_text(template, encoding="utf-8")
    return directory


def embedded_model_dir() -> Path:
    """The embedded model, for tests marked ``model``."""
    directory = home_from_env(os.environ) / "models" / EMBEDDED
    assert (directory / "tokenizer.json").exists(), "run: manage.py model pull"
    return directory
