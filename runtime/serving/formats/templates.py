"""What a chat template takes and writes, found by rendering probes in transformers' sandbox."""

from __future__ import annotations

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

_QUESTION = "probe question"
_CALL_ID = "probe0000"  # nine characters, as Mistral's templates demand


@dataclass(frozen=True)
class TemplateFacts:
    """What a chat template takes and writes.

    Attributes:
        takes_text: content may be a string.
        takes_parts: content may be a list of ``{"type": "text", "text": ...}``.
        takes_tools: it shows tools to the model.
        arguments_as_text: a call's arguments have to be JSON text; else they are an object.
        knows_developer: it has something to say about the role ``developer``.
        generation_prompt: what it writes where an answer begins.
        call: how it writes a call of the probe; None where it writes none.
    """

    takes_text: bool = True
    takes_parts: bool = False
    takes_tools: bool = False
    arguments_as_text: bool = False
    knows_developer: bool = False
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
    """The prompt of a conversation; raises what the template raises."""
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


def probe_template(tokenizer: Any, chat_template: str | None = None) -> TemplateFacts:
    """Facts about a chat template; those of one that takes plain text where it can render nothing.

    Args:
        tokenizer: whose template it is.
        chat_template: in place of the tokenizer's.
    """
    probe = _Probe(tokenizer, chat_template)
    text = probe(_user(_QUESTION))
    parts = probe(_user([{"type": "text", "text": _QUESTION}]))
    takes_text = text is not None and _QUESTION in text
    takes_parts = parts is not None and _QUESTION in parts and "'type'" not in parts and '"type"' not in parts
    content: Any = _QUESTION if takes_text or not takes_parts else [{"type": "text", "text": _QUESTION}]
    asked = _user(content)
    without, with_prompt = probe(asked) or "", probe(asked, add_generation_prompt=True) or ""
    prompt = with_prompt[len(without) :] if without and with_prompt.startswith(without) else ""
    call, as_text = _call(probe, asked)
    return TemplateFacts(
        takes_text=takes_text or not takes_parts,
        takes_parts=takes_parts,
        takes_tools=PROBE_NAME in (probe(asked, tools=[PROBE_TOOL], add_generation_prompt=True) or ""),
        arguments_as_text=as_text,
        knows_developer="developer" in template_source(tokenizer, chat_template),
        generation_prompt=prompt,
        call=call,
    )


class _Probe:
    def __init__(self, tokenizer: Any, chat_template: str | None) -> None:
        self._tokenizer = tokenizer
        self._chat_template = chat_template

    def __call__(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> str | None:
        """The rendered conversation; None where the template refuses it, for whatever reason."""
        try:
            return render(self._tokenizer, messages, chat_template=self._chat_template, **options)
        except Exception:
            return None


def _user(content: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": content}]


def _call(probe: _Probe, asked: list[dict[str, Any]]) -> tuple[str | None, bool]:
    """What the template writes for a call, and whether it needs the arguments as text."""
    as_object, as_text = PROBE_ARGUMENTS, '{"probe_key": "probe value"}'
    for arguments in (as_object, as_text):
        call = {"id": _CALL_ID, "type": "function", "function": {"name": PROBE_NAME, "arguments": arguments}}
        answer = {"role": "assistant", "content": "", "tool_calls": [call]}
        result = {"role": "tool", "tool_call_id": _CALL_ID, "name": PROBE_NAME, "content": "probe result"}
        for messages in ([*asked, answer], [*asked, answer, result]):
            rendered = probe(messages, tools=[PROBE_TOOL])
            if rendered is None:
                continue
            written = rendered[rendered.rfind(_QUESTION) + len(_QUESTION) :]
            # An object that was put into the text as it is looks like Python.
            if "probe value" in written and "{'probe_key'" not in written:
                return written, arguments is as_text
    return None, False


def template_source(tokenizer: Any, chat_template: str | None) -> str:
    """Text of the template, of all of them where a tokenizer has several."""
    source = chat_template if chat_template is not None else getattr(tokenizer, "chat_template", None)
    return "\n".join(map(str, source.values())) if isinstance(source, Mapping) else str(source or "")
