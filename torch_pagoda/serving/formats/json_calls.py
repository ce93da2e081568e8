"""Readers of calls written as JSON: Hermes and Qwen, Mistral, Llama, Phi, Granite, Kimi, DeepSeek V3."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .parser import CallReader
from .source import Malformed, ParsedCall, Source, Steps, load_json
from .tools import Tool


def call_of(value: Any, known_only: bool = False) -> ParsedCall:
    """The call in ``{"name": ..., "arguments": {...}}``; Llama calls them parameters.

    Raises:
        Malformed: it is not a call.
    """
    name = value.get("name") if isinstance(value, dict) else None
    if not isinstance(name, str):
        raise Malformed("a call without a name")
    arguments = value.get("arguments", value.get("parameters"))
    own_id = value.get("id") if isinstance(value.get("id"), str) else None
    return ParsedCall(name, object_of(arguments), own_id, known_only)


def calls_of(value: Any, known_only: bool = False) -> list[ParsedCall]:
    """The calls of an array, or a single call; as ``call_of``."""
    return [call_of(entry, known_only) for entry in (value if isinstance(value, list) else [value])]


def object_of(arguments: Any) -> dict[str, Any]:
    """Arguments as an object: nothing becomes an empty one, JSON text is parsed.

    Raises:
        Malformed: they are not an object.
    """
    if isinstance(arguments, str):
        arguments = load_json(arguments) if arguments.strip() else None
    if arguments is None:
        return {}
    if not isinstance(arguments, dict):
        raise Malformed("the arguments are not an object")
    return arguments


def marked(*marks: tuple[str, str]) -> CallReader:
    """A call, or an array of calls, between two marks: ``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``.

    The closing mark may be missing, as models leave it out at the end. Several calls may precede it, and an extra
    bracket. Without an opening mark, calls count only if they name a tool of the request.

    Args:
        marks: pairs of marks around calls; either may be "".
    """
    closers = dict(marks)

    def read(source: Source, tools: Sequence[Tool]) -> Steps[None]:
        opener = (yield from source.accept(*filter(None, closers))) or ""
        closer = closers[opener]
        yield from source.space()
        while True:
            value = yield from source.json()
            yield calls_of(value, not opener)
            yield from source.stray_closers(*([closer, "{", "["] if closer else []))
            if not closer or (yield from source.accept(closer)) or not (yield from _another(source)):
                return

    return read


def _another(source: Source) -> Steps[bool]:
    """Whether another value follows; skips a comma before it."""
    start = source.pos
    yield from source.accept(",")
    yield from source.space()
    if (yield from source.peek("{", "[")) is not None:
        return True
    source.pos = start
    return False


def read_llama(source: Source, tools: Sequence[Tool]) -> Steps[None]:
    """Bare objects, ``{"name": ..., "parameters": {...}}``, with ``;`` between; ``<|python_tag|>`` may come first."""
    marked = yield from source.accept("<|python_tag|>")
    while True:
        yield from source.space()
        value = yield from source.json()
        yield calls_of(value, marked is None)
        yield from source.stray_closers(";")
        if (yield from source.accept(";")) is None:
            return


def read_mistral(source: Source, tools: Sequence[Tool]) -> Steps[None]:
    """``[TOOL_CALLS]`` and either an array of calls or, for each call, ``name[ARGS]{...}``, ``[CALL_ID]`` between."""
    yield from source.expect("[TOOL_CALLS]")
    yield from source.space()
    if (yield from source.peek("[{", "[ {", "{")) is not None:
        value = yield from source.json()
        yield calls_of(value)
        yield from source.stray_closers("[TOOL_CALLS]")
        return
    own_id = None
    name, mark = yield from source.until("[ARGS]", "[CALL_ID]", "{")
    if mark == "[CALL_ID]":
        own_id, mark = yield from source.until("[ARGS]", "{")
    if mark == "{":
        source.pos -= 1
    yield from source.space()
    arguments = yield from source.json()
    yield [ParsedCall(name.strip(), object_of(arguments), (own_id or "").strip() or None)]
    yield from source.stray_closers("[TOOL_CALLS]")


def read_kimi(source: Source, tools: Sequence[Tool]) -> Steps[None]:
    """A section of calls ``functions.NAME:INDEX``, which is their id, with JSON arguments."""
    yield from source.expect("<|tool_calls_section_begin|>")
    while (yield from source.another("<|tool_call_begin|>", "<|tool_calls_section_end|>")):
        own_id, _ = yield from source.until("<|tool_call_argument_begin|>")
        yield from source.space()
        arguments = yield from source.json()
        yield from source.stray_closers("<|tool_call_end|>")
        if not source.at_end:
            yield from source.expect("<|tool_call_end|>")
        name = own_id.strip().removeprefix("functions.").rpartition(":")
        yield [ParsedCall(name[0] or name[2], object_of(arguments), own_id.strip() if name[0] else None)]


def deepseek(fenced: bool) -> CallReader:
    """A section of calls: V3 and R1 write ``function``, the name and fenced JSON; V3.1 the name and JSON."""

    def read(source: Source, tools: Sequence[Tool]) -> Steps[None]:
        yield from source.expect("<｜tool▁calls▁begin｜>")
        while (yield from source.another("<｜tool▁call▁begin｜>", "<｜tool▁calls▁end｜>")):
            name, _ = yield from source.until("<｜tool▁sep｜>")
            if fenced:
                name, _ = yield from source.until("```json")
            yield from source.space()
            arguments = yield from source.json()
            yield from source.stray_closers("```" if fenced else "<｜tool▁call▁end｜>")
            if fenced:
                yield from source.accept("```")
                yield from source.space()
            if not source.at_end:
                yield from source.expect("<｜tool▁call▁end｜>")
            yield [ParsedCall(name.strip(), object_of(arguments))]

    return read
