"""Harmony, the notation of gpt-oss: marks and headers of its messages, and the calls in them.

``<|start|>assistant<|channel|>analysis<|message|>…<|end|>`` is reasoning, the channel ``final`` is the answer, and
``<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>{…}<|call|>`` is a call; its recipient may also
stand behind the role. Without a recipient, ``commentary`` is text for the user. (OpenAI's harmony, docs/format.md.)
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from .json_calls import object_of
from .source import Malformed, ParsedCall, Source, Steps
from .tools import Tool

START, CHANNEL, CONSTRAIN, MESSAGE = "<|start|>", "<|channel|>", "<|constrain|>", "<|message|>"
END, CALL, RETURN = "<|end|>", "<|call|>", "<|return|>"
MARKS = (START, CHANNEL, CONSTRAIN, MESSAGE, END, CALL, RETURN)
ENDS = (END, CALL, RETURN)
"""Tokens that end a message; generation stops at the last two."""
CHANNELS = ("analysis", "commentary", "final")
ROLE = "assistant"
NAMESPACE = "functions."
OPENERS = (f" to={NAMESPACE}", f"{CHANNEL}commentary to={NAMESPACE}", f"{CHANNEL}analysis to={NAMESPACE}")

_ROLE_NAME = re.compile(r"\s*([^\s<:]*)")
_CHANNEL_NAME = re.compile(rf"{re.escape(CHANNEL)}\s*([a-z]*)")
_RECIPIENT = re.compile(r"(?<!\S)to=((?:(?!<\|)\S)*)")
_TO_NOBODY = ("", "assistant", "user", "all")


@dataclass(frozen=True)
class Header:
    """The text between ``<|start|>`` and ``<|message|>``.

    Attributes:
        role: role of the author; "" if left out.
        channel: the first one named, or "".
        recipient: a function, or another tool; "" for none.
    """

    role: str
    channel: str
    recipient: str

    @property
    def is_reasoning(self) -> bool:
        """The message is neither for the user nor a call of a function."""
        return self.channel == "analysis" or bool(self.recipient) or self.role not in ("", ROLE)


def read_header(text: str) -> Header:
    """Parse the header of a message; other parts, such as a content type, are ignored."""
    role, channel, recipient = _ROLE_NAME.match(text), _CHANNEL_NAME.search(text), _RECIPIENT.search(text)
    to = recipient[1] if recipient else ""
    name = role[1] if role else ""
    return Header(
        "" if name.startswith("to=") else name, channel[1] if channel else "", "" if to in _TO_NOBODY else to
    )


def is_begun_header(text: str) -> bool:
    """Whether text is exactly a truncated header."""
    *words, last = re.sub("|".join(map(re.escape, MARKS)), " ", text).split() or [""]
    known = (*CHANNELS, ROLE, "to=", "json", "code")
    return all(word in known for word in words) and any(word.startswith(last) for word in known)


def function_of(recipient: str, tools: Sequence[Tool]) -> str | None:
    """Name of the function that a recipient names; None for others, such as a built-in tool."""
    if recipient.startswith(NAMESPACE):
        return recipient.removeprefix(NAMESPACE)
    return recipient if any(tool.name == recipient for tool in tools) else None


def message_end(source: Source) -> Steps[bool]:
    """Skip the mark that ends a message here; returns False, without skipping, if more text follows it.

    So text may contain such a mark, as text about the format does.
    """
    start = source.pos
    mark = yield from source.accept(*ENDS)
    yield from source.space()
    if source.at_end or (yield from source.peek(START, *((CHANNEL,) if mark else beginnings()))) is not None:
        return True
    source.pos = start
    return False


def beginnings() -> tuple[str, ...]:
    """Texts that begin a message after one without an end mark."""
    return tuple(f"{CHANNEL}{channel}" for channel in CHANNELS)


def read_arguments(source: Source, name: str) -> Steps[ParsedCall]:
    """The call of a function, from behind ``<|message|>`` to the end of its message."""
    yield from source.space()
    if not source.at_end and (yield from source.peek(*ENDS)) is not None:
        arguments = {}
    else:
        arguments = object_of((yield from source.json()))
    yield from source.stray_closers(*ENDS, START, CHANNEL)
    if not (yield from message_end(source)):
        raise Malformed("text after the arguments of a call")
    return ParsedCall(name, arguments)


def read_harmony(source: Source, tools: Sequence[Tool]) -> Steps[None]:
    """A call by itself, from its recipient on."""
    opener = yield from source.expect(*OPENERS)
    rest, _ = yield from source.until(MESSAGE)
    name = read_header(f"{opener}{rest}").recipient.removeprefix(NAMESPACE)
    yield [(yield from read_arguments(source, name))]
