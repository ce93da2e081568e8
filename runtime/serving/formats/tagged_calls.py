"""Readers of calls that are written as tags with bare values: Qwen3-Coder, Step, MiniMax, GLM, Hunyuan, DeepSeek."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .arguments import argument
from .parser import CallReader
from .source import ParsedCall, Source, Steps
from .tools import Tool


def read_function_tags(source: Source, tools: Sequence[Tool]) -> Steps[None]:
    """``<tool_call><function=NAME><parameter=KEY>VALUE</parameter></function></tool_call>``, each on its line.

    One line break on either side of a value belongs to the format.
    """
    yield from source.accept("<tool_call>")
    yield from source.space()
    yield from source.expect("<function=")
    name, _ = yield from source.until(">")
    name = name.strip()
    arguments: dict[str, Any] = {}
    while True:
        yield from source.space()
        if (yield from source.expect("<parameter=", "</function>")) == "</function>":
            break
        key, _ = yield from source.until(">")
        text = yield from source.value("</parameter>", ("<parameter=", "</function>"))
        arguments[key.strip()] = argument(name, key.strip(), _line(text), tools)
    yield [ParsedCall(name, arguments)]
    yield from source.space()
    yield from source.accept("</tool_call>")


def invocations(opener: str, closer: str, prefix: str = "") -> CallReader:
    """A section of ``<invoke name="NAME"><parameter name="KEY">VALUE</parameter></invoke>``.

    Args:
        opener: of the section.
        closer: of the section.
        prefix: before the tags' names. DeepSeek's tags also say whether the value is text: ``string="true"``.
    """
    invoke, parameter = f"<{prefix}invoke name=", f"<{prefix}parameter name="
    invoke_end, parameter_end = f"</{prefix}invoke>", f"</{prefix}parameter>"

    def read(source: Source, tools: Sequence[Tool]) -> Steps[None]:
        yield from source.expect(opener)
        while (yield from source.another(invoke, closer)):
            name = _attribute((yield from source.until(">"))[0])[0]
            arguments: dict[str, Any] = {}
            while True:
                yield from source.space()
                if (yield from source.expect(parameter, invoke_end)) == invoke_end:
                    break
                key, rest = _attribute((yield from source.until(">"))[0])
                text = yield from source.value(parameter_end, (parameter, invoke_end))
                arguments[key] = text if rest == 'string="true"' else argument(name, key, text, tools)
            yield [ParsedCall(name, arguments)]

    return read


def _attribute(text: str) -> tuple[str, str]:
    """The quoted (or bare) value that begins the text, and what follows it."""
    quote = text[:1]
    if quote in ('"', "'") and quote in text[1:]:
        value, _, rest = text[1:].partition(quote)
        return value, rest.strip()
    return text.strip(), ""


def read_glm(source: Source, tools: Sequence[Tool]) -> Steps[None]:
    """``<tool_call>NAME<arg_key>KEY</arg_key><arg_value>VALUE</arg_value></tool_call>``; GLM-4.5 breaks the lines."""
    yield from source.expect("<tool_call>")
    name, mark = yield from source.until("<arg_key>", "</tool_call>")
    yield [(yield from _keyed(source, tools, name.strip(), mark, ""))]


def hunyuan(suffix: str = "") -> CallReader:
    """A section ``<tool_calls>`` of ``<tool_call>NAME<tool_sep>`` and keyed values as GLM's.

    Args:
        suffix: at the end of the tags' names, as some tokenizers have it.
    """

    def read(source: Source, tools: Sequence[Tool]) -> Steps[None]:
        yield from source.expect(f"<tool_calls{suffix}>")
        while (yield from source.another(f"<tool_call{suffix}>", f"</tool_calls{suffix}>")):
            name, _ = yield from source.until(f"<tool_sep{suffix}>")
            yield from source.space()
            mark = yield from source.expect(f"<arg_key{suffix}>", f"</tool_call{suffix}>")
            yield [(yield from _keyed(source, tools, name.strip(), mark, suffix))]

    return read


def _keyed(source: Source, tools: Sequence[Tool], name: str, mark: str, suffix: str) -> Steps[ParsedCall]:
    """A call from behind its first ``<arg_key>``, or behind its end, whichever ``mark`` is."""
    arguments: dict[str, Any] = {}
    while not mark.startswith("</"):
        key, _ = yield from source.until(f"</arg_key{suffix}>")
        yield from source.space()
        yield from source.expect(f"<arg_value{suffix}>")
        text = yield from source.value(f"</arg_value{suffix}>", (f"<arg_key{suffix}>", f"</tool_call{suffix}>"))
        arguments[key.strip()] = argument(name, key.strip(), text, tools)
        yield from source.space()
        mark = yield from source.expect(f"<arg_key{suffix}>", f"</tool_call{suffix}>")
    return ParsedCall(name, arguments)


def _line(text: str) -> str:
    """The text without one line break on either side."""
    return text.removeprefix("\n").removesuffix("\n")
