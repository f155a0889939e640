from __future__ import annotations

from collections.abc import Callable

import pytest

from engine.tokenizer import Tokenizer
from tests.engine.samples import write_model_dir


@pytest.fixture(scope="session")
def tokenizer_of(tmp_path_factory) -> Callable[[str], Tokenizer]:
    """The sample tokenizer of a kind (``samples.KINDS``)."""
    made: dict[str, Tokenizer] = {}

    def load(kind: str) -> Tokenizer:
        if kind not in made:
            made[kind] = Tokenizer.load(write_model_dir(tmp_path_factory.mktemp(kind), kind))
        return made[kind]

    return load
