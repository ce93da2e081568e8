"""Text of grammars that spells special or added tokens: written in ordinary ones, and never an end."""

from __future__ import annotations

import json
import random
import re
from typing import Any

import jsonschema
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from random_schemas import spelling_schema
from structured_engine import BigramProgram
from word_tokenizers import KINDS, SPECIAL, TAGS, WORDS, word_tokenizer

from torch_pagoda.runtime.engine.engine import Engine
from torch_pagoda.runtime.requests.sampling_params import SamplingParams
from torch_pagoda.runtime.structured.asked import read_structured_outputs
from torch_pagoda.runtime.structured.grammar import compile_grammar
from torch_pagoda.runtime.structured.vocabulary import Vocabulary, vocabulary_of
from torch_pagoda.runtime.token_bytes import TokenBytes

SPELLED = ("<|endoftext|>", "</s>", "<s>", "<unk>", "<0x41>", *SPECIAL, *TAGS, *WORDS)
TEXTS = (*SPELLED, "▁", "a▁b", "a NEWTOK b", "e\u0301", "ﬁ", "😀", " the", "a  b", "see <|im_start|> there")


def engine_of(tokenizer: Any, eos: int | None = None) -> Engine:
    """An engine with random weights over the tokens of a tokenizer."""
    program = BigramProgram(vocab_size=len(tokenizer), max_model_len=1000)
    ends = [tokenizer.eos_token_id if eos is None else eos]
    return Engine(program, tokenizer, eos_token_ids=ends, block_size=16, num_blocks=2048, max_num_seqs=64)  # type: ignore[arg-type]


def complete_all(engine: Engine, asked: list[dict[str, Any]], **params: Any) -> list[Any]:
    given = {"temperature": 1.0, "seed": 1, "max_tokens": 200, **params}
    each = [SamplingParams(structured_outputs=one, **given) for one in asked]
    return [output.outputs[0] for output in engine.generate(["The list"] * len(asked), each)]


def complete(engine: Engine, asked: dict[str, Any], **params: Any) -> Any:
    return complete_all(engine, [asked], **params)[0]


def forms(text: str) -> dict[str, dict[str, Any]]:
    """Grammars with a text in them, by what they write."""
    schema = {"type": "object", "properties": {text: {"const": text}}, "required": [text]}
    quoted = json.dumps(text, ensure_ascii=False)
    return {
        json.dumps({text: text}, ensure_ascii=False): {"json": {**schema, "additionalProperties": False}},
        json.dumps([text], ensure_ascii=False): {"json": {"enum": [[text]]}},
        text: {"choice": [text]},
        f"{text}!": {"grammar": f'start: {quoted} "!"'},
        f"a{text}": {"regex": f"a{re.escape(text)}"},
    }


@pytest.mark.parametrize("kind", KINDS)
def test_literals_are_written_as_they_are(kind: str) -> None:
    written = [pair for text in TEXTS for pair in forms(text).items()]
    answers = complete_all(engine_of(word_tokenizer(kind)), [asked for _, asked in written])
    for (text, asked), answer in zip(written, answers, strict=True):
        assert (answer.text, answer.finish_reason) == (text, "stop"), asked


@pytest.mark.parametrize("kind", KINDS)
def test_no_literal_is_a_special_token(kind: str) -> None:
    tokenizer = word_tokenizer(kind)
    marks = {i for i, token in tokenizer.added_tokens_decoder.items() if token.special or token.content in TAGS}
    answer = complete(engine_of(tokenizer), {"choice": ["".join(SPELLED)]}, max_tokens=300)
    assert answer.finish_reason == "stop" and not marks & set(answer.token_ids)


def test_the_model_chooses_the_tokens_of_a_literal() -> None:
    engine = engine_of(word_tokenizer("byte-level"))
    answers = [complete(engine, {"choice": ["the list"]}, seed=seed) for seed in range(6)]
    assert {answer.text for answer in answers} == {"the list"}
    assert len({tuple(answer.token_ids) for answer in answers}) > 1


def test_a_grammar_that_means_a_token_gets_it() -> None:
    tokenizer = word_tokenizer("byte-level with tags")
    engine = engine_of(tokenizer)
    think, start = tokenizer.convert_tokens_to_ids(["<think>", "<|im_start|>"])
    for lark, token in ((r'start: "a" <think> "b"', think), (f'start: "a" <[{start}]> "b"', start)):
        answer = complete(engine, {"grammar": lark})
        assert answer.finish_reason == "stop" and answer.token_ids[1] == token


def test_a_token_that_ends_the_text_comes_where_the_grammar_is_complete() -> None:
    engine = engine_of(word_tokenizer("byte-level"))
    assert complete(engine, {"grammar": 'start: "a" <|endoftext|>'}).finish_reason == "stop"
    cut = complete(engine, {"grammar": 'start: "a" <|endoftext|> "b"'})
    assert cut.finish_reason == "error" and "text behind a token that ends the text" in cut.error
    for seed in range(8):  # any token, which is an end among others
        assert complete(engine, {"grammar": 'start: "a" <[*]> "bc"'}, seed=seed).text.endswith("bc")


def test_an_ordinary_token_that_ends_the_text_is_written_otherwise() -> None:
    tokenizer = word_tokenizer("byte-level")
    the = tokenizer.convert_tokens_to_ids("Ġthe")
    answer = complete(engine_of(tokenizer, eos=the), {"choice": ["all the way"]})
    assert (answer.text, answer.finish_reason) == ("all the way", "stop")


def test_limits_that_rule_out_the_grammar_are_the_requests_fault() -> None:
    engine = engine_of(word_tokenizer("byte-level"))
    answer = complete(engine, {"choice": ["yes"]}, allowed_token_ids=[5])
    assert answer.finish_reason == "error" and answer.error.startswith(
        "the grammar of structured_outputs cannot continue"
    )
    engine.runner.program.change_logits = lambda logits, last: torch.full_like(logits, torch.nan)  # type: ignore[attr-defined]
    assert complete(engine, {"choice": ["yes"]}).error.startswith("the model's logits")


@pytest.mark.parametrize("kind", KINDS)
@given(text=st.text(max_size=12) | st.sampled_from(TEXTS))
@settings(max_examples=30)
def test_bytes_of_tokens_are_those_of_their_text(kind: str, text: str) -> None:
    tokenizer = word_tokenizer(kind)
    ids = tokenizer.encode(text, add_special_tokens=False)
    read = TokenBytes(tokenizer)
    joined = b"".join([read.of(token) or b"" for token in ids]).decode(errors="replace")
    plain = tokenizer.decode(ids)
    assert joined in (plain, f" {plain}")  # Metaspace strips the first space


def test_only_tokens_that_spell_any_text_can_be_constrained() -> None:
    from tokenizers import Tokenizer, decoders, models
    from transformers import PreTrainedTokenizerFast

    for decoder in (None, decoders.WordPiece(), decoders.Metaspace()):
        base = Tokenizer(models.WordLevel({"a": 0, "b": 1}))
        if decoder is not None:
            base.decoder = decoder
        with pytest.raises(ValueError, match="needs a fast tokenizer"):
            Vocabulary(PreTrainedTokenizerFast(tokenizer_object=base))


def assert_outputs_are_valid(kind: str, count: int, seed: int) -> None:
    """Run so many random schemas that hold texts of tokens; what finishes is valid, most finishes, nothing fails."""
    rng = random.Random(seed)
    engine = engine_of(word_tokenizer(kind))
    finished = 0
    for first in range(0, count, 50):
        schemas = [spelling_schema(rng, SPELLED) for _ in range(min(50, count - first))]
        params = [
            SamplingParams(
                temperature=0 if i % 8 == 0 else 1.5,
                seed=first + i,
                max_tokens=400,
                structured_outputs={"json": schema, "whitespace": "any" if i % 6 == 0 else "compact"},
            )
            for i, schema in enumerate(schemas)
        ]
        outputs = engine.generate([f"Hello {i}" for i in range(len(schemas))], params)
        for schema, output in zip(schemas, outputs, strict=True):
            answer = output.outputs[0]
            assert answer.finish_reason in ("stop", "length"), (schema, answer.error)
            if answer.finish_reason == "stop":
                validator = jsonschema.Draft202012Validator
                validator(schema, format_checker=validator.FORMAT_CHECKER).validate(json.loads(answer.text))
                finished += 1
    assert finished > 0.5 * count


@pytest.mark.parametrize("kind", KINDS)
def test_some_random_outputs_are_valid(kind: str) -> None:
    assert_outputs_are_valid(kind, 12, seed=3)


@pytest.mark.parametrize("kind", KINDS)
def test_many_random_outputs_are_valid(kind: str) -> None:
    assert_outputs_are_valid(kind, 500, seed=4)


def test_text_behind_a_mark_is_read_in_ordinary_tokens() -> None:
    """``after`` may end within a token, whose rest the grammar reads."""
    tokenizer = word_tokenizer("byte-level with tags")
    vocabulary = vocabulary_of(tokenizer)
    assert b"".join(map(vocabulary.token_bytes, vocabulary.tokens_of(b"<b>\xc3"))) == b"<b>\xc3"
    assert not {tokenizer.convert_tokens_to_ids("<b>")} & set(vocabulary.tokens_of(b"<b>"))
    grammar = compile_grammar(read_structured_outputs({"choice": ["e list"]}), vocabulary)
    state = grammar.start(after="of th")
    for token in tokenizer.encode("of the list", add_special_tokens=False):
        state.consume(token)
    assert state.is_finished
