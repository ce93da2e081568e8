"""Answers as models write them, with their flaws, whole and in every cut."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from torch_pagoda.serving.formats import (
    ContentDelta,
    Event,
    ReasoningDelta,
    ToolCall,
    check_tools,
    merge_events,
)
from torch_pagoda.serving.formats.families import REASONING_PARSERS, TOOL_PARSERS
from torch_pagoda.serving.formats.parser import Parser

TOOLS = check_tools(
    [
        {
            "type": "function",
            "function": {
                "name": "weather",
                "parameters": {
                    "type": "object",
                    "properties": {
                        "city": {"type": "string"},
                        "days": {"type": "integer"},
                        "unit": {"anyOf": [{"type": "string"}, {"type": "null"}]},
                        "list": {"type": "array"},
                        "more": {"type": "object"},
                    },
                },
            },
        },
        {"type": "function", "function": {"name": "now"}},
    ]
)

CITY = {"city": "Köln"}
WEATHER = ("weather", CITY)
NOW: tuple[str, dict[str, Any]] = ("now", {})


def events_of(tool_parser: str, text: str, pieces: list[str], **options: Any) -> tuple[list[Event], int]:
    reasoning = REASONING_PARSERS.get(options.pop("reasoning", "qwen3"))
    parser = Parser(reasoning, TOOL_PARSERS[tool_parser].marks, TOOLS, make_id=lambda name, i: str(i), **options)
    events = [event for piece in pieces for event in parser.feed(piece)]
    return merge_events([*events, *parser.finish()]), parser.malformed


def check(tool_parser: str, text: str, expected: list[Any], malformed: int = 0, **options: Any) -> None:
    """The events of the text: strings are content, lists of one string reasoning, pairs calls."""
    wanted: list[Event] = []
    for entry in expected:
        if isinstance(entry, str):
            wanted.append(ContentDelta(entry))
        elif isinstance(entry, list):
            wanted.append(ReasoningDelta(entry[0]))
        else:
            index = sum(isinstance(event, ToolCall) for event in wanted)
            call_id = entry[2] if len(entry) > 2 else str(index)
            wanted.append(ToolCall(call_id, entry[0], json.dumps(entry[1], ensure_ascii=False)))
    assert events_of(tool_parser, text, [text], **options) == (wanted, malformed)
    draw = random.Random(0)
    for pieces in (list(text), *([text[:i], text[i:]] for i in range(len(text)))):
        assert events_of(tool_parser, text, pieces, **options) == (wanted, malformed), pieces
    for _ in range(20):
        cuts = sorted(draw.randrange(len(text) + 1) for _ in range(5))
        pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
        assert events_of(tool_parser, text, pieces, **options) == (wanted, malformed), pieces


HERMES = '<tool_call>\n{"name": "weather", "arguments": {"city": "Köln"}}\n</tool_call>'
TAGS = "<tool_call>\n<function=weather>\n<parameter=city>\nKöln\n</parameter>\n</function>\n</tool_call>"

DEEPSEEK_V3 = (
    "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>weather\n"
    '```json\n{"city": "Köln"}\n```<｜tool▁call▁end｜>\n'
    "<｜tool▁call▁begin｜>function<｜tool▁sep｜>now\n```json\n{}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
)
DSML = (
    "<｜DSML｜SECTION>\n"
    '<｜DSML｜invoke name="weather">\n'
    '<｜DSML｜parameter name="city" string="true">Köln</｜DSML｜parameter>\n'
    '<｜DSML｜parameter name="days" string="false">3</｜DSML｜parameter>\n'
    "</｜DSML｜invoke>\n"
    '<｜DSML｜invoke name="now">\n</｜DSML｜invoke>\n'
    "</｜DSML｜SECTION>"
)
M3 = (
    "NS<tool_call>\n"
    'NS<invoke name="weather">NS<city>KölnNS</city>NS<days>3NS</days>NS</invoke>\n'
    'NS<invoke name="now">NS</invoke>\n'
    "NS</tool_call>"
).replace("NS", "]<]minimax[>[")


@pytest.mark.parametrize(
    "tool_parser, text, expected",
    [
        ("hermes", f"Sure.\n\n{HERMES}\n{HERMES}", ["Sure.", WEATHER, WEATHER]),
        (
            "hermes",
            f"<think>\nhm\n</think>\n\n{HERMES} and {HERMES} done",
            [["hm"], WEATHER, "and", WEATHER, "  done"],
        ),
        ("hermes", '<tool_call>{"name": "now"}</tool_call>', [NOW]),
        ("hermes", '<tool_call>{"name": "now", "arguments": "{}"}</tool_call>', [NOW]),
        ("qwen3_coder", f"Sure.\n\n{TAGS}\n{TAGS}\n", ["Sure.", WEATHER, WEATHER]),
        ("qwen3_coder", "<tool_call>\n<function=now>\n</function>\n</tool_call>", [NOW]),
        ("qwen3_coder", TAGS.removeprefix("<tool_call>\n"), [WEATHER]),
        ("step3p5", f"<think>\nhm\n</think>\n{TAGS}", [["hm"], WEATHER]),
        (
            "minimax_m2",
            '<minimax:tool_call>\n<invoke name="weather">\n<parameter name="city">Köln</parameter>\n'
            '<parameter name="days">3</parameter>\n</invoke>\n<invoke name="now">\n</invoke>\n</minimax:tool_call>',
            [("weather", {**CITY, "days": 3}), NOW],
        ),
        ("minimax_m3", f"I look.\n{M3}", ["I look.", ("weather", {**CITY, "days": 3}), NOW]),
        (
            "glm45",
            "\n<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Köln</arg_value>\n<arg_key>days</arg_key>\n"
            "<arg_value>3</arg_value>\n</tool_call>\n<tool_call>now\n</tool_call>",
            [("weather", {**CITY, "days": 3}), NOW],
        ),
        (
            "glm47",
            "Hm.<tool_call>weather<arg_key>city</arg_key><arg_value>Köln</arg_value></tool_call>"
            "<tool_call>now</tool_call>",
            ["Hm.", WEATHER, NOW],
        ),
        ("mistral", '[TOOL_CALLS]weather[ARGS]{"city": "Köln"}[TOOL_CALLS]now[ARGS]{}</s>', [WEATHER, NOW, "</s>"]),
        ("mistral", "[TOOL_CALLS]now[CALL_ID]Ab3dEf7h9[ARGS]{}", [(*NOW, "Ab3dEf7h9")]),
        (
            "mistral",
            '[TOOL_CALLS] [{"name": "weather", "arguments": {"city": "Köln"}}, {"name": "now"}]',
            [WEATHER, NOW],
        ),
        ("mistral", '[TOOL_CALLS]weather{"city": "Köln"}', [WEATHER]),
        (
            "kimi_k2",
            "Well.<|tool_calls_section_begin|><|tool_call_begin|>functions.weather:2<|tool_call_argument_begin|>"
            '{"city": "Köln"}<|tool_call_end|><|tool_call_begin|>functions.now:3<|tool_call_argument_begin|>{}'
            "<|tool_call_end|><|tool_calls_section_end|>",
            ["Well.", (*WEATHER, "functions.weather:2"), (*NOW, "functions.now:3")],
        ),
        (
            "lfm2",
            "<|tool_call_start|>[weather(city='K\\u00f6ln', days=3, unit=None), now()]<|tool_call_end|>Checking.",
            [("weather", {**CITY, "days": 3, "unit": None}), NOW, "Checking."],
        ),
        ("lfm2", '<|tool_call_start|>[{"name": "now", "arguments": {}}]<|tool_call_end|>', [NOW]),
        (
            "gemma4",
            '<|tool_call>call:weather{city:<|"|>Köln<|"|>,days:3,unit:null}<tool_call|><|tool_call>call:now{}<tool_call|>',
            [("weather", {**CITY, "days": 3, "unit": None}), NOW],
        ),
        (
            "hy_v3",
            "<tool_calls>\n<tool_call>weather<tool_sep>\n<arg_key>city</arg_key>\n<arg_value>Köln</arg_value>\n"
            "</tool_call>\n<tool_call>now<tool_sep>\n</tool_call>\n</tool_calls>",
            [WEATHER, NOW],
        ),
        ("deepseek_v3", f"<think>\nhm</think>\n\n{DEEPSEEK_V3}", [["hm"], WEATHER, NOW]),
        (
            "deepseek_v31",
            '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>weather<｜tool▁sep｜>{"city": "Köln"}<｜tool▁call▁end｜>'
            "<｜tool▁call▁begin｜>now<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
            [WEATHER, NOW],
        ),
        ("deepseek_v32", DSML.replace("SECTION", "function_calls"), [("weather", {**CITY, "days": 3}), NOW]),
        ("deepseek_v4", DSML.replace("SECTION", "tool_calls"), [("weather", {**CITY, "days": 3}), NOW]),
        ("llama3_json", '{"name": "weather", "parameters": {"city": "Köln"}}', [WEATHER]),
        ("llama3_json", '<|python_tag|>{"name": "now", "parameters": {}}; {"name": "now"}', [NOW, NOW]),
        (
            "phi4_mini_json",
            'functools[{"name": "weather", "arguments": {"city": "Köln"}}, {"name": "now"}]',
            [WEATHER, NOW],
        ),
        ("phi4_mini_json", '<|tool_call|>[{"name": "now", "arguments": {}}]<|/tool_call|>', [NOW]),
        ("granite", '<|tool_call|>[{"name": "weather", "arguments": {"city": "Köln"}}]', [WEATHER]),
        ("granite", '<tool_call>[{"name": "now", "arguments": {}}]', [NOW]),
        ("granite", '[{"name": "now", "arguments": {}}]', [NOW]),
    ],
)
def test_calls(tool_parser, text, expected):
    check(tool_parser, text, expected)


@pytest.mark.parametrize(
    "tool_parser, text, expected",
    [
        # The closer is missing, as the model stopped.
        ("hermes", HERMES.removesuffix("\n</tool_call>"), [WEATHER]),
        ("qwen3_coder", TAGS.removesuffix("\n</tool_call>"), [WEATHER]),
        ("deepseek_v3", DEEPSEEK_V3.partition("```<｜tool▁call▁end｜>")[0], [WEATHER]),
        ("glm47", "<tool_call>now</tool_call>\n", [NOW]),
        # Marks of the format stand within a value.
        (
            "hermes",
            '<tool_call>{"name": "weather", "arguments": {"city": "</tool_call>\\"}"}}</tool_call>',
            [("weather", {"city": '</tool_call>"}'})],
        ),
        (
            "qwen3_coder",
            TAGS.replace("Köln", "a\n</parameter>\nb</function>"),
            [("weather", {"city": "a\n</parameter>\nb</function>"})],
        ),
        (
            "lfm2",
            "<|tool_call_start|>[weather(city=')]<|tool_call_end|>')]",
            [("weather", {"city": ")]<|tool_call_end|>"})],
        ),
        # A line break inside a JSON string, which strict JSON refuses.
        (
            "hermes",
            '<tool_call>{"name": "weather", "arguments": {"city": "a\nb"}}</tool_call>',
            [("weather", {"city": "a\nb"})],
        ),
        # Nullable text.
        ("qwen3_coder", TAGS.replace("city", "unit").replace("Köln", "null"), [("weather", {"unit": None})]),
        ("qwen3_coder", TAGS.replace("city", "unit").replace("Köln", '"C"'), [("weather", {"unit": '"C"'})]),
        ("qwen3_coder", TAGS.replace("Köln", "null"), [("weather", {"city": "null"})]),
        # A tool that was not offered is the client's to refuse; but bare JSON is a call of one that was, or no call.
        ("hermes", '<tool_call>{"name": "other"}</tool_call>', [("other", {})]),
        ("llama3_json", '{"name": "other", "parameters": {}}', ['{"name": "other", "parameters": {}}']),
        ("llama3_json", '{"answer": [1, "}"]} is it', ['{"answer": [1, "}"]} is it']),
        ("llama3_json", 'So: {"name": "now"}', ['So: {"name": "now"}']),
        # Plain text that resembles marks.
        ("hermes", "a < b <tool <think> x  \n", ["a < b <tool <think> x  \n"]),
        ("hermes", "  \n indented", ["  \n indented"]),
        ("phi4_mini_json", "use functools.partial[0]", ["use functools.partial[0]"]),
    ],
)
def test_edges(tool_parser, text, expected):
    check(tool_parser, text, expected)


def tags(body: str) -> str:
    return f"<tool_call>\n<function=weather>\n{body}</function>\n</tool_call>"


def keyed(body: str) -> str:
    return f"<tool_call>weather{body}</tool_call>"


def invoked(body: str) -> str:
    return f'<minimax:tool_call>\n<invoke name="weather">\n{body}</invoke>\n</minimax:tool_call>'


BOTH = {"city": "Köln", "days": 3}


@pytest.mark.parametrize(
    "tool_parser, text, arguments",
    [
        ("qwen3_coder", tags("<parameter=city>\nKöln\n<parameter=days>\n3\n</parameter>\n"), BOTH),
        ("qwen3_coder", tags("<parameter=city>\nKöln\n</parameter>\n<parameter=days>\n3\n"), BOTH),
        ("qwen3_coder", tags("<parameter=city>\nKöln\n<parameter=days>\n3\n"), BOTH),
        ("qwen3_coder", tags("<parameter=city>\nKöln\n</parameter>\n").replace("</function>\n", ""), CITY),
        (
            "step3p5",
            tags("<parameter=city>\nKöln\n\n<parameter=days>\n3\n</parameter>\n"),
            BOTH,
        ),
        # Text about the format is text: on no line of its own, not declared, given before, or followed by more text.
        (
            "qwen3_coder",
            tags("<parameter=city>\na <parameter=days>\n3\n</parameter>\n"),
            {"city": "a <parameter=days>\n3"},
        ),
        (
            "qwen3_coder",
            tags("<parameter=city>\na\n<parameter=x>\n3\n</parameter>\n"),
            {"city": "a\n<parameter=x>\n3"},
        ),
        (
            "qwen3_coder",
            tags("<parameter=city>\na\n<parameter=city>\n3\n</parameter>\n"),
            {"city": "a\n<parameter=city>\n3"},
        ),
        ("qwen3_coder", tags("<parameter=city>\na\n</function>\nb\n</parameter>\n"), {"city": "a\n</function>\nb"}),
        (
            "glm47",
            keyed("<arg_key>city</arg_key><arg_value>Köln<arg_key>days</arg_key><arg_value>3</arg_value>"),
            BOTH,
        ),
        (
            "glm47",
            keyed("<arg_key>city</arg_key><arg_value>Köln</arg_value><arg_key>days</arg_key><arg_value>3"),
            BOTH,
        ),
        ("glm45", keyed("\n<arg_key>city</arg_key>\n<arg_value>Köln\n<arg_key>days</arg_key>\n<arg_value>3\n"), BOTH),
        (
            "hy_v3",
            "<tool_calls>\n<tool_call>weather<tool_sep>\n<arg_key>city</arg_key>\n<arg_value>Köln\n"
            "<arg_key>days</arg_key>\n<arg_value>3\n</tool_call>\n</tool_calls>",
            BOTH,
        ),
        ("minimax_m2", invoked('<parameter name="city">Köln\n<parameter name="days">3</parameter>\n'), BOTH),
        ("minimax_m2", invoked('<parameter name="city">Köln</parameter>\n<parameter name="days">3\n'), BOTH),
        (
            "deepseek_v32",
            DSML.replace("SECTION", "function_calls")
            .replace("</｜DSML｜parameter>", "")
            .replace('<｜DSML｜invoke name="now">\n</｜DSML｜invoke>\n', ""),
            BOTH,
        ),
    ],
)
def test_the_end_of_an_argument_may_be_missing(tool_parser, text, arguments):
    check(tool_parser, text, [("weather", arguments)])


@pytest.mark.parametrize(
    ("key", "text", "value"),
    [
        ("list", "['x', True, None]", ["x", True, None]),
        ("list", "('x', 1.5)", ["x", 1.5]),
        ("list", '["x", true]', ["x", True]),
        ("list", "null", None),
        ("list", "x, y", "x, y"),
        ("list", "['x', open()]", "['x', open()]"),
        ("list", "[" * 100 + "]" * 100, "[" * 100 + "]" * 100),
        ("more", "{'a': {'b': False}, 1: 2,}", {"a": {"b": False}, "1": 2}),
        ("more", "['a']", "['a']"),
        ("days", "null", None),
        ("days", "None", None),
        ("days", "+3", 3),
        ("days", "3.0", 3),
        ("days", "True", "True"),
        ("days", "3 days", "3 days"),
        ("city", "None", "None"),
        ("city", "['x']", "['x']"),
        ("unit", "None", "None"),
        ("unit", "null", None),
    ],
)
def test_a_value_is_of_its_declared_type(key, text, value):
    wanted = [("weather", {key: value})]
    check("qwen3_coder", tags(f"<parameter={key}>\n{text}\n</parameter>\n"), wanted)
    check("glm47", keyed(f"<arg_key>{key}</arg_key><arg_value>{text}</arg_value>"), wanted)
    check("minimax_m2", invoked(f'<parameter name="{key}">{text}</parameter>\n'), wanted)


CALL = '{"name": "weather", "arguments": {"city": "Köln"}}'


@pytest.mark.parametrize(
    "tool_parser, text, expected",
    [
        ("hermes", f"<tool_call>\n{CALL}\n{CALL}\n</tool_call>\nSo.", [WEATHER, WEATHER, "So."]),
        ("hermes", f"<tool_call>{CALL}, {CALL}{CALL}</tool_call>{HERMES}", [WEATHER] * 4),
        ("hermes", f"<tool_call>\n{CALL}}}\n</tool_call>\nSo.", [WEATHER, "So."]),
        ("hermes", f"<tool_call>\n{CALL}}}]\n{CALL}}}\n</tool_call>", [WEATHER, WEATHER]),
        ("hermes", f"<tool_call>\n{CALL}}}", [WEATHER]),
        ("hermes", f"<tool_call>\n{CALL}}} is it", [WEATHER, "} is it"]),
        ("hermes", f"<tool_call>\n{CALL}, and so", [WEATHER, ", and so"]),
        ("phi4_mini_json", f"<|tool_call|>[{CALL}]]<|/tool_call|>So.", [WEATHER, "So."]),
        ("phi4_mini_json", f"functools[{CALL}]]", [WEATHER]),
        ("granite", f"<|tool_call|>[{CALL}]}}", [WEATHER]),
        ("llama3_json", f"{CALL}}}; {CALL}}}", [WEATHER, WEATHER]),
        ("mistral", '[TOOL_CALLS]weather[ARGS]{"city": "Köln"}}[TOOL_CALLS]now[ARGS]{}}', [WEATHER, NOW]),
        ("mistral", f"[TOOL_CALLS][{CALL}]]", [WEATHER]),
        ("kimi_k2", "<|tool_calls_section_begin|><|tool_call_begin|>functions.weather:0<|tool_call_argument_begin|>"
         '{"city": "Köln"}}<|tool_call_end|><|tool_calls_section_end|>', [(*WEATHER, "functions.weather:0")]),
        ("deepseek_v3", DEEPSEEK_V3.replace("{}", "{}}"), [WEATHER, NOW]),
        ("deepseek_v31", "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>now<｜tool▁sep｜>{}}<｜tool▁call▁end｜>"
         "<｜tool▁calls▁end｜>", [NOW]),
        ("lfm2", "<|tool_call_start|>[now()]]<|tool_call_end|>", [NOW]),
    ],
)  # fmt: skip
def test_several_calls_and_brackets_between_two_marks(tool_parser, text, expected):
    check(tool_parser, text, expected)


def test_what_is_no_call_behind_a_call_is_content():
    check("hermes", f"<tool_call>{CALL}{{}}</tool_call>", [WEATHER, "{}</tool_call>"], malformed=1)


@pytest.mark.parametrize(
    "tool_parser, text, expected",
    [
        ("hermes", f"Let me look.\n{HERMES}\nDone now.", ["Let me look.", WEATHER, "\n\nDone now."]),
        ("hermes", f"a \n{HERMES}\n{HERMES}\n ", ["a", WEATHER, WEATHER]),
        ("hermes", f" \n{HERMES}\nb ", [WEATHER, "b "]),
        ("hermes", f"<think>x\n</think>\n\na\n{HERMES}\nb", [["x"], "a", WEATHER, "\n\nb"]),
        ("mistral", "a [THINK]x[/THINK] b [THINK] y[/THINK]\nc", ["a", ["x"], "  b", [" y"], " \nc"]),
        ("qwen3_coder", f"a\n\n{TAGS}\nb", ["a", WEATHER, "\n\n\nb"]),
        ("glm47", "a\n<tool_call>now</tool_call>\nb", ["a", NOW, "\n\nb"]),
        ("deepseek_v3", f"a\n{DEEPSEEK_V3} b", ["a", WEATHER, NOW, "\n b"]),
        ("minimax_m3", f"a\n{M3}\nb", ["a", ("weather", {**CITY, "days": 3}), NOW, "\n\nb"]),
    ],
)
def test_white_space_between_texts_is_kept(tool_parser, text, expected):
    check(tool_parser, text, expected, reasoning="mistral" if tool_parser == "mistral" else "qwen3")


@pytest.mark.parametrize(
    "tool_parser, text, expected",
    [
        ("hermes", '<tool_call>{"name": "now", "arguments": {"x": 1}</tool_call> ' + HERMES, [
            '<tool_call>{"name": "now", "arguments": {"x": 1}</tool_call>', WEATHER,
        ]),
        ("hermes", "<tool_call>not json</tool_call>", ["<tool_call>not json</tool_call>"]),
        ("hermes", 'a <tool_call>{"name": "now", "argu', ['a <tool_call>{"name": "now", "argu']),
        ("hermes", '<tool_call>{"arguments": {}}</tool_call>', ['<tool_call>{"arguments": {}}</tool_call>']),
        ("hermes", '<tool_call>{"name": "now", "arguments": [1]}</tool_call>', [
            '<tool_call>{"name": "now", "arguments": [1]}</tool_call>'
        ]),
        ("hermes", '<tool_call>{"name": "a b<c>"}</tool_call>', ['<tool_call>{"name": "a b<c>"}</tool_call>']),
        ("hermes", '<tool_call>{"name": "now", "arguments": {"x": NaN}}', [
            '<tool_call>{"name": "now", "arguments": {"x": NaN}}'
        ]),
        ("hermes", '<tool_call>{"name": "now", "arguments": {"x": 1e999}}', [
            '<tool_call>{"name": "now", "arguments": {"x": 1e999}}'
        ]),
        ("qwen3_coder", TAGS.partition("\n</parameter>")[0], [TAGS.partition("\n</parameter>")[0]]),
        ("minimax_m2", '<minimax:tool_call>\n</minimax:tool_call>', ["<minimax:tool_call>\n</minimax:tool_call>"]),
        ("deepseek_v3", DEEPSEEK_V3.replace("{}", "{]"), [
            WEATHER,
            "<｜tool▁call▁begin｜>function<｜tool▁sep｜>now\n```json\n{]\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        ]),
        ("lfm2", "<|tool_call_start|>[weather(city=open('x'))]<|tool_call_end|>", [
            "<|tool_call_start|>[weather(city=open('x'))]<|tool_call_end|>"
        ]),
        ("gemma4", "<|tool_call>call:weather{city:}<tool_call|>", ["<|tool_call>call:weather{city:}<tool_call|>"]),
        ("minimax_m3", M3.replace("</city>", "</town>"), None),
    ],
)  # fmt: skip
def test_a_malformed_call_is_content(tool_parser, text, expected):
    if expected is None:
        events, malformed = events_of(tool_parser, text, [text])
        assert (events[0], malformed) == (ContentDelta(text), 1)
    else:
        check(tool_parser, text, expected, malformed=1)


ARRAYS = {
    "mistral": "[TOOL_CALLS]" + json.dumps([{"name": "now"}, {"name": "weather", "arguments": CITY}]),
    "hermes": "<tool_call>" + json.dumps([{"name": "now"}, {"name": "weather", "arguments": CITY}]) + "</tool_call>",
    "lfm2": "<|tool_call_start|>[now(), weather(city='Köln')]<|tool_call_end|>",
}


@pytest.mark.parametrize("tool_parser", ARRAYS)
def test_an_array_holds_calls_or_is_content(tool_parser):
    text = ARRAYS[tool_parser]
    for known_only in (False, True):
        check(tool_parser, text + " So.", [NOW, WEATHER, "So."], known_only=known_only)
    other = text.replace("weather", "other")
    check(tool_parser, other + " So.", [NOW, ("other", CITY), "So."])
    check(tool_parser, other + " So.", [other + " So."], 1, known_only=True)
    if tool_parser != "lfm2":  # whose names are Python's
        nameless = text.replace("weather", "<>")
        check(tool_parser, nameless + " So.", [nameless + " So."], 1)
    empty = text[: text.index("[", 1) + 1] + "]" + text[text.rindex("]") + 1 :]
    check(tool_parser, empty + " So.", [empty + " So."], 1)


@pytest.mark.parametrize(
    "schema", [{"type": 5}, {"type": {"object": 1}}, {"type": [5, []]}, {"anyOf": [{"type": 5}]}]
)
@pytest.mark.parametrize(
    "tool_parser, text, value",
    [
        ("gemma4", "<|tool_call>call:f{x:{a:1}}<tool_call|>", {"a": 1}),
        ("gemma4", "<|tool_call>call:f{x:[1]}<tool_call|>", [1]),
        ("minimax_m3", "NS<tool_call>NS<invoke name=f>NS<x>NS<item>1NS</item>NS</x>NS</invoke>NS</tool_call>", [1]),
        ("glm47", "<tool_call>f<arg_key>x</arg_key><arg_value>[1]</arg_value></tool_call>", [1]),
    ],
)
def test_a_schema_that_says_nonsense_says_nothing(tool_parser, text, value, schema):
    declared = {"name": "f", "parameters": {"type": "object", "properties": {"x": schema}}}
    tools = check_tools([{"type": "function", "function": declared}])
    parser = Parser(None, TOOL_PARSERS[tool_parser].marks, tools, make_id=lambda name, i: str(i))
    text = text.replace("NS", "]<]minimax[>[")
    assert [*parser.feed(text), *parser.finish()] == [ToolCall("0", "f", json.dumps({"x": value}))]


def test_nothing_is_read_twice_or_recursed_into():
    for text in (
        "<tool_call>" * 4_000,
        '<tool_call>{"name": "now", "arguments": ' + '{"a":' * 100_000,
        "<tool_call>\n<function=now>\n" + "<parameter=a>\n</parameter>\n" * 3_000,
        "<tool_call>\n<function=now>\n<parameter=a>\n" + "</parameter>" * 3_000,
        " " * 200_000,
    ):
        for tool_parser in ("hermes", "qwen3_coder"):
            for pieces in ([text], [text[i : i + 40] for i in range(0, len(text), 40)]):
                events, _ = events_of(tool_parser, text, pieces)
                assert events == [ContentDelta(text)]


def test_halves_of_surrogate_pairs_become_replacement_characters():
    text = '[TOOL_CALLS][{"name": "now", "arguments": {"\\ude00": "\\ud83d é \\ud83d\\ude00"}, "id": "a\\ud83d"}]'
    (events, malformed) = events_of("mistral", "", [text])
    assert (events, malformed) == ([ToolCall("a\ufffd", "now", '{"\ufffd": "\ufffd é 😀"}')], 0)


@pytest.mark.parametrize(
    "reasoning, text, expected, is_open",
    [
        ("qwen3", "hm\n</think>\n\nHi", [["hm"], "Hi"], True),
        ("qwen3", "<think>\nhm\n</think>\n\nHi", [["hm"], "Hi"], True),
        ("qwen3", "hm <think> is a tag\n", [["hm <think> is a tag"]], True),
        ("qwen3", f"hm {HERMES} Hi", [["hm"], WEATHER, "Hi"], True),
        ("qwen3", "hm <tool_call> is a tag</think>Hi", [["hm <tool_call> is a tag"], "Hi"], True),
        ("qwen3", "</think>\n\nHi", ["Hi"], False),
        ("qwen3", "Hi <think>x</think>", ["Hi <think>x</think>"], False),
        ("mistral", "[THINK]hm[/THINK]Hi", [["hm"], "Hi"], False),
        ("gemma4", "<|channel>thought\nhm\n<channel|>Hi", [["hm"], "Hi"], False),
        ("minimax_m3", "</mm:think>Hi", ["Hi"], False),
        ("granite", "Here is my thought process: hm\n\nHere is my response: Hi", [["hm"], "Hi"], False),
        ("granite", "Here is my dog: Rex", ["Here is my dog: Rex"], False),
        ("", "<think>hm</think>", ["<think>hm</think>"], False),
    ],
)
def test_reasoning(reasoning, text, expected, is_open):
    malformed = int("<tool_call> is" in text)
    check("hermes", text, expected, malformed, reasoning=reasoning, reasoning_open=is_open)
