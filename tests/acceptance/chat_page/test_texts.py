"""Texts as they are shown: hostile ones inert, code intact, streamed as at once."""

from __future__ import annotations

import pytest

from chat_page_reader import CODE, HOSTILE, TRICKY, last, send, until

pytestmark = pytest.mark.acceptance


def test_hostile_text_is_shown_as_text(visit, fake):
    call = {"index": 0, "id": "c", "function": {"name": HOSTILE[:60], "arguments": HOSTILE}}
    fake.answers[HOSTILE.strip()] = [
        {"reasoning_content": HOSTILE},
        *({"content": HOSTILE[i : i + 3]} for i in range(0, len(HOSTILE), 3)),
        {"tool_calls": [call]},
    ]
    fake.delay = 0.002
    page = visit()
    send(page, HOSTILE)
    page.locator("summary").click()
    assert page.evaluate("window.hit") is None
    inserted = "#messages :is(script, img, iframe, style, form, object, [onload], [onerror], [srcdoc], [style])"
    assert page.locator(inserted).count() == 0
    assert page.locator(".md a").count() == 0
    assert "window.hit = 2" in last(page).inner_text()
    assert page.locator("#messages .tool-call code").inner_text().strip() == HOSTILE.strip()
    assert page.locator(".reasoning .plain").text_content() == HOSTILE
    assert page.locator(".user .plain").text_content() == HOSTILE.strip()
    fake.refuse = (400, {"message": HOSTILE}, {})
    send(page, "x", wait=False)
    page.wait_for_selector(".error")
    page.reload()
    page.wait_for_selector(".assistant pre")
    assert page.evaluate("window.hit") is None
    assert page.locator(inserted).count() == 0


def test_the_policy_stops_what_would_get_in(visit):
    visit.expected += ["Content Security Policy", "Trusted", "127.0.0.2"]
    page = visit()
    violations = page.evaluate(
        """async () => {
            const refused = [];
            try { document.body.innerHTML = "<img src=x onerror='window.hit = 1'>"; } catch { refused.push("html"); }
            try { trustedTypes.createPolicy("mine", {}); } catch { refused.push("policy"); }
            try {
                const script = document.createElement("script");
                script.text = "window.hit = 2";
                document.body.append(script);
            } catch { refused.push("script"); }
            try { await fetch("http://127.0.0.2:9/"); } catch { refused.push("fetch"); }
            return [refused, window.hit ?? null];
        }"""
    )
    assert violations == [["html", "policy", "script", "fetch"], None]


def test_code_is_intact_and_copied_as_it_is(visit, fake):
    fake.answers["code"] = f"Use it:\n\n```python\n{CODE}```\n\nInline `__init__` and `**kwargs`."
    page = visit(permissions=["clipboard-read", "clipboard-write"])
    send(page, "code")
    assert page.locator(".md pre code").text_content() == CODE
    assert page.locator(".md p code").all_text_contents() == ["__init__", "**kwargs"]
    page.get_by_role("button", name="Copy code").click()
    until(page, "document.querySelector('.copy-code').textContent === 'Copied'")
    assert page.evaluate("navigator.clipboard.readText()") == CODE.rstrip("\n")
    page.get_by_role("button", name="Copy answer").click()
    until(page, "document.querySelector('#live').textContent.match(/Copied/g).length === 2")
    assert page.evaluate("navigator.clipboard.readText()") == fake.answers["code"]


def test_copying_works_without_a_secure_context(visit, fake):
    fake.answers["code"] = "```\na\nb\n```"
    page = visit()
    page.evaluate("Object.defineProperty(navigator, 'clipboard', {value: undefined})")
    send(page, "code")
    page.get_by_role("button", name="Copy code").click()
    page.focus("#message")
    page.keyboard.press("Control+V")
    assert page.input_value("#message") == "a\nb"


@pytest.mark.parametrize("chunk", [1, 7])
def test_what_was_streamed_looks_like_what_is_rendered_at_once(chunk, visit, fake):
    fake.answers["tricky"] = TRICKY
    fake.chunk, fake.delay = chunk, 0.004 * chunk
    page = visit()
    send(page, "tricky")
    streamed = last(page).inner_html()
    assert page.locator(".md a").get_attribute("href") == "https://example.com/a"
    page.reload()
    page.wait_for_selector(".assistant pre span")
    assert last(page).inner_html() == streamed
    assert page.locator(".md > .block").count() == 7
