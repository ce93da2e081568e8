"""Conversations reach the prompt in whatever form a template takes them, or are refused by name."""

from __future__ import annotations

from typing import Any

import pytest
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from torch_pagoda.runtime.requests import template_views
from torch_pagoda.runtime.requests.conversation import render_conversation
from torch_pagoda.runtime.requests.template_facts import TemplateFacts, probe_template
from torch_pagoda.runtime.requests.template_messages import ConversationError


def loop(content: str = "{{ m.content }}", calls: str = "", *, head: str = "", role: str = "{{ m.role }}") -> str:
    each = f"{{% for c in m.tool_calls or [] %}}{calls}{{% endfor %}}"
    prompt = "{% if add_generation_prompt %}<assistant>{% endif %}"
    return f"{head}{{% for m in messages %}}<{role}>{content}{each}{{% endfor %}}{prompt}"


CALLS = "[{{ c.function.name }} {{ c.function.arguments | tojson }}]"
TOOLS = "{{ tools | tojson if tools }}"
USER = {"role": "user", "content": "q"}
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE()), bos_token="<s>", eos_token="</s>")


def call(arguments: Any = '{"city": "Ulm"}', call_id: str = "c1") -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": "look", "arguments": arguments}}


def turn(content: Any = None, *calls: Any, call_id: str = "c1") -> list[dict[str, Any]]:
    called = {"role": "assistant", "content": content, "tool_calls": list(calls or [call()])}
    return [USER, called, {"role": "tool", "tool_call_id": call_id, "content": "rain"}]


def test_content_null_beside_calls_is_an_empty_text(tokenizer):
    template = loop("{{ m['content'] + ' ' }}", CALLS)
    expected = '<user>q <assistant> [look {"city": "Ulm"}]<tool>rain <assistant>'
    assert render_conversation(tokenizer, turn(), chat_template=template) == expected


@pytest.mark.parametrize("written", ["{{ 'x' + c.function.arguments }}", "{{ c.function.arguments }}"])
def test_arguments_are_text_where_the_template_writes_them_as_they_are(tokenizer, written):
    template = loop(calls="{{ c.function.name }}" + written)
    assert '{"city": "Ulm"}' in render_conversation(tokenizer, turn(), chat_template=template)
    sent_as_object = turn(None, call({"city": "Ulm"}))
    assert '{"city": "Ulm"}' in render_conversation(tokenizer, sent_as_object, chat_template=template)


def test_broken_arguments_of_an_earlier_call_do_not_end_the_conversation(tokenizer):
    broken = turn(None, call('{"city": "Ul'))
    assert "[look {}]<tool>rain" in render_conversation(tokenizer, broken, chat_template=loop(calls=CALLS))
    as_text = loop(calls="{{ c.function.name + c.function.arguments }}")
    assert 'look{"city": "Ul<tool>rain' in render_conversation(tokenizer, broken, chat_template=as_text)


@pytest.mark.parametrize("empty", [[], None])
def test_empty_tool_calls_are_none(tokenizer, empty):
    template = loop("{% if m.tool_calls is defined %}{{ m.tool_calls[0] }}{% else %}{{ m.content }}{% endif %}")
    messages = [USER, {"role": "assistant", "content": "A", "tool_calls": empty}, USER]
    assert render_conversation(tokenizer, messages, chat_template=template).startswith("<user>q<assistant>A<user>q")


def test_a_result_has_the_name_of_its_function(tokenizer):
    template = loop("{{ m.name + ': ' if m.role == 'tool' }}{{ m.content }}", CALLS)
    assert "<tool>look: rain" in render_conversation(tokenizer, turn(), chat_template=template)


PARTS = "{% for p in m.content %}{{ p.text }};{% endfor %}"
FIRST_PART = "{{ m.content[0].text }}"


@pytest.mark.parametrize(
    ("content", "text", "parts"),
    [(PARTS, "a;", "a;b;"), (FIRST_PART, "a", "a\nb"), ("{{ m.content }}", "a", "a\nb")],
)
def test_text_and_parts_come_as_the_template_takes_them(tokenizer, content, text, parts):
    two = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    for sent, expected in (("a", text), (two[:1], text), (two, parts)):
        messages = [{"role": role, "content": sent} for role in ("system", "user", "assistant", "user")]
        found = render_conversation(tokenizer, messages, chat_template=loop(content))
        assert found == "".join(f"<{m['role']}>{expected}" for m in messages) + "<assistant>"


def test_a_role_that_takes_text_alone_gets_text(tokenizer):
    template = loop("{{ m.content + '.' if m.role == 'system' else m.content[0].text }}")
    messages = [{"role": "system", "content": "s"}, USER]
    assert render_conversation(tokenizer, messages, chat_template=template) == "<system>s.<user>q<assistant>"


@pytest.mark.parametrize(
    ("template", "role"),
    [
        (loop(), "system"),
        (loop(head="{# developer #}You help a developer."), "system"),
        (loop("{% if m.role != 'developer' %}{{ m.content }}{% endif %}"), "system"),
        (loop("{% if m.role == 'developer' %}Obey: {% endif %}{{ m.content }}"), "developer"),
        (loop("{{ raise_exception('no') if m.role == 'system' }}{{ m.content }}"), "developer"),
    ],
)
def test_a_developer_speaks_as_the_system_where_the_template_does_not_know_the_role(tokenizer, template, role):
    messages = [{"role": "developer", "content": "d"}, USER]
    found = render_conversation(tokenizer, messages, chat_template=template)
    assert f"<{role}>" in found and "d<user>" in found


SHORT = "{% if (c.id | length) != 9 %}{{ raise_exception('ids have nine') }}{% endif %}" + CALLS + "{{ c.id }}"


def test_ids_are_short_where_the_template_refuses_others(tokenizer):
    template = loop("{{ m.content }}{{ m.tool_call_id }}", SHORT)
    found = render_conversation(
        tokenizer, turn(None, call(call_id="call_abcdef"), call_id="call_abcdef"), chat_template=template
    )
    made = found.partition("]")[2][:9]
    assert made.isalnum() and f"rain{made}" in found
    assert "call_abcdef" in render_conversation(
        tokenizer,
        turn(None, call(call_id="call_abcdef"), call_id="call_abcdef"),
        chat_template=loop(calls=CALLS + "{{ c.id }}"),
    )


@pytest.mark.parametrize("content", ["{{ m.content }}", PARTS.replace(";", "")])
def test_calls_are_text_where_the_template_leaves_them_out(tokenizer, content):
    calls = '[{"name": "look", "arguments": {"city": "Ulm"}}]'
    found = render_conversation(tokenizer, turn(), chat_template=loop(content))
    assert found == f"<user>q<assistant>{calls}<tool>rain<assistant>"
    found = render_conversation(tokenizer, turn("Let me look."), chat_template=loop())
    assert f"<assistant>Let me look.\n{calls}<tool>" in found


LATER = {"role": "system", "content": "s"}
ONE_CALL = loop("{{ m.content }}{% if m.tool_calls %}{% set c = m.tool_calls[0] %}" + CALLS + "{% endif %}")
FIRST_ARGUMENTS = loop(calls="{{ c.function.name }}{{ c.function.arguments | tojson if loop.first }}")
FIRST_ONLY = loop("{% if m.role != 'system' or loop.first %}{{ m.content }}{% endif %}")


@pytest.mark.parametrize(
    ("template", "messages", "options", "field"),
    [
        (loop(calls=CALLS), [USER], {"tools": [TOOL]}, "tools"),
        (loop(), [USER], {"documents": [{"title": "t", "text": "x"}]}, "documents"),
        (ONE_CALL, turn(None, call(), call(call_id="c2")), {}, "messages[1].tool_calls"),
        (FIRST_ARGUMENTS, turn(None, call(), call(call_id="c2")), {}, "messages[1].tool_calls"),
        (loop("{% if m.role != 'tool' %}{{ m.content }}{% endif %}", CALLS), turn(), {}, "messages[2].content"),
        (FIRST_ONLY, [USER, LATER, USER], {}, "messages[1].content"),
        ("{{ messages[0].content }}", [USER, {"role": "assistant", "content": "a"}], {}, "messages[1].content"),
        (
            loop(calls=CALLS),
            turn()[:2],
            {"add_generation_prompt": False, "continue_final_message": True},
            "messages[1]",
        ),
    ],
)
def test_what_a_template_would_leave_out_is_refused_by_name(tokenizer, template, messages, options, field):
    for _ in range(2):  # found out, and remembered
        with pytest.raises(ConversationError) as caught:
            render_conversation(tokenizer, messages, chat_template=template, **options)
        assert caught.value.field == field and str(caught.value).startswith(field)
    named = [f"input[{i}]" for i in range(len(messages))]
    with pytest.raises(ConversationError) as caught:
        render_conversation(tokenizer, messages, "input", places=named, chat_template=template, **options)
    assert caught.value.field == field.replace("messages", "input")


@pytest.mark.parametrize(
    ("template", "messages", "options"),
    [
        (loop(head=TOOLS), [USER], {"tools": [TOOL]}),
        (loop(head="{{ tools[0].name if tools }}"), [USER], {"tools": [{"name": "look"}]}),
        (loop("{{ m.content | replace('/no_think', '') }}"), [{"role": "user", "content": "q /no_think"}], {}),
        (loop("{% if not m.tool_calls %}{{ m.content }}{% endif %}", CALLS), turn("Let me look."), {}),
        (FIRST_ONLY, [LATER, USER], {}),
        (loop(), [{"role": "user", "content": " "}, {"role": "assistant", "content": ""}, USER], {}),
    ],
)
def test_what_a_template_may_do_is_not_refused(tokenizer, template, messages, options):
    assert render_conversation(tokenizer, messages, chat_template=template, **options)


def test_a_template_is_probed_once_and_a_shape_once(tokenizer, monkeypatch):
    rendered = []
    apply = type(tokenizer).apply_chat_template

    def counted(self, messages, **options):
        rendered.append(messages)
        return apply(self, messages, **options)

    monkeypatch.setattr(type(tokenizer), "apply_chat_template", counted)
    template = loop(head="{# once #}")
    render_conversation(tokenizer, [USER], chat_template=template)
    assert len(rendered) > 10
    rendered.clear()
    render_conversation(tokenizer, [{"role": "user", "content": "other"}], chat_template=template)
    assert rendered == [[{"role": "user", "content": "other"}]]
    for i in range(2 * template_views._MOST_TEMPLATES):
        render_conversation(tokenizer, [USER], chat_template=loop(head=f"{{# {i} #}}"))
    assert len(template_views._TEMPLATES[tokenizer]) == template_views._MOST_TEMPLATES


ENDS: dict[str, Any] = {"hides_calls": True, "generation_prompt": "<assistant>"}
ALL = frozenset({"system", "developer", "user", "assistant"})


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        (loop(), TemplateFacts(**ENDS)),
        (loop(PARTS), TemplateFacts(takes_parts=ALL, refuses_text=ALL, **ENDS)),
        (loop(FIRST_PART), TemplateFacts(refuses_text=ALL, **ENDS)),
        (loop(head=TOOLS), TemplateFacts(takes_tools=True, **ENDS)),
        ("{{ raise_exception('no') }}", TemplateFacts()),
        ("{{ ''.__class__.__mro__ }}", TemplateFacts()),
    ],
)
def test_facts_are_found_by_probes(tokenizer, template, expected):
    found = probe_template(tokenizer, template)
    without_tool = {name: getattr(found, name) - {"tool"} for name in ("takes_parts", "refuses_text")}
    assert TemplateFacts(**{**vars(found), **without_tool}) == expected
