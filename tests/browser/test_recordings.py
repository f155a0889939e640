"""Profiles and dumps as a person uses them: start, watch, look inside, compare."""

from __future__ import annotations

import re
import threading

import pytest
from playwright.sync_api import Page, expect

from tests.console.tree import eventually, real_model, running_tree

pytestmark = pytest.mark.browser

READY_MS = 60_000


@pytest.fixture(scope="module")
def served(tmp_path_factory, chromium):
    """A tiny real model: there is something to record."""
    home = tmp_path_factory.mktemp("recorded")
    with running_tree(home, **real_model(home)) as running:
        yield running


@pytest.fixture(scope="module")
def load(served):
    """Answers are made all the time: what records finds steps to record."""
    stop = threading.Event()
    threads = [threading.Thread(target=generate, args=(served, i, stop)) for i in range(4)]
    for thread in threads:
        thread.start()
    yield
    stop.set()
    for thread in threads:
        thread.join()


def generate(served, number: int, stop: threading.Event) -> None:
    sampling = {"max_new_tokens": 200, "ignore_eos": True, "temperature": 0}
    while not stop.is_set():
        served.post("/generate", {"text": f"{number} is", "sampling_params": sampling})


def act(page: Page, button: str, verb: str, **fields: str) -> None:
    """Opens the sheet, fills it, gives a reason, and does it."""
    page.get_by_role("button", name=button).first.click()
    sheet = page.locator("#sheet")
    for label, value in fields.items():
        sheet.get_by_label(label).fill(value)
    expect(sheet.locator(".will p").first).to_be_visible()
    sheet.get_by_label("Reason").fill("a look inside")
    sheet.get_by_role("button", name=verb).click()
    expect(sheet).to_be_hidden()


def test_a_profile_is_taken_merged_and_opened_in_the_viewer(page, served, load):
    page.goto(f"{served.url}/profiles/")
    act(page, "Profile all ranks", "Start profile")
    row = page.locator("#profiles tbody tr").first
    expect(row).to_contain_text("ready", timeout=READY_MS)
    expect(row).to_contain_text("all 2")
    row.click()
    expect(page.locator("#top-ops tbody tr")).not_to_have_count(0)
    expect(page.locator("#profile-ranks tbody tr")).to_have_count(2)
    expect(page.locator("qd-lanes")).to_contain_text("Whole trace")
    page.get_by_role("link", name="Open in the viewer").click()
    expect(page).to_have_title(re.compile(" - speedscope"), timeout=READY_MS)
    expect(page.locator("body")).to_contain_text("(1/")  # one of several threads


def test_dumps_are_armed_shown_and_compared(page, served):
    page.goto(f"{served.url}/dumps/")
    for number in (1, 2):
        act(page, "Arm dump", "Arm dump", Modules="model.layers.*", Requests=f"probe-{number}")
        rows = page.locator("#dumps tbody tr")
        expect(rows).to_have_count(number, timeout=READY_MS)
        eventually(lambda: served.get("/api/jobs").json()["jobs"][0]["message"], 20, served)
        asked = {"text": "a probe", "rid": f"probe-{number}", "sampling_params": {"temperature": 0}}
        assert served.post("/generate", asked).status_code == 200
        expect(rows.first).to_contain_text("ready", timeout=READY_MS)
    for box in page.get_by_label("Choose to compare").all():
        box.check()
    page.get_by_role("link", name="Compare").click()
    expect(page.locator("#dump h2").first).to_have_text("The two dumps agree")
    expect(page.locator("#points tbody tr").first).to_contain_text("input_layernorm")
    page.goto(f"{served.url}/dumps/")
    page.locator("#dumps tbody tr").first.click()
    expect(page.locator("#points tbody tr .histogram").first).to_be_visible()
    page.locator(".tree-name").first.click()
    expect(page.locator(".tree-name").first).to_have_attribute("aria-pressed", "true")
