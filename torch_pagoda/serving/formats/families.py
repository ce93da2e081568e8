"""The tool and reasoning parsers by name: vLLM's ``--tool-call-parser`` and ``--reasoning-parser``."""

from __future__ import annotations

from collections.abc import Mapping

from .bracketed_calls import read_gemma, read_lfm2, read_minimax_m3
from .format import CallSyntax
from .grammar import CallGrammar, TaggedBody, json_body, named_body
from .harmony import HARMONY_CALLS, HARMONY_REASONING
from .json_calls import deepseek, marked, read_kimi, read_llama, read_mistral
from .parser import CallMarks, Reasoning, indexed_id, short_random_id
from .tagged_calls import function_tags, glm, hunyuan, invocations

_DSML = "｜DSML｜"
_KEYED = ("<arg_key", "</arg_key", "<arg_value", "</arg_value")
_MINIMAX_M2 = ("<minimax:tool_call>", "</minimax:tool_call>")

_HERMES = CallSyntax(
    CallMarks(marked(("<tool_call>", "</tool_call>")), ("<tool_call>",), inside=("</tool_call>",)),
    CallGrammar(json_body(), "<tool_call>\n", "\n</tool_call>", between="\n"),
)
_FUNCTION_TAGS = CallSyntax(
    CallMarks(
        function_tags(),
        ("<tool_call>", "<function="),
        inside=("</tool_call>", "</function>", "<parameter=", "</parameter>"),
        read_held=function_tags(lenient=False),
    ),
    CallGrammar(
        TaggedBody("<function={}>\n", "<parameter={}>\n", "\n</parameter>\n"),
        "<tool_call>\n",
        "</function>\n</tool_call>",
        between="\n",
    ),
)


def _deepseek_dsml(section: str) -> CallSyntax:
    opener, closer = f"<{_DSML}{section}>", f"</{_DSML}{section}>"
    body = TaggedBody(
        f'<{_DSML}invoke name="{{}}">\n',
        f'<{_DSML}parameter name="{{}}" string="false">',
        f"</{_DSML}parameter>\n",
        f'<{_DSML}parameter name="{{}}" string="true">',
    )
    return CallSyntax(
        CallMarks(
            invocations(opener, closer, _DSML),
            (opener,),
            inside=(closer, f"</{_DSML}invoke>", body.name, body.closer),
            read_held=invocations(opener, closer, _DSML, lenient=False),
        ),
        CallGrammar(body, "", f"</{_DSML}invoke>\n", f"{opener}\n", closer),
    )


def hunyuan_syntax(suffix: str = "") -> CallSyntax:
    """Hunyuan's notation; some tokenizers have a suffix in all its tags, such as ``:opensource``."""
    key, value = f"<arg_key{suffix}>{{}}</arg_key{suffix}>\n<arg_value{suffix}>", f"</arg_value{suffix}>\n"
    inside = ("</tool_calls", "<tool_call", "</tool_call", "<tool_sep", *_KEYED)
    return CallSyntax(
        CallMarks(
            hunyuan(suffix),
            (f"<tool_calls{suffix}>",),
            inside=tuple(f"{tag}{suffix}>" for tag in inside),
            read_held=hunyuan(suffix, lenient=False),
        ),
        CallGrammar(
            TaggedBody(f"{{}}<tool_sep{suffix}>\n", key, value),
            f"<tool_call{suffix}>",
            f"</tool_call{suffix}>\n",
            f"<tool_calls{suffix}>\n",
            f"</tool_calls{suffix}>",
        ),
    )


def _glm(line: str) -> CallSyntax:
    body = TaggedBody(f"{{}}{line}", f"<arg_key>{{}}</arg_key>{line}<arg_value>", f"</arg_value>{line}")
    return CallSyntax(
        CallMarks(
            glm(),
            ("<tool_call>",),
            inside=("</tool_call>", *(f"{tag}>" for tag in _KEYED)),
            read_held=glm(lenient=False),
        ),
        CallGrammar(body, "<tool_call>", "</tool_call>", between=line),
    )


def _deepseek_json(between: str, before: str = "", after: str = "", fenced: bool = False) -> CallSyntax:
    return CallSyntax(
        CallMarks(
            deepseek(fenced),
            ("<｜tool▁calls▁begin｜>",),
            inside=("<｜tool▁calls▁end｜>", "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>"),
        ),
        CallGrammar(
            named_body(between, before, after),
            "<｜tool▁call▁begin｜>",
            "<｜tool▁call▁end｜>",
            "<｜tool▁calls▁begin｜>",
            "<｜tool▁calls▁end｜>",
            "\n" if fenced else "",
        ),
    )


_MISTRAL_MARKS = CallMarks(read_mistral, ("[TOOL_CALLS]",), inside=("[ARGS]", "[CALL_ID]"))

MISTRAL_ARRAY = CallSyntax(
    _MISTRAL_MARKS,
    CallGrammar(json_body(), "", "", "[TOOL_CALLS][", "]", ", "),
    short_random_id,
)
"""Mistral's notation before tokenizer version 11."""

TOOL_PARSERS: Mapping[str, CallSyntax] = {
    "qwen3_coder": _FUNCTION_TAGS,
    "minimax_m2": CallSyntax(
        CallMarks(
            invocations(*_MINIMAX_M2),
            _MINIMAX_M2[:1],
            inside=(_MINIMAX_M2[1], "<invoke name=", "</invoke>", "<parameter name=", "</parameter>"),
            read_held=invocations(*_MINIMAX_M2, lenient=False),
        ),
        CallGrammar(
            TaggedBody('<invoke name="{}">\n', '<parameter name="{}">', "</parameter>\n"),
            "",
            "</invoke>\n",
            f"{_MINIMAX_M2[0]}\n",
            _MINIMAX_M2[1],
        ),
    ),
    "minimax_m3": CallSyntax(
        CallMarks(
            read_minimax_m3, ("]<]minimax[>[<tool_call>",), inside=("</tool_call>", "<invoke name=", "</invoke>")
        )
    ),
    "glm45": _glm("\n"),
    "glm47": _glm(""),
    "mistral": CallSyntax(_MISTRAL_MARKS, CallGrammar(named_body("[ARGS]"), "[TOOL_CALLS]"), short_random_id),
    "kimi_k2": CallSyntax(
        CallMarks(
            read_kimi,
            ("<|tool_calls_section_begin|>",),
            inside=(
                "<|tool_calls_section_end|>",
                "<|tool_call_begin|>",
                "<|tool_call_argument_begin|>",
                "<|tool_call_end|>",
            ),
        ),
        CallGrammar(
            named_body("<|tool_call_argument_begin|>", "functions.", indexed=True),
            "<|tool_call_begin|>",
            "<|tool_call_end|>",
            "<|tool_calls_section_begin|>",
            "<|tool_calls_section_end|>",
        ),
        indexed_id,
    ),
    "lfm2": CallSyntax(CallMarks(read_lfm2, ("<|tool_call_start|>",), inside=("<|tool_call_end|>",))),
    "gemma4": CallSyntax(CallMarks(read_gemma, ("<|tool_call>",), inside=("<tool_call|>", '<|"|>'))),
    "hy_v3": hunyuan_syntax(),
    "step3p5": _FUNCTION_TAGS,
    "hermes": _HERMES,
    "deepseek_v3": _deepseek_json("\n```json\n", "function<｜tool▁sep｜>", "\n```", fenced=True),
    "deepseek_v31": _deepseek_json("<｜tool▁sep｜>"),
    "deepseek_v32": _deepseek_dsml("function_calls"),
    "deepseek_v4": _deepseek_dsml("tool_calls"),
    "llama3_json": CallSyntax(
        CallMarks(read_llama, ("<|python_tag|>",), ("{", "[")),
        CallGrammar(json_body(between=', "parameters": '), "", between="; "),
    ),
    "gpt_oss": HARMONY_CALLS,
    "granite": CallSyntax(
        CallMarks(
            marked(("<|tool_call|>", ""), ("<tool_call>", ""), ("", "")), ("<|tool_call|>", "<tool_call>"), ("[",)
        ),
        CallGrammar(json_body(), "", "", "<|tool_call|>[", "]", ", "),
    ),
    "phi4_mini_json": CallSyntax(
        CallMarks(
            marked(("functools", ""), ("<|tool_call|>", "<|/tool_call|>")),
            ("functools[", "<|tool_call|>"),
            inside=("<|/tool_call|>",),
        ),
        CallGrammar(json_body(), "", "", "functools[", "]", ", "),
    ),
}
"""Syntax of calls by name of the tool parser."""

HARMONY = "gpt_oss"
"""Name of the parser, of both calls and reasoning, for ``HarmonyFormat``."""
_HARMONY_NAMES = ("gpt-oss", "harmony", "openai", "openai_gptoss")

TOOL_PARSER_ALIASES: Mapping[str, str] = {
    **dict.fromkeys(_HARMONY_NAMES, HARMONY),
    "qwen3_xml": "qwen3_coder",
    "mimo": "qwen3_coder",
    "qwen3": "hermes",
    "granite4": "hermes",
    "hunyuan": "hy_v3",
    "deepseek_r1": "deepseek_v3",
    "llama4_json": "llama3_json",
    "phi4": "phi4_mini_json",
}

_THINK = Reasoning(("<think>",), ("</think>",))
_THINK_OR_CALL = Reasoning(("<think>",), ("</think>",), ended_by_calls=True)

REASONING_PARSERS: Mapping[str, Reasoning] = {
    "qwen3": _THINK_OR_CALL,
    "deepseek_r1": _THINK_OR_CALL,
    "minimax_m2": _THINK_OR_CALL,
    "minimax_m3": Reasoning(("<mm:think>",), ("</mm:think>",), ended_by_calls=True),
    "glm45": _THINK_OR_CALL,
    "mistral": Reasoning(("[THINK]",), ("[/THINK]",), anywhere=True, ended_by_calls=True),
    "kimi_k2": _THINK_OR_CALL,
    "gemma4": Reasoning(("<|channel>thought\n",), ("<channel|>",), anywhere=True, ended_by_calls=True),
    "hy_v3": _THINK_OR_CALL,
    "step3p5": _THINK_OR_CALL,
    HARMONY: HARMONY_REASONING,
    "granite": Reasoning(
        ("Here is my thought process:", "Here's my thought process:"), ("Here is my response:", "Here's my response:")
    ),
}
"""Marks of reasoning by name of the reasoning parser."""

REASONING_PARSER_ALIASES: Mapping[str, str] = {
    **dict.fromkeys(_HARMONY_NAMES, HARMONY),
    **dict.fromkeys(("qwen3_coder", "qwen3_xml", "mimo", "hermes"), "qwen3"),
    **dict.fromkeys(("deepseek_v3", "deepseek_v31", "deepseek_v32", "deepseek_v4"), "deepseek_r1"),
    "glm47": "glm45",
    "hunyuan": "hy_v3",
    "lfm2": "qwen3",
    "nemotron_v3": "deepseek_r1",
    "olmo3": "deepseek_r1",
}
