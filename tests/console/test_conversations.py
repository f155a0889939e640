"""The record of chats: branches, turns side by side, search, export, retention, ownership."""

from __future__ import annotations

import datetime

import pytest
from django.utils import timezone

from console import auth, tasks
from console.models import Conversation, Message
from console.services import conversations, record
from console.services.question import Question
from console.services.streams import Answer
from engine.errors import NotFound
from engine.messages import Finish, Provenance, StrRow


@pytest.fixture
def operator(make_user):
    return auth.principal_of_user(make_user("operator"))


@pytest.fixture
def other(make_user):
    return auth.principal_of_user(make_user("operator", username="other"))


def ask(principal: auth.Principal, text: str, **fields) -> record.Recorder:
    """The question is stored as when an answer begins."""
    question = Question(stream=fields.pop("stream", "s"), text=text, **fields)
    branch = record.branch_of(principal, question)
    recorder = record.Recorder(principal, question, "rid", "1", branch.leaf_id)
    recorder._begin(principal.user_id)
    return recorder


def finish(recorder: record.Recorder, text: str, finish: Finish | None = None) -> None:
    answer = Answer()
    provenance = Provenance(prompt_tokens=5, cached_tokens=0, dp_rank=1, queued_s=0.0)
    for at, word in enumerate(text.split()):
        answer.add(
            StrRow(
                rid="rid",
                http_worker_ipc="w",
                text=word + " ",
                output_ids=[at],
                epochs=[(1, 1 + at // 2)],
                provenance=provenance if at == 0 else None,
            )
        )
    answer.add(StrRow(rid="rid", http_worker_ipc="w", finish=finish or Finish(type="stop")))
    record._store_answer(recorder.message_id, answer)


def test_an_answer_keeps_where_it_came_from(operator):
    recorder = ask(operator, "What is a ship?")
    finish(recorder, "a thing that floats")
    content = conversations.read(operator, recorder.conversation_id)
    question, answer = content["messages"]
    assert content["title"] == "What is a ship?"
    assert (question["role"], question["text"]) == ("user", "What is a ship?")
    assert answer["parent"] == question["id"]
    assert answer["text"].split() == ["a", "thing", "that", "floats"]
    assert answer["epochs"] == [[2, 1], [2, 2]]
    assert (answer["worker"], answer["rank"], answer["state"]) == ("1", 1, "done")
    assert answer["usage"]["completion_tokens"] == 4
    assert answer["slot_freed"] is True


@pytest.mark.parametrize(
    ("reason", "state"),
    [
        (Finish(type="length"), "done"),
        (Finish(type="abort", message="by the user"), "stopped"),
        (Finish(type="abort", status_code=500, err_type="rank_died"), "failed"),
    ],
)
def test_the_state_of_an_answer_says_how_it_ended(operator, reason, state):
    recorder = ask(operator, "q")
    finish(recorder, "some text", reason)
    assert Message.objects.get(pk=recorder.message_id).state == state


def test_the_next_prompt_has_the_turns_before_it(operator):
    first = ask(operator, "one")
    finish(first, "answer one")
    question = Question(stream="t", text="two", conversation=first.conversation_id)
    branch = record.branch_of(operator, question)
    assert [turn["content"].strip() for turn in branch.turns] == ["one", "answer one"]
    assert branch.leaf_id == first.message_id


def test_a_question_whose_answer_failed_is_left_out_of_the_prompt(operator):
    first = ask(operator, "one")
    finish(first, "", Finish(type="abort", status_code=503, err_type="overloaded"))
    branch = record.branch_of(
        operator, Question(stream="t", text="two", conversation=first.conversation_id)
    )
    assert branch.turns == []


def test_an_edited_question_starts_a_branch_behind_its_parent(operator):
    first = ask(operator, "one")
    finish(first, "answer one")
    second = ask(operator, "two", conversation=first.conversation_id)
    finish(second, "answer two")
    branch = record.branch_of(
        operator,
        Question(
            stream="t", text="other", conversation=first.conversation_id, parent=first.message_id
        ),
    )
    assert [turn["content"].strip() for turn in branch.turns] == ["one", "answer one"]


def test_an_edited_first_question_starts_a_branch_of_the_same_conversation(operator, other):
    first = ask(operator, "one")
    finish(first, "answer one")
    second = ask(operator, "edited", conversation=first.conversation_id, parent=0)
    finish(second, "answer two")
    content = conversations.read(operator, first.conversation_id)
    roots = [m["text"] for m in content["messages"] if m["parent"] is None]
    assert roots == ["one", "edited"]
    question = Question(stream="t", text="x", conversation=first.conversation_id, parent=0)
    assert record.branch_of(operator, question).turns == []
    with pytest.raises(NotFound):
        record.branch_of(other, question)


def test_answers_side_by_side_share_one_question_and_one_conversation(operator):
    left = ask(operator, "compare", turn="t1", compare=True, route="worker:1", stream="a")
    right = ask(operator, "compare", turn="t1", compare=True, route="worker:2", stream="b")
    assert left.conversation_id == right.conversation_id
    content = conversations.read(operator, left.conversation_id)
    assert [message["role"] for message in content["messages"]] == [
        "user",
        "assistant",
        "assistant",
    ]
    assert {m["parent"] for m in content["messages"][1:]} == {content["messages"][0]["id"]}


def test_the_turn_id_of_one_account_means_nothing_to_another(operator, other):
    mine = ask(operator, "mine", turn="same")
    theirs = ask(other, "theirs", turn="same")
    assert mine.conversation_id != theirs.conversation_id


def test_nobody_reads_changes_or_continues_anothers_conversation(operator, other):
    mine = ask(operator, "mine").conversation_id
    with pytest.raises(NotFound):
        conversations.read(other, mine)
    with pytest.raises(NotFound):
        conversations.change(other, mine, {"title": "theirs now"})
    with pytest.raises(NotFound):
        conversations.delete(other, mine)
    with pytest.raises(NotFound):
        record.branch_of(other, Question(stream="t", text="x", conversation=mine))
    assert conversations.page(other, words="", offset=0, size=5)["conversations"] == []


def test_search_finds_titles_and_texts_page_by_page(operator):
    for at in range(5):
        finish(ask(operator, f"question {at}"), f"the Whale number {at}")
    found = conversations.page(operator, words="whale", offset=0, size=3)
    assert len(found["conversations"]) == 3
    rest = conversations.page(operator, words="whale", offset=found["next"], size=3)
    assert (len(rest["conversations"]), rest["next"]) == (2, None)
    assert conversations.page(operator, words="shark", offset=0, size=3)["conversations"] == []


def test_the_routes_list_rename_export_and_delete(sign_in):
    browser = sign_in("operator")
    user_id = int(browser.session["_auth_user_id"])
    recorder = ask(auth.principal_of_user_id(user_id), "about ships")
    finish(recorder, "they float")
    address = f"/api/conversations/{recorder.conversation_id}"
    [listed] = browser.get("/api/conversations?q=ships").json()["conversations"]
    assert listed["title"] == "about ships"
    renamed = browser.patch(address, {"title": "Boats"}, content_type="application/json")
    assert renamed.json()["title"] == "Boats"
    markdown = browser.get(f"{address}/export?format=md")
    assert markdown["Content-Disposition"].endswith('.md"')
    assert "# Boats" in markdown.content.decode()
    assert "they float" in markdown.content.decode()
    assert browser.get(f"{address}/export?format=json").json()["messages"][1]["worker"] == "1"
    assert browser.get(f"{address}/export?format=exe").status_code == 400
    assert browser.patch(address, {"title": ""}, content_type="application/json").status_code == 400
    assert browser.delete(address).status_code == 204
    assert browser.get(address).status_code == 404


def test_a_worker_that_starts_fails_what_its_predecessor_left_running(operator):
    lost = ask(operator, "lost", stream="a").message_id
    finished = ask(operator, "done", stream="b")
    finish(finished, "text")
    assert record.fail_lost_answers("2") == 0
    assert record.fail_lost_answers("1") == 1
    assert Message.objects.get(pk=lost).finish["err_type"] == "worker_lost"
    assert Message.objects.get(pk=finished.message_id).state == "done"


def test_retention_deletes_what_rested_too_long_and_spares_what_is_pinned(operator, settings):
    settings.QUARTERDECK_CHAT_RETENTION_DAYS = 30
    old, pinned, fresh = (ask(operator, text, stream=text).conversation_id for text in "abc")
    long_ago = timezone.now() - datetime.timedelta(days=31)
    Conversation.objects.filter(pk__in=[old, pinned]).update(updated_at=long_ago)
    Conversation.objects.filter(pk=pinned).update(pinned=True)
    assert tasks.delete_old_chats() == 1
    assert set(Conversation.objects.values_list("pk", flat=True)) == {pinned, fresh}


def test_a_retention_of_0_days_keeps_everything(operator, settings):
    settings.QUARTERDECK_CHAT_RETENTION_DAYS = 0
    ask(operator, "x")
    Conversation.objects.update(updated_at=timezone.now() - datetime.timedelta(days=9999))
    assert tasks.delete_old_chats() == 0


def test_beat_is_scheduled_to_apply_retention(database):
    from django_celery_beat.models import PeriodicTask

    from console.celery import app

    scheduled = PeriodicTask.objects.get(name="Delete old chats")
    assert scheduled.enabled
    assert scheduled.task in app.tasks
