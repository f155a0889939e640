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


def test_profiles_are_taken_merged_opened_in_the_viewer_and_compared(page, served, load):
    page.goto(f"{served.url}/profiles/")
    expect(page.locator("#profiles .empty").first).to_contain_text("No profile yet")
    rows = page.locator("#profiles tbody tr")
    for number in (1, 2):
        act(page, "Profile all ranks", "Start profile")
        expect(rows).to_have_count(number, timeout=READY_MS)
        expect(rows.first).to_contain_text("ready", timeout=READY_MS)  # the newest one
        expect(rows.first).to_contain_text("all 2")
    rows.first.get_by_role("button", name="Pin").click()
    expect(rows.first.get_by_role("button", name="Pin")).to_have_attribute("aria-pressed", "true")
    page.get_by_label("Pinned").check()
    expect(rows).to_have_count(1)
    page.get_by_label("Pinned").uncheck()
    expect(rows).to_have_count(2)
    page.reload()
    expect(page.locator("qd-retention")).to_contain_text("2 profiles on disk")
    expect(page.locator("qd-retention")).to_contain_text("1 pinned")
    for box in page.get_by_label("Choose to compare").all():
        box.check()
    page.get_by_role("link", name="Compare").click()
    expect(page.locator("#totals")).to_contain_text("Largest token gap")
    changes = page.locator("#changes tbody tr")
    expect(changes).not_to_have_count(0)
    page.get_by_label("Filter operations").fill("no such operation")
    expect(page.locator("#no-changes")).to_be_visible()
    page.locator("#totals th a").first.click()
    expect(page.locator("#top-ops tbody tr")).not_to_have_count(0)
    expect(page.locator("#profile-ranks tbody tr")).to_have_count(2)
    expect(page.locator("qd-lanes")).to_contain_text("Whole trace")
    page.get_by_role("link", name="Open in the viewer").click()
    expect(page).to_have_title(re.compile(" - speedscope"), timeout=READY_MS)
    expect(page.locator("body")).to_contain_text("(1/")  # one of several threads


def test_while_a_profile_is_taken_each_rank_tells_what_it_has_written(page, served, load):
    begun = served.post("/start_profile", {"profile_id": "long", "max_seconds": 30})
    assert begun.status_code == 200, begun.text
    page.goto(f"{served.url}/profiles/long/")
    ranks = page.locator("#profile-ranks tbody tr")
    expect(ranks).to_have_count(2)
    for rank in (ranks.first, ranks.last):
        expect(rank).to_contain_text(re.compile("running.*aligned[1-9][0-9]* segments written"))
    assert served.post("/stop_profile", {"profile_id": "long"}).status_code == 200
    for rank in (ranks.first, ranks.last):
        expect(rank).to_contain_text(re.compile("done.*stopped by"), timeout=READY_MS)


def test_points_are_chosen_in_a_tree_that_counts_and_a_bad_glob_is_told_at_the_field(page, served):
    page.goto(f"{served.url}/dumps/")
    page.get_by_role("button", name="Arm dump").click()
    sheet = page.locator("#sheet")
    modules, count = sheet.get_by_label("Modules"), sheet.locator("qd-points [data-f=count]")
    expect(count).to_contain_text("0 of ")
    modules.fill("model.layers.*.mlq")
    expect(sheet.locator("#a-modules-problem")).to_have_text(
        "No dump point matches model.layers.*.mlq."
    )
    expect(modules).to_have_attribute("aria-invalid", "true")
    sheet.get_by_label("Reason").fill("a look inside")
    sheet.get_by_role("button", name="Arm dump").click()
    expect(sheet).to_be_visible()  # the form does not let it through
    modules.fill("lm_head")
    sheet.get_by_label("model.norm", exact=True).check()
    expect(modules).to_have_value("lm_head, model.norm")
    expect(count).to_contain_text("2 of ")
    sheet.get_by_label("model.norm", exact=True).press("Space")
    expect(modules).to_have_value("lm_head")
    sheet.get_by_label("Layers", exact=True).fill("9")
    expect(sheet.locator("#a-layers-problem")).to_have_text("The model has no layer 9.")


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
    page.goto(f"{served.url}/dumps/?q=probe-1")
    expect(page.locator("#dumps tbody tr")).to_have_count(1)
    page.locator("#dumps tbody tr").first.click()
    expect(page.locator("#points tbody tr .histogram").first).to_be_visible()
    page.locator(".tree-name").first.click()
    expect(page.locator(".tree-name").first).to_have_attribute("aria-pressed", "true")
    page.locator("#points tbody tr").first.press("Enter")
    heat = page.locator("#sheet qd-heat")
    expect(heat.get_by_role("status")).to_contain_text("Arrows walk the cells")
    heat.locator("canvas").first.press("ArrowRight")
    expect(heat.get_by_role("status")).to_contain_text("row 0, column 1: ")
    expect(heat.locator(".heat-ends span")).not_to_have_count(0)
