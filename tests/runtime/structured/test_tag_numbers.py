"""Numbers in structural tags, and in grammars that are one schema, end as those of JSON do; digits of text go on."""

from __future__ import annotations

import re
from typing import Any

import pytest
from structured_engine import VOCAB, BigramProgram, structured_engine

from torch_pagoda.runtime.requests.sampling_params import SamplingParams
from torch_pagoda.runtime.structured import tag_numbers
from torch_pagoda.runtime.structured.asked import read_structured_outputs
from torch_pagoda.runtime.structured.grammar import compile_grammar
from torch_pagoda.runtime.structured.json_numbers import JsonNumbers
from torch_pagoda.runtime.structured.source import GrammarSource
from torch_pagoda.runtime.structured.tag_numbers import Tag, TagNumbers
from torch_pagoda.runtime.structured.vocabulary import vocabulary_of

from toy_program import character_tokenizer

PLAIN = Tag(b"<f=", b"a>", b"</f>")
LONG = "1" * 30


def left(text: str, *tags: Tag) -> int | None:
    numbers = TagNumbers(tags or (PLAIN,))
    numbers.feed(text.encode())
    return numbers.digits_left


@pytest.mark.parametrize(
    ("text", "digits"),
    [
        (LONG, None),
        (f"<f={LONG}", None),
        ("<f=a>", None),
        ("<f=a>1", 19),
        ("é <<f=a>\n -12", 18),
        ("<f=a>" + "1" * 20, 0),
        ("<f=a>" + "1" * 20 + ".", None),
        ("<f=a>1.25e", 2),
        ('<f=a>{"a": [1', 19),
        ('<f=a>{"a": "<f=a>' + LONG, None),
        ('<f=a>"' + LONG, None),
        ('<f=a>"\\"' + LONG, None),
        ('<f=a>"]' + LONG, None),
        ('<f=a>{"}</f>": 12', 18),
        (f"<f=a>{{}}</f>{LONG}", None),
        (f'<f=a>"x"</f>{LONG}', None),
        (f"<f=a>true</f>{LONG}", None),
        (f"<f=a>12</f>{LONG}", None),
        ("<f=a>12</f> 7 <f=a>[3", 19),
        (f"no <f=b>{LONG}", None),  # the grammar does not allow it; whatever comes is text
    ],
)
def test_digits_count_in_the_json_of_a_tag(text: str, digits: int | None) -> None:
    assert left(text) == digits


def test_text_that_can_be_read_in_several_ways_has_the_most_generous_bound() -> None:
    two = (Tag(b"<f=", b"", b"!"), Tag(b"<f=", b"t", b"!"))
    assert left("<f=t", *two) is None and left("<f=1", *two) == 19 and left("<f=t1", *two) == 19
    assert left("<f=true!" + LONG, *two) is None
    # A digit behind a number may be the end's, and then what follows is text.
    assert left("<f=11", Tag(b"<f=", b"", b"1")) is None
    assert left("<f=[11", Tag(b"<f=", b"", b"1")) == 18
    assert left("<f=11", Tag(b"<f=", b"", b"")) is None
    assert left("<f=[11", Tag(b"<f=", b"", b"")) == 18
    assert left("x<f=1", Tag(b"<f=", b"", b"!"), Tag(b"f=", b"", b"!")) == 19


def test_readings_of_one_text_are_few() -> None:
    numbers = TagNumbers([Tag(b"<", b"", b"1" * 5000)])
    numbers.feed(b"<" + b"1" * 4000)
    assert numbers.digits_left is None and len(numbers._places) <= tag_numbers._MAX_READINGS + 1
    numbers.feed(b"</" * 10)
    assert numbers.digits_left is None


NUMBER = {"type": "number"}


def answers(**asked: Any) -> str:
    """Of a model that writes sevens wherever it may, and the tag's beginning where it may not."""
    program = BigramProgram(vocab_size=VOCAB, max_model_len=1000)
    seven, order = 15 + 7, [15 + ord(c) - 48 for c in "<f=>"]

    def change(logits: Any, last: Any) -> Any:
        logits[:, seven] = 1000.0
        for place, token in enumerate(order):
            logits[:, token] = 900.0 - place
        return logits

    program.change_logits = change
    params = SamplingParams(temperature=0, max_tokens=80, structured_outputs=asked)
    return structured_engine(program).generate(["Hello"], params)[0].outputs[0].text


def test_a_weak_model_ends_its_numbers() -> None:
    schema = '{"type": "array", "items": {"type": "integer"}, "minItems": 1}'
    grammar = f"start: %json {schema}"
    assert max(map(len, re.findall("7+", answers(grammar=grammar)))) == 20
    # What a grammar itself says is obeyed, and text is free.
    assert max(map(len, re.findall("7+", answers(grammar="start: /7+;/")))) == 80
    tag = {"structures": [{"begin": "<f=", "schema": NUMBER, "end": ">"}], "triggers": ["<f="]}
    assert answers(structural_tag=tag) == "7" * 80


def test_the_mask_of_a_tag_ends_its_numbers() -> None:
    tokenizer: Any = character_tokenizer()
    vocabulary = vocabulary_of(tokenizer)
    tag = {"structures": [{"begin": "<f=a>", "schema": NUMBER, "end": "</f>"}], "triggers": ["<f="]}
    state = compile_grammar(read_structured_outputs({"structural_tag": tag}), vocabulary).start()
    for text, digits in ((LONG, None), (f"{LONG}<f=a>12", 18), (f"<f=a>12</f>{LONG}", None)):
        state.restore(list(tokenizer(text, add_special_tokens=False).input_ids))
        assert state.digits_left == digits


@pytest.mark.parametrize(
    ("text", "is_json"),
    [
        ('start: %json {"type": "array"}', True),
        ('\n%llguidance {}\nstart : %json{"type": "array"}\n', True),
        ('start: "a" %json {"type": "array"}', False),
        ('start: %json {"type": "array"} "b"', False),
        ('start: %json {"type": "array"}\nA: "b"', False),
        ("start: /[0-9]+/", False),
    ],
)
def test_a_grammar_that_is_one_schema_is_json(text: str, is_json: bool) -> None:
    source = GrammarSource("grammar", read_structured_outputs({"grammar": text}))
    assert source.numbers is (JsonNumbers if is_json else None)
