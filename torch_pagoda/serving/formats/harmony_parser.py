"""Parses the messages of a harmony completion into content, reasoning and tool calls."""

from __future__ import annotations

import re
from collections.abc import Sequence

from .events import ContentDelta, Event, ReasoningDelta, ToolCall, merge_events
from .harmony_text import (
    CHANNEL,
    CONSTRAIN,
    ENDS,
    MARKS,
    MESSAGE,
    ROLE,
    START,
    Header,
    beginnings,
    function_of,
    is_begun_header,
    message_end,
    read_arguments,
    read_header,
)
from .parser import MakeId, dump, random_id
from .source import Malformed, Source, Steps
from .tools import TOOL_NAME, Tool
from .watch import watch

_IN_TEXT = (*ENDS, f"{START}{ROLE}", *beginnings())
"""Tokens that may end a text."""


def open_message(prompt_text: str) -> tuple[str, str | None]:
    """The header at the end of a prompt, and the text after it; None while the header is incomplete.

    For a prompt without an open message, "" and None: the completion begins with ``<|start|>``.
    """
    _, start, rest = prompt_text.rpartition(START)
    if not start:
        return ROLE, None
    header, message, text = rest.partition(MESSAGE)
    if message and text.rstrip().endswith(ENDS):
        return "", None
    return header, text if message else None


class HarmonyParser:
    """Parses a completion's text incrementally into events; see ``AnswerParser``.

    Text is unchanged, with a line break between two messages of a kind. A call that cannot be parsed becomes content,
    with its header.

    Args:
        prompt_text: its last message is continued.
        tools: the callable tools; without any, calls are text.
        reasoning: separate it from content.
        make_id: ids of calls.
        known_only: treat calls of other functions as malformed.
        awaits_answer: a grammar constrains the channel ``final``, before which there is only reasoning.
    """

    def __init__(
        self,
        prompt_text: str,
        tools: Sequence[Tool] = (),
        *,
        reasoning: bool = True,
        make_id: MakeId | None = None,
        known_only: bool = False,
        awaits_answer: bool = False,
    ) -> None:
        self.malformed = 0
        self._tools = tools
        self._tells_reasoning = reasoning
        self._make_id = make_id or random_id
        self._known_only = known_only
        self._awaits_answer = awaits_answer
        self._num_calls = 0
        self._source = Source()
        self._out: list[Event] = []
        self._given = {False: False, True: False}  # content, reasoning
        self._is_new = True  # nothing of this message has been given
        header, text = open_message(prompt_text)
        self.reasoning_open = text is not None and self._is_reasoning(read_header(header))
        self._steps = self._messages(header, text)

    def feed(self, text: str) -> list[Event]:
        """Events of the next text."""
        self._source.text += text
        return self._run()

    def finish(self) -> list[Event]:
        """The remaining events, after the end of the text."""
        self._source.ended = True
        return self._run()

    def _run(self) -> list[Event]:
        self._out = []
        next(self._steps, None)
        return merge_events(self._out)

    def _is_reasoning(self, header: Header) -> bool:
        is_reasoning = header.is_reasoning or (self._awaits_answer and header.channel != "final")
        return is_reasoning and self._tells_reasoning

    def _messages(self, begun: str, text: str | None) -> Steps[None]:
        """All messages; the first one begins in the prompt."""
        if text is not None:
            reasoning = self._is_reasoning(read_header(begun))
            self._is_new, self._given[reasoning] = not text, bool(text)
            yield from self._text(reasoning)
        else:
            yield from self._message(begun)
        while not self._source.at_end:
            yield from self._message("")

    def _message(self, begun: str) -> Steps[None]:
        """One message, whose header begins with this text."""
        source = self._source
        source.forget()
        self._is_new = True
        start = source.pos
        if (yield from source.accept(START)) is not None:
            begun, start = "", source.pos
        elif not (yield from self._goes_on_as_header()):
            yield from self._text(False)
            return
        try:
            text, mark = yield from source.until(MESSAGE, START, *ENDS)
        except Malformed:
            self._unfinished(begun, source.text[start:])
            return
        if mark != MESSAGE:
            source.pos = start + len(text)
            self._unfinished(begun, text)
            if not (yield from message_end(source)):
                source.pos += len(mark)
            return
        header = read_header(begun + text)
        name = None if self._awaits_answer else function_of(header.recipient, self._tools)
        if name is None:
            self.malformed += bool(header.recipient and self._tools and not self._awaits_answer)
            yield from self._text(self._is_reasoning(header))
        else:
            yield from self._call(name, text)

    def _goes_on_as_header(self) -> Steps[bool]:
        """Whether the next text can be part of a header, and not the text of a model that writes none."""
        source = self._source
        start = source.pos
        yield from source.space()
        found = yield from source.peek("to=", CHANNEL, CONSTRAIN, MESSAGE, START, *ENDS)
        source.pos = start
        return found is not None

    def _unfinished(self, begun: str, text: str) -> None:
        """Emit the text of a header without a message."""
        if read_header(begun + text).recipient:
            self._fail(text)
        elif not is_begun_header(text):
            self._give(self._tells_reasoning, re.sub("|".join(map(re.escape, MARKS)), " ", text).strip())

    def _call(self, name: str, header: str) -> Steps[None]:
        """A call, from the end of its header."""
        source = self._source
        start = source.pos
        is_known = any(tool.name == name for tool in self._tools)
        try:
            if not is_known and (self._known_only or not self._tools or not TOOL_NAME.fullmatch(name)):
                raise Malformed(f"{name!r} is not an allowed tool")
            call = yield from read_arguments(source, name)
        except Malformed:
            self._fail(f"{header}{MESSAGE}")
            source.pos = start
            yield from self._text(False)
            return
        self._out.append(ToolCall(self._make_id(name, self._num_calls), name, dump(call.arguments)))
        self._num_calls += 1

    def _fail(self, text: str) -> None:
        """Emit the header of a call that cannot be parsed, unchanged."""
        self.malformed += bool(self._tools)
        self._give(False, text.removeprefix(ROLE))

    def _text(self, reasoning: bool) -> Steps[None]:
        """The text of a message, emitted as it arrives."""
        source, marks = self._source, watch(_IN_TEXT)
        self.reasoning_open = reasoning
        while True:
            found = marks.search(source.text, source.pos)
            end = (
                found.start() if found else len(source.text) if source.ended else marks.held(source.text, source.pos)
            )
            self._give(reasoning, source.text[source.pos : end])
            source.pos = end
            if found is None:
                source.forget()
                if source.ended:
                    return
                yield None
            elif (yield from message_end(source)):
                self.reasoning_open = False
                return
            else:
                self._give(reasoning, found.group())
                source.pos += len(found.group())

    def _give(self, reasoning: bool, text: str) -> None:
        if not text:
            return
        if self._is_new and self._given[reasoning]:
            text = f"\n{text}"
        self._is_new, self._given[reasoning] = False, True
        self._out.append(ReasoningDelta(text) if reasoning else ContentDelta(text))
