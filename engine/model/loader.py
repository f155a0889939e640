"""Reads a Hugging Face model directory: its config, its end tokens, its safetensors.

Path: runner.py -> here -> native.py, hf.py, scripted.py. Every fault of a directory becomes a
ConfigError whose sentence names the file or the tensor that is missing. No torch is needed for the
configs, so the scripted backend stays light.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine.errors import ConfigError

if TYPE_CHECKING:
    import torch

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"


@dataclass(frozen=True, slots=True)
class ModelDirectory:
    """What the JSON files of a model directory say; ``text`` is the language model's config."""

    path: Path
    config: dict[str, Any]
    text: dict[str, Any]
    eos_token_ids: tuple[int, ...]

    @property
    def architecture(self) -> str:
        names = self.config.get("architectures") or [self.config.get("model_type", "unknown")]
        return str(names[0])

    @property
    def vocab_size(self) -> int:
        return self._integer("vocab_size")

    @property
    def max_context(self) -> int:
        """Tokens that the positions of this model reach."""
        for name in ("max_position_embeddings", "n_positions", "seq_length"):
            if name in self.text:
                return self._integer(name)
        raise ConfigError(f"{self.path}/config.json names no context length")

    def _integer(self, name: str) -> int:
        value = self.text.get(name)
        if not isinstance(value, int):
            raise ConfigError(f"{self.path}/config.json: {name} must be a number, is {value!r}")
        return value


def open_directory(path: Path) -> ModelDirectory:
    """Reads config.json and generation_config.json of ``path``."""
    if not path.is_dir():
        raise ConfigError(
            f"no model directory at {path}: run `manage.py model pull` for the embedded model, "
            "or set QUARTERDECK_MODEL"
        )
    config = _read_json(path / "config.json")
    text = config.get("text_config") or config
    generation_path = path / "generation_config.json"
    generation = _read_json(generation_path) if generation_path.exists() else {}
    return ModelDirectory(path, config, text, _eos_token_ids(generation, config, text))


def _eos_token_ids(*configs: dict[str, Any]) -> tuple[int, ...]:
    """Those of the first config that names any."""
    for config in configs:
        found = config.get("eos_token_id")
        if isinstance(found, int):
            return (found,)
        if found:
            return tuple(found)
    return ()


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text())
    except FileNotFoundError as error:
        raise ConfigError(f"the model directory {path.parent} has no {path.name}") from error
    except ValueError as error:
        raise ConfigError(f"{path} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise ConfigError(f"{path} holds a {type(value).__name__}, not an object")
    return value


class Checkpoint:
    """Tensors by name, read one at a time, of directories (sharded or not) and safetensors files.

    Of several paths the later wins, tensor by tensor: an epoch may be a base and updates over it.
    """

    def __init__(self, *paths: Path) -> None:
        self._paths = paths
        self._file_of = {
            name: file for path in paths for name, file in _file_of_tensors(path).items()
        }

    @property
    def names(self) -> frozenset[str]:
        return frozenset(self._file_of)

    def read(self, name: str) -> torch.Tensor:
        """A copy of the tensor in its stored dtype. Raises ConfigError when it is missing."""
        from safetensors import safe_open

        if name not in self._file_of:
            raise ConfigError(f"{' + '.join(map(str, self._paths))} has no tensor {name}")
        with safe_open(self._file_of[name], framework="pt") as file:
            tensor: torch.Tensor = file.get_tensor(name)
        return tensor


def _file_of_tensors(path: Path) -> dict[str, Path]:
    if path.is_file():
        return _names_in(path)
    if (path / INDEX).exists():
        index: dict[str, str] = _read_json(path / INDEX).get("weight_map", {})
        missing = sorted({name for name in index.values() if not (path / name).exists()})
        if missing:
            raise ConfigError(f"{path} lacks {', '.join(missing)}, which {INDEX} names")
        return {name: path / file for name, file in index.items()}
    if not (path / SINGLE).exists():
        raise ConfigError(f"{path} has neither {SINGLE} nor {INDEX}")
    return _names_in(path / SINGLE)


def _names_in(file: Path) -> dict[str, Path]:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(file, framework="np") as opened:
            return dict.fromkeys(opened.keys(), file)
    except SafetensorError as error:
        raise ConfigError(f"{file} cannot be read: {error}") from error
