"""Splits a model's text incrementally into content, reasoning and tool calls.

The events depend on the text alone: however it is cut, the joined events are the same.
"""

from __future__ import annotations

import json
import re
import secrets
import string
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from .events import ContentDelta, Event, ReasoningDelta, ToolCall, merge_events
from .source import Malformed, ParsedCall, Source, Steps
from .tools import TOOL_NAME, Tool
from .watch import watch

_VISIBLE = re.compile(r"\S")

CallReader: TypeAlias = Callable[[Source, Sequence[Tool]], Steps[None]]
"""Reads the calls from an opener on; see ``source``."""

MakeId: TypeAlias = Callable[[str, int], str]
"""Id of a call from its name and its index in the completion."""


@dataclass(frozen=True)
class Reasoning:
    """The marks around a model's reasoning.

    Attributes:
        open: each of them opens reasoning; the first is the usual one.
        close: each of them closes it.
        anywhere: reasoning may also begin after content, as its marks are special tokens that no text has by chance.
        ended_by_calls: a tool call may begin without closing the reasoning.
    """

    open: tuple[str, ...]
    close: tuple[str, ...]
    anywhere: bool = False
    ended_by_calls: bool = False


@dataclass(frozen=True)
class CallMarks:
    """The openers of tool calls, and their reader.

    Attributes:
        read: the reader.
        open: each of them begins calls, anywhere.
        open_at_start: each of them begins calls if only white space, reasoning and calls precede it.
        inside: further marks that the reader needs, if they may be special tokens or contain some.
        read_held: the reader of calls that a grammar constrains, if ``read`` accepts more than the grammar.
    """

    read: CallReader
    open: tuple[str, ...]
    open_at_start: tuple[str, ...] = ()
    inside: tuple[str, ...] = ()
    read_held: CallReader | None = None


class Parser:
    """Parses a completion's text incrementally into events.

    White space around content and reasoning is dropped; a malformed call becomes content, unchanged.

    Args:
        reasoning: its marks, or None.
        calls: their marks, or None: do not look for calls.
        tools: the callable tools.
        reasoning_open: the prompt ends within reasoning.
        make_id: ids of calls without one of the model's.
        known_only: treat calls of other functions as malformed.
        in_content: the prompt ends within content, which this text continues.

    Attributes:
        malformed: calls that could not be parsed.
    """

    def __init__(
        self,
        reasoning: Reasoning | None,
        calls: CallMarks | None,
        tools: Sequence[Tool] = (),
        reasoning_open: bool = False,
        make_id: MakeId | None = None,
        known_only: bool = False,
        in_content: bool = False,
    ) -> None:
        self.malformed = 0
        self.reasoning_open = reasoning_open and reasoning is not None
        self._reasoning = reasoning or Reasoning((), ())
        self._calls = calls
        self._tools = tools
        self._make_id = make_id or random_id
        self._known_only = known_only
        self._num_calls = 0
        self._source = Source()
        self._reader: Iterator[list[ParsedCall] | None] | None = None
        self._unread = 0  # where the text begins that is content again if the reader fails
        self._called = False  # by this reader
        self._marked = True  # this reader began at a mark that begins nothing else
        self._at_start = not in_content  # of the answer, but for white space, reasoning and calls
        self._text = AnswerText(calls is not None, in_content)
        openers = calls.open if calls else ()
        at_start = (*openers, *(calls.open_at_start if calls else ()), *self._reasoning.open, *self._reasoning.close)
        later = (*openers, *(self._reasoning.open if self._reasoning.anywhere else ()))
        in_reasoning = (*self._reasoning.close, *(openers if self._reasoning.ended_by_calls else ()))
        self._watched_at_start = watch(at_start)
        self._watched_in_content = watch(later)
        self._watched_in_reasoning = watch(in_reasoning)
        self._watched_at_start_of_reasoning = watch((*self._reasoning.open, *in_reasoning))

    def feed(self, text: str) -> list[Event]:
        """Events of the next text."""
        self._source.text += text
        return self._run()

    def finish(self) -> list[Event]:
        """The remaining events, after the end of the text."""
        self._source.ended = True
        events = self._run()
        if not self.reasoning_open:
            self._text.flush(events)
        return merge_events(events)

    def _run(self) -> list[Event]:
        out: list[Event] = []
        while self._read(out) if self._reader else self._scan(out):
            pass
        return merge_events(out)

    def _scan(self, out: list[Event]) -> bool:
        """Emit the text before the next mark and skip the mark; returns False if there is none yet."""
        source = self._source
        if self._at_start:
            visible = _VISIBLE.search(source.text, source.pos)
            blank = visible.start() if visible else len(source.text)
            self._text.give(out, self.reasoning_open, source.text[source.pos : blank])
            source.pos = blank
            watched = self._watched_at_start_of_reasoning if self.reasoning_open else self._watched_at_start
            if blank == len(source.text):
                source.forget()
                return False
            if mark := watched.match(source.text, blank):
                return self._pass(mark)
            if not source.ended and watched.may_begin(source.text, blank):
                return False
            self._at_start = False
        watched = self._watched_in_reasoning if self.reasoning_open else self._watched_in_content
        found = watched.search(source.text, source.pos)
        end = found.start() if found else len(source.text) if source.ended else watched.held(source.text, source.pos)
        self._text.give(out, self.reasoning_open, source.text[source.pos : end])
        source.pos = end
        if found:
            return self._pass(found.group())
        source.forget()
        return False

    def _pass(self, mark: str) -> bool:
        """Act on the mark at the current position."""
        calls, source = self._calls, self._source
        if calls and mark in (*calls.open, *calls.open_at_start):
            self._reader, self._unread, self._called = calls.read(source, self._tools), source.pos, False
            self._marked = mark in calls.open
            return True
        source.pos += len(mark)
        if mark in self._reasoning.open or mark in self._reasoning.close:
            self._turn(mark in self._reasoning.open)
        return True

    def _turn(self, reasoning_open: bool) -> None:
        """Open or close the reasoning."""
        self._text.cut()
        self._at_start = True
        self.reasoning_open = reasoning_open

    def _read(self, out: list[Event]) -> bool:
        """Run the reader; returns False if it waits for text."""
        assert self._reader is not None
        source = self._source
        try:
            calls = next(self._reader)
        except (Malformed, StopIteration) as stop:
            self._reader = None
            if isinstance(stop, Malformed) or not self._called:
                self._fail(out)
            source.forget()
            return True
        if calls is None:
            return False
        if not calls or not all(self._may_be_called(call) for call in calls):
            self._reader = None
            self._fail(out)
            return True
        self._turn(False)
        self._called, self._unread = True, source.pos
        for call in calls:
            own_id = whole_characters(call.id or self._make_id(call.name, self._num_calls))
            out.append(ToolCall(own_id, call.name, dump(call.arguments)))
            self._num_calls += 1
        return True

    def _may_be_called(self, call: ParsedCall) -> bool:
        is_known = any(tool.name == call.name for tool in self._tools)
        return is_known or (not (call.known_only or self._known_only) and TOOL_NAME.fullmatch(call.name) is not None)

    def _fail(self, out: list[Event]) -> None:
        """Emit the text of a malformed call as text."""
        source = self._source
        self.malformed += self._marked
        source.pos = max(source.pos, self._unread + 1)
        self._at_start = False
        self._text.give(out, self.reasoning_open, source.text[self._unread : source.pos])


class AnswerText:
    """Content and reasoning, without the surrounding white space.

    White space between two parts of the content is kept, even if a call or reasoning separates them; likewise between
    two parts of the reasoning.

    Args:
        holds_space: calls may follow, so white space at the end of content waits for the next text.
        in_content: continues existing content.
    """

    def __init__(self, holds_space: bool, in_content: bool = False) -> None:
        self._holds_space = holds_space
        self._is_cut = False  # nothing visible came since
        self._begun = {False: in_content, True: False}  # content, reasoning
        self._space = {False: "", True: ""}  # held back

    def give(self, out: list[Event], reasoning: bool, text: str) -> None:
        """Emit text, except white space at its end."""
        if self._is_cut and not self._begun[reasoning]:
            text = text.lstrip()
        kept = text.rstrip() if self._holds_space or reasoning or self._is_cut else text
        if kept:
            kind = ReasoningDelta if reasoning else ContentDelta
            out.append(kind(self._space[reasoning] + kept))
            self._space[reasoning] = ""
            self._begun[reasoning], self._is_cut = True, False
        self._space[reasoning] += text[len(kept) :]

    def cut(self) -> None:
        """A call, or reasoning, begins or ends here: white space is kept only between two parts."""
        self._is_cut = True
        for reasoning, begun in self._begun.items():
            if not begun:
                self._space[reasoning] = ""

    def flush(self, out: list[Event]) -> None:
        """Emit the held white space if it ends the content rather than precedes a call."""
        if self._space[False] and not self._is_cut:
            out.append(ContentDelta(self._space[False]))
            self._space[False] = ""


def dump(arguments: object) -> str:
    """JSON text without halves of surrogate pairs; see ``whole_characters``."""
    return whole_characters(json.dumps(arguments, ensure_ascii=False, allow_nan=False))


def whole_characters(text: str) -> str:
    """The text with U+FFFD for each half of a surrogate pair, which UTF-8 and many clients reject."""
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")


def random_id(name: str, index: int) -> str:
    """``call_`` and 24 hexadecimal digits."""
    return f"call_{secrets.token_hex(12)}"


def short_random_id(name: str, index: int) -> str:
    """9 letters and digits, as Mistral's templates require."""
    return "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(9))


def indexed_id(name: str, index: int) -> str:
    """``functions.NAME:INDEX``, as Kimi's templates write it."""
    return f"functions.{name}:{index}"
