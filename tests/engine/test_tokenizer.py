"""The tokenizer gives what transformers gives for the same directory, and says what is wrong."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from datetime import date
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken
from transformers import AutoTokenizer

from engine.client import TOKEN_CHARACTERS, GenerateReqInput, TokenizerWorker
from engine.errors import BadRequest, ConfigError
from engine.messages import SamplingParams
from engine.tokenizer import Tokenizer
from tests.engine.samples import KINDS, TEMPLATE, embedded_model_dir, write_model_dir

TEXTS = [
    "",
    " ",
    "The quick brown fox",
    "  two spaces, trailing  ",
    "Grüße, мир! 世界 🙂👨‍👩‍👧",
    "def f(x):\n\treturn x\n\n\n",
    "<|user|> spelled out </s>",
    "\x00\x01 control \r\n",
]


class Pair:
    """Ours and transformers', of one directory."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.ours = Tokenizer.load(directory)
        self.theirs = AutoTokenizer.from_pretrained(str(directory))


@pytest.fixture(scope="module")
def pair_of(tmp_path_factory):
    made: dict[str, Pair] = {}

    def load(kind: str) -> Pair:
        if kind not in made:
            made[kind] = Pair(write_model_dir(tmp_path_factory.mktemp(kind), kind))
        return made[kind]

    return load


@pytest.fixture(scope="module")
def smollm2():
    return Pair(embedded_model_dir())


# --------------------------------------------------------------------------- other threads


def test_a_long_text_does_not_hold_up_other_threads(smollm2):
    """A worker's lease and its other streams lived on the same interpreter lock."""
    done = threading.Event()
    gaps = []

    def tick():
        while not done.is_set():
            began = time.monotonic()
            time.sleep(0.001)
            gaps.append(time.monotonic() - began)

    ticker = threading.Thread(target=tick)
    ticker.start()
    began = time.monotonic()
    smollm2.ours.encode("hello world " * 50_000)
    took = time.monotonic() - began
    done.set()
    ticker.join()
    assert max(gaps) < took / 2


async def test_a_text_that_no_context_can_hold_is_refused_unread(pair_of):
    worker = TokenizerWorker(pair_of("byte_level").ours, max_context=10, vocab_size=400)
    long = "x" * (10 * TOKEN_CHARACTERS + 1)
    for prompt in ({"text": long}, {"messages": [{"role": "user", "content": long}]}):
        request = GenerateReqInput(sampling=SamplingParams(), **prompt)
        with pytest.raises(BadRequest, match="characters") as refusal:
            await worker.tokenize(request)
        assert refusal.value.err_type == "context_length_exceeded"


# --------------------------------------------------------------------------- text


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("text", TEXTS)
def test_encoding_equals_transformers(pair_of, kind, text):
    pair = pair_of(kind)
    for special in (True, False):
        assert pair.ours.encode(text, add_special_tokens=special) == pair.theirs.encode(
            text, add_special_tokens=special
        )


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=50, deadline=None)
@given(numbers=st.lists(st.integers(0, 2**20), max_size=12), skip=st.booleans())
def test_decoding_equals_transformers(pair_of, kind, numbers, skip):
    pair = pair_of(kind)
    ids = [n % pair.ours.vocab_size for n in numbers]
    assert pair.ours.decode(ids, skip_special_tokens=skip) == pair.theirs.decode(
        ids, skip_special_tokens=skip
    )


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("spaces", [True, False])
def test_spaces_between_special_tokens_changes_nothing_here_and_there(pair_of, kind, spaces):
    pair = pair_of(kind)
    ids = [*pair.ours.special_ids, *pair.ours.encode("a fox")]
    ours = pair.ours.decode(ids, skip_special_tokens=False, spaces_between_special_tokens=spaces)
    assert ours == pair.ours.decode(ids, skip_special_tokens=False)
    assert ours == pair.theirs.decode(
        ids, skip_special_tokens=False, spaces_between_special_tokens=spaces
    )


@pytest.mark.parametrize("kind", KINDS)
def test_special_tokens_have_the_ids_that_transformers_gives_them(pair_of, kind):
    pair = pair_of(kind)
    assert (pair.ours.bos_token_id, pair.ours.eos_token_id) == (
        pair.theirs.bos_token_id,
        pair.theirs.eos_token_id,
    )
    assert pair.ours.vocab_size == len(pair.theirs)
    assert set(pair.theirs.all_special_ids) <= pair.ours.special_ids


def test_the_bytes_of_all_tokens_are_the_text(pair_of):
    for kind in ("byte_level", "gemma"):
        ours = pair_of(kind).ours
        ids = ours.encode("Grüße, 世界 🙂", add_special_tokens=False)
        assert b"".join(map(ours.token_bytes, ids)).decode() == "Grüße, 世界 🙂"
        assert any(len(ours.token_bytes(i).decode(errors="ignore")) == 0 for i in ids)


def test_a_special_token_has_the_bytes_of_its_name(pair_of):
    ours = pair_of("byte_level").ours
    assert ours.token_bytes(ours.encode("<|user|>")[0]) == b"<|user|>"
    assert ours.token_bytes(ours.encode("<｜tool｜>")[0]) == "<｜tool｜>".encode()


@pytest.mark.parametrize("token_id", [-1, 10**6])
def test_ids_out_of_range_are_the_callers_mistake(pair_of, token_id):
    ours = pair_of("byte_level").ours
    for call in (lambda: ours.decode([1, token_id]), lambda: ours.token_bytes(token_id)):
        with pytest.raises(BadRequest, match=f"token id {token_id} is not in 0"):
            call()


def test_an_unknown_id_in_a_stream_says_nothing(pair_of):
    """The model's table of logits may be padded beyond the vocabulary."""
    assert pair_of("byte_level").ours.piece(10**6) == b""


def test_a_text_with_half_a_surrogate_pair_is_refused(pair_of):
    with pytest.raises(BadRequest, match="not valid Unicode"):
        pair_of("byte_level").ours.encode("a \ud800")


# --------------------------------------------------------------------------- configuration


def test_the_configuration_can_add_special_tokens(tmp_path):
    """eos is an ordinary token of tokenizer.json; the others stand in the configuration only."""
    added = {"455": {"content": "<extra>", "special": False, "normalized": False}}
    directory = write_model_dir(
        tmp_path,
        eos_token="###",
        added_tokens_decoder=added,
        image_token="<image>",
        extra_special_tokens=["<|note|>"],
    )
    pair = Pair(directory)
    for text in ("a ### b<extra>", "<image><|note|>x", *TEXTS):
        ids = pair.ours.encode(text)
        assert ids == pair.theirs.encode(text)
        assert pair.ours.decode(ids) == pair.theirs.decode(ids, skip_special_tokens=True)
    assert pair.ours.eos_token_id == pair.theirs.eos_token_id


def test_a_legacy_special_tokens_map_is_read(tmp_path):
    directory = write_model_dir(tmp_path)
    (directory / "tokenizer_config.json").write_text("{}")
    (directory / "special_tokens_map.json").write_text(
        json.dumps({"eos_token": {"content": "</s>", "lstrip": False, "rstrip": False}})
    )
    pair = Pair(directory)
    assert pair.ours.eos_token_id == pair.theirs.eos_token_id
    assert pair.ours.named_tokens == {"eos_token": "</s>"}


def test_every_token_that_ends_an_answer_is_known(tmp_path):
    directory = write_model_dir(tmp_path)
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 3]}))
    assert Tokenizer.load(directory).eos_token_ids == (2, 3, 1)
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": 1}))
    assert Tokenizer.load(directory).eos_token_ids == (1,)


def test_truncation_and_padding_of_the_file_do_not_apply(tmp_path):
    directory = write_model_dir(tmp_path)
    backend = Tokenizer.load(directory)._backend
    backend.enable_truncation(3)
    backend.enable_padding(length=8)
    backend.add_tokens([AddedToken("x")])
    backend.save(str(directory / "tokenizer.json"))
    text = "The quick brown fox jumps"
    pair = Pair(directory)
    assert len(pair.ours.encode(text)) > 3
    assert pair.ours.encode(text) == pair.theirs.encode(text)


def test_text_that_was_streamed_is_not_cleaned_up_afterwards(tmp_path):
    """The one case in which decoding differs from transformers, on purpose."""
    directory = write_model_dir(tmp_path, "words", clean_up_tokenization_spaces=True)
    pair = Pair(directory)
    ids = pair.ours.encode("dog .")
    assert pair.ours.decode(ids) == "dog ."
    assert pair.theirs.decode(ids) == "dog."


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("tokenizer.json", None, "no tokenizer.json"),
        ("tokenizer.json", "{", "cannot be read"),
        ("tokenizer_config.json", "{", "not JSON"),
        ("tokenizer_config.json", "[]", "a JSON object"),
    ],
)
def test_a_directory_without_a_usable_tokenizer_stops_the_start(tmp_path, name, content, reason):
    directory = write_model_dir(tmp_path)
    if content is None:
        (directory / name).unlink()
    else:
        (directory / name).write_text(content)
    with pytest.raises(ConfigError, match=reason):
        Tokenizer.load(directory)


def test_transformers_and_torch_stay_out_of_the_process(tmp_path):
    directory = write_model_dir(tmp_path)
    script = (
        "import sys, pathlib; from engine.tokenizer import Tokenizer;"
        f"t = Tokenizer.load(pathlib.Path({str(directory)!r}));"
        "t.decode(t.apply_chat_template([{'role': 'user', 'content': 'hi'}]));"
        "print(sorted({'transformers', 'torch', 'zmq'} & set(sys.modules)))"
    )
    found = subprocess.run([sys.executable, "-c", script], capture_output=True, check=True)
    assert found.stdout.strip() == b"[]"


# --------------------------------------------------------------------------- chats

CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Hi <|user|> 世界"},
    {"role": "assistant", "content": "Hello!  "},
]
LOGIC = """
{%- set notes = namespace(count=0) %}
{% for message in messages %}
    {% if loop.index0 == 9 %}
        {% break %}
    {% endif %}
    {% set notes.count = notes.count + 1 %}
{{ bos_token if loop.first else '' }}[{{ message.role | upper }}]
    {% generation %}
{{ message['content'] | trim }}{{ eos_token }}
    {% endgeneration %}
{% endfor %}
{{ notes.count }} {{ strftime_now('%Y-%m-%d') }} {{ {'é': ['<', 1]} | tojson }}
{{ {'b': 1, 'a': 2} | tojson(indent=2, sort_keys=true) }}
{% if tools %}{{ tools | tojson(separators=(',', ':')) }}{% endif %}
{% if documents is none %}no documents{% endif %}
{% if add_generation_prompt %}<|assistant|>{% endif %}
"""
REASONING = (
    "{% for m in messages %}{{ m.role }}:{{ m.thinking }}|{{ m.reasoning_content }}|"
    "{{ m.get('tool_calls', 'none') }};{% endfor %}"
)
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]


@pytest.mark.parametrize("template", [TEMPLATE, LOGIC])
@pytest.mark.parametrize("tools", [None, TOOLS])
@pytest.mark.parametrize("prompt", [True, False])
def test_a_chat_equals_transformers(tmp_path, template, tools, prompt):
    pair = Pair(write_model_dir(tmp_path, template=template))
    ours = pair.ours.apply_chat_template(CHAT, tools=tools, add_generation_prompt=prompt)
    assert ours == pair.theirs.apply_chat_template(
        CHAT, tools=tools, add_generation_prompt=prompt, return_dict=False
    )
    assert len(ours) > 10


def test_a_template_knows_the_day(tmp_path):
    ours = Tokenizer.load(write_model_dir(tmp_path, template="{{ strftime_now('%Y-%m-%d') }}"))
    assert ours.render_chat(CHAT) == date.today().isoformat()


@pytest.mark.parametrize("key", ["reasoning", "thinking", "reasoning_content"])
def test_reasoning_has_the_names_that_templates_read(tmp_path, key):
    pair = Pair(write_model_dir(tmp_path, template=REASONING))
    chat = [{"role": "assistant", key: "hm", "content": "x", "tool_calls": None}]
    assert pair.ours.render_chat(chat) == "assistant:hm|hm|none;"
    assert pair.ours.render_chat(chat) == pair.theirs.apply_chat_template(chat, tokenize=False)


@pytest.mark.parametrize("template", [TEMPLATE, LOGIC, "{{ messages[-1]['content'] }}"])
@pytest.mark.parametrize("content", ["Once upon", "Once upon ", " Once "])
def test_the_last_message_can_be_continued(tmp_path, template, content):
    pair = Pair(write_model_dir(tmp_path, template=template))
    chat = [*CHAT[:2], {"role": "assistant", "content": content}]
    ours = pair.ours.render_chat(chat, add_generation_prompt=False, continue_final_message=True)
    assert ours == pair.theirs.apply_chat_template(
        chat, continue_final_message=True, tokenize=False
    )
    assert ours.endswith(content.strip()) or ours.endswith(content)
    assert chat[-1]["content"] == content


def test_a_tool_template_is_used_when_there_are_tools(tmp_path):
    directory = write_model_dir(
        tmp_path,
        template=None,
        chat_template=[
            {"name": "default", "template": "plain"},
            {"name": "tool_use", "template": "tools: {{ tools | length }}"},
        ],
    )
    pair = Pair(directory)
    assert pair.ours.chat_template == "plain"
    for tools in (None, TOOLS):
        assert pair.ours.render_chat(CHAT, tools=tools) == pair.theirs.apply_chat_template(
            CHAT, tools=tools, tokenize=False
        )


def test_template_files_win_over_the_configuration(tmp_path):
    directory = write_model_dir(tmp_path, template="file", chat_template="configured")
    (directory / "additional_chat_templates").mkdir()
    (directory / "additional_chat_templates" / "tool_use.jinja").write_text("tool file")
    pair = Pair(directory)
    for tools in (None, TOOLS):
        assert pair.ours.render_chat(CHAT, tools=tools) == pair.theirs.apply_chat_template(
            CHAT, tools=tools, tokenize=False
        )


def test_a_template_can_take_more_variables(tmp_path):
    pair = Pair(write_model_dir(tmp_path, template="{{ enable_thinking }} {{ bos_token }}"))
    assert pair.ours.render_chat(
        CHAT, template_kwargs={"enable_thinking": False}
    ) == pair.theirs.apply_chat_template(CHAT, enable_thinking=False, tokenize=False)


# --------------------------------------------------------------------------- content in parts

PARTS = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
WALKS_PARTS = (
    "{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for part in m.content %}({{ part.text }}){% endfor %}{% endif %}{% endfor %}"
)


def test_text_parts_become_lines_for_a_template_that_takes_strings(tmp_path):
    ours = Tokenizer.load(write_model_dir(tmp_path))
    assert ours.render_chat([{"role": "user", "content": PARTS}]) == ours.render_chat(
        [{"role": "user", "content": "one\ntwo"}]
    )


@pytest.mark.parametrize("template", ["{{ messages[0].content }}", "{{ messages[0]['content'] }}"])
def test_a_template_that_would_print_the_list_gets_text(tmp_path, template):
    ours = Tokenizer.load(write_model_dir(tmp_path, template=template))
    assert ours.render_chat([{"role": "user", "content": PARTS}]) == "one\ntwo"


def test_a_template_that_walks_parts_gets_them(tmp_path):
    pair = Pair(write_model_dir(tmp_path, template=WALKS_PARTS))
    chat = [{"role": "user", "content": PARTS}, {"role": "user", "content": "three"}]
    assert pair.ours.render_chat(chat) == "(one)(two)three"
    assert pair.ours.render_chat(chat) == pair.theirs.apply_chat_template(chat, tokenize=False)
    assert pair.ours.render_chat(
        chat[:1], add_generation_prompt=False, continue_final_message=True
    ) == pair.theirs.apply_chat_template(chat[:1], continue_final_message=True, tokenize=False)


# --------------------------------------------------------------------------- mistakes in chats

USER = {"role": "user", "content": "x"}


@pytest.mark.parametrize(
    ("messages", "reason"),
    [
        ([], "at least one message"),
        ("hi", "a list"),
        (["hi"], r"messages\[0\] must be an object"),
        ([USER, {"content": "x"}], r"messages\[1\] must be an object with a role"),
        ([{"role": "user"}], "does not take these messages"),
        ([{"role": "user", "content": 7}], "does not take these messages"),
        (
            [{"role": "user", "content": [{"type": "image_url"}]}],
            "not a content part of type 'image",
        ),
        ([{"role": "user", "content": [{"type": "text"}]}], "must have a text"),
        ([{"role": "user", "content": ["x"]}], "type 'str'"),
    ],
)
def test_bad_messages_are_the_callers_mistake(pair_of, messages, reason):
    with pytest.raises(BadRequest, match=reason):
        pair_of("byte_level").ours.apply_chat_template(messages)


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        (None, "no chat template"),
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{% for %}", "does not take these messages"),
        ("{{ messages.append(1) }}", "does not take these messages"),
        ("{{ ''.__class__.__mro__ }}", "does not take these messages"),
        ("{{ 1 // 0 }}", "does not take these messages"),
    ],
)
def test_a_template_that_refuses_says_why(tmp_path, template, reason):
    ours = Tokenizer.load(write_model_dir(tmp_path, template=template))
    with pytest.raises(BadRequest, match=reason):
        ours.render_chat([USER])


def test_templates_without_a_default_are_named(tmp_path):
    config = [{"name": "rag", "template": "x"}]
    ours = Tokenizer.load(write_model_dir(tmp_path, template=None, chat_template=config))
    with pytest.raises(BadRequest, match="rag"):
        ours.render_chat([USER])


@pytest.mark.parametrize(
    ("messages", "prompt", "reason"),
    [
        ([USER], True, "exclude each other"),
        ([{"role": "user", "content": [{"type": "text", "text": ""}]}], False, ""),
        ([{"role": "assistant", "tool_calls": []}], False, "needs a text"),
    ],
)
def test_a_message_that_cannot_be_continued(tmp_path, messages, prompt, reason):
    ours = Tokenizer.load(write_model_dir(tmp_path))
    if reason:
        with pytest.raises(BadRequest, match=reason):
            ours.render_chat(messages, add_generation_prompt=prompt, continue_final_message=True)
    else:
        assert ours.render_chat(
            messages, add_generation_prompt=prompt, continue_final_message=True
        ).endswith("<|user|>\n")


def test_a_template_that_drops_the_last_message_cannot_continue_it(tmp_path):
    ours = Tokenizer.load(write_model_dir(tmp_path, template="{{ messages[0].content }}"))
    with pytest.raises(BadRequest, match="does not keep"):
        ours.render_chat(
            [USER, {"role": "assistant", "content": "gone"}],
            add_generation_prompt=False,
            continue_final_message=True,
        )


# --------------------------------------------------------------------------- the embedded model


@pytest.mark.model
@pytest.mark.parametrize("text", TEXTS)
def test_the_embedded_model_encodes_and_decodes_like_transformers(smollm2, text):
    ids = smollm2.ours.encode(text)
    assert ids == smollm2.theirs.encode(text)
    for skip in (True, False):
        assert smollm2.ours.decode(ids, skip_special_tokens=skip) == smollm2.theirs.decode(
            ids, skip_special_tokens=skip
        )


@pytest.mark.model
@pytest.mark.parametrize("chat", [CHAT, CHAT[1:], [USER]])
def test_the_embedded_models_chats_equal_transformers(smollm2, chat):
    assert smollm2.ours.apply_chat_template(chat) == smollm2.theirs.apply_chat_template(
        chat, add_generation_prompt=True, return_dict=False
    )


@pytest.mark.model
def test_the_embedded_models_decoder_is_known(smollm2):
    assert smollm2.ours.style == "lossy"
    assert smollm2.ours.eos_token_id in smollm2.ours.eos_token_ids
