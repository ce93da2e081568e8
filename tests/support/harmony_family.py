"""A chat model for tests that answers in harmony messages: a tokenizer of bytes and marks, with a small template."""

from __future__ import annotations

from functools import cache
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

MARKS = ("<|start|>", "<|channel|>", "<|constrain|>", "<|message|>", "<|end|>", "<|call|>", "<|return|>")

TEMPLATE = """<|start|>system<|message|>Reasoning: {{ reasoning_effort or 'medium' }}<|end|>
{%- if tools %}<|start|>developer<|message|>{% for t in tools %}{{ t.function.name }} {% endfor %}<|end|>{% endif %}
{%- for m in messages %}
{%- if m.role == 'tool' %}<|start|>functions.f to=assistant<|channel|>commentary<|message|>{{ m.content }}<|end|>
{%- elif m.role != 'assistant' %}<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>
{%- elif m.tool_calls %}
{%- if m.content and m.thinking %}{{ raise_exception('both content and thinking') }}{% endif %}
{%- set text = m.content or m.thinking %}
{%- if text %}<|start|>assistant<|channel|>analysis<|message|>{{ text }}<|end|>{% endif %}
{%- set f = m.tool_calls[0].function -%}
<|start|>assistant to=functions.{{ f.name }}<|channel|>commentary json<|message|>{{ f.arguments | tojson }}<|call|>
{%- else %}<|start|>assistant<|channel|>final<|message|>{{ m.content }}<|end|>{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|start|>assistant{% endif %}"""
"""The shape of gpt-oss's: a call's reasoning is one text, of ``content`` or ``thinking``."""


@cache
def harmony_tokenizer() -> Any:
    """Tokens are bytes and the marks, which are special; ``<|return|>`` alone is known to end a text."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE(vocab={char: i for i, char in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(mark, special=True, normalized=False) for mark in MARKS])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|return|>")
    tokenizer.chat_template = TEMPLATE
    return tokenizer
