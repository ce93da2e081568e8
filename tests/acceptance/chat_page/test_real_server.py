"""The page and ``pagoda serve`` together: what the page shows is what the engine did."""

from __future__ import annotations

import re

import pytest

from chat_page_reader import ended, last, send, until

pytestmark = pytest.mark.acceptance

LINE = r"(\d+) tokens · [\d.,]+ tok/s · first token [\d.]+ m?s · (\d+) of (\d+) cached · context (\d+) of 1,024"
GENERATED = "vllm:generation_tokens_total"


def figures(line):
    """Tokens, cached ones, those of the prompt and of the context, as the page says."""
    found = re.fullmatch(LINE, line)
    assert found, line
    return [int(text) for text in found.groups()]


def settings(page, **values):
    page.get_by_role("button", name="Settings").click()
    for label, value in values.items():
        page.get_by_label(label.replace("_", " ")).fill(str(value))
    page.keyboard.press("Escape")


@pytest.mark.parametrize("served", ["chat"], indirect=True)
def test_a_conversation(visit_served, served):
    page = visit_served()
    settings(page, Temperature=0, Max_tokens=150)
    before = served.figure(GENERATED)
    send(page, "Return the absolute value of the argument.", wait=False)
    until(page, "document.querySelector('.assistant .md')?.textContent.length > 20")
    seen = last(page).inner_text()
    assert page.get_by_role("button", name="Stop").is_visible(), "text is there while more comes"
    ended(page)
    answer = last(page).inner_text()
    assert len(answer) > len(seen) > 0
    tokens, cached, prompt, context = figures(last(page, "footer > .meta").inner_text())
    assert served.figure(GENERATED) - before == tokens <= 150
    assert cached == 0 and context == prompt + tokens
    # The next turn finds the one before in the cache.
    settings(page, Max_tokens=8)
    send(page, "And of the next?")
    tokens, cached, longer, _ = figures(last(page, "footer > .meta").inner_text())
    assert tokens <= 8 and longer > context and prompt + 100 < cached < longer


@pytest.mark.parametrize("served", ["chat"], indirect=True)
def test_stop_ends_the_request_in_the_engine(visit_served, served):
    page = visit_served()
    settings(page, Temperature=0, Max_tokens=900)
    before = served.figure(GENERATED)
    send(page, "Write until the end of the context.", wait=False)
    until(page, "document.querySelector('.assistant .md')?.textContent.length > 20")
    page.get_by_role("button", name="Stop").click()
    ended(page)
    assert last(page, ".notice").inner_text() == "Stopped."
    assert len(last(page).inner_text()) > 20
    served.becomes_idle()
    assert served.figure(GENERATED) - before < 900
    # And it goes on from where it was.
    kept = last(page).inner_text()
    settings(page, Max_tokens=8)
    page.get_by_role("button", name="Continue the answer").click()
    ended(page)
    assert last(page).inner_text().startswith(kept)


@pytest.mark.parametrize("served", ["notebook"], indirect=True)
def test_the_shipped_model_has_a_notebook(visit_served, served):
    page = visit_served()
    page.wait_for_selector("#notebook-text:focus")
    settings(page, Temperature=0, Max_tokens=24)
    page.fill("#notebook-text", "Return the")
    page.keyboard.press("Control+Enter")
    page.wait_for_selector("#notebook-text[aria-busy=true]")
    page.wait_for_selector("#notebook-text[aria-busy=false]")
    text = page.input_value("#notebook-text")
    assert text.startswith("Return the ") and len(text) > 60
    tokens, _, prompt, context = figures(page.locator("#notebook-stats").inner_text())
    assert (tokens, prompt, context) == (24, 2, 26)
