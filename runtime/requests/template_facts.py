"""Facts about a chat template, found by rendering probes in transformers' sandbox: its input forms and its output."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

PROBE_NAME = "probe_tool"
PROBE_ARGUMENTS = {"probe_key": "probe value"}
PROBE_TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": PROBE_NAME,
        "description": "A probe.",
        "parameters": {
            "type": "object",
            "properties": {"probe_key": {"type": "string", "description": "A probe."}},
            "required": ["probe_key"],
        },
    },
}

_QUESTION, _DETAIL = "probe question", "probe detail"
_LISTED = re.compile(r"""['"]text['"]\s*:\s*['"]probe """)
"""Matches content parts that the prompt contains as a list instead of as their text."""
_OTHER_ROLE = "proberole"
_SHORT_ID = "probe0000"  # nine characters, which Mistral's templates require
_OTHER_IDS = ("call_probe0000", "c1")


@dataclass(frozen=True)
class TemplateFacts:
    """Input forms that a chat template accepts, and the text that it writes.

    Attributes:
        takes_parts: roles whose content may be a list of several ``{"type": "text", "text": ...}``.
        refuses_text: roles whose content must be a list, of one part unless ``takes_parts`` has them.
        takes_tools: the template shows tools to the model.
        arguments_as_text: a call's arguments must be JSON text; else they are an object.
        knows_developer: the template has its own form for the role ``developer``.
        hides_calls: the template renders a conversation with a call, and leaves the call out.
        short_ids: ids of calls must be nine letters and digits.
        generation_prompt: text that the template writes where an answer begins.
        call: text that the template writes for the probe's call; None if it writes none.
    """

    takes_parts: frozenset[str] = frozenset()
    refuses_text: frozenset[str] = frozenset()
    takes_tools: bool = False
    arguments_as_text: bool = False
    knows_developer: bool = False
    hides_calls: bool = False
    short_ids: bool = False
    generation_prompt: str = ""
    call: str | None = None


def render(
    tokenizer: Any,
    messages: Sequence[Mapping[str, Any]],
    *,
    chat_template: str | None = None,
    tools: Sequence[Mapping[str, Any]] | None = None,
    add_generation_prompt: bool = False,
    **variables: Any,
) -> str:
    """Render the prompt of a conversation; exceptions of the template propagate."""
    return str(
        tokenizer.apply_chat_template(
            [dict(message) for message in messages],
            chat_template=chat_template,
            tools=[dict(tool) for tool in tools] if tools else None,
            add_generation_prompt=add_generation_prompt,
            tokenize=False,
            **variables,
        )
    )


def try_render(tokenizer: Any, messages: Sequence[Mapping[str, Any]], **options: Any) -> str | None:
    """Render as ``render`` does; None if the template rejects the conversation for any reason."""
    try:
        return render(tokenizer, messages, **options)
    except MemoryError:  # the bound on a request's template
        raise
    except Exception:
        return None


def probe_template(tokenizer: Any, chat_template: str | None = None) -> TemplateFacts:
    """Probe a chat template; the facts are those of a plain-text template if it renders nothing.

    Args:
        tokenizer: tokenizer with the template.
        chat_template: used instead of the tokenizer's.
    """
    return _Probe(tokenizer, chat_template).facts()


class _Probe:
    def __init__(self, tokenizer: Any, chat_template: str | None) -> None:
        self._tokenizer = tokenizer
        self._chat_template = chat_template
        self._question: Any = _QUESTION  # in the form that the template takes, like the others
        self._nothing: Any = ""

    def facts(self) -> TemplateFacts:
        takes_parts: set[str] = set()
        refuses_text: set[str] = set()
        self._find_content("user", takes_parts, refuses_text)
        if "user" in refuses_text:
            self._question = _parts(_QUESTION)
        asked = [_message("user", self._question)]
        without, with_prompt = self(asked) or "", self(asked, add_generation_prompt=True) or ""
        for role in ("system", "developer", "assistant"):
            self._find_content(role, takes_parts, refuses_text)
        if "assistant" in refuses_text:
            self._nothing = _parts("")
        call, as_text = self._call()
        arguments: Any = '{"probe_key": "probe value"}' if as_text else PROBE_ARGUMENTS
        self._find_content("tool", takes_parts, refuses_text, arguments)
        return TemplateFacts(
            takes_parts=frozenset(takes_parts),
            refuses_text=frozenset(refuses_text),
            takes_tools=PROBE_NAME in (self(asked, tools=[PROBE_TOOL], add_generation_prompt=True) or ""),
            arguments_as_text=as_text,
            knows_developer=self._knows_developer(),
            hides_calls=call is None
            and self([*asked, self._calls(arguments, _SHORT_ID)], tools=[PROBE_TOOL]) is not None,
            short_ids=call is not None and any(self._called(arguments, other) is None for other in _OTHER_IDS),
            generation_prompt=with_prompt[len(without) :] if without and with_prompt.startswith(without) else "",
            call=call,
        )

    def __call__(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> str | None:
        """Return the rendered conversation; None if the template rejects it."""
        return try_render(self._tokenizer, messages, chat_template=self._chat_template, **options)

    def _find_content(
        self, role: str, takes_parts: set[str], refuses_text: set[str], arguments: Any = PROBE_ARGUMENTS
    ) -> None:
        """Add a role to the set for the content forms that it accepts."""
        if self._shows(role, _parts(_QUESTION, _DETAIL), arguments):
            takes_parts.add(role)
        if self._shows(role, _QUESTION, arguments):
            return
        if role in takes_parts or self._shows(role, _parts(_QUESTION), arguments):
            refuses_text.add(role)

    def _shows(self, role: str, content: Any, arguments: Any) -> bool:
        """Return True if the content of a message with this role appears in the prompt."""
        asked, message = _message("user", self._other_question()), _message(role, content)
        if role == "tool":
            call = self._calls(arguments, _SHORT_ID)
            text = self([asked, call, message | {"tool_call_id": _SHORT_ID, "name": PROBE_NAME}], tools=[PROBE_TOOL])
        elif role == "assistant":
            text = self([asked, message, asked])
        else:
            text = self([message] if role == "user" else [message, asked])
        return text is not None and (
            _QUESTION in text
            and (isinstance(content, str) or len(content) == 1 or _DETAIL in text)
            and not (isinstance(content, list) and _LISTED.search(text))
        )

    def _other_question(self) -> Any:
        return "probe" if isinstance(self._question, str) else _parts("probe")

    def _knows_developer(self) -> bool:
        after = _message("user", self._other_question())
        for content in (_QUESTION, _parts(_QUESTION)):
            if self._shows("developer", content, PROBE_ARGUMENTS):
                own, other, system = (
                    self([_message(r, content), after]) for r in ("developer", _OTHER_ROLE, "system")
                )
                return other is None or system is None or other.replace(_OTHER_ROLE, "developer") != own
        return False

    def _call(self) -> tuple[str | None, bool]:
        """Return the text that the template writes for a call, and True if it needs the arguments as text."""
        for arguments in (PROBE_ARGUMENTS, '{"probe_key": "probe value"}'):
            if (written := self._called(arguments, _SHORT_ID)) is not None:
                return written, isinstance(arguments, str)
        return None, False

    def _calls(self, arguments: Any, call_id: str) -> dict[str, Any]:
        call = {"id": call_id, "type": "function", "function": {"name": PROBE_NAME, "arguments": arguments}}
        return _message("assistant", self._nothing) | {"tool_calls": [call]}

    def _called(self, arguments: Any, call_id: str) -> str | None:
        """Return the text that the template writes for a call; None if it omits the call or its arguments."""
        asked, call = _message("user", self._question), self._calls(arguments, call_id)
        result = _message("tool", "probe result") | {"tool_call_id": call_id, "name": PROBE_NAME}
        for messages in ([asked, call], [asked, call, result]):
            rendered = self(messages, tools=[PROBE_TOOL])
            if rendered is None:
                continue
            written = rendered[rendered.rfind(_QUESTION) + len(_QUESTION) :]
            # An object inserted into the text without conversion looks like Python.
            if "probe value" in written and "{'probe_key'" not in written:
                return written
        return None


def _message(role: str, content: Any) -> dict[str, Any]:
    return {"role": role, "content": content}


def _parts(*texts: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": text} for text in texts]


def template_source(tokenizer: Any, chat_template: str | None) -> str:
    """Return the text of the template; of all templates if the tokenizer has several."""
    source = chat_template if chat_template is not None else getattr(tokenizer, "chat_template", None)
    return "\n".join(map(str, source.values())) if isinstance(source, Mapping) else str(source or "")
