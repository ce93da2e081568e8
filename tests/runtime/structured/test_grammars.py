"""Grammars: compiled, kept, refused by name; what a schema means and what it costs."""

from __future__ import annotations

import gc
import json
import re
import subprocess
import sys
import weakref
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from torch_pagoda.runtime.structured import vocabulary as vocabulary_module
from torch_pagoda.runtime.structured.asked import read_structured_outputs
from torch_pagoda.runtime.structured.grammar import Grammar, check_structured, compile_grammar
from torch_pagoda.runtime.structured.vocabulary import Vocabulary, vocabulary_of

from toy_program import character_tokenizer

TOKENIZER: Any = character_tokenizer()
EOS = 256


@pytest.fixture(scope="module")
def vocabulary() -> Vocabulary:
    return vocabulary_of(TOKENIZER)


def compiled(vocabulary: Vocabulary, **asked: Any) -> Grammar:
    return compile_grammar(read_structured_outputs(asked), vocabulary)


def tokens_of(text: str) -> list[int]:
    return list(TOKENIZER(text, add_special_tokens=False).input_ids)


def accepts(grammar: Grammar, text: str) -> bool:
    matcher, ids = grammar.matcher(), tokens_of(text)
    return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()


def chain(rule: str, count: int) -> str:
    """A grammar of rules that lead to each other, in the syntax and letters of ``rule``."""
    name, sign = rule.split("{}")[0], "::=" if "::=" in rule else ":"
    rules = [rule.format(i, i + 1) for i in range(count)]
    return "\n".join([f"{'root' if sign == '::=' else 'start'} {sign} {name}0", *rules, f'{name}{count} {sign} "a"'])


@pytest.mark.parametrize(
    ("asked", "inside", "outside"),
    [
        ({"regex": r"a/b[/\\]\d{2}"}, ["a/b/12", "a/b\\34"], ["a/b/1", "xa/b/12", "a/b/123"]),
        ({"regex": "a|"}, ["a", ""], ["b"]),
        (
            {"choice": ["yes", "no", 'q"\\', "é\n/", "\u2028\x01"]},
            ["yes", 'q"\\', "é\n/", "\u2028\x01"],
            ["ye", "yesno"],
        ),
        ({"grammar": 'start: "a" b+\nb: "x" | /[0-9]/'}, ["ax", "a1x2"], ["a", "ay"]),
        ({"grammar": 'root ::= "a" item*\nitem ::= [x-z] | "\\n"'}, ["a", "axz\n"], ["b", "aw"]),
        ({"json": True}, ['{"a": 1}', "{}"], ["1", "[]", '{"a":1}']),
        ({"json": {"description": "anything"}}, ["{}"], ["1"]),
        ({"json_object": True}, ["{}", '{"a": [1, {"b": null}]}'], ["1", "[]"]),
        ({"json": {"type": "array", "items": {"type": "integer"}}}, ["[]", "[1, 2]"], ["[1,2]", "[1.5]"]),
        ({"json": {"type": "array"}, "whitespace": "any"}, ["[1,2]", "[ 1 ,\n2]"], ["[1 2]"]),
    ],
)
def test_what_each_kind_accepts(
    vocabulary: Vocabulary, asked: dict[str, Any], inside: list[str], outside: list[str]
) -> None:
    grammar = compiled(vocabulary, **asked)
    assert [text for text in inside if not accepts(grammar, text)] == []
    assert [text for text in outside if accepts(grammar, text)] == []


def test_a_tag_stands_in_free_text(vocabulary: Vocabulary) -> None:
    schema = {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]}
    tag = {"structures": [{"begin": "<f=a>", "schema": schema, "end": "</f>"}], "triggers": ["<f="]}
    grammar = compiled(vocabulary, structural_tag=tag)
    assert accepts(grammar, "free < text")
    assert accepts(grammar, 'so <f=a>{"x": 1}</f> and <f=a>{"x": 2}</f> end')
    assert (
        not accepts(grammar, "so <f=b>") and not accepts(grammar, 'so <f=a>{"x":') and not accepts(grammar, "<f=a>{}")
    )


@pytest.mark.parametrize("triggers", [["<f", "<f=", "<f=ab"], ["<f=ab", "<f=", "<f"], ["<f=", "<f=ab"]])
def test_triggers_may_begin_with_each_other(vocabulary: Vocabulary, triggers: list[str]) -> None:
    structures = [{"begin": f"<f={name}>", "schema": {"type": "object"}, "end": "</f>"} for name in ("a", "ab", "c")]
    grammar = compiled(vocabulary, structural_tag={"structures": structures, "triggers": triggers})
    for name in ("a", "ab", "c"):
        assert accepts(grammar, f"so <f={name}>{{}}</f> end"), name
    assert not accepts(grammar, "so <f=abc>{}</f> end") and not accepts(grammar, "<f=a>{}")


def test_a_trigger_within_a_tag_opens_none(vocabulary: Vocabulary) -> None:
    """It belongs to the tag's JSON, or to its end."""
    schema = {"type": "object", "properties": {"x": {"type": "string"}}}
    structures = [{"begin": "<f=a>", "schema": schema, "end": "</f>"}]
    grammar = compiled(vocabulary, structural_tag={"structures": structures, "triggers": ["<f="]})
    assert accepts(grammar, 'so <f=a>{"x": "<f=a>"}</f> and <f=a>{"x": "<f=b>"}</f>')
    assert accepts(grammar, 'so <f=a>{"<f=": 1}</f>') and not accepts(grammar, "so <f=a>{<f=a>{}</f>}</f>")
    structures = [{"begin": mark, "schema": schema, "end": "<b>"} for mark in ("<a>", "<b>")]
    grammar = compiled(vocabulary, structural_tag={"structures": structures, "triggers": ["<a>", "<b>"]})
    assert accepts(grammar, "<a>{}<b>free<b>{}<b>") and not accepts(grammar, "<a>{}<b>free<b>{}")


def test_triggers_may_end_with_each_other(vocabulary: Vocabulary) -> None:
    structures = [{"begin": begin, "schema": {"type": "object"}, "end": "!"} for begin in ("<f=a>", "f=b>")]
    grammar = compiled(vocabulary, structural_tag={"structures": structures, "triggers": ["<f=", "f="]})
    assert accepts(grammar, "<f=a>{}! <f=b>{}! f=b>{}!") and not accepts(grammar, "f=a>{}!")


def test_a_key_has_one_spelling(vocabulary: Vocabulary) -> None:
    """Python takes the last of two equal keys, so a second spelling would put a text in place of ``a``."""
    grammar = compiled(vocabulary, json={"type": "object", "properties": {"a": {"type": "integer"}}})
    assert accepts(grammar, '{"a": 1, "b": "x"}')
    assert not accepts(grammar, '{"\\u0061": "x"}') and not accepts(grammar, '{"a": 1, "a": "x"}')


def one_tag(schema: object) -> dict[str, Any]:
    return {"structures": [{"begin": "<f", "schema": schema, "end": ""}], "triggers": ["<f"]}


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"json": {"type": "array", "uniqueItems": True}}, "structured_outputs.json cannot be enforced: .*uniqueItems"),
    ({"json": {"not": {"type": "null"}}}, r'\["not"\].*strict=False'),
    ({"json": {"if": {}, "then": {}}}, '"if", "then"'),
    ({"json": {"type": "array", "contains": {}}}, "contains"),
    ({"json": {"oneOf": [{"type": "integer"}, {"type": "number"}]}}, "oneOf"),
    ({"json": {"type": "objct"}}, "objct"),
    ({"json": {"$ref": "http://127.0.0.1:1/x"}}, "does not fetch"),
    ({"json": {"$ref": "file:///etc/passwd"}}, "cannot be enforced"),
    ({"json": {"type": "string", "pattern": "(?=a)b"}}, "look-ahead"),
    ({"json": {"type": "string", "format": "foo"}}, "foo"),
    ({"json": False}, "structured_outputs.json=False allows no text"),
    ({"json": {"type": "object", "properties": {"a": False}, "required": ["a"]}}, "required property 'a'"),
    ({"json": {"type": "object", "x-guidance": {"lenient": True}, "not": {}}}, "x-guidance"),
    ({"json": {"type": "object", "minProperties": 2}}, "minProperties=2"),
    ({"json": {"enum": ["a\x01"]}}, "control character"),
    ({"json": {"type": "object", "properties": {"\x7f": {}}}}, "control character"),
    ({"json": {"const": 777_777_777_777_777_777}}, "2\\*\\*53"),
    ({"json": {"enum": [1, {"a": [-(2**60)]}]}}, "2\\*\\*53"),
    ({"json": {"type": "integer", "multipleOf": 1_000_003}}, "multipleOf=1000003"),
    ({"json": {"allOf": [{"multipleOf": 997}, {"multipleOf": 991}]}}, "least common multiple"),
    ({"grammar": 'start: %json {"x-guidance": {}, "multipleOf": 1000003}'}, "multipleOf=1000003"),
    ({"grammar": 'start: "a" %json {"not": {}}'}, '"not"'),
    ({"grammar": 'start: %json {"const": 777777777777777777}'}, "2\\*\\*53"),
    ({"grammar": 'start: "a" %json {"type": "object", "minProperties": 2}'}, "minProperties=2"),
    ({"grammar": 'start: A\nA: "x"{2,99999999999}'}, "number too large"),
    ({"grammar": "start: a{99999999999}\na: /x/ | /y/"}, "number too large"),
    ({"grammar": "root ::= [a-z]{1,99999999999}"}, "number too large"),
    ({"regex": "x{1,99999999999}"}, "decimal literal"),
    ({"json": {"type": "string", "maxLength": 99999999999}}, "decimal literal"),
    ({"grammar": "start: foo"}, 'unknown name: "foo"'),
    ({"grammar": "root ::= foo"}, "neither Lark nor GBNF: Rule 'foo' not found"),
    ({"grammar": "hello"}, "neither Lark nor GBNF"),
    ({"grammar": "root ::= " + "(" * 50_000}, "neither Lark nor GBNF"),
    ({"grammar": "start: " + "(" * 50_000 + '"a"' + ")" * 50_000}, "nests more than 1000 rules and brackets"),
    ({"grammar": 'root ::= "a"\n' + "\n" * 1000}, "GBNF of more than 1000 lines"),
    ({"grammar": chain("r{}: r{}", 10_000)}, "nests more than 1000 rules and brackets"),
    ({"grammar": chain("R{} : R{}", 10_000)}, "nests more than 1000 rules and brackets"),
    ({"grammar": chain("?r{}: r{}", 10_000).replace(": ?r", ": r")}, "nests more than 1000 rules and brackets"),
    ({"grammar": chain("r{}: r{}", 10_000).replace("\n", '\n# "\n', 1) + '\n// "'}, "nests more than 1000 rules"),
    ({"grammar": 'Q: /"/\n' + chain("r{}: r{}", 10_000) + '\nP: /"/'}, "nests more than 1000 rules and brackets"),
    ({"grammar": chain("r{}: ((((((((r{}))))))))", 700)}, "nests more than 1000 rules and brackets"),
    ({"grammar": chain('r{} ::= ("x" ([r] r{})?)*', 900)}, "nests more than 1000 rules and brackets"),
    ({"grammar": "start: A\nA: /x/ & /y/"}, "allows no text"),
    ({"regex": "a(?=b)"}, "structured_outputs.regex cannot be enforced: .*look-around"),
    ({"regex": "[a"}, "unclosed character class"),
    ({"regex": "(a)\\1"}, "backreferences"),
    ({"regex": "(" * 50_000}, "structured_outputs.regex"),
    ({"grammar": "start: " + "t? " * 1500 + '\nt: "x" | "y"'}, "items; max is 2000"),
    ({"structural_tag": one_tag({"const": 777_777_777_777_777_777})}, "2\\*\\*53"),
    ({"structural_tag": one_tag({"type": "string", "maxLength": 99999999999})}, "decimal literal"),
    ({"structural_tag": one_tag({"multipleOf": 1_000_003})}, "multipleOf=1000003"),
    ({"structural_tag": one_tag({"not": {}})}, '"not"'),
]


@pytest.mark.parametrize(("asked", "words"), REFUSED, ids=lambda value: str(value)[:60])
def test_a_refusal_says_what_and_why(vocabulary: Vocabulary, asked: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words) as caught:
        compiled(vocabulary, **asked)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 600


def test_lenient_schemas_are_taken_with_warnings() -> None:
    schema = {"type": "array", "items": {"oneOf": [{"type": "integer"}, {"type": "number"}]}, "uniqueItems": True}
    with pytest.raises(ValueError, match="uniqueItems"):
        check_structured({"json": schema}, TOKENIZER)
    warnings = check_structured({"json": schema, "strict": False}, TOKENIZER)
    assert any("uniqueItems" in line for line in warnings)
    assert check_structured({"json": {"type": "object", "minProperties": 2}, "strict": False}, TOKENIZER) == [
        "minProperties=2 is more than what is required: a key that comes twice would count twice"
    ]
    assert check_structured({"json": {"enum": ["a\x01"]}, "strict": False}, TOKENIZER)
    assert check_structured({"json": {"type": "null"}, "strict": False}, TOKENIZER) == []
    with pytest.raises(ValueError, match="look-ahead"):
        check_structured({"json": {"pattern": "(?=a)b"}, "strict": False}, TOKENIZER)


def test_schemas_in_grammars_are_held_to_as_others(vocabulary: Vocabulary) -> None:
    grammar = 'start: %json {"type": "object", "minProperties": 2}'
    warnings = check_structured({"grammar": grammar, "strict": False}, TOKENIZER)
    assert len(warnings) == 1 and warnings[0].startswith("minProperties=2")
    # Whoever says that one is to be read leniently knows; calls of tools are written so.
    lenient = 'start: %json {"x-guidance": {"lenient": true}, "type": "object", "minProperties": 2}'
    assert check_structured({"grammar": lenient}, TOKENIZER) == []


@pytest.mark.parametrize(
    "asked",
    [
        {"regex": "[ab]{0,999999999}"},
        {"grammar": 'start: A\nA: "x"{1,999999999}'},
        {"grammar": "start: a{1,999999999}\na: /x/ | /y/"},
        {"grammar": "root ::= [a-z]{1,999999999}"},
        {"json": {"type": "array", "maxItems": 999_999_999}},
        {"structural_tag": one_tag({"type": "string", "maxLength": 999_999_999})},
    ],
    ids=str,
)
def test_repetitions_cost_nothing_before_they_come(vocabulary: Vocabulary, asked: dict[str, Any]) -> None:
    """They are counted, not written out: no memory, no time, and a mask as long as something may come."""
    state = compiled(vocabulary, **asked).start()
    for _ in range(50):
        allowed = int.from_bytes(state.matcher.compute_bitmask(), "little")
        assert allowed and not state.matcher.is_error()
        if state.consume((allowed & -allowed).bit_length() - 1):
            break


def test_a_lenient_schema_still_has_an_instance(vocabulary: Vocabulary) -> None:
    grammar = compiled(vocabulary, json={"enum": ["a\x01"]}, strict=False)
    assert accepts(grammar, '"a\\u0001"')


def test_grammars_are_kept(vocabulary: Vocabulary, monkeypatch: pytest.MonkeyPatch) -> None:
    first = compiled(vocabulary, regex="keep[0-9]")
    assert compiled(vocabulary, regex="keep[0-9]", after=[3]) is first
    assert compiled(vocabulary, choice=["keep[0-9]"]) is not first
    assert compiled(vocabulary, json={"type": "null"}) is not compiled(
        vocabulary, json={"type": "null"}, strict=False
    )
    monkeypatch.setattr(vocabulary_module, "MAX_KEPT", 3)
    others = [compiled(vocabulary, regex=f"other{i}") for i in range(3)]
    assert compiled(vocabulary, regex="other2") is others[2]
    assert compiled(vocabulary, regex="keep[0-9]") is not first
    assert len(vocabulary.kept._entries) == 3
    monkeypatch.setattr(vocabulary_module, "MAX_KEPT_BYTES", 200)
    longer = compiled(vocabulary, choice=["x" * 150])
    assert compiled(vocabulary, choice=["x" * 150]) is longer and len(vocabulary.kept._entries) == 1


def reference_chain(length: int, link: dict[str, object]) -> dict[str, object]:
    definitions: dict[str, object] = {
        f"d{i}": {**link, "items": {"$ref": f"#/$defs/d{i + 1}"}} for i in range(length)
    }
    definitions[f"d{length}"] = {"type": "integer"}
    return {"$defs": definitions, "$ref": "#/$defs/d0"}


@pytest.mark.parametrize("strict", [True, False])
def test_a_chain_of_references_that_would_overflow_the_stack_is_refused(vocabulary: Vocabulary, strict: bool) -> None:
    """Some 1,200 links end the process."""
    with pytest.raises(ValueError, match="references and more than"):
        compiled(vocabulary, json=reference_chain(1500, {"type": "array"}), strict=strict)
    assert accepts(compiled(vocabulary, json=reference_chain(3, {"type": "array", "maxItems": 1})), "[[[7]]]")


def test_many_properties_are_refused(vocabulary: Vocabulary) -> None:
    wide = {"type": "object", "properties": {f"p{i}": {"type": "integer"} for i in range(2001)}}
    with pytest.raises(ValueError, match="more than 2000 properties"):
        compiled(vocabulary, json=wide)


def test_a_vocabulary_is_freed_with_its_tokenizer() -> None:
    tokenizer = character_tokenizer()
    vocabulary = vocabulary_of(tokenizer, 258, [256])
    compiled(vocabulary, regex="a")
    gone = weakref.ref(vocabulary)
    del tokenizer, vocabulary
    gc.collect()
    assert gone() is None


def test_a_vocabulary_is_made_once_and_may_be_wider_than_the_tokenizer() -> None:
    assert vocabulary_of(TOKENIZER) is vocabulary_of(TOKENIZER)
    wide = vocabulary_of(TOKENIZER, 300, [EOS])
    assert wide is not vocabulary_of(TOKENIZER) and wide is vocabulary_of(TOKENIZER, 300, {EOS})
    assert wide.size == 300 and wide.num_words == 10 and wide.eos_token_ids == {EOS}
    assert vocabulary_of(TOKENIZER, 100).size == len(TOKENIZER)
    assert vocabulary_of(TOKENIZER, 300, [255, EOS]).eos_token_ids == {255, EOS}
    matcher = compile_grammar(read_structured_outputs({"regex": "(?s).*"}), wide).matcher()
    bits = int.from_bytes(matcher.compute_bitmask(), "little")
    assert bits >> len(TOKENIZER) == 0, "a token that the tokenizer does not have"


def test_a_slow_tokenizer_is_refused() -> None:
    class Slow:
        eos_token_id = 0

    with pytest.raises(ValueError, match=r"needs a fast tokenizer, not Slow"):
        vocabulary_of(Slow())


@pytest.mark.parametrize(
    "rule", ["r{}: r{}", 'r{}: ["x" r{}]', "R{}: (((((((((R{})))))))))", "r{}: (((((((((r{})))))))))"]
)
def test_the_deepest_grammars_fit_a_thread(vocabulary: Vocabulary, rule: str) -> None:
    """Whose stack would end the process if they did not."""
    text = chain(rule, 998 // (1 + rule.count("(") + rule.count("[")))
    with ThreadPoolExecutor(1) as pool:
        grammar = pool.submit(compiled, vocabulary, grammar=text).result()
    assert accepts(grammar, "a") != ("x" in rule)


def test_colons_and_brackets_within_json_are_no_rules(vocabulary: Vocabulary) -> None:
    schema = {"type": "object", "properties": {f"k{i}": {"const": i} for i in range(400)}}
    assert accepts(compiled(vocabulary, grammar=f"start: %json {json.dumps(schema)}"), '{"k3": 3}')


def test_numbers_end(vocabulary: Vocabulary) -> None:
    """The digits that the mask leaves; the grammar itself knows no bound."""
    state = compiled(vocabulary, json={"type": "array"}).start()

    def left_after(text: str) -> int | None:
        state.restore(tokens_of(text))
        return state.digits_left

    assert left_after("[") is None and left_after("[1") == 19 and left_after("[-12") == 18
    assert left_after("[" + "1" * 20) == 0
    assert left_after("[" + "1" * 20 + ".") is None and left_after("[1." + "1" * 20) == 0
    assert left_after("[1e") == 2 and left_after("[1E-") == 2 and left_after("[1e+99") == 0
    assert left_after("[1, 2") == 19
    assert left_after('["' + "1" * 30) is None and left_after('["\\"' + "1" * 30) is None
    assert left_after('["\\\\", 1') == 19


def test_without_llguidance() -> None:
    """The runtime imports without it, and says what to install."""
    code = """
import sys
import weakref
sys.modules["llguidance"] = None
from torch_pagoda.runtime.engine.engine import Engine
from torch_pagoda.runtime.requests.sampling_params import SamplingParams
from torch_pagoda.runtime.structured.grammar import check_structured
SamplingParams(structured_outputs={"regex": "a"})
try:
    check_structured({"regex": "a"}, object())
except ValueError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == 'structured_outputs needs llguidance; pip install "torch-pagoda[structured]"'


def test_llguidance_is_not_imported_before_it_is_asked_for() -> None:
    code = "import sys; import torch_pagoda.runtime.engine.engine; print('llguidance' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_every_message_fits_a_line() -> None:
    for asked, _ in REFUSED:
        with pytest.raises(ValueError) as caught:
            check_structured(json.loads(json.dumps(asked)), TOKENIZER)
        assert re.fullmatch(r"structured_outputs[^\n]+", str(caught.value))
