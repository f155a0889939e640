"""Token rows in, text rows out: streams say what one answer says, without its stop."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.detokenizer.incremental import Detokenizer
from engine.detokenizer.stops import StopChecker
from engine.messages import (
    DecodeParams,
    Finish,
    InputLogprobs,
    OutputLogprobs,
    SamplingParams,
    StrRow,
    TokenIDRow,
    TopLogprobs,
    merge_all,
)
from tests.engine.detokenizer.vocabulary import ListVocabulary
from tests.engine.scheduler.replay import calls_of

LENGTH = Finish(type="length")
ABORT = Finish(type="abort", message="gone")


def token_row(rid="r", ids=(), *, inbox="ipc://w1", **fields):
    return TokenIDRow(rid=rid, http_worker_ipc=inbox, output_ids=list(ids), **fields)


def params(**fields):
    return DecodeParams(prompt_tail=[], **fields)


def texts_of(detokenizer, rows):
    return [answer.text for row in rows if (answer := detokenizer.accept(row)) is not None]


def stream(tokens, finish, *, sizes=(), special=(), **fields):
    """Deltas of an answer of all ``tokens``, in rows of ``sizes`` ids (one each by default)."""
    ids = list(range(len(tokens)))
    rows, at = [], 0
    for size in (*sizes, *[1] * len(ids)):
        if at < len(ids):
            rows.append(token_row(ids=ids[at : at + size]))
            at += size
    rows = rows or [token_row()]
    rows[0].decode = params(**fields)
    rows[-1].finish = finish
    return texts_of(Detokenizer(ListVocabulary(tokens, special)), rows)


# --------------------------------------------------------------------------- stops


@pytest.mark.parametrize("sizes", [(), (3,), (2, 1), (1, 2)])
def test_no_character_of_a_stop_string_is_sent(sizes):
    """E32."""
    deltas = stream(
        ["a #", "#", "# b"], Finish(type="stop", matched="###"), sizes=sizes, stop=("###",)
    )
    assert "".join(deltas) == "a "
    assert not any("#" in delta for delta in deltas)


@pytest.mark.parametrize("no_stop_trim", [False, True])
def test_a_stop_string_far_into_an_answer_and_right_at_its_end(no_stop_trim):
    """E32: "#", "##" as the 50th and 51st token, and the same as the very last ones."""
    words = [f"word {number} " for number in range(49)]
    tokens = [*words, "#", "##", "</s>"]
    shown = "".join(words) + ("###" if no_stop_trim else "")
    finish = Finish(type="stop", matched="###")
    for sizes in ((99,), (50, 1), (49, 2), ()):  # whole, over the border, and token by token
        deltas = stream(tokens[:51], finish, sizes=sizes, stop=("###",), no_stop_trim=no_stop_trim)
        assert "".join(deltas) == shown
        assert no_stop_trim or not any("#" in delta for delta in deltas)
    at_eos = stream(tokens, Finish(type="stop", matched=51), stop=("####",))
    assert "".join(at_eos) == "".join(words) + "###"


def test_text_that_only_began_like_a_stop_string_is_sent_when_it_is_clear():
    assert stream(["a #", "#", "b"], LENGTH, stop=("###",)) == ["a ", "", "##b"]


def test_held_back_text_is_sent_when_the_request_ends_without_the_stop():
    for finish in (LENGTH, ABORT, Finish(type="stop", matched=3)):
        deltas = stream(
            ["a ", "#", "#", "</s>"][: 3 + (finish.type == "stop")], finish, stop=("###",)
        )
        assert "".join(deltas) == "a ##"


def test_the_stop_string_stays_with_no_stop_trim_and_is_not_held_back():
    """E32."""
    deltas = stream(
        ["a #", "#", "# b"],
        Finish(type="stop", matched="###"),
        stop=("###",),
        no_stop_trim=True,
    )
    assert deltas == ["a #", "#", "# b"]


def test_the_cut_is_at_the_match_that_ended_the_request_not_at_an_earlier_one():
    """min_new_tokens let the first one pass."""
    deltas = stream(
        ["think ", "###", " more ", "###"], Finish(type="stop", matched="###"), stop=("###",)
    )
    assert "".join(deltas) == "think ### more "


def test_the_matched_token_is_cut_off_and_token_zero_is_one():
    row = token_row(ids=[1, 0], decode=params(), finish=Finish(type="stop", matched=0))
    (text,) = texts_of(Detokenizer(ListVocabulary(["zero", "one "])), [row])
    assert text == "one "
    row.decode = params(no_stop_trim=True)
    (text,) = texts_of(Detokenizer(ListVocabulary(["zero", "one "])), [row])
    assert text == "one zero"


def test_an_end_by_length_keeps_a_last_token_that_looks_like_a_stop_token():
    row = token_row(ids=[1, 0], decode=params(), finish=LENGTH)
    assert texts_of(Detokenizer(ListVocabulary(["zero", "one "])), [row]) == ["one zero"]


def test_a_special_token_as_stop_string_has_nothing_to_cut():
    finish = Finish(type="stop", matched="<|end|>")
    tokens = ["a <|", "<|end|>"]
    assert "".join(stream(tokens, finish, special=[1], stop=("<|end|>",))) == "a <|"


def test_a_stop_regex_holds_back_and_is_cut():
    deltas = stream(
        ["step 1", ".", " go", "\nAns", "wer: 4", "2 then"],
        Finish(type="stop", matched=r"Answer: \d+"),
        stop_regex=(r"Answer: \d+",),
    )
    assert deltas[:4] == ["step 1", ".", " go", "\n"]
    assert "".join(deltas) == "step 1. go\n"


@pytest.mark.parametrize(("stop", "shown"), [("fox", ""), (" fox", ""), ("x", "fo")])
def test_a_first_space_that_is_not_shown_still_counts_for_stops(tokenizer_of, stop, shown):
    """Behind a prompt of special tokens only, a Llama answer is shown without its first space."""
    tokenizer = tokenizer_of("llama")
    ids = tokenizer.encode("fox", add_special_tokens=False)
    checker = StopChecker(SamplingParams(stop=(stop,)), tokenizer)
    assert [checker.push(i) for i in ids][-1] == stop
    rows = [token_row(ids=[i]) for i in ids]
    rows[0].decode = DecodeParams(prompt_tail=tokenizer.encode(""), stop=(stop,))
    rows[-1].finish = Finish(type="stop", matched=stop)
    assert "".join(texts_of(Detokenizer(tokenizer), rows)) == shown


some_tokens = st.lists(
    st.sampled_from(["a", "#", "##", "b#", " ", b"\xe4", b"\xb8\x96", "世", "###b"]), max_size=14
)


@settings(max_examples=400, deadline=None)
@given(
    tokens=some_tokens,
    stop=st.lists(st.sampled_from(["##", "###", "a#", "世#", "b"]), max_size=2),
    stop_regex=st.lists(st.sampled_from(["#+b", "世.", "[^a]#$"]), max_size=1),
    sizes=st.lists(st.integers(1, 4), max_size=6),
    min_new_tokens=st.integers(0, 4),
)
def test_streams_of_any_shape_say_what_the_whole_answer_says(
    tokens, stop, stop_regex, sizes, min_new_tokens
):
    """E32: the scheduler ends at the first match that may end; the text is all before it."""
    sampling = SamplingParams(stop=tuple(stop), stop_regex=tuple(stop_regex))
    vocabulary = ListVocabulary(tokens)
    checker = StopChecker(sampling, vocabulary)
    finish, used = LENGTH, tokens
    for index in range(len(tokens)):
        matched = checker.push(index)
        if matched is not None and index + 1 >= min_new_tokens:
            finish, used = Finish(type="stop", matched=matched), tokens[: index + 1]
            break
    options = {"stop": tuple(stop), "stop_regex": tuple(stop_regex)}
    whole = stream(used, finish, sizes=[99], **options)
    deltas = stream(used, finish, sizes=sizes, **options)
    assert "".join(deltas) == "".join(whole)
    text, everything = "".join(deltas), vocabulary.decode_known(range(len(used)), True)
    if finish is LENGTH:
        assert text == everything
    elif finish.matched in stop:
        assert everything.startswith(text + finish.matched)
    else:
        assert everything.startswith(text)


# --------------------------------------------------------------------------- each its own


def test_each_request_has_its_own_flags():
    """E31: whatever the order."""
    tokens, ids = ["hi", "<|x|>"], [0, 1]
    rows = [
        token_row("a", ids, decode=params(skip_special_tokens=True), finish=LENGTH),
        token_row("b", ids, decode=params(skip_special_tokens=False), finish=LENGTH),
    ]
    for order in (rows, rows[::-1]):
        detokenizer = Detokenizer(ListVocabulary(tokens, special=[1]))
        texts = {row.rid: detokenizer.accept(row).text for row in order}
        assert texts == {"a": "hi", "b": "hi<|x|>"}


def test_raw_bytes_are_those_of_the_rows_tokens():
    tokens = ["a", b"\xe4\xb8", "<|x|>", b"\x96"]
    detokenizer = Detokenizer(ListVocabulary(tokens, special=[2]))
    rows = [token_row(ids=[0, 1], decode=params(return_bytes=True)), token_row(ids=[2, 3])]
    answers = [detokenizer.accept(row) for row in rows]
    assert [(a.text, a.raw_bytes) for a in answers] == [("a", b"a\xe4\xb8"), ("世", b"\x96")]
    assert merge_all(answers).raw_bytes == "a世".encode()


def test_only_requests_that_asked_have_raw_bytes():
    detokenizer = Detokenizer(ListVocabulary(["a"]))
    assert detokenizer.accept(token_row(ids=[0], decode=params())).raw_bytes is None


def test_logprobs_carry_the_texts_of_their_tokens():
    detokenizer = Detokenizer(ListVocabulary(["a", " b", b"\xe4"]))
    row = token_row(
        ids=[1],
        decode=params(logprob_text=True),
        output_logprobs=OutputLogprobs(
            values=[-0.5], top=TopLogprobs(ids=[[1, 2]], values=[[-0.5, -1.0]])
        ),
        input_logprobs=InputLogprobs(ids=[0, 1], values=[None, -1.0]),
    )
    answer = detokenizer.accept(row)
    assert answer.output_logprobs.texts == [" b"]
    assert answer.output_logprobs.top.texts == [[" b", "\ufffd"]]
    assert answer.input_logprobs.texts == ["a", " b"]


def test_a_row_costs_the_same_however_long_its_answer_is():
    """E39: 5,000 rows with logprobs; each says what is new and nothing else."""
    detokenizer = Detokenizer(ListVocabulary(["a", " b"]))
    costs, answers = [], []

    def accept(number: int) -> None:
        top = TopLogprobs(ids=[[0, 1]], values=[[-0.5, -1.0]])
        logprobs = OutputLogprobs(values=[-0.5], top=top)
        decode = None if number else params(logprob_text=True, stop=("###",))
        row = token_row(ids=[number % 2], output_logprobs=logprobs, decode=decode)
        answers.append(detokenizer.accept(row))

    for number in range(5000):
        costs.append(calls_of(lambda number=number: accept(number)))
    assert max(costs[1:1001]) == max(costs[-1000:]) < 2 * min(costs[1:])
    for answer in answers:
        part = answer.output_logprobs
        assert len(answer.output_ids) == len(part.values) == len(part.texts) == 1
        assert len(part.top.ids) == 1


def test_every_shared_field_of_a_row_is_passed_on():
    fields = {
        "output_ids": [0],
        "epochs": [(1, 7)],
        "entropy": [0.25],
        "kv_epochs": [(3, 6), (1, 7)],
        "made_at": 12.5,
        "retractions": 2,
        "finish": LENGTH,
    }
    row = TokenIDRow(rid="r", http_worker_ipc="ipc://w", decode=params(), **fields)
    answer = Detokenizer(ListVocabulary(["a"])).accept(row)
    assert (answer.rid, answer.http_worker_ipc, answer.text) == ("r", "ipc://w", "a")
    assert {name: getattr(answer, name) for name in fields} == fields


# --------------------------------------------------------------------------- life of a request


def test_state_is_freed_at_the_terminal_row_and_later_rows_are_dropped_and_counted():
    detokenizer = Detokenizer(ListVocabulary(["a"]))
    assert texts_of(
        detokenizer,
        [
            token_row(ids=[0], decode=params()),
            token_row(ids=[0], finish=LENGTH),
            token_row(ids=[0]),
        ],
    ) == ["a", "a"]
    assert len(detokenizer) == 0
    assert detokenizer.counters["unknown_rows"] == 1


def test_a_row_of_a_request_that_never_began_is_dropped_and_counted():
    detokenizer = Detokenizer(ListVocabulary(["a"]))
    assert detokenizer.accept(token_row(ids=[0])) is None
    assert detokenizer.counters["unknown_rows"] == 1


def test_an_end_that_the_router_makes_lets_held_back_text_out_first():
    detokenizer = Detokenizer(ListVocabulary(["a #", b"\xe4"]))
    detokenizer.accept(token_row(ids=[0, 1], decode=params(stop=("##",))))
    end = detokenizer.accept(token_row(finish=ABORT))
    assert (end.text, end.finish) == ("#\ufffd", ABORT)
    assert len(detokenizer) == 0


@pytest.mark.parametrize("kind", [TokenIDRow, StrRow])
def test_an_end_of_a_request_that_was_never_seen_is_passed_on(kind):
    detokenizer = Detokenizer(ListVocabulary(["a"]))
    end = detokenizer.accept(kind(rid="r", http_worker_ipc="ipc://w", finish=ABORT))
    assert (end.rid, end.http_worker_ipc, end.finish) == ("r", "ipc://w", ABORT)
    assert detokenizer.counters["unseen_ends"] == 1


def test_a_rid_that_is_used_again_starts_anew():
    detokenizer = Detokenizer(ListVocabulary([b"\xe4", "a"]))
    detokenizer.accept(token_row(ids=[0], decode=params()))
    assert detokenizer.accept(token_row(ids=[1], decode=params())).text == "a"
    assert detokenizer.counters["replaced"] == 1
    assert len(detokenizer) == 1


def test_an_inbox_that_is_gone_takes_its_requests_along_and_no_others():
    detokenizer = Detokenizer(ListVocabulary(["a"]))
    for rid, inbox in (("a", "ipc://w1"), ("b", "ipc://w2"), ("c", "ipc://w1")):
        detokenizer.accept(token_row(rid, [0], inbox=inbox, decode=params()))
    assert sorted(detokenizer.forget_inbox("ipc://w1")) == ["a", "c"]
    assert len(detokenizer) == 1


# --------------------------------------------------------------------------- merging and splitting


@settings(max_examples=100, deadline=None)
@given(
    tokens=some_tokens.filter(bool),
    cuts=st.lists(st.integers(1, 13), max_size=5),
    stop=st.lists(st.sampled_from(["##", "a#"]), max_size=1),
)
def test_merging_the_rows_of_any_split_gives_the_row_of_the_whole(tokens, cuts, stop):
    def rows(borders):
        borders = [0, *sorted(b for b in set(borders) if b < len(tokens)), len(tokens)]
        for start, end in zip(borders, borders[1:], strict=False):
            yield token_row(
                ids=range(start, end),
                epochs=[(1, i // 3) for i in range(start, end)],
                entropy=[i / 2 for i in range(start, end)],
                decode=params(stop=tuple(stop), return_bytes=True) if start == 0 else None,
                finish=LENGTH if end == len(tokens) else None,
                made_at=float(end),
            )

    def whole(borders):
        detokenizer = Detokenizer(ListVocabulary(tokens))
        return merge_all([detokenizer.accept(row) for row in rows(borders)])

    assert whole(cuts) == merge_all([whole([])])
