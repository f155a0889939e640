from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.dumps.points import DumpPoint, parse_layers, parse_spec, select
from engine.errors import BadRequest

POINTS = [
    DumpPoint(name="model.embed_tokens", shard_dim={"output": None}),
    *[
        DumpPoint(
            name=f"model.layers.{layer}.{part}",
            layer=layer,
            shard_dim={"input": None, "output": 1, "weight": 0},
        )
        for layer in range(4)
        for part in ("self_attn.q_proj", "mlp.up_proj")
    ],
    DumpPoint(name="lm_head", shard_dim={"logits": None}),
]


def chosen(**raw: object) -> dict:
    return select(POINTS, parse_spec({"dump_id": "d", "directory": "x"} | raw))


def test_without_a_filter_every_output_and_the_logits_are_chosen_in_order():
    found = chosen()
    assert list(found) == [point.name for point in POINTS]
    assert found["lm_head"] == {"logits"}
    assert found["model.layers.0.mlp.up_proj"] == {"output"}


def test_globs_layers_and_kinds_narrow_the_choice_together():
    found = chosen(modules=["*.q_proj"], layers="1-2", kinds=["inputs", "weights"])
    assert found == {
        "model.layers.1.self_attn.q_proj": {"input", "weight"},
        "model.layers.2.self_attn.q_proj": {"input", "weight"},
    }


@pytest.mark.parametrize(
    ("raw", "sentence"),
    [
        ({"modules": ["*.k_proj"]}, "no dump point matches '*.k_proj'"),
        (
            {"modules": ["model.layers.0.self_attn.q_prj"]},
            "near it: model.layers.0.self_attn.q_proj",
        ),
        ({"modules": ["lm_head"], "layers": [0]}, "'lm_head' matches points of other layers only"),
        ({"layers": [3, 9]}, "the model has no layer 9"),
        ({"kinds": ["kv"]}, "none of the wanted kinds"),
        ({"kinds": ["gradient"]}, "kind 'gradient' is not one of"),
        ({"kinds": 5}, "kinds must be a list"),
        ({"layers": "3-1"}, "counts down"),
        ({"layers": "a"}, "is not a list like 0-3,7"),
        ({"max_steps": 0}, "max_steps must be above 0"),
        ({"max_bytes": 1 << 60}, "max_bytes must be above 0 and at most"),
        ({"max_seconds": "soon"}, "max_seconds"),
        ({"modules": []}, "at least one module glob"),
        ({"dump_id": "../d"}, "may hold up to 128"),
    ],
)
def test_a_request_that_makes_no_sense_is_refused_with_a_sentence(raw, sentence):
    with pytest.raises(BadRequest) as refused:
        chosen(**raw)
    assert sentence in refused.value.message


def test_num_steps_is_another_word_for_max_steps_and_may_be_a_text():
    spec = parse_spec({"dump_id": "d", "directory": "x", "num_steps": "3"})
    assert spec.max_steps == 3


@given(st.sets(st.integers(0, 300), min_size=1, max_size=20))
def test_layers_written_one_by_one_read_back(layers):
    assert parse_layers(",".join(map(str, layers))) == sorted(layers)
