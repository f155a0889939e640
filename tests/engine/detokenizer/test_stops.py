"""Stop strings and regexes: when a request ends, and where its text is cut."""

from __future__ import annotations

import time

import pytest
import regex
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.client import GenerateReqInput, TokenizerWorker
from engine.detokenizer.regex_size import regex_size
from engine.detokenizer.stops import (
    MAX_STOPS,
    REGEX_CHARACTERS,
    REGEX_TIMEOUT_S,
    STOP_CHARACTERS,
    Match,
    StopChecker,
    StopScanner,
    check_stops,
)
from engine.errors import BadRequest
from engine.messages import SamplingParams
from tests.engine.detokenizer.vocabulary import ListVocabulary


def first_stop(tokens, stop=(), stop_regex=(), special=(), skip=True):
    """(index of the token, what it completed), or None; ``tokens`` are pushed in order."""
    sampling = SamplingParams(stop=stop, stop_regex=stop_regex, skip_special_tokens=skip)
    checker = StopChecker(sampling, ListVocabulary(tokens, special))
    for index in range(len(tokens)):
        if (matched := checker.push(index)) is not None:
            return index, matched
    return None


def test_a_stop_string_in_one_token():
    assert first_stop(["one ", "###", "two"], stop=("###",)) == (1, "###")


def test_a_stop_string_over_three_tokens():
    assert first_stop(["a#", "#", "#b"], stop=("###",)) == (2, "###")


def test_a_stop_string_whose_character_is_split_over_tokens():
    world = "世".encode()
    assert first_stop(["a", world[:1], world[1:2], world[2:], "b"], stop=("世",)) == (3, "世")


def test_text_without_the_stop_string_runs_on():
    assert first_stop(["a#", "#", "b#"], stop=("###",)) is None


def test_the_match_that_is_complete_first_wins():
    assert first_stop(["abcd"], stop=("abcd", "bc")) == (0, "bc")
    assert first_stop(["x", "abcd"], stop=("d", "a")) == (1, "a")


def test_of_matches_that_are_complete_at_once_the_longest_wins():
    assert first_stop(["say stop"], stop=("op", "stop", "p")) == (0, "stop")


def test_a_match_is_told_once_for_the_token_that_completes_it():
    vocabulary = ListVocabulary(["##", "#", "a"])
    checker = StopChecker(SamplingParams(stop=("##",)), vocabulary)
    assert [checker.push(i) for i in (0, 2, 2, 1, 1)] == ["##", None, None, None, "##"]


def test_a_special_token_that_is_not_shown_can_be_a_stop_string():
    tokens = ["hi", "<|end|>"]
    assert first_stop(tokens, stop=("<|end|>",), special=[1]) == (1, "<|end|>")
    assert first_stop(tokens, stop=("<|end|>",), special=[1], skip=False) == (1, "<|end|>")
    assert first_stop(tokens, stop=("i<|end|>",), special=[1]) is None


def test_a_stop_string_made_of_byte_tokens_matches_before_the_run_of_bytes_ends(tokenizer_of):
    tokenizer = tokenizer_of("llama")
    checker = StopChecker(SamplingParams(stop=("𒀀",)), tokenizer)
    ids = tokenizer.encode("ok 𒀀", add_special_tokens=False)
    assert [checker.push(i) for i in ids][-2:] == [None, "𒀀"]


# --------------------------------------------------------------------------- regexes


def test_a_regex_over_tokens():
    assert first_stop(["id ", "12", "3-", "4"], stop_regex=(r"\d+-\d",)) == (3, r"\d+-\d")


def test_an_empty_match_never_stops():
    assert first_stop(["a", "b"], stop_regex=("x*",)) is None


def test_a_regex_sees_the_characters_before_it():
    tokens = ["a", "x" * 300, "foo", "bar"]
    assert first_stop(tokens, stop_regex=("(?<=foo)bar",)) == (3, "(?<=foo)bar")
    assert first_stop(tokens, stop_regex=("^foo",)) is None


def test_a_match_longer_than_the_bound_is_not_found():
    long = "x" * REGEX_CHARACTERS
    assert first_stop(["a", long, "z"], stop_regex=("ax*z",)) is None
    assert first_stop(["a", long[2:], "z"], stop_regex=("ax*z",)) == (2, "ax*z")


def test_a_regex_that_explodes_ends_its_request_with_a_sentence():
    with pytest.raises(BadRequest, match="took too long") as caught:
        first_stop(["a" * 60 + "b"], stop_regex=(r"(a|aa)+$",))
    assert caught.value.err_type == "stop_regex_too_slow"


def test_many_slow_regexes_have_no_more_time_than_one():
    """64 patterns that are each just quick enough held up every other request for seconds."""
    slow = "(?:a|aa)+(?:b|$)(?!)"
    sources = tuple(f"{slow}{at}" for at in range(MAX_STOPS))
    began = time.thread_time()
    with pytest.raises(BadRequest, match="took too long"):
        first_stop(["a" * 24] * 4, stop_regex=sources)
    assert time.thread_time() - began < 10 * REGEX_TIMEOUT_S


@pytest.mark.parametrize(
    ("source", "size"),
    [
        (r"\d{4}-\d{2}-\d{2}", 10),
        (r"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}", 45),
        ("x{0,90000000}", 1),
        ("1{1000}", 1000),
        ("(?:(?:a{30}){30}){30}", 30**3),
        ("(?x)a{1 000}", 1000),
        ("(?x)a{1#,\n000}", 1000),
        ("(?x)(?:a{100}#(\n){100}", 10_000),
        ("(?:a{100}[(]){100}", 10_000),
        ("(?:a{100}[[(]){100}", 10_000),
        (r"(?:a{100}\(){100}", 10_000),
        ("a{x(?:a{100}){100}", 10_000),
    ],
)
def test_a_regex_is_measured_before_it_is_compiled(source, size):
    assert size <= regex_size(source)
    if size < 100:
        assert regex_size(source) == size


@pytest.mark.parametrize(
    ("stop", "stop_regex", "reason"),
    [
        ((), ("a{50000000}",), "unroll"),  # compiled it takes gigabytes
        ((), ("(?:a{100}){100}", "(?:b{100}){100}"), "unroll"),
        ((), ("(?V1)" + "[" * 200 + "a" + "]" * 200,), "does not compile"),
        ((), ("(",), "does not compile"),
        (("",), (), "characters"),
        (("x" * (STOP_CHARACTERS + 1),), (), "characters"),
        (tuple(map(str, range(65))), (), "at most"),
    ],
)
def test_stops_that_no_request_may_have_are_refused(stop, stop_regex, reason):
    with pytest.raises(BadRequest, match=reason):
        check_stops(stop, stop_regex)


async def test_bad_stops_are_refused_before_a_prompt_is_sent(tokenizer_of):
    worker = TokenizerWorker(tokenizer_of("byte_level"), max_context=100, vocab_size=400)
    sampling = SamplingParams(stop_regex=("(",))
    with pytest.raises(BadRequest, match="does not compile"):
        await worker.tokenize(GenerateReqInput(text="hi", sampling=sampling))


def test_ordinary_stops_are_accepted():
    check_stops(("###", "\n\n", "世"), (r"\d+\.",))


# --------------------------------------------------------------------------- the scanner


def first_match(text, stops):
    """By definition: the first end of a match, and of those the longest."""
    for end in range(1, len(text) + 1):
        found = [s for s in stops if text.endswith(s, 0, end)]
        if found:
            longest = max(found, key=len)
            return Match(longest, end - len(longest), end)
    return None


texts = st.text("ab#世", max_size=24)
pieces = st.lists(st.text("ab#世", min_size=1, max_size=5), max_size=10)
some_stops = st.lists(st.text("ab#世", min_size=1, max_size=4), min_size=1, max_size=3)


@settings(max_examples=300)
@given(parts=pieces, stops=some_stops)
def test_the_match_does_not_depend_on_where_tokens_end(parts, stops):
    scanner = StopScanner(tuple(stops), ())
    found = None
    for part in parts:
        found = found or scanner.feed(part)
    assert found == first_match("".join(parts), stops)


@settings(max_examples=300)
@given(parts=pieces, stops=some_stops)
def test_held_back_text_is_the_longest_that_begins_a_stop_string(parts, stops):
    scanner = StopScanner(tuple(stops), ())
    for part in parts:
        scanner.feed(part)
    text = "".join(parts)
    begun = [n for s in stops for n in range(1, len(s)) if text.endswith(s[:n])]
    assert scanner.hold_back() == max(begun, default=0)


regexes = st.recursive(
    st.sampled_from(["a", "b", "#", "世", ".", "[ab]", "[^a]", r"\b", "a$", r"\w"]),
    lambda inner: st.one_of(
        st.tuples(inner, inner).map("".join),
        st.tuples(inner, inner).map(lambda two: f"(?:{two[0]}|{two[1]})"),
        st.tuples(inner, st.sampled_from(["*", "+", "?", "{2}", "*?"])).map(
            lambda two: f"(?:{two[0]}){two[1]}"
        ),
        inner.map(lambda one: f"(?<=a){one}"),
        inner.map(lambda one: f"{one}(?=b)"),
        inner.map(lambda one: f"{one}(?!b)"),
    ),
    max_leaves=5,
)


@settings(max_examples=600, deadline=None)
@given(parts=pieces, sources=st.lists(regexes, min_size=1, max_size=2), stops=some_stops)
def test_no_character_of_a_match_is_let_go_before_the_match_is_known(parts, sources, stops):
    scanner = StopScanner(tuple(stops), tuple(sources))
    text, let_go = "", 0
    for part in parts:
        text += part
        match = scanner.feed(part)
        if match is not None:
            assert let_go <= match.start < match.end <= len(text)
            if match.source in sources and match.source not in stops:
                assert regex.compile(match.source).match(text, match.start)
            return
        let_go = max(let_go, len(text) - scanner.hold_back())


@settings(max_examples=100, deadline=None)
@given(parts=st.lists(st.text("ab#", min_size=1, max_size=9), max_size=80))
def test_the_tail_that_is_kept_is_bounded(parts):
    scanner = StopScanner(("#ab#",), ("ab+#",))
    for part in parts:
        scanner.feed(part)
        assert len(scanner._tail) <= 2 * REGEX_CHARACTERS


def test_a_whole_match_that_did_not_end_the_request_holds_back_what_is_in_reach():
    """min_new_tokens: the scheduler ran on, and a later match may begin inside the earlier one."""
    scanner = StopScanner((), (r"\d+",))
    assert scanner.feed("room 12") == Match(r"\d+", 5, 7)
    assert scanner.hold_back() >= 2
    assert scanner.feed("3") == Match(r"\d+", 5, 8)
