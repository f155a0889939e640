from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine.artifacts import Rank
from engine.dumps.capture import DumpCapture, RowSpan
from engine.dumps.hooks import hooked, kept_spans, layer_of, module_points, row_spans
from engine.dumps.points import parse_spec
from engine.dumps.store import TensorStore, read_dump


@pytest.fixture(scope="module")
def llama():
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(3)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=4,
        pad_token_id=0,
    )
    return LlamaForCausalLM(config).eval()


def probe(llama):
    return lambda: llama(input_ids=torch.zeros(1, 1, dtype=torch.int64), use_cache=False)


@torch.inference_mode()
def test_points_have_hugging_face_names_in_the_order_in_which_modules_finish(llama):
    points = module_points(llama, probe(llama))
    names = [point.name for point in points]
    layer = [name for name in names if name.startswith("model.layers.1")]
    assert layer == [
        "model.layers.1.input_layernorm",
        *[f"model.layers.1.self_attn.{part}_proj" for part in "qkvo"],
        "model.layers.1.self_attn",
        "model.layers.1.post_attention_layernorm",
        "model.layers.1.mlp.gate_proj",
        "model.layers.1.mlp.act_fn",
        "model.layers.1.mlp.up_proj",
        "model.layers.1.mlp.down_proj",
        "model.layers.1.mlp",
        "model.layers.1",
    ]
    assert names[0] == "model.embed_tokens" and names[-1] == "lm_head"
    assert {point.layer for point in points if point.name in layer} == {1}
    kinds = {point.name: set(point.shard_dim) for point in points}
    assert kinds["lm_head"] == {"input", "logits", "weight"}
    assert kinds["model.layers.1.mlp.up_proj"] == {"input", "output", "weight"}


@torch.inference_mode()
def test_a_dump_equals_forward_hooks_on_plain_transformers(llama, tmp_path):
    ids = torch.tensor([[5, 9, 2, 7, 1]])
    expected = {}
    hooks = [
        module.register_forward_hook(
            lambda _module, _inputs, output, name=name: expected.update(
                {name: output[0] if isinstance(output, tuple) else output[0]}
            )
        )
        for name, module in llama.named_modules()
        if name.startswith("model.layers.")
    ]
    llama(input_ids=ids, use_cache=False)
    for hook in hooks:
        hook.remove()
    capture = DumpCapture(Rank(), module_points(llama, probe(llama)), "hf eager fp32")
    raw = {"dump_id": "d", "directory": str(tmp_path), "layers": "0-2", "rids": ["b"]}
    capture.arm(parse_spec(raw))
    rows = [RowSpan("a", 0, 3, 0), RowSpan("b", 3, 5, 3)]
    with capture.step(1, epoch=1) as tap, hooked(llama, tap, rows, kept_spans(rows, [2, 4])):
        llama(input_ids=ids, use_cache=False, logits_to_keep=torch.tensor([2, 4]))
    capture.close()
    dump = read_dump(tmp_path, "d")
    store = TensorStore(tmp_path)
    records = dump.manifests[0].records
    assert {record.rid for record in records} == {"b"}
    assert {record.name for record in records} == expected.keys()
    for record in records:
        reference = expected[record.name]
        reference = reference[0] if reference.dim() == 3 else reference
        assert torch.equal(torch.tensor(store.read(record)), reference[3:5]), record.name


@torch.inference_mode()
def test_logits_are_cut_to_the_tokens_that_were_kept(llama, tmp_path):
    capture = DumpCapture(Rank(), module_points(llama, probe(llama)), "hf")
    raw = {"dump_id": "d", "directory": str(tmp_path), "modules": ["lm_head"]}
    capture.arm(parse_spec(raw))
    rows = [RowSpan("a", 0, 3, 7), RowSpan("b", 3, 5, 0)]
    keep = [2, 4, 3, 4]
    with capture.step(1, epoch=1) as tap, hooked(llama, tap, rows, kept_spans(rows, keep)):
        output = llama(
            input_ids=torch.tensor([[5, 9, 2, 7, 1]]),
            use_cache=False,
            logits_to_keep=torch.tensor(keep),
        )
    capture.close()
    records = read_dump(tmp_path, "d").manifests[0].records
    assert [(r.rid, r.start, r.stop) for r in records] == [("a", 9, 10), ("b", 1, 2), ("b", 0, 2)]
    store = TensorStore(tmp_path)
    parts = torch.cat([torch.tensor(store.read(record)) for record in records])
    assert torch.equal(parts, output.logits[0])


@torch.inference_mode()
def test_no_hook_is_left_behind_even_when_the_forward_fails(llama, tmp_path):
    points = module_points(llama, probe(llama))
    capture = DumpCapture(Rank(), points, "hf")
    capture.arm(parse_spec({"dump_id": "d", "directory": str(tmp_path)}))
    with (
        pytest.raises(ZeroDivisionError),
        capture.step(1, epoch=1) as tap,
        hooked(llama, tap, [], []),
    ):
        _ = 1 / 0
    capture.close()
    assert not [name for name, module in llama.named_modules() if module._forward_hooks]


@given(st.lists(st.tuples(st.integers(1, 4), st.integers(0, 9)), min_size=1, max_size=4), st.data())
def test_kept_spans_tell_request_and_position_of_every_kept_token(groups, data):
    rids = [f"r{number}" for number in range(len(groups))]
    starts = [0]
    for count, _ in groups:
        starts.append(starts[-1] + count)
    rows = row_spans(rids, starts, [position for _, position in groups])
    whose = [(row.rid, row.position + at) for row in rows for at in range(row.stop - row.start)]
    keep = data.draw(st.lists(st.integers(0, starts[-1] - 1), max_size=8))
    spans = kept_spans(rows, keep)
    told = [(s.rid, s.position + at) for s in spans for at in range(s.stop - s.start)]
    assert told == [whose[token] for token in keep]


@pytest.mark.parametrize(
    ("name", "layer"),
    [
        ("model.layers.12.mlp", 12),
        ("model.layers.3", 3),
        ("transformer.h.0.attn", 0),
        ("model.norm", None),
        ("model.layers", None),
    ],
)
def test_the_layer_is_read_from_the_name(name, layer):
    assert layer_of(name) == layer
