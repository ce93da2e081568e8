"""Families of chat models for tests: a tokenizer of bytes, and templates that write calls as each family does."""

from __future__ import annotations

from functools import cache
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

EOS = "<|im_end|>"

_CHATML = """
{%- macro gemma(v) %}
{%- if v is string %}<|"|>{{ v }}<|"|>
{%- elif v is mapping %}{{ '{' }}
{%- for k, w in v.items() %}{{ k }}:{{ gemma(w) }}{{ '' if loop.last else ',' }}{% endfor %}{{ '}' }}
{%- elif v is sequence %}[{% for w in v %}{{ gemma(w) }}{{ '' if loop.last else ',' }}{% endfor %}]
{%- else %}{{ v | tojson }}{% endif %}{% endmacro %}

{%- macro elements(v) %}
{%- if v is string %}{{ v }}
{%- elif v is mapping %}{% for k, w in v.items() %}{{ element(k, w) }}{% endfor %}
{%- elif v is sequence %}{% for w in v %}{{ element('item', w) }}{% endfor %}
{%- else %}{{ v | tojson }}{% endif %}{% endmacro %}
{%- macro element(k, v) %}]<]minimax[>[<{{ k }}>{{ elements(v) }}]<]minimax[>[</{{ k }}>{% endmacro %}

{%- if tools %}<|im_start|>system
{% for t in tools %}{{ t | tojson }}
{% endfor %}<|im_end|>
{% endif %}
{%- for m in messages %}<|im_start|>{{ m.role }}
{% if m.reasoning_content %}OPENED{{ m.reasoning_content }}
DESOLC

{% endif %}{{ m.content }}{% if m.tool_calls %}

{% for c in m.tool_calls %}{% set f = c.function %}{{ SECTION if loop.first }}CALL{{ END if loop.last else BETWEEN }}
{%- endfor %}{% endif %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""

_TEXT = "{{ v if v is string else v | tojson }}"
_JSON = '{"name": "{{ f.name }}", "arguments": {{ f.arguments | tojson }}}'
_EACH = "{% for k, v in f.arguments.items() %}"
_KEYED = _EACH + "<arg_key>{{ k }}</arg_key>LINE<arg_value>" + _TEXT + "</arg_value>{{ 'LINE' }}{% endfor %}"
_DSML = (
    f'<｜DSML｜invoke name="{{{{ f.name }}}}">\n{_EACH}'
    '<｜DSML｜parameter name="{{ k }}" string="{{ "true" if v is string else "false" }}">'
    f"{_TEXT}</｜DSML｜parameter>{{{{ '\n' }}}}{{% endfor %}}</｜DSML｜invoke>\n"
)
_FUNCTION = (
    f"<tool_call>\n<function={{{{ f.name }}}}>\n{_EACH}<parameter={{{{ k }}}}>\n"
    f"{_TEXT}\n</parameter>\n{{% endfor %}}</function>\n</tool_call>"
)
_PYTHON = "{{ f.name }}(" + _EACH + "{{ k }}={{ PY }}{{ '' if loop.last else ', ' }}{% endfor %})"

# Name: call, section, its end, between two calls; added tokens.
_CALLS: dict[str, tuple[tuple[str, str, str, str], tuple[str, ...]]] = {
    "hermes": (("<tool_call>\n" + _JSON + "\n</tool_call>", "", "", "\n"), ("<tool_call>", "</tool_call>")),
    "qwen3_coder": ((_FUNCTION, "", "", "\n"), ("<tool_call>", "</tool_call>")),
    "minimax_m2": (
        (
            '<invoke name="{{ f.name }}">\n'
            + _EACH
            + '<parameter name="{{ k }}">'
            + _TEXT
            + "</parameter>\n{% endfor %}</invoke>\n",
            "<minimax:tool_call>\n",
            "</minimax:tool_call>",
            "",
        ),
        ("<minimax:tool_call>", "</minimax:tool_call>"),
    ),
    "minimax_m3": (
        (
            ']<]minimax[>[<invoke name="{{ f.name }}">{{ elements(f.arguments) }}]<]minimax[>[</invoke>\n',
            "]<]minimax[>[<tool_call>\n",
            "]<]minimax[>[</tool_call>",
            "",
        ),
        ("]<]minimax[>[",),
    ),
    "glm45": (
        (
            "<tool_call>{{ f.name }}\n" + _KEYED.replace("LINE", "\n") + "</tool_call>",
            "",
            "",
            "\n",
        ),
        ("<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
    ),
    "glm47": (
        ("<tool_call>{{ f.name }}" + _KEYED.replace("LINE", "") + "</tool_call>", "", "", ""),
        ("<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
    ),
    "mistral": (("[TOOL_CALLS]{{ f.name }}[ARGS]{{ f.arguments | tojson }}", "", "", ""), ("[TOOL_CALLS]", "[ARGS]")),
    "kimi_k2": (
        (
            "<|tool_call_begin|>{{ c.id }}<|tool_call_argument_begin|>{{ f.arguments | tojson }}<|tool_call_end|>",
            "<|tool_calls_section_begin|>",
            "<|tool_calls_section_end|>",
            "",
        ),
        (
            "<|tool_calls_section_begin|>",
            "<|tool_calls_section_end|>",
            "<|tool_call_begin|>",
            "<|tool_call_argument_begin|>",
            "<|tool_call_end|>",
        ),
    ),
    "lfm2": (
        (
            _PYTHON.replace("PY", "v | tojson | replace('true', 'True') if v is boolean else v | tojson"),
            "<|tool_call_start|>[",
            "]<|tool_call_end|>",
            ", ",
        ),
        ("<|tool_call_start|>", "<|tool_call_end|>"),
    ),
    "gemma4": (
        ("<|tool_call>call:{{ f.name }}{{ gemma(f.arguments) }}<tool_call|>", "", "", ""),
        ("<|tool_call>", "<tool_call|>", '<|"|>'),
    ),
    "hy_v3": (
        (
            "<tool_call>{{ f.name }}<tool_sep>\n" + _KEYED.replace("LINE", "\n") + "</tool_call>\n",
            "<tool_calls>\n",
            "</tool_calls>",
            "",
        ),
        ("<tool_calls>", "</tool_calls>", "<tool_call>", "</tool_call>", "<tool_sep>"),
    ),
    "deepseek_v3": (
        (
            "<｜tool▁call▁begin｜>function<｜tool▁sep｜>{{ f.name }}\n```json\n{{ f.arguments | tojson }}\n```"
            "<｜tool▁call▁end｜>",
            "<｜tool▁calls▁begin｜>",
            "<｜tool▁calls▁end｜>",
            "\n",
        ),
        (
            "<｜tool▁calls▁begin｜>",
            "<｜tool▁calls▁end｜>",
            "<｜tool▁call▁begin｜>",
            "<｜tool▁call▁end｜>",
            "<｜tool▁sep｜>",
        ),
    ),
    "deepseek_v31": (
        (
            "<｜tool▁call▁begin｜>{{ f.name }}<｜tool▁sep｜>{{ f.arguments | tojson }}<｜tool▁call▁end｜>",
            "<｜tool▁calls▁begin｜>",
            "<｜tool▁calls▁end｜>",
            "",
        ),
        (
            "<｜tool▁calls▁begin｜>",
            "<｜tool▁calls▁end｜>",
            "<｜tool▁call▁begin｜>",
            "<｜tool▁call▁end｜>",
            "<｜tool▁sep｜>",
        ),
    ),
    "deepseek_v32": (
        (_DSML, "<｜DSML｜function_calls>\n", "</｜DSML｜function_calls>", ""),
        ("｜DSML｜",),
    ),
    "deepseek_v4": ((_DSML, "<｜DSML｜tool_calls>\n", "</｜DSML｜tool_calls>", ""), ("｜DSML｜",)),
    "llama3_json": (
        ('{"name": "{{ f.name }}", "parameters": {{ f.arguments | tojson }}}', "", "", "; "),
        ("<|python_tag|>",),
    ),
    "phi4_mini_json": ((_JSON, "functools[", "]", ", "), ()),
    "granite": ((_JSON, "<|tool_call|>[", "]", ", "), ("<|tool_call|>",)),
}

FAMILIES = tuple(_CALLS)
"""Names of tool parsers that have a template here."""

_THINK = {
    "minimax_m3": ("<mm:think>", "</mm:think>"),
    "mistral": ("[THINK]", "[/THINK]"),
    "gemma4": ("<|channel>thought\n", "<channel|>"),
    "granite": ("Here is my thought process:", "Here is my response:"),
}


def chat_template(family: str) -> str:
    """The template of a family."""
    (call, section, end, between), _ = _CALLS[family]
    opened, closed = _THINK.get(family, ("<think>\n", "</think>"))
    text = _CHATML.replace("DESOLC", closed).replace("OPENED", opened)
    for place, written in (("SECTION", section), ("BETWEEN", between), ("END", end)):
        text = text.replace(place, repr(written))
    return text.replace("CALL", call)


@cache
def chat_tokenizer(family: str, special_marks: bool = False) -> Any:
    """A tokenizer whose tokens are bytes and the family's marks, which may be special tokens, with its template."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE(vocab={char: i for i, char in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([EOS, "<|im_start|>"])
    _, marks = _CALLS[family]
    think = [mark.strip() for mark in _THINK.get(family, ("<think>", "</think>")) if " " not in mark]
    backend.add_tokens([AddedToken(mark, special=special_marks, normalized=False) for mark in (*marks, *think)])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=EOS)
    tokenizer.chat_template = chat_template(family)
    return tokenizer
