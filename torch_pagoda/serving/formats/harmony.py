"""The format of gpt-oss: completions are harmony messages, and grammars constrain a whole message."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from .format import AnswerParser, CallSyntax, Format
from .grammar import CallGrammar, Lark, Prepare, named_body
from .harmony_parser import HarmonyParser, open_message
from .harmony_text import (
    CALL,
    CHANNEL,
    CONSTRAIN,
    END,
    MARKS,
    MESSAGE,
    NAMESPACE,
    OPENERS,
    RETURN,
    ROLE,
    START,
    read_harmony,
    read_header,
)
from .parser import CallMarks, MakeId, Reasoning
from .tools import Tool, ToolChoice, chosen

HARMONY_CALLS = CallSyntax(
    CallMarks(read_harmony, OPENERS, inside=MARKS),
    CallGrammar(named_body(f" {CONSTRAIN}json{MESSAGE}"), OPENERS[1], CALL),
)
"""Calls; ``HarmonyFormat.grammar`` defines their headers."""

HARMONY_REASONING = Reasoning((f"{CHANNEL}analysis{MESSAGE}",), (f"{CHANNEL}final{MESSAGE}",))

_ANSWER = (f"{CHANNEL}final", MESSAGE)
"""Texts in sequence, the content type between them, before the final message."""


def one_text_before_call(message: dict[str, Any]) -> dict[str, Any]:
    """The message without content, if it has reasoning and calls a function.

    gpt-oss's template accepts one text before a call, and writes it as reasoning: content is appended to that.
    """
    content, reasoning = message.get("content"), message.get("reasoning_content", message.get("reasoning"))
    if not (message.get("tool_calls") and content and reasoning):
        return message
    if not isinstance(content, str) or not isinstance(reasoning, str):
        return message
    return {**message, "content": "", "reasoning_content": f"{reasoning}\n{content}"}


@dataclass(frozen=True)
class HarmonyFormat(Format):
    """A format of harmony messages; see ``Format``."""

    grammar_takes_reasoning: ClassVar[bool] = True

    @property
    def end_token_ids(self) -> tuple[int, ...]:
        """Tokens that end a completion, even if the checkpoint does not list them."""
        return tuple(self.added_tokens[mark] for mark in (RETURN, CALL) if mark in self.added_tokens)

    def reasoning_open(self, prompt_text: str) -> bool:
        """Whether a prompt ends within a message of the channel ``analysis``."""
        header, text = open_message(prompt_text)
        return self.reasoning is not None and text is not None and read_header(header).is_reasoning

    def reasoning_ahead(self, prompt_text: str) -> tuple[str, ...] | None:
        """The texts after which the answer begins; None if a prompt ends within it."""
        header, text = open_message(prompt_text)
        return None if text is not None and read_header(header).channel == "final" else _ANSWER

    def parser(
        self,
        prompt_text: str,
        tools: Sequence[Tool] = (),
        *,
        make_id: MakeId | None = None,
        known_only: bool = False,
        awaits_answer: bool = False,
        **options: Any,
    ) -> AnswerParser:
        """A parser for one completion; arguments as for ``Format.parser``. Constrained text is parsed like any
        other."""
        return HarmonyParser(
            prompt_text,
            tools if self.calls else (),
            reasoning=self.reasoning is not None,
            make_id=make_id,
            known_only=known_only,
            awaits_answer=awaits_answer,
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
        """A grammar of all messages of a completion, in llguidance's Lark; arguments as for ``Format.grammar``.

        Reasoning is free. Generation stops after a call, so there is at most one.
        """
        left = chosen(tools, choice)
        if not left or self.calls is None:
            return None
        lark = _HarmonyLark(self.added_tokens, prepare)
        required = choice.mode == "required"
        last = lark.call(left) if required else f"({lark.call(left)} | {lark.answer()})"
        messages = f"{lark.earlier(not required)}* {last}"
        if open_message(prompt_text)[1] is None:
            return lark.start(messages)
        rest = f"{lark.text_until(END)} {lark.next_message} {messages}"
        return lark.start(rest if required else f"{rest} | ANY_TEXT")


class _HarmonyLark(Lark):
    """Rules of harmony messages. The prompt contains the first one's ``<|start|>`` and role."""

    def __init__(self, added_tokens: Mapping[str, int], prepare: Prepare | None) -> None:
        super().__init__(added_tokens, prepare)
        self.next_message = self.literal(f"{START}{ROLE}")
        constrain = self.literal(CONSTRAIN)
        kind = self.rule(f'" "? {constrain} ("json" | "code") | " json" | " code"')
        self._content_type = f"{kind}?"

    def _header(self, channels: Sequence[str], recipient: str = "", content_type: bool = False) -> str:
        """A header, with the recipient before or after the channel."""
        names = " | ".join(self.literal(channel) for channel in channels)
        end = f"{self._content_type if content_type else ''} {self.literal(MESSAGE)}"
        channel = f"{self.literal(CHANNEL)} ({names})"
        if not recipient:
            return f"{channel} {end}"
        to = self.literal(f" to={recipient}")
        return f"({channel} {to} | {to} {channel}) {end}"

    def call(self, tools: Sequence[Tool]) -> str:
        """A call of one of the tools."""
        calls = []
        for tool in tools:
            header = self._header(("commentary", "analysis"), f"{NAMESPACE}{tool.name}", content_type=True)
            calls.append(self.rule(f"{header} {self.json(tool.parameters)}"))
        return self.rule(" | ".join(calls))

    def answer(self) -> str:
        """A message that may end a completion."""
        final, preamble = self._header(("final",), content_type=True), self._header(("commentary",))
        return self.rule(f"({final} | {preamble}) ANY_TEXT")

    def earlier(self, with_text: bool) -> str:
        """A message followed by another one: reasoning, or also text."""
        header = self._header(("analysis",))
        if with_text:
            header = f"{header} | {self._header(('final',), content_type=True)} | {self._header(('commentary',))}"
        return self.rule(f"({header}) {self.text_until(END)} {self.next_message}")
