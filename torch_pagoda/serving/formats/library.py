"""Formats that a tokenizer defines: transformers' ``response_template`` and its streaming parser."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import regex
from transformers.utils.chat_parsing import ResponseParser
from transformers.utils.chat_parsing.content_parsers import process_field
from transformers.utils.chat_parsing.response_templates import load_response_template

from .arguments import argument
from .events import Event, ToolCall, merge_events
from .json_calls import object_of
from .parser import AnswerText, MakeId, dump, random_id
from .source import Malformed
from .tools import TOOL_NAME, Tool, ToolChoice

_CALLS = "tool_calls"
_REASONING = ("reasoning_content", "thinking", "reasoning")


class TemplateFormat:
    """A format defined by a tokenizer's ``response_template``; see ``Format``.

    The library finds the regions of the text. The calls in a region are parsed here, so that a malformed one does not
    end the stream, and JSON strings stay strings whatever else the schema allows.

    Args:
        template: the template.

    Raises:
        ValueError: transformers rejects it.
    """

    name = "response_template"

    def __init__(self, template: Mapping[str, Any]) -> None:
        try:
            loaded = load_response_template(dict(template))
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise ValueError(f"the tokenizer's response_template cannot be used: {error}") from error
        self._field = loaded.fields.get(_CALLS)
        if self._field is not None and self._field.open_re is not None:
            loaded.fields[_CALLS] = replace(
                self._field,
                open_re=regex.compile(f"(?P<whole_opener>{self._field.open_re.pattern})", regex.DOTALL),
                content="text",
                content_args={"strip": False},
                transform={"opener": "{whole_opener}", "text": "{content}"},
                transform_each=False,
                repeats=True,
                join=None,
            )
        self._template = loaded

    @property
    def calls_tools(self) -> bool:
        """Whether the parser finds tool calls."""
        return self._field is not None

    def kept_special_token_ids(self, stop: Sequence[str] = ()) -> list[int] | None:
        """None: any special token may be part of the template's patterns."""
        return None

    def parser(
        self,
        prompt_text: str,
        tools: Sequence[Tool] = (),
        *,
        make_id: MakeId | None = None,
        known_only: bool = False,
        **options: Any,
    ) -> TemplateParser:
        """A parser for one completion; the other arguments of ``Format.parser`` concern grammars."""
        return TemplateParser(self._template, self._field, prompt_text, tools, make_id or random_id, known_only)

    def reasoning_ahead(self, prompt_text: str) -> str | None:
        """The text that ends the reasoning in which a prompt ends; None if it ends elsewhere.

        Raises:
            ValueError: there is no such text, or more than one.
        """
        opened = ResponseParser(self._template, prefix=prompt_text).initial_events
        marks = [event for event in opened if event["type"] in ("region_open", "region_close")]
        if not marks or marks[-1]["type"] == "region_close" or marks[-1]["field"] not in _REASONING:
            return None
        ends = self._template.fields[marks[-1]["field"]].close_literals or ()
        if len(ends) != 1:
            raise ValueError(
                f"the tokenizer's response_template does not end {marks[-1]['field']} with one fixed text"
            )
        return str(ends[0])

    def grammar(self, tools: Sequence[Tool], choice: ToolChoice, **options: Any) -> str | None:
        """None: a template defines how calls are parsed, not how they are written."""
        return None


class TemplateParser:
    """The library's parser with this package's events; malformed calls are content.

    Attributes:
        malformed: regions of calls that could not be parsed.
        reasoning_open: the next text is reasoning.
    """

    def __init__(
        self,
        template: Any,
        field: Any,
        prompt_text: str,
        tools: Sequence[Tool],
        make_id: MakeId,
        known_only: bool = False,
    ) -> None:
        self.malformed = 0
        self.reasoning_open = False
        self._field = field
        self._tools = tools
        self._make_id = make_id
        self._known_only = known_only
        self._num_calls = 0
        self._text = AnswerText(holds_space=field is not None)
        self._parser = ResponseParser(template, prefix=prompt_text)
        self._convert(self._parser.initial_events)

    def feed(self, text: str) -> list[Event]:
        """Events of the next text."""
        return merge_events(self._convert(self._parser.feed(text)))

    def finish(self) -> list[Event]:
        """The remaining events, after the end of the text."""
        events = self._convert(self._parser.finalize()[1])
        if not self.reasoning_open:
            self._text.flush(events)
        return merge_events(events)

    def _convert(self, regions: list[dict[str, Any]]) -> list[Event]:
        out: list[Event] = []
        for region in regions:
            field, kind = region["field"], region["type"]
            if field == _CALLS:
                if kind == "region_close":
                    self._call(out, **region["value"])
            elif field not in _REASONING:
                self._text.give(out, False, region.get("text", ""))
            else:
                if kind != "region_chunk":
                    self._text.cut()
                    self.reasoning_open = kind == "region_open"
                self._text.give(out, True, region.get("text", ""))
        return out

    def _call(self, out: list[Event], opener: str, text: str) -> None:
        """Emit the calls of a region; its text if there are no tools, or it is malformed."""
        closers = self._field.close_literals or ("",)
        if not self._tools:
            self._text.give(out, False, opener + text + closers[0])
            return
        try:
            calls = self._read(opener, text)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            self.malformed += 1
            self._text.give(out, False, opener + text + closers[0])
            return
        self._text.cut()
        for name, arguments in calls:
            out.append(ToolCall(self._make_id(name, self._num_calls), name, arguments))
            self._num_calls += 1

    def _read(self, opener: str, text: str) -> list[tuple[str, str]]:
        groups = self._field.open_re.fullmatch(opener).groupdict()
        value = process_field(text, self._field, {key: group for key, group in groups.items() if group is not None})
        calls = []
        for call in value if isinstance(value, list) else [value]:
            function = call["function"]
            name, arguments = function["name"].strip(), object_of(function.get("arguments"))
            if not TOOL_NAME.fullmatch(name):
                raise Malformed(f"{name[:80]!r} is not a name")
            if self._known_only and all(tool.name != name for tool in self._tools):
                raise Malformed(f"{name!r} is not an allowed tool")
            if self._field.content != "json":
                arguments = {
                    key: argument(name, key, entry, self._tools) if isinstance(entry, str) else entry
                    for key, entry in arguments.items()
                }
            calls.append((name, dump(arguments)))
        return calls
