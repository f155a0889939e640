"""Pages as a person uses them: compare, tokens, branches, keys, keyboard, narrow screens."""

from __future__ import annotations

import re

import pytest
from playwright.sync_api import Page, expect

pytestmark = pytest.mark.browser

PAGES = (
    "/fleet/",
    "/playground/",
    "/requests/",
    "/weights/",
    "/jobs/",
    "/jobs/audit/",
    "/connect/",
    "/keys/",
)

NAMELESS = """() => [...document.querySelectorAll("button, a[href], input, select, textarea")]
  .filter((e) => e.checkVisibility() && e.type !== "hidden")
  .filter((e) => !(e.textContent.trim() || e.title || e.ariaLabel || e.labels?.length))
  .map((e) => e.outerHTML.slice(0, 120))"""


def ask(page: Page, text: str) -> None:
    """Sends a message and waits for the end of its answers."""
    page.get_by_role("textbox", name="Message").fill(text)
    page.keyboard.press("Control+Enter")
    expect(page.locator("qd-answer").last).to_have_attribute("data-phase", "done", timeout=15000)


def test_two_ranks_answer_side_by_side_in_one_conversation(page, served):
    page.goto(f"{served.url}/playground/")
    page.get_by_role("button", name="Side by side").click()
    ask(page, "side by side [[eos 12]]")
    expect(page.locator("qd-answer")).to_have_count(2)
    expect(page.locator(".facts-line").nth(0)).to_contain_text("dp0")
    expect(page.locator(".facts-line").nth(1)).to_contain_text("dp1")
    page.reload()
    expect(page.locator(".turn")).to_have_count(1)
    expect(page.locator("qd-answer")).to_have_count(2)


def test_tokens_show_their_epoch_their_chance_and_the_alternatives(page, served):
    page.goto(f"{served.url}/playground/")
    page.get_by_label("Logprobs and alternatives").check()
    page.get_by_label("Entropy").check()
    ask(page, "[[say Naïve 世界]]")
    page.get_by_role("button", name="Tokens").click()
    text = "".join(page.locator(".token:not(.outside)").all_inner_texts())
    assert text == "Naïve 世界"
    page.get_by_role("button", name="Logprob", exact=True).click()
    expect(page.locator(".token-legend")).to_contain_text("nats")
    page.locator(".token").nth(1).hover()
    expect(page.locator(".token-hint")).to_contain_text(re.compile(r"% \(-.* nats\) · entropy"))
    expect(page.locator(".token-hint .other")).not_to_have_count(0)


def test_markup_in_an_answer_is_text_and_its_links_are_harmless(page, served):
    page.goto(f"{served.url}/playground/")
    ask(page, "[[say <img src=x onerror=alert(1)> <b>bold</b> *soft* <javascript:alert(1)>]]")
    body = page.locator(".answer-body").last
    expect(body).to_contain_text("<img src=x onerror=alert(1)> <b>bold</b>")
    expect(body.locator("em")).to_have_text("soft")
    assert body.locator("img, b, script, [onerror], a[href^=javascript]").count() == 0


def test_an_edited_question_is_a_branch_and_the_first_one_stays(page, served):
    page.goto(f"{served.url}/playground/")
    ask(page, "start [[eos 4]]")
    ask(page, "[[say first way]]")
    page.get_by_role("button", name="Edit and send").last.click()
    page.get_by_role("textbox", name="Edit the message").fill("[[say second way]]")
    page.get_by_role("button", name="Send edited").click()
    expect(page.locator(".answer-body").last).to_contain_text("second way")
    expect(page.locator(".branches").last).to_contain_text("2 of 2")
    page.get_by_role("button", name="Version before").last.click()
    expect(page.locator(".answer-body").last).to_contain_text("first way")


def test_a_conversation_is_renamed_found_exported_and_deleted_by_keyboard(page, served):
    page.goto(f"{served.url}/playground/")
    ask(page, "[[say to be renamed]]")
    page.locator("#conversations li a").first.press("F2")
    page.get_by_label("Title").fill("The renamed one")
    page.keyboard.press("Enter")
    row = page.locator("#conversations li", has_text="The renamed one")
    expect(row.locator("a").first).to_be_focused()
    page.get_by_label("Search conversations").fill("renamed one")
    expect(page.locator("#conversations li")).to_have_count(1)
    page.keyboard.press("Control+k")
    page.keyboard.type("export markdown")
    with page.expect_download() as download:
        page.keyboard.press("Enter")
    assert "to be renamed" in download.value.path().read_text()
    row.locator("a").first.press("Delete")
    page.get_by_role("dialog").get_by_role("button", name="Delete conversation").click()
    page.wait_for_url("**/playground/")
    expect(row).to_have_count(0)


def test_the_last_question_is_edited_and_its_answer_made_again_by_keyboard(page, served):
    page.goto(f"{served.url}/playground/")
    ask(page, "[[say one]]")
    page.get_by_role("textbox", name="Message").press("ArrowUp")
    page.get_by_role("textbox", name="Edit the message").fill("[[say two]]")
    page.keyboard.press("Control+Enter")
    expect(page.locator("qd-answer[data-phase=done] .answer-body")).to_have_text("two")
    page.keyboard.press("Control+k")
    page.keyboard.type("regenerate")
    page.keyboard.press("Enter")
    expect(page.locator(".branches")).to_contain_text("3 of 3")
    expect(page.get_by_role("button", name="Regenerate")).to_be_visible()


def test_what_cannot_be_sent_says_why(page, served):
    page.goto(f"{served.url}/playground/")
    page.get_by_label("Temperature").fill("3")
    page.get_by_role("textbox", name="Message").fill("hello")
    page.keyboard.press("Control+Enter")
    expect(page.get_by_role("alert")).to_have_text("Temperature: From 0 to 2.")
    expect(page.get_by_label("Temperature")).to_be_focused()
    page.get_by_label("Temperature").fill("")
    page.get_by_role("textbox", name="Message").fill("a long story")
    page.keyboard.press("Control+Enter")
    expect(page.locator("qd-answer[data-phase=streaming]")).to_be_visible()
    page.get_by_role("textbox", name="Message").fill("another")
    page.keyboard.press("Control+Enter")
    expect(page.get_by_role("alert").first).to_contain_text("One answer at a time")
    page.keyboard.press("Escape")
    expect(page.get_by_text("slot freed")).to_be_visible()
    expect(page.get_by_text("One answer at a time")).to_have_count(0)


def test_code_in_an_answer_can_be_copied(page, served):
    page.goto(f"{served.url}/playground/")
    ask(page, "[[say ```\nx = 1\n```]]")
    expect(page.locator(".answer-body .code pre")).to_have_text("x = 1")
    page.get_by_role("button", name="Copy the code").click()
    expect(page.get_by_role("button", name=re.compile("Copied|Selected"))).to_be_visible()


def test_charts_show_what_was_before_the_page_was_opened(page, served):
    served.post("/generate", {"text": "x", "sampling_params": {"max_new_tokens": 20}})
    page.wait_for_timeout(1500)
    page.goto(f"{served.url}/fleet/")
    for chart in ("#chart-ttft", "#chart-itl"):
        words = re.compile(r"p50 [\d.]+, p95 [\d.]+")
        expect(page.locator(f"{chart} .plot")).to_have_attribute("aria-label", words)
    page.locator("#chart-speed").get_by_role("button").click()
    expect(page.locator("#chart-speed tbody tr")).not_to_have_count(0)


def test_a_key_is_shown_once_and_can_be_revoked(page, served):
    page.goto(f"{served.url}/keys/")
    page.get_by_role("button", name="Create key").first.click()
    page.get_by_label("Name").fill("browser test")
    page.locator("dialog").get_by_role("button", name="Create key").click()
    secret = page.locator("#secret").inner_text()
    assert secret.startswith("qd-")
    page.goto(f"{served.url}/keys/")
    assert secret not in page.content()
    row = page.get_by_role("row", name=re.compile("browser test"))
    row.get_by_role("button", name="Revoke key").click()
    page.locator("dialog[open]").get_by_role("button", name="Revoke key").click()
    expect(row).to_contain_text("revoked")


def test_the_palette_and_the_table_keys_need_no_mouse(page, served):
    expect(page.get_by_role("row", name=re.compile("^2 web"))).to_be_visible()
    page.keyboard.press("j")
    page.keyboard.press("j")
    page.keyboard.press("Enter")
    expect(page.get_by_role("dialog", name="Worker 2")).to_be_visible()
    page.keyboard.press("Escape")
    page.keyboard.press("Control+k")
    page.keyboard.type("conn")
    page.keyboard.press("Enter")
    page.wait_for_url("**/connect/")
    expect(page.locator("#snippets")).to_contain_text(f"{served.url}/v1")


@pytest.mark.parametrize("path", PAGES)
def test_every_control_has_a_name_and_nothing_sticks_out_of_a_narrow_screen(page, served, path):
    page.set_viewport_size({"width": 390, "height": 844})
    page.goto(served.url + path)
    page.wait_for_timeout(300)
    assert page.evaluate(NAMELESS) == []
    width = page.evaluate("document.querySelector('main').scrollWidth")
    assert width <= page.evaluate("document.querySelector('main').clientWidth")
