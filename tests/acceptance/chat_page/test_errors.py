"""What goes wrong is said, and nothing is lost."""

from __future__ import annotations

import pytest

from chat_page_reader import contents, last, send, until

pytestmark = pytest.mark.acceptance


def test_the_key_is_asked_for_and_kept_in_the_tab(visit, fake):
    fake.key = "right"
    page = visit(ready=False)
    field = page.get_by_label("API key")
    field.fill("wrong")
    page.keyboard.press("Enter")
    until(page, "document.querySelector('#key-reason').textContent !== ''")
    field.fill("right")
    page.keyboard.press("Enter")
    until(page, "document.querySelector('#model').options.length > 0")
    send(page, "**Hi**")
    assert page.locator(".assistant strong").inner_text() == "Hi"
    assert page.evaluate("[Object.values(sessionStorage).includes('right'), JSON.stringify(localStorage)]") == [
        True,
        "{}",
    ]
    page.reload()
    page.wait_for_selector(".assistant strong")
    assert page.locator("dialog[open]").count() == 0
    # One that is not given is an error that can be tried again.
    page.get_by_role("button", name="Settings").click()
    page.get_by_role("button", name="Forget the key").click()
    page.keyboard.press("Escape")
    send(page, "x", wait=False)
    page.wait_for_selector("#key[open]")
    page.keyboard.press("Escape")
    page.wait_for_selector(".error")
    assert "key" in page.locator(".error").inner_text()


def test_a_full_queue_is_shown_with_its_time(visit, fake):
    fake.refuse = (429, {"message": "The queue is full.", "code": "queue_full"}, {"Retry-After": "7"})
    page = visit()
    send(page, "Hi")
    assert "The server is busy. The queue is full. Try again in 7 s." in page.locator(".error").inner_text()
    fake.refuse = None
    page.get_by_role("button", name="Try again").click()
    until(page, "document.querySelector('.assistant .md').textContent.includes('You said: Hi')")
    assert page.locator(".error").count() == 0
    assert contents(fake) == ["Hi"]


@pytest.mark.parametrize("way", ["cut", "event"])
def test_a_server_that_ends_in_the_middle_is_shown_and_the_text_kept(way, visit, fake):
    fake.answers["Hi"] = "word " * 100
    fake.cut_after, fake.error_after = (30, None) if way == "cut" else (None, 30)
    fake.delay = 0.005
    visit.expected.append("ERR_INCOMPLETE_CHUNKED_ENCODING")
    page = visit()
    send(page, "Hi")
    said = "The connection to the server was lost." if way == "cut" else "The engine ended."
    assert f"{said} The text so far is kept." in page.locator(".error").inner_text()
    assert len(last(page).inner_text()) > 100
    page.reload()
    page.wait_for_selector(".error")
    assert len(last(page).inner_text()) > 100


def test_a_server_that_cannot_be_reached(visit, fake):
    page = visit()
    page.context.set_offline(True)
    send(page, "Hi")
    assert "The server cannot be reached." in page.locator(".error").inner_text()
