"""Readers of calls written as tags with bare values: Qwen3-Coder, Step, MiniMax, GLM, Hunyuan, DeepSeek."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from .arguments import argument
from .parser import CallReader
from .source import MissingCloser, ParsedCall, Source, Steps
from .tools import Tool


def function_tags(lenient: bool = True) -> CallReader:
    """``<tool_call><function=NAME><parameter=KEY>VALUE</parameter></function></tool_call>``, each on its line.

    One line break on either side of a value belongs to the format.

    Args:
        lenient: ``</parameter>`` may be missing before another declared parameter, or at the end of the call, and
            ``</function>`` before ``</tool_call>``.
    """
    ends = ("</function>", "</tool_call>") if lenient else ("</function>",)

    def read(source: Source, tools: Sequence[Tool]) -> Steps[None]:
        yield from source.accept("<tool_call>")
        yield from source.space()
        yield from source.expect("<function=")
        name, _ = yield from source.until(">")
        name = name.strip()
        arguments: dict[str, Any] = {}
        while True:
            yield from source.space()
            if (yield from source.expect("<parameter=", *ends)) != "<parameter=":
                break
            key = (yield from source.until(">"))[0].strip()
            may_follow = _may_follow(key, name, tools, arguments)
            missing = MissingCloser("\n<parameter=", "</function>", may_follow, ("</tool_call>",), ends_lines=False)
            text = yield from source.value("</parameter>", ("<parameter=", *ends), missing if lenient else None)
            arguments[key] = argument(name, key, _line(text), tools)
        yield [ParsedCall(name, arguments)]
        yield from source.space()
        yield from source.accept("</tool_call>")

    return read


def _may_follow(key: str, name: str, tools: Sequence[Tool], arguments: Mapping[str, Any]) -> Callable[[str], bool]:
    """Whether an argument may follow the value of ``key``: the tool declares it, and it has not occurred yet."""
    declared: Mapping[str, Any] = next(
        (tool.parameters.get("properties", {}) for tool in tools if tool.name == name), {}
    )
    return lambda other: other.strip() in declared and other.strip() != key and other.strip() not in arguments


def invocations(opener: str, closer: str, prefix: str = "", lenient: bool = True) -> CallReader:
    """A section of ``<invoke name="NAME"><parameter name="KEY">VALUE</parameter></invoke>``.

    Args:
        opener: begins the section.
        closer: ends the section.
        prefix: precedes the tags' names. DeepSeek's tags also say whether the value is text: ``string="true"``.
        lenient: the end of a value may be missing before another declared parameter, or at the end of the call.
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
                missing = MissingCloser(
                    parameter, invoke_end, _may_follow(key, name, tools, arguments), (invoke, closer)
                )
                text = yield from source.value(parameter_end, (parameter, invoke_end), missing if lenient else None)
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


def glm(lenient: bool = True) -> CallReader:
    """``<tool_call>NAME<arg_key>KEY</arg_key><arg_value>VALUE</arg_value></tool_call>``; GLM-4.5 breaks the lines.

    Args:
        lenient: as for ``invocations``.
    """

    def read(source: Source, tools: Sequence[Tool]) -> Steps[None]:
        yield from source.expect("<tool_call>")
        name, mark = yield from source.until("<arg_key>", "</tool_call>")
        behind = ("<tool_call>",) if lenient else None
        yield [(yield from _keyed(source, tools, name.strip(), mark, "", behind))]

    return read


def hunyuan(suffix: str = "", lenient: bool = True) -> CallReader:
    """A section ``<tool_calls>`` of ``<tool_call>NAME<tool_sep>`` and keyed values as GLM's.

    Args:
        suffix: ends the tags' names, with some tokenizers.
        lenient: as for ``invocations``.
    """

    def read(source: Source, tools: Sequence[Tool]) -> Steps[None]:
        yield from source.expect(f"<tool_calls{suffix}>")
        while (yield from source.another(f"<tool_call{suffix}>", f"</tool_calls{suffix}>")):
            name, _ = yield from source.until(f"<tool_sep{suffix}>")
            yield from source.space()
            mark = yield from source.expect(f"<arg_key{suffix}>", f"</tool_call{suffix}>")
            behind = (f"<tool_call{suffix}>", f"</tool_calls{suffix}>") if lenient else None
            yield [(yield from _keyed(source, tools, name.strip(), mark, suffix, behind))]

    return read


def _keyed(
    source: Source, tools: Sequence[Tool], name: str, mark: str, suffix: str, behind_end: tuple[str, ...] | None
) -> Steps[ParsedCall]:
    """A call from behind its first ``<arg_key>``, or from behind its end, as ``mark`` says.

    ``behind_end``: text after a call; None: the end of a value is never missing.
    """
    arguments: dict[str, Any] = {}
    while not mark.startswith("</"):
        key = (yield from source.until(f"</arg_key{suffix}>"))[0].strip()
        yield from source.space()
        yield from source.expect(f"<arg_value{suffix}>")
        opener, end = f"<arg_key{suffix}>", f"</tool_call{suffix}>"
        missing = None
        if behind_end is not None:
            missing = MissingCloser(opener, end, _may_follow(key, name, tools, arguments), behind_end)
        text = yield from source.value(f"</arg_value{suffix}>", (opener, end), missing)
        arguments[key] = argument(name, key, text, tools)
        yield from source.space()
        mark = yield from source.expect(opener, end)
    return ParsedCall(name, arguments)


def _line(text: str) -> str:
    """The text without one line break on each side."""
    return text.removeprefix("\n").removesuffix("\n")
