"""Chromium for the browser tests: found on the machine, or skipped with one visible line.

Playwright's event loop runs in this thread while ``chromium`` lives; package scope ends it before
other tests want a loop of their own.
"""

from __future__ import annotations

import os
import shutil

import pytest
from playwright.sync_api import sync_playwright

from tests.console.tree import PASSWORD, running_tree

GRACE_S = "8"  # the default: a busy machine may take longer than the other tests' 2 s to reload
ARGUMENTS = [
    "--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-sync",
    "--disable-component-update", "--no-first-run", "--disable-quic",
]  # fmt: skip


def chromium_path() -> str | None:
    return (
        shutil.which("chromium")
        or shutil.which("chromium-browser")
        or shutil.which("google-chrome")
    )


@pytest.fixture(scope="package")
def chromium():
    path = chromium_path()
    if path is None:
        if os.environ.get("QUARTERDECK_REQUIRE_BROWSER"):
            pytest.fail("no Chromium on this machine, and QUARTERDECK_REQUIRE_BROWSER is set")
        pytest.skip("no Chromium on this machine: browser tests skipped")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=ARGUMENTS)
        yield browser
        browser.close()


@pytest.fixture(scope="package")
def served(tmp_path_factory, chromium):
    home = tmp_path_factory.mktemp("browser")
    speed = {"QUARTERDECK_SCRIPTED_STEP_S": "0.02", "QUARTERDECK_RESUME_GRACE_S": GRACE_S}
    with running_tree(home, **speed) as running:
        yield running


@pytest.fixture
def page(chromium, served):
    """A signed-in page; a JavaScript error or a CSP violation fails the test."""
    context = chromium.new_context(viewport={"width": 1440, "height": 900})
    page = context.new_page()
    problems: list[str] = []
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.on("console", lambda m: problems.append(m.text) if "Content Security" in m.text else None)
    page.goto(served.url)
    page.get_by_label("User").fill("admin")
    page.get_by_label("Password").fill(PASSWORD)
    page.get_by_role("button", name="Sign in").click()
    page.wait_for_url("**/fleet/")
    yield page
    context.close()
    assert not problems
