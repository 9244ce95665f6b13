"""The browser of the tests of pages and notebooks."""

import shutil

import pytest


@pytest.fixture(scope="module")
def browser():
    """The system's chromium; without one the tests are skipped, which .ci/run does not allow."""
    program = shutil.which("chromium")
    if program is None:
        pytest.skip("no chromium: the tests of pages and notebooks in a browser did not run")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])
        yield browser
        browser.close()
