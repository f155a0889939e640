"""What a person does first: sign in, look at the fleet, chat, stop, reload in mid-answer."""

from __future__ import annotations

import re

import pytest
from playwright.sync_api import Page, expect

from tests.browser.conftest import GRACE_S

pytestmark = pytest.mark.browser


def send(page: Page, text: str) -> None:
    page.get_by_role("textbox", name="Message").fill(text)
    page.keyboard.press("Control+Enter")


def test_a_wrong_password_says_so(chromium, served):
    page = chromium.new_page()
    page.goto(served.url)
    page.get_by_label("User").fill("admin")
    page.get_by_label("Password").fill("wrong")
    page.get_by_role("button", name="Sign in").click()
    expect(page.get_by_role("alert")).to_be_visible()
    page.close()


def test_the_fleet_page_shows_both_ranks_and_both_workers(page):
    expect(page.get_by_text("dp0 · tp0")).to_be_visible()
    expect(page.get_by_text("dp1 · tp0")).to_be_visible()
    expect(page.get_by_role("row", name=re.compile("^1 web"))).to_be_visible()
    expect(page.get_by_role("row", name=re.compile("^2 web"))).to_be_visible()


@pytest.mark.parametrize(
    ("route", "shown"),
    [("Worker 1", "worker 1"), ("Worker 2", "worker 2"), ("Rank dp0", "dp0"), ("Rank dp1", "dp1")],
)
def test_an_answer_streams_through_the_chosen_route(page, served, route, shown):
    page.goto(f"{served.url}/playground/")
    page.get_by_text(route, exact=False).first.click()
    send(page, f"[[say Here is the answer by {route}.]]")
    expect(page.get_by_text(f"Here is the answer by {route}.", exact=False).last).to_be_visible()
    expect(page.locator(".facts-line").last).to_contain_text(shown)


def test_stop_says_that_the_slot_is_free_once_the_engine_said_so(page, served):
    page.goto(f"{served.url}/playground/")
    send(page, "tell me a long story")
    page.wait_for_timeout(1000)
    page.keyboard.press("Escape")
    expect(page.get_by_text("slot freed")).to_be_visible(timeout=5000)
    with served.client() as client:
        running = [rank["running"] for rank in client.get("/api/fleet").json()["ranks"]]
    assert running == [0, 0]


def test_a_reload_in_mid_answer_goes_on_where_it_was(page, served):
    page.goto(f"{served.url}/playground/")
    words = " ".join(f"word{i}" for i in range(60))
    send(page, f"[[say {words}]]")
    expect(page.locator("qd-answer").get_by_text("word5 ", exact=False)).to_be_visible()
    page.reload()
    expect(page.get_by_text("word58 word59", exact=False).last).to_be_visible(timeout=30000)


def test_who_comes_back_after_the_grace_sees_what_was_stored(page, served):
    page.goto(f"{served.url}/playground/")
    send(page, f"[[say {' '.join(f'word{i}' for i in range(900))}]]")
    expect(page.locator("qd-answer").get_by_text("word5 ", exact=False)).to_be_visible()
    address = page.url
    page.goto("about:blank")
    page.wait_for_timeout(1000 * (float(GRACE_S) + 1))
    page.goto(address)
    answer = page.locator("qd-answer").last
    expect(answer.get_by_text(re.compile("^Stopped, .* slot freed"))).to_be_visible()
    expect(answer.get_by_text("word10 ", exact=False)).to_be_visible()
    expect(answer).to_have_attribute("data-phase", "stopped")


def test_an_edited_first_question_is_a_branch_beside_it(page, served):
    page.goto(f"{served.url}/playground/")
    send(page, "[[say the first answer]]")
    expect(page.get_by_text("the first answer", exact=True)).to_be_visible()
    page.get_by_role("button", name="Edit").first.click()
    page.get_by_role("textbox", name="Edit the message").fill("[[say the second answer]]")
    page.get_by_role("button", name="Send edited").click()
    expect(page.get_by_text("the second answer", exact=True)).to_be_visible()
    expect(page.get_by_text("2 of 2")).to_be_visible()
    expect(page.get_by_text("the first answer", exact=True)).to_have_count(0)
    page.reload()
    expect(page.get_by_text("the second answer", exact=True)).to_be_visible()
    expect(page.locator("qd-answer")).to_have_count(1)
