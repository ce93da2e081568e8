"""Conversations of the kinds that clients send, through every chat template of a folder.

``python benchmarks/chat_templates.py FOLDER`` renders each ``*.jinja`` file there and prints, for each kind of
conversation, in how many prompts everything that was said stands, how many templates refuse it (a server answers 400
with the reason), and which prompts lack something.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from transformers.tokenization_utils_base import PreTrainedTokenizerBase

import torch_pagoda  # noqa: F401
from torch_pagoda.runtime.requests.conversation import render_conversation

SPECIAL = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>", "unk_token": "<unk>"}
ASKED, SAID, TOLD, RESULT, OTHER, THOUGHT = "Zauber", "Yacht", "Xylophon", "Quitte", "Wachtel", "Vesuv"
USER = {"role": "user", "content": ASKED}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": f"look_{name}",
            "description": "Looks.",
            "parameters": {"type": "object", "properties": {"city": {"type": "string", "description": "Where."}}},
        },
    }
    for name in ("here", "there")
]

Render = Callable[..., str]


def call(index: int = 0, arguments: str | None = None) -> dict[str, Any]:
    name = TOOLS[index]["function"]["name"]
    written = json.dumps({"city": ("Ulm", "Bern")[index]}) if arguments is None else arguments
    return {"id": f"call_{index}abcdef", "type": "function", "function": {"name": name, "arguments": written}}


def calling(*calls: dict[str, Any], content: Any = None, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, "tool_calls": list(calls), **more}


def result(index: int = 0, content: Any = RESULT) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": f"call_{index}abcdef", "content": content}


def part(text: str) -> dict[str, str]:
    return {"type": "text", "text": text}


TOOL_TURN = [USER, calling(call()), result()]
KINDS: dict[str, tuple[list[dict[str, Any]], tuple[str, ...], dict[str, Any]]] = {
    "plain": ([USER, {"role": "assistant", "content": SAID}, {"role": "user", "content": OTHER}], (SAID, OTHER), {}),
    "system": ([{"role": "system", "content": TOLD}, USER], (TOLD,), {}),
    "developer": ([{"role": "developer", "content": TOLD}, USER], (TOLD,), {}),
    "tools": ([USER], ("look_here", "look_there"), {"tools": TOOLS}),
    "call, null": (TOOL_TURN[:2], ("Ulm", "look_here"), {}),
    "call, []": ([USER, calling(call(), content=[]), result()], ("Ulm", "look_here", RESULT), {}),
    "no calls": ([USER, {"role": "assistant", "content": SAID, "tool_calls": []}, USER], (SAID,), {}),
    "result": (TOOL_TURN, ("Ulm", "look_here", RESULT), {"tools": TOOLS}),
    "parallel": (
        [USER, calling(call(), call(1)), result(), result(1, OTHER)],
        ("Ulm", "Bern", "look_there", RESULT, OTHER),
        {"tools": TOOLS},
    ),
    "broken JSON": ([USER, calling(call(0, '{"city": "Ul')), result()], ("look_here", RESULT), {}),
    "parts": ([{"role": "user", "content": [part(ASKED), part(OTHER)]}], (OTHER,), {}),
    "result, parts": (
        [USER, calling(call()), result(0, [part(RESULT), part(OTHER)])],
        ("Ulm", RESULT, OTHER),
        {"tools": TOOLS},
    ),
    "prefill": (
        [USER, {"role": "assistant", "content": SAID}],
        (SAID,),
        {"add_generation_prompt": False, "continue_final_message": True},
    ),
    "reasoning": (
        [
            USER,
            calling(call(), content=SAID, reasoning_content=THOUGHT),
            result(),
            {"role": "user", "content": OTHER},
        ],
        ("Ulm", RESULT, OTHER),
        {"tools": TOOLS},
    ),
}
"""Name → messages, what has to stand in the prompt beside the question, and options."""


def judged(render: Render, tokenizer: Any, template: str, kind: str) -> tuple[str, str]:
    """``"in prompt"``, ``"refused"`` or ``"wrong"``, and the reason."""
    messages, words, options = KINDS[kind]
    try:
        text = render(tokenizer, messages, chat_template=template, **options)
    except ValueError as error:
        return "refused", str(error)
    lacks = [word for word in (ASKED, *words) if word not in text]
    # Values that went into the text as they are look like Python.
    raw = [mark for mark in ("{'city': 'Ulm'", "{'type': 'text'", '{"type": "text"') if mark in text]
    wrong = [f"lacks {word}" for word in lacks] + [f"has {mark}" for mark in raw]
    return ("wrong", ", ".join(wrong)) if wrong else ("in prompt", "")


class Templates:
    """Stands in for a tokenizer: renders the template that it is given."""

    apply_chat_template = PreTrainedTokenizerBase.apply_chat_template

    def __init__(self, special_tokens: dict[str, str]) -> None:
        self.special_tokens_map = special_tokens
        for name, value in special_tokens.items():
            setattr(self, name, value)

    def get_chat_template(self, chat_template: str, tools: Any = None) -> str:
        """The one that is given."""
        return chat_template


def table(render: Render, files: list[Path]) -> dict[str, dict[str, list[str]]]:
    """Kind → judgement → a line for each template."""
    found: dict[str, dict[str, list[str]]] = {kind: {"in prompt": [], "refused": [], "wrong": []} for kind in KINDS}
    tokenizer = Templates(SPECIAL)
    for file in files:
        for kind, lines in found.items():
            judgement, reason = judged(render, tokenizer, file.read_text(), kind)
            lines[judgement].append(f"{file.stem}: {reason}")
    return found


def main(arguments: list[str] | None = None) -> int:
    """Print the table; returns 1 where a prompt lacks something."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="of *.jinja files")
    parser.add_argument("--reasons", action="store_true", help="print why templates refuse")
    asked = parser.parse_args(arguments)
    found = table(render_conversation, sorted(asked.folder.glob("*.jinja")))
    print(f"{'':14}{'in prompt':>10}{'refused':>10}{'wrong':>10}")
    for kind, lines in found.items():
        print(f"{kind:14}" + "".join(f"{len(entries):10}" for entries in lines.values()))
    shown = ("wrong", "refused") if asked.reasons else ("wrong",)
    for kind, lines in found.items():
        for judgement in shown:
            for line in lines[judgement]:
                print(f"{kind}, {judgement}: {line}")
    return int(any(lines["wrong"] for lines in found.values()))


if __name__ == "__main__":
    sys.exit(main())
