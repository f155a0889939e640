"""What a request is told: its rows, its end, and refusals."""

import pytest

from engine.config import Limits
from engine.messages import (
    Finish,
    Hidden,
    InputLogprobs,
    LogprobParams,
    OutputLogprobs,
    TopLogprobs,
)
from tests.engine.scheduler.replay import (
    HIDDEN,
    Rig,
    alone,
    input_logprobs,
    model_info,
    next_token,
    request,
)

ALL_FAMILIES = {
    "logprob": LogprobParams(start_len=0, top_num=2, token_ids=(3, 4)),
    "return_entropy": True,
    "return_hidden_states": True,
}


def first_tokens(prompt: list[int], count: int) -> list[int]:
    context = list(prompt)
    for _ in range(count):
        context.append(next_token(7, context))
    return context[len(prompt) :]


def test_each_token_is_a_row_and_the_last_one_says_why_it_ended():
    """E35: the ids are the new ones alone."""
    rig = Rig()
    rig.run(request("a", [1, 2, 3], max_new_tokens=3, ignore_eos=True))
    rows = rig.rows["a"]
    assert [row.output_ids for row in rows] == [[t] for t in first_tokens([1, 2, 3], 3)]
    assert [row.finish for row in rows] == [None, None, Finish(type="length")]
    assert [row.made_at for row in rows] == [101.0, 102.0, 103.0]
    assert rig.ended == ["a"]


def test_the_first_row_tells_what_the_detokenizer_and_the_client_need_once():
    rig = Rig()
    rig.now = 50.0
    asked = request(
        "a",
        list(range(1, 13)),
        stop=("zzz",),
        skip_special_tokens=False,
        return_bytes=True,
        return_text_in_logprobs=True,
        received_at=48.5,
        ignore_eos=True,
    )
    rig.run(asked)
    first, *later = rig.rows["a"]
    assert first.decode is not None and first.provenance is not None
    assert first.decode.prompt_tail == list(range(5, 13))
    assert (first.decode.stop, first.decode.skip_special_tokens) == (("zzz",), False)
    assert first.decode.return_bytes and first.decode.logprob_text
    assert first.provenance.prompt_tokens == 12
    assert (first.provenance.dp_rank, first.provenance.weight_form) == (3, "plain")
    assert first.provenance.queued_s == pytest.approx(2.5)
    assert all(row.decode is None and row.provenance is None for row in later)


def test_an_end_of_sequence_token_stops_and_is_part_of_the_output():
    eos = first_tokens([1, 2, 3], 3)[2]
    rig = Rig(info=model_info(eos_token_ids=(eos,)))
    (answer,) = rig.run(request("a", [1, 2, 3], max_new_tokens=9))
    assert answer.output_ids == first_tokens([1, 2, 3], 3)
    assert answer.finish == Finish(type="stop", matched=eos)


def test_ignore_eos_ignores_the_models_own_ids_and_not_the_requests():
    second, third = first_tokens([1, 2, 3], 3)[1:]
    rig = Rig(info=model_info(eos_token_ids=(second,)))
    asked = request("a", [1, 2, 3], ignore_eos=True, stop_token_ids=(third,), max_new_tokens=9)
    (answer,) = rig.run(asked)
    assert answer.finish == Finish(type="stop", matched=third)
    assert len(answer.output_ids) == 3


def test_token_id_zero_is_a_stop_like_any_other():
    for first in range(1, 50):
        if next_token(7, [first]) == 0:
            break
    (answer,) = Rig().run(request("a", [first], max_new_tokens=9))
    assert answer.finish == Finish(type="stop", matched=0)


def test_a_stop_on_the_last_allowed_token_is_a_stop():
    third = first_tokens([1, 2, 3], 3)[2]
    (answer,) = Rig().run(request("a", [1, 2, 3], stop_token_ids=(third,), max_new_tokens=3))
    assert answer.finish == Finish(type="stop", matched=third)


def test_a_stop_string_ends_the_request_with_the_string_that_matched():
    text = "".join(chr(ord("A") + t % 5) for t in first_tokens([1, 2, 3], 4))
    asked = request("a", [1, 2, 3], stop=("XY", text[2:4]), ignore_eos=True, max_new_tokens=9)
    (answer,) = Rig().run(asked)
    assert answer.finish is not None and answer.finish.matched == text[2:4]
    assert answer.output_ids == alone(asked, model_info(), Limits())[0]


def test_a_stop_that_cannot_be_checked_refuses_the_request():
    rig = Rig()
    rig.accept(request("a", [1, 2, 3], stop=("(",)))
    (row,) = rig.rows["a"]
    assert row.finish is not None
    assert (row.finish.status_code, row.finish.message) == (400, "'(' does not compile")
    assert rig.ended == ["a"] and rig.core.idle


def test_a_stop_that_takes_too_long_ends_its_own_request_only():
    rig = Rig()
    slow, other = rig.run(
        request("slow", [1, 2, 3], stop=("slow",), ignore_eos=True, max_new_tokens=9),
        request("other", [4, 5, 6], ignore_eos=True),
    )
    assert (slow.finish.type, slow.finish.err_type) == ("abort", "stop_regex_too_slow")
    assert slow.output_ids == first_tokens([1, 2, 3], 3)
    assert slow.kv_epochs == [(5, 0)]
    assert other.finish == Finish(type="length")


def test_nothing_stops_a_request_below_its_minimum():
    tokens = first_tokens([1, 2, 3], 6)
    asked = request(
        "a", [1, 2, 3], stop_token_ids=tuple(tokens), min_new_tokens=5, max_new_tokens=9
    )
    (answer,) = Rig().run(asked)
    assert answer.output_ids == tokens[:5]


def test_an_answer_ends_with_length_when_the_context_is_full():
    rig = Rig(Limits(max_context=10), model_info(max_context=64))
    (answer,) = rig.run(request("a", [1] * 7, max_new_tokens=50, ignore_eos=True))
    assert (len(answer.output_ids), answer.finish) == (3, Finish(type="length"))


def test_an_answer_ends_with_length_when_it_fills_the_whole_kv_pool():
    rig = Rig(info=model_info(num_blocks=3, block_size=4))
    (answer,) = rig.run(request("a", [1] * 7, max_new_tokens=50, ignore_eos=True))
    assert (len(answer.output_ids), answer.finish) == (5, Finish(type="length"))


@pytest.mark.parametrize(
    ("changes", "info", "sentence"),
    [
        (
            {"input_ids": [1] * 64},
            {},
            "the prompt of 64 tokens and one new token do not fit the model's context of 64 tokens",
        ),
        (
            {"input_ids": [1] * 12},
            {"num_blocks": 3},
            "the prompt of 12 tokens and one new token do not fit a rank's KV pool of 12 tokens",
        ),
        (
            {"input_ids": [1] * 65, "max_new_tokens": 0},
            {},
            "the prompt of 65 tokens does not fit the model's context of 64 tokens",
        ),
        ({"input_ids": []}, {}, "the prompt has no tokens"),
        ({"input_ids": [1, 50]}, {}, "the prompt has token ids outside 0 .. 49"),
        ({"input_ids": [-1]}, {}, "the prompt has token ids outside 0 .. 49"),
        ({"stop_token_ids": (3, 50)}, {}, "stop_token_ids has token ids outside 0 .. 49"),
        ({"logit_bias": {-2: 1.0}}, {}, "logit_bias has token ids outside 0 .. 49"),
        (
            {"logprob": LogprobParams(token_ids=(1, 99))},
            {},
            "token_ids_logprob has token ids outside 0 .. 49",
        ),
        ({"max_new_tokens": -1}, {}, "max_new_tokens is -1, it must be at least 0"),
        (
            {"logprob": LogprobParams(start_len=3)},
            {},
            "logprob_start_len is 3, it must be below the prompt's 3 tokens",
        ),
    ],
)
def test_a_request_that_can_never_run_is_refused_with_a_sentence(changes, info, sentence):
    rig = Rig(info=model_info(**info))
    rig.accept(request("a", changes.pop("input_ids", [1, 2, 3]), **changes))
    (row,) = rig.rows["a"]
    assert row.finish == Finish(
        type="abort", message=sentence, status_code=400, err_type="invalid_request_error"
    )
    assert row.decode is not None and row.http_worker_ipc == "ipc://inbox-a"
    assert rig.ended == ["a"] and rig.core.idle
    assert rig.core.plan(0.0) is None


def test_the_longest_possible_prompt_gets_its_one_token():
    rig = Rig(info=model_info(num_blocks=3, block_size=4))
    (answer,) = rig.run(request("a", [1] * 11, max_new_tokens=50))
    assert len(answer.output_ids) == 1


def test_no_new_tokens_gives_the_prompts_logprobs_and_nothing_else():
    prompt = [1, 2, 3, 4, 5, 6]
    rig = Rig(Limits(chunk_tokens=4))
    (answer,) = rig.run(request("a", prompt, max_new_tokens=0, **ALL_FAMILIES))
    assert (answer.output_ids, answer.finish) == ([], Finish(type="length"))
    assert answer.input_logprobs == input_logprobs(ALL_FAMILIES["logprob"], prompt, 0, 6)
    assert answer.kv_epochs == [(6, 0)]


def test_a_second_request_with_a_live_rid_is_an_error_and_leaves_the_first_alone():
    rig = Rig()
    rig.accept(request("a", [1, 2, 3]))
    with pytest.raises(ValueError, match="a is live already"):
        rig.core.accept(request("a", [4]), 0.0)
    rig.drain()
    assert len(rig.answer("a").output_ids) == 4
    rig.rows.clear()
    assert len(rig.run(request("a", [1, 2, 3]))) == 1


def test_an_abort_before_the_first_step_has_every_family_empty():
    """E18."""
    rig = Rig()
    rig.accept(request("a", [1, 2, 3], received_at=98.0, **ALL_FAMILIES))
    assert rig.abort("a") == ["a"]
    (row,) = rig.rows["a"]
    none = TopLogprobs(ids=[], values=[])
    assert (row.output_ids, row.epochs, row.entropy, row.kv_epochs) == ([], [], [], [])
    assert row.output_logprobs == OutputLogprobs(values=[], top=none, token_ids=none)
    assert row.input_logprobs == InputLogprobs(ids=[], values=[], top=none, token_ids=none)
    assert row.hidden == Hidden(width=0, data=b"")
    assert row.finish == Finish(type="abort", message="because")
    assert row.decode is not None and row.provenance is not None
    assert row.provenance.queued_s == pytest.approx(2.0)


def test_an_abort_during_prefill_has_what_was_computed_of_the_prompt():
    rig = Rig(Limits(chunk_tokens=4))
    prompt = list(range(1, 11))
    rig.accept(request("a", prompt, **ALL_FAMILIES))
    rig.step()
    rig.abort("a")
    (row,) = rig.rows["a"]
    assert row.input_logprobs == input_logprobs(ALL_FAMILIES["logprob"], prompt, 0, 4)
    assert row.kv_epochs == [(4, 0)]


def test_an_abort_after_ten_tokens_keeps_ten_of_everything():
    """E18."""
    rig = Rig()
    rig.accept(request("a", [1, 2, 3], max_new_tokens=20, ignore_eos=True, **ALL_FAMILIES))
    for _ in range(10):
        rig.step()
    rig.abort("a", status_code=503, err_type="engine_restarting")
    answer = rig.answer("a")
    assert len(answer.output_ids) == len(answer.entropy) == len(answer.output_logprobs.values) == 10
    assert answer.hidden.width == 2
    assert len(answer.hidden.data) == 12 * HIDDEN.size
    assert (answer.finish.status_code, answer.finish.err_type) == (503, "engine_restarting")
    assert answer.made_at == 110.0
    assert rig.rows["a"][-1].input_logprobs is None


def test_a_chunked_prompt_sends_its_logprobs_once_with_the_first_token():
    rig = Rig(Limits(chunk_tokens=3))
    prompt = list(range(1, 11))
    asked = LogprobParams(start_len=2, top_num=3)
    rig.run(request("a", prompt, logprob=asked, ignore_eos=True))
    first, *later = rig.rows["a"]
    assert first.input_logprobs == input_logprobs(asked, prompt, 0, 10)
    assert first.input_logprobs.values[0] is None
    assert all(row.input_logprobs is None for row in later)


@pytest.mark.parametrize("chunk_tokens", [2, 512])
def test_families_go_only_to_the_requests_that_asked(chunk_tokens):
    """E38: also in chunks; and output logprobs need no input logprobs."""
    rig = Rig(Limits(chunk_tokens=chunk_tokens))
    five = LogprobParams(start_len=0, top_num=5)
    rig.run(
        request("plain", [1, 2, 3], ignore_eos=True),
        request("rich", [4, 5, 6], ignore_eos=True, **ALL_FAMILIES),
        request("output", [7, 8, 9], ignore_eos=True, logprob=LogprobParams()),
        request("five", [3, 2, 1, 5], ignore_eos=True, logprob=five),
    )
    plain, rich, output = (rig.answer(rid) for rid in ("plain", "rich", "output"))
    assert plain.output_logprobs is plain.entropy is plain.hidden is plain.input_logprobs is None
    assert len(rich.output_logprobs.top.ids) == 4
    assert all(len(ids) == 2 for ids in rich.output_logprobs.top.ids)
    assert len(output.output_logprobs.values) == 4
    assert output.output_logprobs.top is output.input_logprobs is None
    for part in (rig.answer("five").output_logprobs, rig.answer("five").input_logprobs):
        assert [len(ids) for ids in part.top.ids] == [5] * 4


def test_hidden_states_are_those_of_the_request_that_asked():
    """E37."""
    rig = Rig(Limits(chunk_tokens=2))
    rig.run(
        request("plain", [1, 2, 3, 4], ignore_eos=True),
        request("asked", [5, 6, 7], ignore_eos=True, return_hidden_states=True),
    )
    context = [5, 6, 7, *rig.answer("asked").output_ids]
    expected = b"".join(HIDDEN.pack(p, context[p]) for p in range(6))
    assert rig.answer("asked").hidden.data == expected


def test_a_silent_end_frees_everything_and_sends_nothing():
    rig = Rig()
    rig.accept(request("a", [1, 2, 3], max_new_tokens=20))
    rig.step()
    rig.rows.clear()
    rig.abort("a", silent=True)
    assert (rig.rows, rig.ended) == ({}, ["a"])


def test_aborting_names_exactly_the_live_requests_it_found():
    rig = Rig()
    for rid in ("job_1", "job_10", "job_2"):
        rig.accept(request(rid, [1, 2, 3], max_new_tokens=20))
    assert rig.abort("job_1", "unknown", "job_1") == ["job_1"]
    assert rig.abort("job_1") == []
    assert rig.core.abort(None, "all", now=0.0) == ["job_10", "job_2"]
    assert rig.core.idle


def test_a_step_in_flight_does_not_give_a_token_to_an_aborted_request():
    """E14: it ends within the step."""
    rig = Rig()
    rig.accept(request("a", [1, 2, 3], max_new_tokens=20))
    rig.accept(request("b", [4, 5, 6], max_new_tokens=5, ignore_eos=True))
    rig.step(between=lambda: rig.abort("a"))
    assert [row.output_ids for row in rig.rows["a"]] == [[]]
    rig.accept(request("c", [7, 8, 9]))
    plan = rig.step()
    assert plan is not None and plan.ends == [0]
    rig.drain()
    assert len(rig.answer("b").output_ids) == 5


def test_delays_are_counted_from_the_receipt_and_between_tokens():
    rig = Rig()
    rig.run(request("a", [1, 2, 3], max_new_tokens=4, ignore_eos=True, received_at=98.5))
    assert (rig.core.ttft.sum_s, sum(rig.core.ttft.counts)) == (2.5, 1)
    assert (rig.core.itl.sum_s, sum(rig.core.itl.counts)) == (3.0, 3)
