"""Weights, Requests, Jobs and audit in Chromium: preview, act, follow, look it up afterwards."""

from __future__ import annotations

import contextlib
import re
import threading

import httpx
import pytest
from playwright.sync_api import Page, expect

from engine.weights.checkpoint import SINGLE
from tests.console.tree import Tree, eventually
from tests.engine.weights.checkpoints import favourites, scripted_checkpoint

pytestmark = pytest.mark.browser


def checkpoint(served: Tree, index: int) -> str:
    path = served.home / "models" / f"policy-{index}"
    path.mkdir(exist_ok=True)
    scripted_checkpoint(path / SINGLE, index)
    answer = served.post(
        "/api/checkpoints", {"path": str(path), "token_step": 1000 + index, "run": "grpo-7"}
    )
    assert answer.json()["success"], answer.text
    return f"models/policy-{index}"


@contextlib.contextmanager
def one_long_request(served: Tree, rid: str):
    def generate() -> None:
        body = {"text": "long", "rid": rid,
                "sampling_params": {"max_new_tokens": 4000, "ignore_eos": True}}  # fmt: skip
        with contextlib.suppress(httpx.TransportError):
            served.post("/generate", body)

    thread = threading.Thread(target=generate)
    thread.start()
    eventually(lambda: served.running() >= 1, 10, served)
    try:
        yield
    finally:
        served.post("/abort_request", {"rid": rid})
        thread.join(20)


def test_weights_are_reloaded_from_a_checkpoint_with_preview_and_reason(page: Page, served):
    path = checkpoint(served, 1)
    page.goto(f"{served.url}/weights/")
    row = page.locator("#checkpoints tbody tr", has_text=path)
    expect(row).to_contain_text("1001")
    with one_long_request(served, "browser-long"):
        row.get_by_role("button", name="Reload weights").click()
        sheet = page.get_by_role("dialog")
        sheet.get_by_label("Running requests").select_option("in_place")
        expect(sheet).to_contain_text("1 running request: ")
        expect(sheet).to_contain_text("policy in_place: they go on with the new weights")
        sheet.get_by_label("Reason").fill("better on the held-out set")
        sheet.get_by_role("button", name="Reload weights").click()
        expect(page.locator("#job-chips")).to_contain_text("Reload weights policy-1")
        expect(page.locator("#job-chips")).to_contain_text("done", timeout=15_000)
    expect(page.locator("#current-version")).to_contain_text("policy-1", timeout=15_000)
    expect(page.locator("#current-version")).to_contain_text("step 1001")
    expect(page.locator("#engine-truth")).to_contain_text("policy-1")


def test_a_job_shows_every_rank_what_changed_and_the_same_as_curl(page: Page, served):
    page.goto(f"{served.url}/jobs/?kind=reload_weights")
    page.locator("#jobs tbody tr").first.click()
    page.wait_for_url(re.compile(r"/jobs/\d+/"))
    job = page.locator("#job")
    for text in ("dp0·tp0 done", "dp1·tp0 done", "better on the held-out set",
                 "update_weights_from_disk", "token_step"):  # fmt: skip
        expect(job).to_contain_text(text)
    expect(job.locator("[data-changes]")).to_contain_text("policy-1")


def test_the_audit_lists_who_did_it_and_the_chain_holds(page: Page, served):
    page.goto(f"{served.url}/jobs/audit/")
    row = page.locator("#audit tbody tr", has_text="reload_weights").first
    expect(row).to_contain_text("user:admin")
    expect(row).to_contain_text("page")
    page.get_by_role("button", name="Verify chain").click()
    expect(page.locator("#chain")).to_contain_text("Unbroken")
    page.get_by_label("Search the audit").fill("nobody of that name")
    expect(page.locator("#audit .nothing")).to_be_visible()
    assert "unbroken" in served.manage("audit", "verify")


def test_a_roll_back_serves_the_weights_of_an_earlier_epoch_again(page: Page, served):
    body = {"model_path": checkpoint(served, 2), "reason": "next"}
    assert served.post("/update_weights_from_disk", body).json()["success"]
    page.goto(f"{served.url}/weights/")
    rows = page.locator("#versions tbody tr")
    expect(rows.first).to_contain_text("policy-2", timeout=15_000)
    rows.filter(has_text="policy-1").get_by_role("button", name="Roll back").click()
    sheet = page.get_by_role("dialog")
    expect(sheet).to_contain_text("become a new epoch")
    sheet.get_by_label("Reason").fill("it was worse")
    sheet.get_by_role("button", name="Roll back").click()
    expect(page.locator("#job-chips")).to_contain_text("done", timeout=15_000)
    expect(rows.first).to_contain_text("user:admin", timeout=15_000)
    expect(rows.first).to_contain_text("epoch", timeout=15_000)
    token = served.post("/generate", {"text": "x", "sampling_params": {"max_new_tokens": 1}})
    assert token.json()["output_ids"][0] in favourites(1)


def test_a_request_in_flight_is_seen_and_aborted(page: Page, served):
    with one_long_request(served, "to-be-aborted"):
        page.goto(f"{served.url}/requests/")
        row = page.locator("#request-table tbody tr", has_text="to-be-aborted")
        expect(row).to_contain_text("decode", timeout=10_000)
        expect(row).to_contain_text("key:test")
        row.get_by_role("button", name="Abort").click()
        sheet = page.get_by_role("dialog")
        sheet.get_by_label("Reason").fill("too long")
        sheet.get_by_role("button", name="Abort request").click()
        expect(row).to_have_count(0, timeout=10_000)


def act(page: Page, verb: str) -> None:
    sheet = page.get_by_role("dialog")
    expect(sheet.get_by_label("Reason")).to_be_focused()
    sheet.get_by_label("Reason").fill("to look at it")
    sheet.get_by_role("button", name=verb).click()
    expect(page.locator("#job-chips")).to_contain_text("done", timeout=15_000)


def test_the_engine_is_paused_and_continued_from_its_page(page: Page, served):
    page.goto(f"{served.url}/fleet/")
    page.get_by_role("button", name="Pause engine").click()
    act(page, "Pause engine")
    expect(page.locator("#statebar")).to_contain_text("paused", ignore_case=True, timeout=5_000)
    page.get_by_role("button", name="Continue engine").click()
    act(page, "Continue engine")
    expect(page.locator("#statebar")).to_be_hidden(timeout=5_000)


def test_a_rank_is_drained_and_put_back_from_its_sheet(page: Page, served):
    page.goto(f"{served.url}/fleet/")
    card = page.get_by_role("button", name=re.compile("dp1 · tp0"))
    card.click()
    expect(page.get_by_role("link", name="Its requests")).to_have_attribute(
        "href", "/requests/?q=dp1"
    )
    page.get_by_role("button", name="Drain rank").click()
    act(page, "Drain rank")
    expect(card).to_contain_text("draining", timeout=5_000)
    card.click()
    page.get_by_role("button", name="Put rank back").click()
    act(page, "Put rank back")
    expect(card).to_contain_text("running", timeout=5_000)
