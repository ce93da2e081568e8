"""Markdown as HTML: inert whatever the text is, faithful to code, the same block by block as at once."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from urllib.parse import urlsplit

import pytest

from torch_pagoda.serving.page import code_colors as code_colors
from torch_pagoda.serving.page import markdown
from torch_pagoda.serving.page.markdown import render_blocks

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
    monkeypatch.setattr(code_colors, "escape", lambda text: text)


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
            '<p><a href="https://b.example/?q=1&amp;r=2" target="_blank" '
            'rel="noopener noreferrer nofollow">a</a></p>',
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


@pytest.mark.parametrize("language", ["", "no-such", *sorted(code_colors._NAMED)])
def test_code_is_its_source_in_every_language(language):
    source = CODE.replace("\r", "")
    html = rendered(f"````{language}\n{source}````")
    assert Elements(html).text.rstrip("\n") == source.rstrip("\n")
    assert Elements(html).text == f"{source}\n" or Elements(html).text == source


def test_code_has_colors():
    html = rendered("```py\ndef f(x): # c\n    return 'a', 1\n```")
    assert '<span class="k">def</span> <span class="f">f</span>' in html
    assert '<span class="c"># c</span>' in html
    assert rendered("```py\n" + "x = 1\n" * 20_000 + "```").count("<span") == 0


def test_every_language_of_the_table_is_known_to_pygments():
    assert [name for name in code_colors._LEXERS if code_colors._lexer(name) is None] == []


def test_code_that_a_lexer_would_change_is_left_without_colors(monkeypatch):
    source = "\ufeffx = 1\n"
    assert Elements(code_colors.colored(source, "python")).text == source
    monkeypatch.setattr(code_colors._lexer("Python"), "get_tokens", lambda text: [(code_colors.Token, "y")])
    assert code_colors.colored("x = 1\n", "python") == "x = 1\n"


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
