"""The chat page in a real browser, against a server without a model: what a reader sees and what the server is asked.

Needs Chromium on the PATH (Debian: ``apt-get install chromium``) and ``pip install playwright``.
"""

from __future__ import annotations

import json
import re
import shutil
import time

import pytest

sync_api = pytest.importorskip("playwright.sync_api", reason="pip install playwright")

from fake_openai_server import running  # noqa: E402

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")

pytestmark = [
    pytest.mark.acceptance,
    pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on the PATH: apt-get install chromium"),
]

FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--no-first-run"]

CODE = (
    'class A:\n    def __init__(self, **kwargs):\n        self.html = "<b>&amp;</b>"  # `*_x_*`\n\n\tprint(f"{a}")\n'
)

TRICKY = f"""# Title

Some **bold** text, a [reference][1] and `__init__`.

1. one

2. two

   ```python
   def f(**kwargs): pass
   ```

10. ten

- a
- b
  > quoted

  | x | y |
  |--:|---|
  | 1 | `a` |

Setext
------

```python
{CODE}```
last ~~line~~ | no table

[1]: https://example.com/a
"""

HOSTILE = """<script>window.hit = 1</script><img src=x onerror="window.hit = 2"><svg onload="window.hit = 3">

[click](javascript:window.hit=4) [data](data:text/html,<script>1</script>) ![p](http://evil.example/p.png)

```"><img src=x onerror=window.hit=5>
<script>window.hit = 6</script>
```

```html
<img src=x onerror="window.hit = 7">
```

| <img src=x onerror=window.hit=8> | `<script>window.hit = 9</script>` |
|:-:|--|
| <iframe srcdoc="<script>parent.hit=10</script>"></iframe> | <style>body{display:none}</style> |
"""


@pytest.fixture(scope="module")
def browser():
    with sync_api.sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield chromium
        chromium.close()


@pytest.fixture
def fake():
    with running() as server:
        yield server


@pytest.fixture
def visit(browser, fake):
    """Opens a page of a fresh profile; at the end there must be no error in it and no request to anybody else."""
    contexts, wrong = [], []
    visit_expected = []

    def expected(message) -> bool:
        # The browser itself reports every answer of 4xx and 5xx and every lost connection.
        return "Failed to load resource" in message or any(re.search(text, message) for text in visit_expected)

    def watch(page):
        page.on("pageerror", lambda error: wrong.append(str(error)))
        page.on("console", lambda m: m.type in ("error", "warning") and not expected(m.text) and wrong.append(m.text))
        page.on("dialog", lambda dialog: (wrong.append(f"dialog {dialog.message}"), dialog.dismiss()))
        page.on("request", lambda r: r.url.startswith((fake.url, "blob:" + fake.url)) or wrong.append(r.url))

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
        page.goto(fake.url + path)
        if ready:
            until(page, "document.querySelector('#model').options.length > 0")
        return page

    open_page.expected = visit_expected
    yield open_page
    for context in contexts:
        context.close()
    assert wrong == []


def send(page, text, wait=True):
    page.fill("#message", text)
    page.press("#message", "Enter")
    if wait:
        ended(page)


def ended(page):
    """Wait until the last answer is complete and formatted."""
    page.wait_for_selector("#messages > .assistant:last-child[aria-busy=false]")
    page.wait_for_selector("#messages > .assistant:last-child .pending", state="detached")


def until(page, expression, seconds=30):
    """Wait until an expression holds in the page, whose policy forbids Playwright's own way of waiting for one."""
    deadline = time.monotonic() + seconds
    while not page.evaluate(expression):
        assert time.monotonic() < deadline, f"never came true: {expression}"
        page.wait_for_timeout(20)


def last(page, part=".md"):
    return page.locator(f"#messages > .assistant:last-child {part}")


def contents(fake, index=-1):
    return [message["content"] for message in fake.seen[index].body["messages"]]


def test_an_answer_streams_and_has_its_figures(visit, fake):
    fake.answers["Hi"] = "word " * 60
    fake.chunk, fake.delay = 5, 0.02
    page = visit()
    send(page, "Hi", wait=False)
    until(page, "document.querySelector('.assistant .md')?.textContent.length > 20")
    assert len(last(page).inner_text()) < 290
    assert page.get_by_role("button", name="Stop").is_visible()
    ended(page)
    assert last(page).inner_text().split() == ["word"] * 60
    line = last(page, "footer > .meta").inner_text()
    assert re.fullmatch(
        r"60 tokens · [\d.]+ tok/s · first token [\d.]+ m?s · 96 of 120 cached · context 180 of 4,096", line
    )
    assert page.locator("#context-text").inner_text() == "180 of 4,096 tokens"
    body = fake.seen[0].body
    assert body["stream"] is True and body["stream_options"] == {"include_usage": True}
    assert body["model"] == "fake-1b" and body["messages"] == [{"role": "user", "content": "Hi"}]


@pytest.mark.parametrize("way", ["button", "escape"])
def test_stop_ends_the_request_and_keeps_the_text(way, visit, fake):
    fake.answers["Hi"] = "word " * 2_000
    fake.delay = 0.02
    page = visit()
    send(page, "Hi", wait=False)
    until(page, "document.querySelector('.assistant .md')?.textContent.length > 20")
    if way == "button":
        page.get_by_role("button", name="Stop").click()
    else:
        page.keyboard.press("Escape")
    fake.wait_for(lambda: fake.seen[0].aborted)
    ended(page)
    assert fake.seen[0].sent < 1_000
    assert last(page).inner_text().startswith("word word")
    assert last(page, ".notice").inner_text() == "Stopped."
    # And it goes on from there.
    fake.delay = 0
    fake.answers["continue"] = " and more"
    page.get_by_role("button", name="Continue the answer").click()
    ended(page)
    assert last(page).inner_text().endswith("and more")
    body = fake.seen[1].body
    assert body["continue_final_message"] is True and body["add_generation_prompt"] is False
    assert body["messages"][-1]["role"] == "assistant"


def test_answers_are_made_again_and_kept_beside_each_other(visit, fake):
    fake.answers["Hi"] = "first"
    page = visit()
    send(page, "Hi")
    fake.answers["Hi"] = "second"
    page.get_by_role("button", name="Answer again").click()
    until(page, "document.querySelector('.assistant .md').textContent.trim() === 'second'")
    ended(page)
    assert contents(fake) == ["Hi"]
    assert "2 of 2" in last(page, ".actions").inner_text()
    page.get_by_role("button", name="Previous answer").click()
    assert last(page).inner_text() == "first"
    send(page, "Next")
    assert contents(fake) == ["Hi", "first", "Next"]
    page.reload()
    page.get_by_role("button", name="Next answer").click()
    assert page.locator(".assistant").first.locator(".md").inner_text() == "second"


def test_my_message_is_edited_and_sent_again(visit, fake):
    page = visit()
    send(page, "one")
    send(page, "two")
    page.locator(".user").first.hover()
    page.get_by_role("button", name="Edit message").first.click()
    page.get_by_label("Edit your message").fill("uno")
    page.get_by_role("button", name="Save and send").click()
    ended(page)
    assert contents(fake) == ["uno"]
    assert page.locator(".message").count() == 2
    page.get_by_role("button", name="Undo").click()
    assert page.locator(".message").count() == 4
    assert page.locator(".user").all_inner_texts() == ["uno", "two"]


def test_an_answer_is_edited_and_the_model_is_told(visit, fake):
    page = visit()
    send(page, "one")
    page.get_by_role("button", name="Edit answer").click()
    page.get_by_label("Edit the answer").fill("**I** said this")
    page.get_by_role("button", name="Save", exact=True).click()
    page.wait_for_selector(".assistant strong")
    send(page, "two")
    assert contents(fake) == ["one", "**I** said this", "two"]


def test_a_reload_keeps_everything(visit, fake):
    fake.answers["code"] = f"```python\n{CODE}```"
    page = visit()
    send(page, "code")
    html = last(page).inner_html()
    line = last(page, "footer > .meta").inner_text()
    page.reload()
    page.wait_for_selector(".assistant pre span")
    assert last(page).inner_html() == html
    assert last(page, "footer > .meta").inner_text() == line
    send(page, "next")
    assert contents(fake) == ["code", fake.answers["code"], "next"]


def test_a_reload_in_the_middle_of_an_answer_keeps_its_text(visit, fake):
    fake.answers["Hi"] = "word " * 2_000
    fake.delay = 0.02
    page = visit()
    send(page, "Hi", wait=False)
    until(page, "document.querySelector('.assistant .md')?.textContent.length > 100")
    page.wait_for_timeout(1_000)
    page.reload()
    fake.wait_for(lambda: fake.seen[0].aborted)
    ended(page)
    assert len(last(page).inner_text()) > 90
    assert last(page, ".notice").inner_text() == "Stopped."
    assert page.get_by_role("button", name="Send").is_visible()


def test_several_conversations(visit, fake):
    fake.answers["slow"] = "tick " * 100
    fake.delay = 0.01
    page = visit()
    send(page, "slow", wait=False)
    page.wait_for_selector(".assistant .md:not(:empty)")
    # It is answered on while another one is open.
    page.get_by_role("button", name="New chat").click()
    send(page, "fast")
    assert page.locator("#conversations li").count() == 2
    fake.wait_for(lambda: fake.seen[0].done)
    page.get_by_role("link", name="slow").click()
    ended(page)
    assert last(page).inner_text().split() == ["tick"] * 100
    page.locator("#conversations li", has_text="fast").hover()
    page.get_by_role("button", name="Rename fast").click()
    page.get_by_label("Title").fill("quick")
    page.keyboard.press("Enter")
    page.get_by_role("link", name="quick").click()
    assert page.locator("#title").inner_text() == "quick"
    assert page.locator(".user").all_inner_texts() == ["fast"]
    page.get_by_role("button", name="Delete quick").click()
    until(page, "document.querySelectorAll('#conversations li').length === 1")
    page.get_by_role("button", name="Undo").click()
    until(page, "document.querySelectorAll('#conversations li').length === 2")
    page.locator("#conversations li", has_text="slow").hover()
    page.get_by_role("button", name="Delete slow").click()
    until(page, "document.querySelectorAll('#conversations li').length === 1")
    page.reload()
    page.wait_for_selector("#conversations a")
    assert page.locator("#conversations a").all_inner_texts() == ["quick"]


def test_two_tabs_show_the_same(visit, fake):
    fake.answers["Hi"] = "word " * 150
    fake.delay = 0.02
    one = visit()
    send(one, "Hi", wait=False)
    one.wait_for_selector("#conversations a")
    two = visit(one.url.removeprefix(fake.url), beside=one)
    until(two, "document.querySelector('.assistant .md')?.textContent.length > 20")
    two.fill("#message", "x")
    assert two.get_by_role("button", name="Send").is_disabled()
    assert len(fake.seen) == 1
    ended(two)
    until(two, "document.querySelector('.assistant .md').textContent.trim().split(' ').length === 150")
    fake.delay = 0
    send(two, "more")
    until(one, "document.querySelectorAll('.message').length === 4")
    assert one.locator(".user").all_inner_texts() == ["Hi", "more"]
    two.locator("#conversations li").first.hover()
    two.get_by_role("button", name="Delete Hi").click()
    until(one, "document.querySelectorAll('#conversations li').length === 0")
    assert one.locator(".message").count() == 0


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
    assert (
        page.evaluate(
            "(() => { const s = document.querySelector('#scroller'); return s.scrollHeight - s.scrollTop - s.clientHeight })()"
        )
        < 50
    )


def test_a_reader_who_scrolls_up_is_left_there(visit, fake):
    fake.answers["long"] = "line\n\n" * 400
    fake.delay = 0.005
    page = visit()
    send(page, "long", wait=False)
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
    overflow = """() => [...document.querySelectorAll("body, main, #scroller, #dock, #notebook, dialog[open], #sidebar")]
        .filter((e) => e.scrollWidth > e.clientWidth + 1).map((e) => e.id || e.nodeName)"""
    assert page.evaluate(overflow) == []
    send(page, "wide")
    send(page, "q" * 300)
    fake.refuse = (400, {"message": "e" * 300}, {})
    send(page, "x")
    assert page.evaluate("innerWidth") == 360
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


def test_a_model_without_a_chat_template_has_a_notebook(visit, fake):
    fake.has_chat_template = False
    fake.answers["def add(a, b):"] = "\n    return a + b\n"
    page = visit()
    page.wait_for_selector("#notebook-text:focus")
    assert page.get_by_role("button", name="New chat").count() == 0
    page.keyboard.type("def add(a, b):")
    page.keyboard.press("Control+Enter")
    until(page, "document.querySelector('#notebook-text').value.endsWith('a + b\\n')")
    page.wait_for_selector("#notebook-text[aria-busy=false]")
    assert fake.seen[0].path == "text"
    assert fake.seen[0].body["prompt"] == "def add(a, b):" and fake.seen[0].body["stream"] is True
    assert "context 125 of 4,096" in page.locator("#notebook-stats").inner_text()
    page.get_by_role("button", name="Undo").click()
    assert page.input_value("#notebook-text") == "def add(a, b):"
    fake.answers["def add(a, b):"] = "\n    return b + a\n" * 500
    fake.delay = 0.01
    page.get_by_role("button", name="Continue").click()
    until(page, "document.querySelector('#notebook-text').value.includes('b + a')")
    page.keyboard.press("Escape")
    fake.wait_for(lambda: fake.seen[1].aborted)
    page.wait_for_selector("#notebook-text[aria-busy=false]")
    kept = page.input_value("#notebook-text")
    page.reload()
    until(page, "document.querySelector('#notebook-text').value.length > 20")
    assert page.input_value("#notebook-text") == kept
    fake.delay, fake.answers["def add(a, b):"] = 0, "!"
    page.get_by_role("button", name="Again").click()
    until(page, "document.querySelector('#notebook-text').value === 'def add(a, b):!'")


def test_settings_reach_the_request(visit, fake):
    page = visit()
    page.get_by_role("button", name="Settings").click()
    page.get_by_label("System prompt").fill("Be brief.")
    page.get_by_label("Temperature").fill("0.3")
    page.get_by_label("Top-k").fill("7")
    page.get_by_label("Max tokens").fill("12")
    page.get_by_label("Stop at").fill("END\n\\n\\n")
    page.get_by_label("More request fields").fill('{"chat_template_kwargs": {"enable_thinking": false}}')
    page.get_by_label("Temperature").focus()
    page.keyboard.press("Escape")
    send(page, "Hi")
    body = fake.seen[0].body
    assert body["messages"][0] == {"role": "system", "content": "Be brief."}
    assert (body["temperature"], body["top_k"], body["max_tokens"]) == (0.3, 7, 12)
    assert body["stop"] == ["END", "\n\n"]
    assert body["chat_template_kwargs"] == {"enable_thinking": False}
    assert "top_p" not in body and "seed" not in body
    page.reload()
    page.wait_for_selector(".assistant")
    page.get_by_role("button", name="Settings").click()
    assert page.get_by_label("Temperature").input_value() == "0.3"
    page.get_by_label("Temperature").fill("")
    # What is wrong is not taken over.
    page.get_by_label("More request fields").fill("{")
    page.get_by_label("Top-p").fill("3")
    page.get_by_label("Seed").focus()
    assert page.locator("[aria-invalid=true]").count() == 2
    page.get_by_role("button", name="Close settings").click()
    send(page, "Again")
    body = fake.seen[1].body
    assert "temperature" not in body and "top_p" not in body
    assert body["chat_template_kwargs"] == {"enable_thinking": False}


def test_conversations_are_exported_and_imported(visit, fake, tmp_path):
    page = visit()
    send(page, "keep **this**")
    with page.expect_download() as download:
        page.get_by_role("button", name="Export all").click()
    file = tmp_path / "conversations.json"
    download.value.save_as(file)
    exported = json.loads(file.read_text())
    assert [m["content"] for m in exported["conversations"][0]["messages"]] == [
        "keep **this**",
        "You said: keep **this**",
    ]
    other = visit()
    other.set_input_files("#import-file", file)
    other.wait_for_selector(".assistant strong")
    send(other, "go on")
    assert contents(fake) == ["keep **this**", "You said: keep **this**", "go on"]
    hostile = {
        "conversations": [
            {"title": {"a": 1}, "messages": [{"role": "system"}, 5, {"role": "user", "content": HOSTILE}]},
            7,
        ]
    }
    file.write_text(json.dumps(hostile))
    other.set_input_files("#import-file", file)
    until(other, "document.querySelectorAll('#conversations li').length === 3")
    assert other.evaluate("window.hit") is None
    file.write_text("not JSON")
    other.set_input_files("#import-file", file)
    other.wait_for_selector("#banner:not([hidden])")


def test_reasoning_is_folded_and_tool_calls_are_readable(visit, fake):
    pieces = ['{"city": "Ly', 'on", "days', '": 3}']
    fake.answers["weather"] = [
        *[{"reasoning_content": "I think. "}] * 5,
        {"content": "I ask."},
        {
            "tool_calls": [
                {"index": 0, "id": "c1", "type": "function", "function": {"name": "weather", "arguments": ""}}
            ]
        },
        *({"tool_calls": [{"index": 0, "function": {"arguments": piece}}]} for piece in pieces),
        {"tool_calls": [{"index": 1, "id": "c2", "function": {"name": "time", "arguments": "{}"}}]},
        {"tool_calls": [{"index": 10_000_000, "function": {"arguments": "x"}}]},
    ]
    page = visit()
    send(page, "weather")
    assert not page.locator(".reasoning .plain").is_visible()
    page.get_by_text(re.compile("Thought for")).click()
    assert page.locator(".reasoning .plain").inner_text().strip() == ("I think. " * 5).strip()
    assert page.locator(".tool-call strong").all_inner_texts() == ["weather", "time"]
    assert json.loads(page.locator(".tool-call code").first.inner_text()) == {"city": "Lyon", "days": 3}
    assert "\n" in page.locator(".tool-call code").first.inner_text()
    send(page, "and?")
    assert fake.seen[1].body["messages"][1] == {
        "role": "assistant",
        "content": "I ask.",
        "tool_calls": [
            {
                "id": "c1",
                "type": "function",
                "function": {"name": "weather", "arguments": '{"city": "Lyon", "days": 3}'},
            },
            {"id": "c2", "type": "function", "function": {"name": "time", "arguments": "{}"}},
        ],
    }


AUDIT = """() => {
    const wrong = [];
    const shown = (e) => e.checkVisibility({visibilityProperty: true});
    for (const e of document.querySelectorAll("button, a[href], input, select, textarea, summary, meter, [role=region]")) {
        if (!shown(e) && e.type !== "file") continue;
        const label = e.ariaLabel || [...(e.labels ?? [])].map((l) => l.textContent).join("") || e.textContent.trim();
        if (!label) wrong.push(`no name: ${e.outerHTML.slice(0, 80)}`);
        const box = e.getBoundingClientRect();
        if (e.matches("button") && shown(e) && Math.min(box.width, box.height) < 24) wrong.push(`small: ${label}`);
    }
    const ids = [...document.querySelectorAll("[id]")].map((e) => e.id);
    for (const id of ids) if (ids.indexOf(id) !== ids.lastIndexOf(id)) wrong.push(`twice: ${id}`);
    for (const name of ["aria-labelledby", "aria-describedby", "aria-controls", "for"])
        for (const e of document.querySelectorAll(`[${name}]`))
            if (!document.getElementById(e.getAttribute(name))) wrong.push(`${name} ${e.getAttribute(name)}`);
    for (const e of document.querySelectorAll("[tabindex]")) if (e.tabIndex > 0) wrong.push("tabindex");
    if (document.querySelectorAll("h1").length < 1 || !document.documentElement.lang || !document.title) wrong.push("page");
    if (!document.querySelector("main") || !document.querySelector("[aria-live=polite]")) wrong.push("landmarks");

    const canvas = document.createElement("canvas").getContext("2d", {willReadFrequently: true});
    const rgba = (color) => {
        canvas.clearRect(0, 0, 1, 1);
        canvas.fillStyle = color;
        canvas.fillRect(0, 0, 1, 1);
        return [...canvas.getImageData(0, 0, 1, 1).data];
    };
    const light = ([r, g, b]) => {
        const [x, y, z] = [r, g, b].map((v) => v / 255).map((v) => v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
        return 0.2126 * x + 0.7152 * y + 0.0722 * z;
    };
    const behind = (e) => {
        for (; e; e = e.parentElement) {
            const color = rgba(getComputedStyle(e).backgroundColor);
            if (color[3] === 255) return color;
        }
        return [255, 255, 255, 255];
    };
    const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
    const seen = new Set();
    while (walker.nextNode()) {
        const e = walker.currentNode.parentElement;
        if (!walker.currentNode.data.trim() || !shown(e) || seen.has(e) || e.closest(":disabled, .sr, .skip, noscript, option")) continue;
        if (document.querySelector("dialog[open]") && !e.closest("dialog")) continue;
        seen.add(e);
        const [a, b] = [light(rgba(getComputedStyle(e).color)), light(behind(e))];
        const ratio = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
        if (ratio < 4.5) wrong.push(`contrast ${ratio.toFixed(2)}: ${e.className} ${e.textContent.slice(0, 30)}`);
    }
    return wrong;
}"""


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


def test_facts_that_the_server_leaves_out_are_left_out(visit, fake):
    fake.has_chat_template = fake.max_model_len = None
    fake.models = ["a", "b"]
    page = visit()
    page.get_by_label("Model", exact=True).select_option("b")
    send(page, "Hi")
    assert fake.seen[0].body["model"] == "b"
    assert last(page, "footer > .meta").inner_text().endswith("context 123")
    assert not page.locator("#context").is_visible()
