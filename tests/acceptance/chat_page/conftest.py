"""A browser, servers with and without a model, and pages that must be free of errors and ask nobody else.

Needs Chromium on the PATH (Debian: ``apt-get install chromium``) and ``pip install playwright``.
"""

from __future__ import annotations

import re
import shutil
from contextlib import contextmanager

import pytest

from chat_page_reader import until
from fake_openai_server import running
from served import ROOT, Served

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")

FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--no-first-run"]


@pytest.fixture(scope="module")
def browser():
    sync_api = pytest.importorskip("playwright.sync_api", reason="pip install playwright")
    if CHROMIUM is None:
        pytest.skip("no Chromium on the PATH: apt-get install chromium")
    with sync_api.sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield chromium
        chromium.close()


@pytest.fixture
def fake():
    with running() as server:
        yield server


@pytest.fixture(scope="module", params=["notebook", "chat"])
def served(request):
    """``pagoda serve``, of a model without a chat template and with one."""
    template = ("--chat-template", str(ROOT / "examples" / "chatml.jinja"))
    server = Served("--served-model-name", "tiny", *(template if request.param == "chat" else ()))
    server.mode = request.param
    yield server
    server.kill()


@pytest.fixture
def visit(browser, fake):
    """Opens a page of the server without a model."""
    with pages_of(browser, fake.url) as open_page:
        yield open_page


@pytest.fixture
def visit_served(browser, served):
    """Opens a page of the real server."""
    with pages_of(browser, served.url) as open_page:
        yield open_page


@contextmanager
def pages_of(browser, url):
    """A way to open pages of a fresh profile; at the end they had no error and no request to anybody else."""
    contexts, wrong = [], []
    expected_texts = []

    def expected(message) -> bool:
        # The browser itself reports every answer of 4xx and 5xx and every lost connection.
        return "Failed to load resource" in message or any(re.search(text, message) for text in expected_texts)

    def watch(page):
        page.on("pageerror", lambda error: wrong.append(str(error)))
        page.on("console", lambda m: m.type in ("error", "warning") and not expected(m.text) and wrong.append(m.text))
        page.on("dialog", lambda dialog: (wrong.append(f"dialog {dialog.message}"), dialog.dismiss()))
        page.on("request", lambda r: r.url.startswith((url, "blob:" + url)) or wrong.append(r.url))

    def open_page(path="", beside=None, ready=True, **options):
        context = (
            beside.context
            if beside
            else browser.new_context(**{"viewport": {"width": 1280, "height": 800}, **options})
        )
        if not beside:
            contexts.append(context)
            context.set_default_timeout(30_000)
        page = context.new_page()
        watch(page)
        page.goto(url + path)
        if ready:
            until(page, "document.querySelector('#model').options.length > 0")
        return page

    open_page.expected = expected_texts
    yield open_page
    for context in contexts:
        context.close()
    assert wrong == []
