"""A model family's format of reasoning and tool calls."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import ClassVar, Protocol

from .events import Event
from .grammar import CallGrammar, Prepare, calls_grammar, left_out
from .parser import CallMarks, MakeId, Parser, Reasoning, random_id
from .tools import Tool, ToolChoice, chosen


class AnswerParser(Protocol):
    """Parses a completion's text incrementally into events; see ``Parser``.

    Attributes:
        malformed: calls that could not be read.
        reasoning_open: the next text is reasoning.
    """

    malformed: int
    reasoning_open: bool

    def feed(self, text: str) -> list[Event]:
        """Events of the next text."""
        ...

    def finish(self) -> list[Event]:
        """The remaining events, after the end of the text."""
        ...


@dataclass(frozen=True)
class CallSyntax:
    """A format of tool calls.

    Attributes:
        marks: for the parser.
        grammar: None if calls of this format cannot be enforced.
        make_id: ids of calls.
    """

    marks: CallMarks
    grammar: CallGrammar | None = None
    make_id: MakeId = random_id

    @property
    def grammar_mark(self) -> str:
        """The mark that begins the grammar's calls; "" if it has none."""
        begin = (self.grammar.section or self.grammar.opener) if self.grammar else ""
        return max((mark for mark in self.marks.open if begin.startswith(mark)), key=len, default="")

    @property
    def held_marks(self) -> CallMarks:
        """The marks of calls that the grammar enforces; other marks are text."""
        marks = replace(self.marks, read=self.marks.read_held or self.marks.read)
        return replace(marks, open=(self.grammar_mark,), open_at_start=()) if self.grammar_mark else marks


@dataclass(frozen=True)
class Format:
    """The format of a model's output.

    Attributes:
        name: of the tool parser; without one, of the reasoning parser.
        calls: format of tool calls; None: the model has no known one.
        reasoning: marks of reasoning, or None.
        answer_begins: the chat template's text at the beginning of an answer, without marks of reasoning; may be "".
        special_tokens: text of each special token by its id.
        added_tokens: id of each added token by its text.
    """

    name: str
    calls: CallSyntax | None = None
    reasoning: Reasoning | None = None
    answer_begins: str = ""
    special_tokens: Mapping[int, str] = field(default_factory=dict)
    added_tokens: Mapping[str, int] = field(default_factory=dict)

    grammar_takes_reasoning: ClassVar[bool] = False
    """``grammar`` constrains the whole completion, its reasoning included."""

    @property
    def end_token_ids(self) -> tuple[int, ...]:
        """Tokens that end a completion, in addition to the checkpoint's."""
        return ()

    @property
    def calls_tools(self) -> bool:
        """Whether the parser finds tool calls."""
        return self.calls is not None

    @property
    def reasoning_end(self) -> tuple[str, ...]:
        """Texts, each of which ends reasoning; empty if there is no reasoning."""
        return self.reasoning.close if self.reasoning else ()

    def reasoning_ahead(self, prompt_text: str) -> str | tuple[str, ...] | None:
        """The text that ends the reasoning in which a prompt ends; None if it ends elsewhere.

        A tuple: several texts in sequence.
        """
        return self.reasoning_end[0] if self.reasoning_open(prompt_text) else None

    def kept_special_token_ids(self, stop: Sequence[str] = ()) -> list[int] | None:
        """Special tokens that must be detokenized, for the parser or a stop string; the others have no text."""
        in_stop = (token_id for token_id, text in self.special_tokens.items() if any(text in end for end in stop))
        return sorted({*self._marking_ids, *in_stop})

    @cached_property
    def _marking_ids(self) -> frozenset[int]:
        """Special tokens that are part of a mark, or contain one."""
        calls = (*self.calls.marks.open, *self.calls.marks.inside) if self.calls else ()
        marks = (*calls, *((*self.reasoning.open, *self.reasoning.close) if self.reasoning else ()))
        texts = self.special_tokens.items()
        return frozenset(token_id for token_id, text in texts if any(text in mark or mark in text for mark in marks))

    def parser(
        self,
        prompt_text: str,
        tools: Sequence[Tool] = (),
        *,
        make_id: MakeId | None = None,
        known_only: bool = False,
        is_held: bool = False,
        awaits_answer: bool = False,
    ) -> AnswerParser:
        """A parser for one completion.

        Args:
            prompt_text: shows whether the prompt ends within reasoning.
            tools: the callable tools; without any, the parser does not look for calls.
            make_id: replaces the format's own.
            known_only: treat calls of other functions as malformed.
            is_held: ``grammar`` constrains the completion, so only calls of the grammar count.
            awaits_answer: a grammar begins after ``reasoning_ahead``; nothing else ends the reasoning.
        """
        calls = self.calls if tools else None
        reasoning, (reasoning_open, in_content) = self.reasoning, self._ends_within(prompt_text)
        if reasoning is not None and reasoning_open and awaits_answer:
            reasoning = replace(reasoning, close=reasoning.close[:1], ended_by_calls=False)
        return Parser(
            reasoning,
            (calls.held_marks if is_held else calls.marks) if calls else None,
            tools,
            reasoning_open,
            make_id or (calls.make_id if calls else None),
            known_only,
            in_content,
        )

    def reasoning_open(self, prompt_text: str) -> bool:
        """Whether a prompt ends within reasoning: an unclosed block of it at the beginning of the answer.

        Marks within a prefill, a text that begins the answer, are part of that text.
        """
        return self._ends_within(prompt_text)[0]

    def _ends_within(self, prompt_text: str) -> tuple[bool, bool]:
        """Whether a prompt ends within reasoning, and whether it ends within content."""
        opened = tuple(mark.rstrip() for mark in self.reasoning.open) if self.reasoning else ()
        closed = self.reasoning_end
        end = prompt_text.rstrip()
        begin = end.rfind(self.answer_begins) if self.answer_begins else -1
        if begin < 0:
            return end.endswith(opened), False
        answer = end[begin + len(self.answer_begins) :].lstrip()
        while mark := next((mark for mark in (*opened, *closed) if answer.startswith(mark)), None):
            answer = answer[len(mark) :]
            if mark in opened:
                ends = [(at, at + len(close)) for close in closed if (at := answer.find(close)) >= 0]
                if not ends:
                    return True, False
                answer = answer[min(ends)[1] :]
            answer = answer.lstrip()
        # After results of tools, some templates go on without another beginning.
        open_mark = next((mark for mark in opened if end.endswith(mark)), "")
        if not answer or end.removesuffix(open_mark).rstrip().endswith(self._token_texts):
            return bool(answer and open_mark), False
        return False, True

    @cached_property
    def _token_texts(self) -> tuple[str, ...]:
        """Visible texts of the added tokens, without marks of reasoning."""
        marks = {mark.strip() for mark in (*self.reasoning.open, *self.reasoning.close)} if self.reasoning else set()
        return tuple(
            text for text in {*self.added_tokens, *self.special_tokens.values()} if text.strip() not in {"", *marks}
        )

    def grammar(
        self,
        tools: Sequence[Tool],
        choice: ToolChoice,
        *,
        parallel: bool = True,
        prepare: Prepare | None = None,
        prompt_text: str = "",
    ) -> str | None:
        """A grammar for the text after the reasoning, in llguidance's Lark; None if the format has none.

        With ``"required"``, the text consists of calls of the chosen tools; with ``"auto"``, it is any text whose
        calls all fit their schemas.

        Args:
            tools: of the request.
            choice: see ``check_tool_choice``.
            parallel: allow several calls, if the choice does.
            prepare: converts a tool's schema to the one to compile.
            prompt_text: may contain the beginning of the answer.
        """
        left = chosen(tools, choice)
        if not left or self.calls is None or self.calls.grammar is None:
            return None
        return calls_grammar(
            self.calls.grammar,
            self.calls.grammar_mark,
            left,
            self.added_tokens,
            required=choice.mode == "required",
            parallel=parallel and not choice.once,
            prepare=prepare,
        )

    def left_out(self, tool: Tool) -> list[str]:
        """Parts of a tool's schema that ``grammar`` accepts but does not enforce."""
        return [] if self.calls is None or self.calls.grammar is None else left_out(self.calls.grammar, tool)
