"""KV between requests: what is shared, under which weights, and what happens when it runs out."""

import pytest

from engine.config import Limits
from engine.messages import LogprobParams
from tests.engine.scheduler.replay import Rig, alone, calls_of, input_logprobs, model_info, request

PROMPT = list(range(1, 14))  # three full blocks of four and one token


def finished(rig: Rig) -> None:
    """All answers equal those of requests that nobody disturbed."""
    for rid, asked in rig.requests.items():
        answer = rig.answer(rid)
        assert (answer.output_ids, answer.finish) == alone(asked, rig.info, rig.limits)


def test_a_second_request_reuses_all_full_blocks_of_an_equal_prompt():
    rig = Rig()
    rig.run(request("a", PROMPT))
    rig.run(request("b", PROMPT))
    assert (rig.cached("a"), rig.cached("b")) == (0, 12)
    load = rig.core.load()
    assert (load.cached_tokens, load.prompt_tokens, load.output_tokens) == (12, 26, 8)


def test_at_least_one_token_of_a_prompt_is_computed():
    rig = Rig()
    rig.run(request("a", PROMPT[:12]))
    rig.run(request("b", PROMPT[:12]))
    assert rig.cached("b") == 8


def test_generated_tokens_are_reused_by_the_next_turn():
    rig = Rig()
    (answer,) = rig.run(request("turn-1", PROMPT, max_new_tokens=8, ignore_eos=True))
    rig.run(request("turn-2", [*PROMPT, *answer.output_ids, 9, 9]))
    assert rig.cached("turn-2") == 20


def test_full_blocks_are_shared_while_their_writer_still_runs():
    rig = Rig()
    rig.accept(request("a", PROMPT, max_new_tokens=20, ignore_eos=True))
    rig.step()
    rig.accept(request("b", PROMPT))
    rig.drain()
    assert rig.cached("b") == 12
    finished(rig)


def test_prompt_logprobs_are_computed_from_their_start():
    rig = Rig()
    rig.run(request("a", PROMPT))
    asked = LogprobParams(start_len=6)
    (answer,) = rig.run(request("b", PROMPT, logprob=asked))
    assert rig.cached("b") == 4
    assert answer.input_logprobs == input_logprobs(asked, PROMPT, 0, 13)


def test_hidden_states_of_a_prompt_are_computed_whatever_is_cached():
    rig = Rig()
    rig.run(request("a", PROMPT))
    rig.run(request("b", PROMPT, return_hidden_states=True))
    assert rig.cached("b") == 0


def test_output_logprobs_do_not_hinder_reuse():
    rig = Rig()
    rig.run(request("a", PROMPT))
    rig.run(request("b", PROMPT, logprob=LogprobParams(top_num=2)))
    assert rig.cached("b") == 12


@pytest.mark.parametrize("kv_reuse", ["isolate", "group", "share"])
def test_no_kv_crosses_an_extra_key(kv_reuse: str):
    rig = Rig()
    for rid, extra_key in [("a", "tenant-1"), ("b", "tenant-2"), ("c", None), ("d", "tenant-1")]:
        rig.run(request(rid, PROMPT, extra_key=extra_key, kv_reuse=kv_reuse))
    assert [rig.cached(rid) for rid in "abcd"] == [0, 0, 0, 12]


@pytest.mark.parametrize(
    ("kv_reuse", "extra_key", "cached"),
    [
        ("isolate", None, 0),
        ("isolate", "session", 0),
        ("group", None, 0),
        ("group", "session", 12),
        ("share", None, 12),
        ("share", "session", 12),
    ],
)
def test_kv_of_older_weights_is_reused_only_as_asked(kv_reuse, extra_key, cached):
    rig = Rig()
    rig.run(request("a", PROMPT, extra_key=extra_key))
    rig.set_epoch(1)
    (answer,) = rig.run(
        request("b", PROMPT, extra_key=extra_key, kv_reuse=kv_reuse, ignore_eos=True)
    )
    assert rig.cached("b") == cached
    assert answer.epochs == [(4, 1)]
    assert answer.kv_epochs == ([(12, 0), (4, 1)] if cached else [(16, 1)])


def test_isolated_requests_share_again_under_the_new_weights():
    rig = Rig()
    rig.run(request("a", PROMPT))
    rig.set_epoch(1)
    rig.run(request("b", PROMPT))
    rig.run(request("c", PROMPT))
    assert (rig.cached("b"), rig.cached("c")) == (0, 12)


def test_kv_of_a_request_that_met_a_weight_commit_is_of_both_epochs():
    rig = Rig()
    rig.accept(request("a", PROMPT[:6], max_new_tokens=6, ignore_eos=True))
    rig.step()
    rig.step()
    rig.set_epoch(4)
    rig.drain()
    answer = rig.answer("a")
    assert answer.epochs == [(2, 0), (4, 4)]
    assert answer.kv_epochs == [(7, 0), (4, 4)]
    assert rig.rows["a"][0].kv_epochs is None
    rig.run(request("old", [*PROMPT[:6], *answer.output_ids]))
    rig.run(request("any", [*PROMPT[:6], *answer.output_ids], kv_reuse="share"))
    assert rig.cached("old") == 0
    assert rig.cached("any") == 8


def test_sharing_prefers_the_chain_of_one_epoch():
    rig = Rig()
    context = PROMPT[:8]
    rig.accept(request("hybrid", context, max_new_tokens=9, ignore_eos=True))
    rig.step()
    rig.set_epoch(1)
    rig.drain()
    prompt = [*context, *rig.answer("hybrid").output_ids]
    rig.run(request("pure", prompt, max_new_tokens=1))
    (answer,) = rig.run(request("b", prompt, kv_reuse="share", max_new_tokens=1))
    assert answer.kv_epochs == [(17, 1)]
    assert rig.cached("b") == 16


def test_the_oldest_unused_blocks_make_way():
    rig = Rig(info=model_info(num_blocks=8))
    rig.run(request("a", PROMPT, max_new_tokens=1))
    rig.run(request("b", PROMPT[::-1], max_new_tokens=1))
    rig.run(request("a2", PROMPT, max_new_tokens=1))
    rig.run(request("c", [9] * 13, max_new_tokens=1))
    rig.run(request("a3", PROMPT, max_new_tokens=1), request("b3", PROMPT[::-1], max_new_tokens=1))
    assert rig.cached("a2") == rig.cached("a3") == 12
    assert rig.cached("b3") < 12


def test_a_flush_drops_what_no_live_request_holds_and_counts_both():
    rig = Rig()
    rig.run(request("a", PROMPT, max_new_tokens=1))
    rig.accept(request("b", [9] * 9, max_new_tokens=9, ignore_eos=True))
    rig.step()
    flushed = rig.core.flush_cache()
    assert (flushed.dropped, flushed.kept) == (3, 2)
    rig.drain()
    rig.run(request("c", PROMPT))
    assert rig.cached("c") == 0
    finished(rig)


def test_a_flush_with_a_step_in_flight_leaves_its_blocks_alone():
    """E25."""
    rig = Rig()
    rig.accept(request("a", PROMPT, max_new_tokens=2, ignore_eos=True))
    rig.step(between=rig.core.flush_cache)
    rig.step(between=rig.core.flush_cache)
    rig.core.flush_cache()
    finished(rig)
    assert rig.core.load().kv_used == 0


def test_a_flush_while_the_last_request_ends_under_a_step_in_flight_breaks_nothing():
    """E25: its result is still to come; whoever gets the freed blocks then is right."""
    rig = Rig(info=model_info(num_blocks=8))
    rig.accept(request("last", PROMPT, max_new_tokens=20, ignore_eos=True))
    rig.step()

    def end_flush_and_begin() -> None:
        rig.abort("last")
        assert rig.core.flush_cache().kept == 0
        rig.accept(request("next", PROMPT[::-1], max_new_tokens=12, ignore_eos=True))

    rig.step(between=end_flush_and_begin)
    rig.core.flush_cache()
    rig.drain()
    answer = rig.answer("next")
    asked = rig.requests["next"]
    assert (answer.output_ids, answer.finish) == alone(asked, rig.info, rig.limits)
    assert rig.cached("next") == 0
    rig.core.flush_cache()
    assert rig.core.load().kv_used == 0


def test_when_kv_runs_out_the_newest_request_is_retracted_and_begins_again_first():
    rig = Rig(info=model_info(num_blocks=8))
    for n in range(3):
        rig.accept(request(str(n), [n + 1] * 5, max_new_tokens=20, ignore_eos=True))
    plans = rig.drain()
    finished(rig)
    assert [begin.rid for plan in plans for begin in plan.begins] == ["0", "1", "1", "2"]
    assert [rig.answer(str(n)).retractions for n in range(3)] == [0, 1, 0]
    assert rig.core.load().retractions == 1


def test_a_retracted_request_begins_again_with_its_history_and_emits_nothing_twice():
    rig = Rig()
    rig.accept(request("a", PROMPT[:5], max_new_tokens=9, ignore_eos=True))
    for _ in range(4):
        rig.step()
    assert rig.core.retract_all() == ["a"]
    plan = rig.step()
    assert plan is not None
    assert plan.ends == [0]
    assert plan.begins[0].prompt_ids == PROMPT[:5]
    assert plan.begins[0].history_ids == rig.answer("a").output_ids[:4]
    assert plan.rows[0].start == 8  # its own full blocks were cached
    rig.drain()
    finished(rig)
    assert [row.retractions for row in rig.rows["a"]] == [0] * 4 + [1] * 5


def test_prompt_logprobs_that_were_sent_are_not_computed_again_after_a_retraction():
    rig = Rig()
    asked = LogprobParams(start_len=0)
    rig.accept(request("a", PROMPT, logprob=asked, ignore_eos=True))
    rig.step()
    rig.core.retract_all()
    plan = rig.step()
    assert plan is not None
    assert plan.begins[0].logprob == LogprobParams(start_len=-1)
    assert plan.rows[0].start == 12
    rig.drain()
    assert rig.answer("a").input_logprobs == input_logprobs(asked, PROMPT, 0, 13)


def test_prompt_logprobs_begin_again_when_prefill_was_interrupted():
    rig = Rig(Limits(chunk_tokens=6))
    asked = LogprobParams(start_len=0)
    rig.accept(request("a", PROMPT, logprob=asked, ignore_eos=True))
    rig.step()
    rig.core.retract_all()
    rig.drain()
    assert rig.answer("a").input_logprobs == input_logprobs(asked, PROMPT, 0, 13)


def test_the_lower_priority_is_retracted_even_if_it_is_older():
    rig = Rig(info=model_info(num_blocks=8))
    rig.accept(request("low", [1] * 5, max_new_tokens=20, ignore_eos=True, priority=0))
    rig.step()
    rig.accept(request("high", [2] * 5, max_new_tokens=20, ignore_eos=True, priority=1))
    rig.drain()
    finished(rig)
    assert (rig.answer("low").retractions, rig.answer("high").retractions) == (1, 0)


def test_a_waiting_request_of_higher_priority_takes_the_kv_of_lower_ones():
    rig = Rig(info=model_info(num_blocks=9))
    for n in range(2):
        rig.accept(request(f"low-{n}", [n + 1] * 9, max_new_tokens=4, ignore_eos=True))
    rig.step()
    rig.accept(request("high", [5] * 13, priority=1))
    plan = rig.step()
    assert plan is not None
    assert [begin.rid for begin in plan.begins] == ["high"]
    assert rig.core.running_rids() == ["high", "low-0"]
    rig.drain()
    finished(rig)


def test_a_waiting_request_of_equal_priority_takes_nothing():
    rig = Rig(info=model_info(num_blocks=8))
    for n in range(2):
        rig.accept(request(f"a-{n}", [n + 1] * 9, max_new_tokens=4, ignore_eos=True))
    rig.step()
    rig.accept(request("b", [5] * 13))
    rig.drain()
    finished(rig)
    assert rig.core.load().retractions == 0


def test_nobody_is_retracted_for_a_request_that_still_would_not_fit():
    rig = Rig(info=model_info(num_blocks=10))
    rig.accept(request("top", [1] * 17, max_new_tokens=4, ignore_eos=True, priority=2))
    rig.accept(request("low", [2] * 5, max_new_tokens=4, ignore_eos=True, priority=0))
    rig.step()
    rig.accept(request("high", [5] * 24, priority=1))
    rig.step()
    assert rig.core.running_rids() == ["top", "low"]
    rig.drain()
    finished(rig)
    assert rig.core.load().retractions == 0


def test_a_request_begins_only_if_the_running_ones_can_grow():
    rig = Rig(info=model_info(num_blocks=6))
    rig.accept(request("a", [1] * 9, max_new_tokens=8, ignore_eos=True))
    rig.step()
    rig.accept(request("b", [2] * 8, max_new_tokens=2, ignore_eos=True))
    rig.step()
    assert rig.core.running_rids() == ["a"]
    rig.drain()
    finished(rig)
    assert rig.core.load().retractions == 0


def test_two_writers_of_the_same_text_can_both_finish_in_a_tiny_pool():
    """Each has blocks of its own for equal tokens, and pins those of the other."""
    rig = Rig(info=model_info(num_blocks=8))
    for rid in "ab":
        rig.accept(request(rid, [1] * 4, max_new_tokens=24, ignore_eos=True))
    rig.drain()
    finished(rig)


def cost_of_a_step_behind_a_blocked_prompt(length: int) -> int:
    rig = Rig(Limits(max_running=4), model_info(num_blocks=80, max_context=400))
    rig.accept(request("a", [1] * 17, max_new_tokens=30, ignore_eos=True))
    rig.step()
    rig.accept(request("b", [2] * 200, max_new_tokens=9, ignore_eos=True))
    rig.step()
    rig.accept(request("c", [3] * length, max_new_tokens=1))
    rig.step()
    cost = calls_of(lambda: rig.core.plan(0.0))
    assert [view.phase for view in rig.core.requests()] == ["decode", "decode", "waiting"]
    return cost


def test_a_prompt_that_has_to_wait_for_room_is_not_read_again_in_each_step():
    costs = {cost_of_a_step_behind_a_blocked_prompt(length) for length in (120, 300)}
    assert len(costs) == 1
