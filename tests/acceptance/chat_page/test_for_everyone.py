"""Long answers, small screens, keyboards, screen readers, both themes."""

from __future__ import annotations

from pathlib import Path

import pytest

from chat_page_reader import CODE, TRICKY, contents, ended, send, until

pytestmark = pytest.mark.acceptance


AUDIT = (Path(__file__).parent / "audit.js").read_text(encoding="utf-8")


def test_ten_thousand_tokens_stay_smooth(visit, fake):
    part = (
        "## Part\n\nSome **bold** text with `code` and a [link](https://example.com), and so on.\n\n- one\n- two\n\n"
    )
    fake.answers["long"] = (part + f"```python\n{CODE * 4}```\n\n| a | b |\n|---|---|\n| 1 | 2 |\n\n") * 72
    fake.chunk, fake.delay = 4, 0.0008
    page = visit()
    page.evaluate(
        """() => {
            window.long = [];
            window.frames_ = 0;
            new PerformanceObserver((list) => window.long.push(...list.getEntries().map((e) => e.duration)))
                .observe({type: "longtask"});
            const count = () => { window.frames_ += 1; requestAnimationFrame(count); };
            requestAnimationFrame(count);
            window.began = performance.now();
        }"""
    )
    send(page, "long")
    assert fake.seen[0].sent >= 10_000
    tasks, frames, seconds = page.evaluate("[window.long, window.frames_, (performance.now() - window.began) / 1000]")
    print(
        f"{len(tasks)} tasks over 50 ms, the longest {max(tasks, default=0):.0f} ms; {frames / seconds:.0f} frames/s"
    )
    assert len(tasks) < 100
    assert page.locator(".md > .block").count() == 72 * 5
    left = """() => {
        const { scrollHeight, scrollTop, clientHeight } = document.querySelector("#scroller");
        return scrollHeight - scrollTop - clientHeight;
    }"""
    assert page.evaluate(left) < 50


def test_a_reader_who_scrolls_up_is_left_there(visit, fake):
    fake.answers["long"] = "line\n\n" * 400
    fake.delay = 0.005
    page = visit()
    send(page, "long", wait=False)
    page.wait_for_selector(".block:nth-child(20)")
    until(page, "document.querySelector('#scroller').scrollTop > 300")
    page.mouse.move(700, 400)
    page.mouse.wheel(0, -250)
    page.wait_for_selector("#to-end:not([hidden])")
    page.wait_for_timeout(500)
    before = page.evaluate("document.querySelector('#scroller').scrollTop")
    page.wait_for_timeout(600)
    assert abs(page.evaluate("document.querySelector('#scroller').scrollTop") - before) < 5
    page.get_by_role("button", name="Go to the end").click()
    ended(page)
    page.wait_for_selector("#to-end", state="hidden")


def test_a_phone_has_no_sideways_scroll(visit, fake):
    fake.answers["wide"] = (
        "x" * 300 + "\n\n" + "`" + "y" * 200 + "`\n\n```\n" + "z" * 300 + "\n```\n\n"
        "|" + "|".join(["column"] * 12) + "|\n" + "|-" * 12 + "|\n" + "|" + "|".join(["value"] * 12) + "|\n\n"
        "1. " + "w" * 200 + "\n\n# " + "t" * 100
    )
    page = visit(viewport={"width": 360, "height": 740}, has_touch=True, is_mobile=True)
    overflow = """() => [
            ...document.querySelectorAll("body, main, #scroller, #dock, #notebook, dialog[open], #sidebar")
        ]
        .filter((e) => e.scrollWidth > e.clientWidth + 1).map((e) => e.id || e.nodeName)"""
    assert page.evaluate(overflow) == []
    send(page, "wide")
    send(page, "q" * 300)
    fake.refuse = (400, {"message": "e" * 300}, {})
    send(page, "x")
    assert page.evaluate("innerWidth") == 360
    cut_off = """() => [...document.querySelectorAll(".message, .message *")].filter((e) => {
        const { left, right } = e.getBoundingClientRect();
        const overflows = e.clientWidth > 0 && e.scrollWidth > e.clientWidth + 1;
        return !e.closest("pre, .table, svg") && (left < 0 || right > innerWidth || overflows);
    }).map((e) => e.outerHTML.slice(0, 80))"""
    assert page.evaluate(cut_off) == []
    assert page.evaluate(overflow) == []
    for opens, closes in [("Settings", "Close settings"), ("Show conversations", "Hide conversations")]:
        page.get_by_role("button", name=opens).click()
        assert page.evaluate(overflow) == []
        page.get_by_role("button", name=closes).click()
    page.get_by_role("button", name="Edit message").first.click()
    assert page.evaluate(overflow) == []
    page.get_by_role("button", name="Cancel").click()
    page.get_by_role("button", name="New conversation").click()
    assert page.evaluate(overflow) == []


def test_all_goes_by_the_keyboard(visit, fake):
    page = visit()
    page.keyboard.type("one")
    page.keyboard.press("Shift+Enter")
    page.keyboard.type("two")
    page.keyboard.press("Enter")
    ended(page)
    assert contents(fake) == ["one\ntwo"]
    page.keyboard.press("ArrowUp")
    assert page.evaluate("document.activeElement.value") == "one\ntwo"
    page.keyboard.press("Escape")
    assert page.locator(".editor").count() == 0
    page.focus("#message")
    page.keyboard.press("ArrowUp")
    page.keyboard.type("!")
    page.keyboard.press("Enter")
    ended(page)
    assert contents(fake) == ["one\ntwo!"]
    # From the top every control is reached, in the order of the page, and shows that it is.
    page.evaluate("document.querySelector('.skip').focus()")
    names = []
    for i in range(30):
        if i:
            page.keyboard.press("Tab")
        name, shown = page.evaluate(
            """() => { const e = document.activeElement, s = getComputedStyle(e);
            const ring = s.outlineStyle !== "none" || getComputedStyle(e.parentElement).boxShadow !== "none";
            return [e.ariaLabel || e.labels?.[0]?.textContent || e.textContent.trim(), ring] }"""
        )
        assert shown, name
        names.append(name)
        if name == "Message":
            break
    assert names[0] == "Skip to the message box"
    order = ["Hide conversations", "New chat", "Import", "Settings", "Edit message", "Copy answer", "Message"]
    assert [name for name in names if name in order] == order
    page.keyboard.press("Shift+Tab")
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.id") == "message"


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_names_references_sizes_and_contrast(scheme, visit, fake):
    fake.answers["all"] = [
        {"reasoning_content": "Hm."},
        {"content": TRICKY},
        {"tool_calls": [{"index": 0, "id": "c", "function": {"name": "f", "arguments": "{}"}}]},
    ]
    page = visit(color_scheme=scheme, reduced_motion="reduce")
    assert page.evaluate(AUDIT) == []
    send(page, "all")
    page.locator("summary").click()
    assert page.evaluate(AUDIT) == []
    fake.refuse = (429, {"message": "Full."}, {"Retry-After": "3"})
    send(page, "x")
    page.locator(".user").last.hover()
    assert page.evaluate(AUDIT) == []
    page.get_by_role("button", name="Edit message").last.click()
    assert page.evaluate(AUDIT) == []
    page.get_by_role("button", name="Cancel").click()
    page.get_by_role("button", name="Settings").click()
    assert page.evaluate(AUDIT) == []
    page.keyboard.press("Escape")
    page.get_by_role("button", name="New notebook").click()
    assert page.evaluate(AUDIT) == []


def test_the_audit_finds_what_is_wrong(visit):
    page = visit()
    page.evaluate(
        """() => {
            const button = document.createElement("button");
            button.style.width = "50px";
            const pale = document.createElement("p");
            pale.textContent = "pale";
            pale.style.color = "#bbb";
            pale.id = "title";
            document.querySelector("main").append(button, pale);
        }"""
    )
    found = " ".join(page.evaluate(AUDIT))
    assert all(text in found for text in ["no name", "contrast 1.", "twice: title"])


def test_a_screen_reader_is_told(visit, fake):
    fake.answers["Hi"] = "First paragraph.\n\nSecond paragraph.\n\nThird."
    fake.delay = 0.05
    page = visit()
    send(page, "Hi")
    until(page, "document.querySelector('#live').textContent.includes('complete')")
    told = page.locator("#live p").all_text_contents()
    assert [text.strip() for text in told] == [
        "Answering",
        "First paragraph.",
        "Second paragraph.",
        "Third.",
        "The answer is complete.",
    ]


def test_the_theme_is_chosen_and_kept(visit):
    page = visit(color_scheme="light")
    background = "getComputedStyle(document.body).backgroundColor"
    light = page.evaluate(background)
    page.get_by_role("button", name="Settings").click()
    page.get_by_label("Dark").check()
    dark = page.evaluate(background)
    assert dark != light
    page.reload()
    assert page.evaluate(background) == dark
    page.get_by_role("button", name="Settings").click()
    page.get_by_label("As the system").check()
    assert page.evaluate(background) == light
    page.emulate_media(color_scheme="dark")
    assert page.evaluate(background) == dark
