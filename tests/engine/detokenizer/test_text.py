"""Streams: what they give out concatenates to one-shot decoding, whatever the ids and chunks."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.detokenizer.text import (
    CONTEXT_IDS,
    PENDING_IDS,
    WindowStream,
    is_at_start,
    open_stream,
)
from engine.tokenizer import Tokenizer
from tests.engine.samples import KINDS, embedded_model_dir

ALL = sorted(KINDS)
seeds = st.lists(st.integers(0, 2**32 - 1), max_size=40)  # become ids of any vocabulary
sizes = st.lists(st.integers(1, 5), min_size=40, max_size=40)


@pytest.fixture(scope="module")
def smollm2():
    return Tokenizer.load(embedded_model_dir())


def ids_of(tokenizer, numbers):
    """Half of them small ids, where byte and special tokens are."""
    small = min(300, tokenizer.vocab_size)
    return [n % (small if n % 2 else tokenizer.vocab_size) for n in numbers]


def chunks(ids, lengths):
    at = 0
    for length in (*lengths, len(ids)):
        if at < len(ids):
            yield ids[at : at + length]
            at += length


def answer(tokenizer, ids, lengths, *, prompt=(), skip=True):
    """The deltas, the last one from ``flush``."""
    stream = open_stream(tokenizer, skip_special_tokens=skip, prompt_tail=prompt)
    deltas = [stream.push(part) for part in chunks(ids, lengths)]
    deltas.append(stream.flush())
    if is_at_start(tokenizer, prompt, skip) and "".join(deltas).startswith(" "):
        first = next(i for i, delta in enumerate(deltas) if delta)
        deltas[first] = deltas[first][1:]
    return deltas


@pytest.mark.parametrize("kind", ALL)
@pytest.mark.parametrize("skip", [True, False])
@settings(max_examples=60, deadline=None)
@given(numbers=seeds, lengths=sizes)
def test_deltas_concatenate_to_one_shot_decoding(tokenizer_of, kind, skip, numbers, lengths):
    """C16, E29: any ids in any chunks."""
    tokenizer = tokenizer_of(kind)
    ids = ids_of(tokenizer, numbers)
    whole = tokenizer.decode(ids, skip_special_tokens=skip)
    assert "".join(answer(tokenizer, ids, lengths, skip=skip)) == whole


@pytest.mark.model
@settings(max_examples=300, deadline=None)
@given(numbers=seeds, lengths=sizes, skip=st.booleans())
def test_deltas_of_the_embedded_model_concatenate_to_one_shot_decoding(
    smollm2, numbers, lengths, skip
):
    ids = ids_of(smollm2, numbers)
    whole = smollm2.decode(ids, skip_special_tokens=skip)
    assert "".join(answer(smollm2, ids, lengths, skip=skip)) == whole


@pytest.mark.parametrize("kind", ALL)
@settings(max_examples=60, deadline=None)
@given(prompt=st.text("The fox ", max_size=8), numbers=seeds, lengths=sizes)
def test_an_answer_is_what_decoding_adds_to_the_prompt(
    tokenizer_of, kind, prompt, numbers, lengths
):
    tokenizer = tokenizer_of(kind)
    prompt_ids = tokenizer.encode(prompt)
    ids = ids_of(tokenizer, numbers)
    whole = tokenizer.decode(prompt_ids + ids)
    added = "".join(answer(tokenizer, ids, lengths, prompt=prompt_ids))
    assert added == whole[len(tokenizer.decode(prompt_ids)) :]


@pytest.mark.parametrize("kind", ALL)
@settings(max_examples=60, deadline=None)
@given(text=st.text("aé世🙂 👨‍👩‍👧#.", max_size=30), lengths=sizes)
def test_no_replacement_character_shows_while_a_character_is_unfinished(
    tokenizer_of, kind, text, lengths
):
    """C16."""
    tokenizer = tokenizer_of(kind)
    ids = tokenizer.encode(text, add_special_tokens=False)
    if "\ufffd" not in tokenizer.decode(ids):
        assert all("\ufffd" not in delta for delta in answer(tokenizer, ids, lengths))


@pytest.mark.parametrize("kind", ["byte_level", "llama", "gemma"])
def test_a_character_cut_by_the_end_of_the_answer_is_what_one_shot_decoding_makes_of_it(
    tokenizer_of, kind
):
    tokenizer = tokenizer_of(kind)
    ids = tokenizer.encode("ok 𒀀", add_special_tokens=False)[:-1]
    deltas = answer(tokenizer, ids, [1] * 40)
    assert "".join(deltas) == tokenizer.decode(ids)
    assert "\ufffd" in deltas[-1] and not any("\ufffd" in delta for delta in deltas[:-1])


@pytest.mark.parametrize("kind", ["byte_level", "llama", "gemma"])
def test_a_character_that_the_prompt_began_belongs_to_the_answer(tokenizer_of, kind):
    tokenizer = tokenizer_of(kind)
    ids = tokenizer.encode("ok 𒀀.", add_special_tokens=False)
    border = len(ids) - 3  # inside the character, which is four byte tokens
    deltas = answer(tokenizer, ids[border:], [1] * 40, prompt=ids[:border])
    assert "".join(deltas) == "𒀀."


def test_a_whole_character_at_the_end_of_the_prompt_is_not_said_again(tokenizer_of):
    tokenizer = tokenizer_of("llama")
    prompt = tokenizer.encode("ok 𒀀", add_special_tokens=False)
    ids = tokenizer.encode("𒀀", add_special_tokens=False)[-4:] + tokenizer.encode(
        "ok", add_special_tokens=False
    )
    assert "".join(answer(tokenizer, ids, [1] * 40, prompt=prompt)) == "𒀀 ok"


def test_the_space_in_front_of_a_word_shows_behind_a_prompt_and_not_at_a_start(tokenizer_of):
    tokenizer = tokenizer_of("llama")
    ids = tokenizer.encode("fox", add_special_tokens=False)
    assert "".join(answer(tokenizer, ids, [1] * 9, prompt=tokenizer.encode("The"))) == " fox"
    bos = tokenizer.encode("")
    assert "".join(answer(tokenizer, ids, [1] * 9, prompt=bos)) == "fox"
    assert "".join(answer(tokenizer, ids, [1] * 9, prompt=bos, skip=False)) == " fox"


@given(data=st.binary(max_size=40), lengths=sizes)
def test_wrong_bytes_become_what_the_library_makes_of_them(tokenizer_of, data, lengths):
    tokenizer = tokenizer_of("byte_level")
    letters = {tokenizer.piece(i): i for i in range(tokenizer.vocab_size)}
    ids = [letters[bytes([byte])] for byte in data]
    whole = tokenizer.decode(ids)
    assert whole == data.decode(errors="replace")
    assert "".join(answer(tokenizer, ids, lengths)) == whole


# --------------------------------------------------------------------------- opaque decoders


class Decoder:
    """A decode function that counts the ids it is asked for."""

    def __init__(self, decode):
        self.decode = decode
        self.longest = 0

    def __call__(self, ids):
        self.longest = max(self.longest, len(ids))
        return self.decode(ids)


def bytes_of(ids):
    return bytes(ids).decode(errors="replace")


@given(data=st.text(max_size=40), lengths=sizes)
def test_a_window_is_exact_for_a_decoder_it_knows_nothing_about(data, lengths):
    ids = list(data.encode())
    stream = WindowStream(bytes_of, [])
    assert "".join([stream.push(part) for part in chunks(ids, lengths)]) == data
    assert stream.flush() == ""


def test_printable_text_that_grows_shrinks_and_grows_is_given_out_once():
    """E29."""
    texts = {0: "", 1: "A 世\ufffd", 2: "A 世a\ufffd", 3: "A 世ab"}
    stream = WindowStream(lambda ids: texts[len(ids)], [])
    deltas = [stream.push([7]) for _ in range(3)]
    assert deltas == ["A 世", "a", "b"]


def test_a_window_stays_short_even_if_the_text_keeps_ending_in_replacement_characters():
    decoder = Decoder(lambda ids: "\ufffd" * len(ids))
    stream = WindowStream(decoder, [])
    text = "".join(stream.push([1]) for _ in range(500)) + stream.flush()
    assert text == "\ufffd" * 500
    assert decoder.longest <= 2 * PENDING_IDS + CONTEXT_IDS


def test_the_fallback_for_an_unknown_decoder_shows_the_same_words(tokenizer_of):
    tokenizer = tokenizer_of("reversing")
    assert tokenizer.style == "opaque"
    ids = tokenizer.encode("The quick brown fox 世界 🙂", add_special_tokens=False)
    assert "".join(answer(tokenizer, ids, [1] * 99)) == tokenizer.decode(ids)
