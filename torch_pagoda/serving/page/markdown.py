"""Markdown to inert HTML, block by block: HTML in the text is text, links are checked, code is colored.

As a program it renders for another process: frames of a length (four bytes, big-endian) and JSON, until its input
ends. ``MarkdownRenderer`` in ``markdown_process.py`` is its client.
"""

from __future__ import annotations

import json
import os
import re
import signal
import sys
from collections.abc import Iterator, Sequence
from html import escape
from typing import Any, BinaryIO, TypedDict

from markdown_it import MarkdownIt
from markdown_it.renderer import RendererHTML
from markdown_it.token import Token
from markdown_it.utils import EnvType, OptionsDict

from .code_colors import colored
from .markdown_process import LENGTH

MAX_NESTING = 40
"""Maximum depth of quotes, lists and emphasis; deeper ones are text."""

_SAFE_LINK = re.compile(r"(?:https?://|mailto:)[^\s\x00-\x1f\x7f]+", re.IGNORECASE)
_LANGUAGE = re.compile(r"[a-z0-9][a-z0-9_+#.-]{0,23}")
_ALIGNMENT = re.compile(r"text-align:(left|center|right)")


class Block(TypedDict):
    """A top-level block: paragraph, list, table, fenced code, …

    Keys:
        line: its first line in the text, counted from 0.
        html: its HTML; it loads, runs and sends nothing.
    """

    line: int
    html: str


def render_blocks(text: str) -> list[Block]:
    """Blocks of a CommonMark text with tables and strikethrough.

    Appending text can change only the last block, and link references in earlier ones.
    """
    env: EnvType = {}
    return [
        Block(
            line=tokens[0].map[0] if tokens[0].map else 0,
            html=_MARKDOWN.renderer.render(tokens, _MARKDOWN.options, env),
        )
        for tokens in _outermost(_MARKDOWN.parse(text, env))
    ]


def _outermost(tokens: Sequence[Token]) -> Iterator[list[Token]]:
    """The tokens of each block of level 0."""
    block: list[Token] = []
    for token in tokens:
        block.append(token)
        if token.level == 0 and token.nesting <= 0:
            yield block
            block = []


class _Renderer(RendererHTML):
    """HTML without style, image or script; code with spans for its colors."""

    def fence(self, tokens: Sequence[Token], idx: int, options: OptionsDict, env: EnvType) -> str:
        return _code(tokens[idx].content, tokens[idx].info)

    def code_block(self, tokens: Sequence[Token], idx: int, options: OptionsDict, env: EnvType) -> str:
        return _code(tokens[idx].content, "")

    def image(self, tokens: Sequence[Token], idx: int, options: OptionsDict, env: EnvType) -> str:
        """The text of an image: loading the image would tell its server who reads."""
        return f'<span class="image">{escape(tokens[idx].content)}</span>'

    def link_open(self, tokens: Sequence[Token], idx: int, options: OptionsDict, env: EnvType) -> str:
        href = escape(str(tokens[idx].attrs.get("href", "")))
        return f'<a href="{href}" target="_blank" rel="noopener noreferrer nofollow">'

    def th_open(self, tokens: Sequence[Token], idx: int, options: OptionsDict, env: EnvType) -> str:
        return _cell("th", tokens[idx])

    def td_open(self, tokens: Sequence[Token], idx: int, options: OptionsDict, env: EnvType) -> str:
        return _cell("td", tokens[idx])


def _cell(tag: str, token: Token) -> str:
    """The opening of a cell; its alignment is a class, as the page's policy forbids style attributes."""
    aligned = _ALIGNMENT.fullmatch(str(token.attrs.get("style", "")))
    return f'<{tag} class="{aligned[1]}">' if aligned else f"<{tag}>"


def _code(source: str, info: str) -> str:
    words = info.split(maxsplit=1)
    language = words[0].lower() if words else ""
    if not _LANGUAGE.fullmatch(language):
        language = ""
    return f'<pre data-language="{escape(language)}"><code>{colored(source, language)}</code></pre>\n'


class _Markdown(MarkdownIt):
    """A parser that allows http, https and mailto links only."""

    def validateLink(self, url: str) -> bool:
        return _SAFE_LINK.fullmatch(url) is not None


def _parser() -> MarkdownIt:
    options: dict[str, Any] = {"html": False, "breaks": True, "maxNesting": MAX_NESTING}
    parser = _Markdown("commonmark", options, renderer_cls=_Renderer)
    return parser.enable(["table", "strikethrough"])


_MARKDOWN = _parser()


def serve(source: BinaryIO, sink: BinaryIO) -> None:
    """Answer frames, each a JSON list of texts, with a JSON list of their blocks, until ``source`` ends.

    An empty frame means that one of the texts could not be rendered.
    """
    while head := source.read(LENGTH.size):
        texts = json.loads(source.read(LENGTH.unpack(head)[0]))
        try:
            answer = json.dumps([render_blocks(text) for text in texts], separators=(",", ":")).encode()
        except Exception:
            answer = b""
        sink.write(LENGTH.pack(len(answer)) + answer)
        sink.flush()


if __name__ == "__main__":
    # Ctrl+C in a terminal reaches this process, too: the one that it serves decides when to end it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # Tokens go before colors.
    os.nice(5)
    serve(sys.stdin.buffer, sys.stdout.buffer)
