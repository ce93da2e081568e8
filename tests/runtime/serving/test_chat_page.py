"""The chat page's files and headers, and the HTML that its markdown route makes: inert, bounded, faithful to code."""

from __future__ import annotations

import asyncio
import json
import re
from html.parser import HTMLParser
from urllib.parse import urlsplit

import httpx
import pytest
from fastapi import FastAPI

from torch_pagoda.runtime.serving import chat_page, code_colours, markdown
from torch_pagoda.runtime.serving.chat_page import chat_page_router, page_paths
from torch_pagoda.runtime.serving.markdown import render_blocks
from torch_pagoda.runtime.serving.markdown_process import MarkdownRenderer, RenderBusy, RenderFailed

TAGS = "p h1 h2 h3 h4 h5 h6 ul ol li blockquote pre code span em strong s a br hr table thead tbody tr th td".split()
ATTRIBUTES = {
    "a": {"href", "target", "rel"},
    "ol": {"start"},
    "pre": {"data-language"},
    "span": {"class"},
    "td": {"class"},
    "th": {"class"},
}

HOSTILE = [
    "<script>alert(1)</script>",
    "<img src=x onerror=alert(1)>",
    "<svg/onload=alert(1)>",
    "<iframe src=javascript:alert(1)></iframe>",
    "<a href='javascript:alert(1)'>x</a>",
    "<style>@import 'http://evil.example/x.css';</style>",
    "<form action=http://evil.example><button>x",
    "<!-- --><script>alert(1)</script><!-- -->",
    "<![CDATA[<script>alert(1)</script>]]>",
    "<?php alert(1) ?>",
    "<math><mtext></p><script>alert(1)</script>",
    "[x](javascript:alert(1))",
    "[x](JaVaScRiPt:alert(1))",
    "[x](javascript&colon;alert(1))",
    "[x](&#106;avascript:alert(1))",
    "[x](java\tscript:alert(1))",
    "[x](\x01javascript:alert(1))",
    "[x](<java\nscript:alert(1)>)",
    "[x](vbscript:msgbox(1))",
    "[x](data:text/html;base64,PHNjcmlwdD5hbGVydCgxKTwvc2NyaXB0Pg==)",
    "[x](file:///etc/passwd)",
    "[x](blob:http://a/1)",
    "[x](//evil.example)",
    "[x](/v1/models)",
    "[x](#top)",
    '[x](http://a.example/"onmouseover="alert(1))',
    "[x](http://a.example 'title\"onmouseover=\"alert(1)')",
    "[x](<http://a.example/ onclick=alert(1)>)",
    "[x]: javascript:alert(1)\n\n[x]",
    "[x]: http://a.example '\"><script>alert(1)</script>'\n\n[x]",
    "<javascript:alert(1)>",
    '<http://a.example/"onclick=alert(1)>',
    "![x](http://evil.example/pixel.png)",
    "![x](javascript:alert(1))",
    '![x"onerror="alert(1)](y)',
    "![<img src=x onerror=alert(1)>](http://a.example/i.png)",
    "[![x](http://evil.example/a.png)](http://a.example)",
    '```"><script>alert(1)</script>\nx\n```',
    '```" onmouseover="alert(1)\nx\n```',
    "```x' onclick='alert(1)\nx\n```",
    "```../../etc/passwd\nx\n```",
    "```__class__\nx\n```",
    "```html\n<script>alert(1)</script>\n```",
    "```svg\n<svg onload=alert(1)>\n```",
    "```diff\n-<img src=x onerror=alert(1)>\n```",
    "    <script>alert(1)</script>",
    "`<script>alert(1)</script>`",
    "| <script>alert(1)</script> | b |\n|:-:|-|\n| <img src=x onerror=alert(1)> | `<b>` |",
    '|a"onclick="|\n|:-|\n|b|',
    "# <script>alert(1)</script>",
    "> <script>alert(1)</script>",
    "- <script>alert(1)</script>",
    "**<script>alert(1)</script>**",
    "~~<img src=x onerror=alert(1)>~~",
    "&lt;script&gt;alert(1)&lt;/script&gt; &#60;script&#62;",
    "</div></article><script>alert(1)</script>",
    "\x00<script>alert(1)</script>",
    "<scr\x00ipt>alert(1)</scr\x00ipt>",
    "\u2028<script>alert(1)</script>\u2029",
    "{{constructor.constructor('alert(1)')()}}",
    "<a name=x id=messages>clobbers</a>",
]


class Elements(HTMLParser):
    """What a browser would make of HTML: elements with their attributes, and text."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.other: list[str] = []
        self.feed(html)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))

    def handle_data(self, data):
        self.text += data

    def handle_comment(self, data):
        self.other.append(data)

    handle_decl = handle_pi = unknown_decl = handle_comment


def rendered(text: str) -> str:
    return "".join(block["html"] for block in render_blocks(text))


def faults(html: str) -> list[str]:
    """What in some HTML could load, run or send anything, or is not of the page's making."""
    parsed = Elements(html)
    found = [f"<!{text}>" for text in parsed.other]
    for tag, attributes in parsed.elements:
        if tag not in TAGS:
            found.append(f"<{tag}>")
        found += [f"{tag}.{name}" for name in attributes if name not in ATTRIBUTES.get(tag, ())]
        if tag == "a" and urlsplit(attributes.get("href") or "").scheme not in ("http", "https", "mailto"):
            found.append(f"href {attributes.get('href')}")
        if tag == "a" and "noopener" not in (attributes.get("rel") or ""):
            found.append("rel")
        if not re.fullmatch(r"[a-z]*", attributes.get("class") or ""):
            found.append(f"class {attributes['class']}")
        if not re.fullmatch(r"[a-z0-9_+#.-]*", attributes.get("data-language") or ""):
            found.append(f"language {attributes['data-language']}")
    return found


def in_page(check, renderer: MarkdownRenderer | None = None):
    """The result of an async ``check(client)`` against an app with the page."""
    renderer = renderer or MarkdownRenderer()

    async def run():
        app = FastAPI()
        app.include_router(chat_page_router(renderer))
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://page") as client:
            return await check(client)

    try:
        return asyncio.run(run())
    finally:
        renderer.close()


# ---- markdown


@pytest.mark.parametrize("text", HOSTILE)
def test_hostile_text_is_inert(text):
    assert faults(rendered(text)) == []


def test_hostile_text_is_inert_beside_each_other():
    together = "\n\n".join(HOSTILE)
    assert faults(rendered(together)) == []
    assert faults(rendered(together.replace("\n\n", "\n"))) == []
    for start in range(0, len(together), 7):
        assert faults(rendered(together[start : start + 300])) == []


def mutant_html(monkeypatch):
    monkeypatch.setitem(markdown._MARKDOWN.options, "html", True)
    markdown._MARKDOWN.enable(["html_block", "html_inline"])


def mutant_links(monkeypatch):
    monkeypatch.setattr(markdown, "_SAFE_LINK", re.compile(r".*", re.DOTALL))


def mutant_relative_links(monkeypatch):
    monkeypatch.setattr(markdown, "_SAFE_LINK", re.compile(r"(?!\w*script)(?!data)(?!vbs)(?!file)(?!blob).*"))


def mutant_images(monkeypatch):
    monkeypatch.delitem(markdown._MARKDOWN.renderer.rules, "image")
    monkeypatch.setitem(markdown._MARKDOWN.renderer.rules, "image", lambda *_: '<img src="http://evil.example">')


def mutant_languages(monkeypatch):
    monkeypatch.setattr(markdown, "_LANGUAGE", re.compile(r".*"))
    monkeypatch.setattr(markdown, "escape", lambda text: text)


def mutant_code(monkeypatch):
    monkeypatch.setattr(code_colours, "escape", lambda text: text)


def mutant_table_styles(monkeypatch):
    monkeypatch.delitem(markdown._MARKDOWN.renderer.rules, "th_open")


@pytest.mark.parametrize(
    "mutate",
    [
        mutant_html,
        mutant_links,
        mutant_relative_links,
        mutant_images,
        mutant_languages,
        mutant_code,
        mutant_table_styles,
    ],
)
def test_a_renderer_that_lets_something_through_is_found(mutate, monkeypatch):
    mutate(monkeypatch)
    assert any(faults(rendered(text)) for text in HOSTILE)


@pytest.mark.parametrize(
    "text, html",
    [
        ("**a** *b* ~~c~~ `d`", "<p><strong>a</strong> <em>b</em> <s>c</s> <code>d</code></p>"),
        ("# a\n## b", "<h1>a</h1><h2>b</h2>"),
        ("a\nb", "<p>a<br />\nb</p>"),
        ("3. a\n4. b", '<ol start="3">\n<li>a</li>\n<li>b</li>\n</ol>'),
        ("- a\n  - b", "<ul>\n<li>a\n<ul>\n<li>b</li>\n</ul>\n</li>\n</ul>"),
        ("> a", "<blockquote>\n<p>a</p>\n</blockquote>"),
        ("---", "<hr />"),
        (
            "snake_case_name and __init__.py in 2 * 3 * 4",
            "<p>snake_case_name and <strong>init</strong>.py in 2 * 3 * 4</p>",
        ),
        ("`__init__(**kwargs)` `a*b*c`", "<p><code>__init__(**kwargs)</code> <code>a*b*c</code></p>"),
        ("```\n__init__ **kw** <b>\n```", '<pre data-language=""><code>__init__ **kw** &lt;b&gt;\n</code></pre>'),
        ("```\nopen", '<pre data-language=""><code>open</code></pre>'),
        (
            "[a](https://b.example/?q=1&r=2)",
            '<p><a href="https://b.example/?q=1&amp;r=2" target="_blank" rel="noopener noreferrer nofollow">a</a></p>',
        ),
        ("[a](/b)", "<p>[a](/b)</p>"),
        ("![a *b*](http://c.example/d.png)", '<p><span class="image">a *b*</span></p>'),
    ],
)
def test_markdown(text, html):
    assert rendered(text).replace("</h1>\n", "</h1>").strip() == html


def test_table_cells_are_aligned_by_class():
    html = rendered("| a | b | c |\n|:--|--:|:-:|\n| 1 | 2 | 3 |")
    assert '<th class="left">a</th>' in html
    assert '<td class="right">2</td>' in html
    assert '<td class="center">3</td>' in html


CODE = '# <comment> & "quotes"\r\n\n\ndef __init__(self, **kwargs):\n\treturn f"{self!r} </code>" \\\n  \n\n'


@pytest.mark.parametrize("language", ["", "no-such", *sorted(code_colours._NAMED)])
def test_code_is_its_source_in_every_language(language):
    source = CODE.replace("\r", "")
    html = rendered(f"````{language}\n{source}````")
    assert Elements(html).text.rstrip("\n") == source.rstrip("\n")
    assert Elements(html).text == f"{source}\n" or Elements(html).text == source


def test_code_has_colours():
    html = rendered("```py\ndef f(x): # c\n    return 'a', 1\n```")
    assert '<span class="k">def</span> <span class="f">f</span>' in html
    assert '<span class="c"># c</span>' in html
    assert rendered("```py\n" + "x = 1\n" * 20_000 + "```").count("<span") == 0


def test_every_language_of_the_table_is_known_to_pygments():
    assert [name for name in code_colours._LEXERS if code_colours._lexer(name) is None] == []


def test_code_that_a_lexer_would_change_is_left_without_colours(monkeypatch):
    source = "\ufeffx = 1\n"
    assert Elements(code_colours.coloured(source, "python")).text == source
    monkeypatch.setattr(code_colours._lexer("Python"), "get_tokens", lambda text: [(code_colours.Token, "y")])
    assert code_colours.coloured("x = 1\n", "python") == "x = 1\n"


def test_blocks_begin_at_their_lines():
    text = "# a\n\np\nq\n\n- l\n\n  m\n\n```\nc\n```\n\n| t |\n|---|\n| u |\n"
    blocks = render_blocks(text)
    assert [block["line"] for block in blocks] == [0, 2, 5, 9, 13]
    lines = text.split("\n")
    for block, after in zip(blocks, [*blocks[1:], None], strict=True):
        alone = "\n".join(lines[block["line"] : after["line"] if after else None])
        assert rendered(alone) == block["html"]


@pytest.mark.parametrize(
    "text", ["[" * 20_000, "![" * 8_000, ">" * 50_000, "*a **a " * 5_000, "- " * 5_000, "`" * 50_000, "<" * 50_000]
)
def test_text_that_nests_deeply_is_rendered(text):
    assert faults(rendered(text)) == []


# ---- the route


def post(texts, renderer=None):
    return in_page(lambda client: client.post("/ui/markdown", json={"texts": texts}), renderer)


def test_the_route_renders_each_text():
    response = post(["# a\n\nb", "", "*c*"])
    assert response.status_code == 200
    assert response.json() == {"results": [render_blocks("# a\n\nb"), [], render_blocks("*c*")]}
    assert response.headers["content-type"] == "application/json"
    assert response.headers["x-content-type-options"] == "nosniff"
    assert response.headers["cache-control"] == "no-store"


@pytest.mark.parametrize(
    "body, status",
    [
        (b"", 400),
        (b"[]", 400),
        (b"{", 400),
        (b'{"texts": "a"}', 400),
        (b'{"texts": [1]}', 400),
        (b'{"texts": [null]}', 400),
        (b'{"texts": ["\xff"]}', 400),
        (b"[" * 100_000, 400),
        (b'{"texts": ["\\ud800"]}', None),
        (json.dumps({"texts": [""] * 65}).encode(), 413),
        (json.dumps({"texts": ["a" * 200_001]}).encode(), 413),
        (b'{"texts": ["' + b" " * (1 << 20) + b'"]}', 413),
    ],
)
def test_bodies_that_are_not_texts_are_refused(body, status):
    response = in_page(lambda client: client.post("/ui/markdown", content=body))
    assert response.status_code == status or (status is None and response.status_code < 500)
    if response.status_code != 200:
        assert set(response.json()["error"]) == {"message", "type", "param", "code"}


def test_a_long_body_is_refused_before_it_has_come():
    read = 0

    async def chunks():
        nonlocal read
        for _ in range(1_000):
            read += 1
            yield b" " * (1 << 16)

    async def ask():
        received: list = []
        source = chunks()

        async def receive():
            return {"type": "http.request", "body": await anext(source), "more_body": True}

        async def send(message):
            received.append(message)

        app = FastAPI()
        app.include_router(chat_page_router(MarkdownRenderer()))
        scope = {
            "type": "http",
            "method": "POST",
            "path": "/ui/markdown",
            "raw_path": b"/ui/markdown",
            "query_string": b"",
            "headers": [],
            "http_version": "1.1",
        }
        await app(scope, receive, send)
        return received[0]["status"]

    assert asyncio.run(ask()) == 413
    assert read <= 18


def test_a_text_that_takes_too_long_is_given_up():
    renderer = MarkdownRenderer(seconds=1.0)
    slow = "![" * 60_000

    async def ask(client):
        return [await client.post("/ui/markdown", json={"texts": [text]}) for text in (slow, "*a*")]

    given_up, next_one = in_page(ask, renderer)
    assert given_up.status_code == 400
    assert "1.0 s" in given_up.json()["error"]["message"]
    assert next_one.json()["results"] == [render_blocks("*a*")]


def test_a_process_that_was_killed_is_begun_again():
    async def ask():
        before = await renderer.render(["a"])
        renderer._process.kill()
        renderer._process.wait()
        return before, await renderer.render(["a"])

    renderer = MarkdownRenderer()
    try:
        before, after = asyncio.run(ask())
    finally:
        renderer.close()
    assert before == after


def test_a_renderer_ends_its_process_when_nothing_comes():
    renderer = MarkdownRenderer(idle_seconds=0.05)

    async def ask():
        await renderer.render(["a"])
        return renderer._process

    process = asyncio.run(ask())
    if process is not None:
        process.wait(timeout=30)
    assert renderer._process is None or renderer._process.poll() is not None


def test_no_more_than_so_many_texts_wait():
    renderer = MarkdownRenderer(max_waiting=2)

    async def ask():
        return await asyncio.gather(*(renderer.render(["a"]) for _ in range(5)), return_exceptions=True)

    try:
        results = asyncio.run(ask())
    finally:
        renderer.close()
    assert [isinstance(result, RenderBusy) for result in results] == [False, False, True, True, True]


@pytest.mark.parametrize(
    "raised, status, code", [(RenderBusy("x"), 429, "queue_full"), (RenderFailed("x"), 400, "invalid_value")]
)
def test_what_the_renderer_refuses_is_said(raised, status, code, monkeypatch):
    async def refuse(self, texts):
        raise raised

    monkeypatch.setattr(MarkdownRenderer, "render", refuse)
    response = post(["a"])
    assert (response.status_code, response.json()["error"]["code"]) == (status, code)
    assert ("retry-after" in response.headers) == (status == 429)


# ---- the files


def test_every_file_has_its_type_and_headers():
    async def ask(client):
        return {path: await client.get(path) for path, _ in page_paths()}

    answers = in_page(ask)
    types = {path.rpartition(".")[2]: answer.headers["content-type"] for path, answer in answers.items()}
    assert types == {
        "/": "text/html; charset=utf-8",
        "js": "text/javascript; charset=utf-8",
        "css": "text/css; charset=utf-8",
        "svg": "image/svg+xml",
    }
    for path, file in page_paths():
        assert answers[path].status_code == 200
        assert answers[path].content == file.read_bytes()
        headers = answers[path].headers
        policy = headers["content-security-policy"]
        assert policy.startswith("default-src 'self';") and "unsafe" not in policy and "http" not in policy
        assert headers["x-content-type-options"] == "nosniff"
        assert headers["cache-control"] == "no-cache"
        assert headers["referrer-policy"] == "no-referrer"


def test_a_file_that_is_known_is_not_sent_again():
    async def ask(client):
        first = await client.get("/ui/app.js")
        etag = first.headers["etag"]
        asked = [etag, f'W/"x", W/{etag}', "*", '"other"', "", 'W/"']
        answers = [await client.get("/ui/app.js", headers={"if-none-match": value}) for value in asked]
        head = await client.head("/ui/app.js")
        return [answer.status_code for answer in answers], [answer.content for answer in answers[:3]], head

    statuses, contents, head = in_page(ask)
    assert statuses == [304, 304, 304, 200, 200, 200]
    assert contents == [b""] * 3
    assert head.status_code == 200 and head.content == b""


@pytest.mark.parametrize(
    "path",
    [
        "/ui/../chat_page.py",
        "/ui/..%2fchat_page.py",
        "/ui/%2e%2e/chat_page.py",
        "/ui/....//chat_page.py",
        "/ui//etc/passwd",
        "/ui/app.js%00.html",
        "/ui/app.js/",
        "/ui/",
        "/ui",
        "/ui/index.html",
        "/app.js",
        "/ui/APP.JS",
    ],
)
def test_no_other_path_is_served(path):
    response = in_page(lambda client: client.get(path, follow_redirects=False))
    assert response.status_code in (307, 404)
    assert b"def " not in response.content


def test_a_file_is_not_written_to():
    response = in_page(lambda client: client.post("/ui/app.js", content=b"x"))
    assert response.status_code == 405


def test_the_page_is_small_and_asks_nobody_else():
    files = {path: file.read_text(encoding="utf-8") for path, file in page_paths()}
    assert sum(len(text.encode()) for text in files.values()) <= 90_000
    for path, text in files.items():
        foreign = re.findall(r"https?://[^\s\"')]+", text.replace("http://www.w3.org/2000/svg", ""))
        assert foreign == [], path
        assert not re.search(r"\beval\(|new Function|@import|insertAdjacentHTML|outerHTML|document\.write", text), (
            path
        )
    # HTML goes into the page at one place, which takes it from the route.
    assert [path for path, text in files.items() if "innerHTML" in text] == ["/ui/markdown.js"]
    assert files["/ui/markdown.js"].count("innerHTML") == 1
    page = files["/"]
    assert not re.search(r"\son\w+=|\sstyle=|<style|<script(?![^>]*\bsrc=)", page)


def test_what_the_page_links_exists():
    known = {path.lstrip("/") for path, _ in page_paths()}
    texts = {path: file.read_text(encoding="utf-8") for path, file in page_paths()}
    linked = set(re.findall(r'(?:src|href)="(ui/[^"#]+)"', texts["/"]))
    imported = {f"ui/{name}" for text in texts.values() for name in re.findall(r'from "\./([^"]+)"', text)}
    assert linked | imported <= known
    # Nothing lies there that nobody loads.
    assert known - {""} == linked | imported
    icons = set(re.findall(r'<symbol id="i-([a-z]+)"', texts["/"]))
    used = {name for text in texts.values() for name in re.findall(r'(?:\bicon|iconButton)\("([a-z]+)"', text)}
    used |= set(re.findall(r'data-icon="([a-z]+)"', texts["/"]))
    assert used <= icons


def test_the_wheel_carries_the_page():
    import tomllib
    from pathlib import Path

    settings = tomllib.loads((Path(__file__).resolve().parents[3] / "pyproject.toml").read_text(encoding="utf-8"))
    data = settings["tool"]["setuptools"]["package-data"]["torch_pagoda.runtime.serving"]
    covered = {file for pattern in data for file in chat_page.FOLDER.parent.glob(pattern)}
    assert {file for _, file in page_paths()} <= covered
