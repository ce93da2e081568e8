"""Tokens that a grammar forces are verified together; masks follow any draft, and return."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from drafters import Oracle, draft
from structured_engine import BigramProgram, structured_engine

from torch_pagoda.runtime.engine.draft_setup import draft_with
from torch_pagoda.runtime.engine.engine import Engine
from torch_pagoda.runtime.requests.outputs import RequestOutput
from torch_pagoda.runtime.requests.request import Request
from torch_pagoda.runtime.requests.sampling_params import SamplingParams
from torch_pagoda.runtime.structured.asked import read_structured_outputs
from torch_pagoda.runtime.structured.grammar import compile_grammar
from torch_pagoda.runtime.structured.masks import MaskPool
from torch_pagoda.runtime.structured.state import GrammarState
from torch_pagoda.runtime.structured.vocabulary import vocabulary_of

from toy_program import character_tokenizer

FIELDS = [
    *("first_name", "family_name", "date_of_birth", "place_of_birth", "nationality"),
    *("street_address", "postal_code", "city_of_residence", "telephone_number", "mail_address"),
]
SCHEMA = {
    "type": "object",
    "properties": {name: {"enum": ["a", "b"]} for name in FIELDS},
    "required": FIELDS,
    "additionalProperties": False,
}
ASKED: dict[str, dict[str, Any]] = {
    "schema": {"json": SCHEMA},
    "choice": {"choice": ["a long answer", "another one"]},
    "after reasoning": {"json": SCHEMA, "after": "b"},
    "numbers": {"json": {"type": "array", "items": {"type": "number"}, "minItems": 3, "maxItems": 3}},
    "ends": {"regex": "xyz[ab]?"},
}


def make_engine(**options: Any) -> Engine:
    """In float64 a row's logits do not depend on how many rows there are."""
    return structured_engine(BigramProgram(vocab_size=258, max_model_len=1000, dtype=torch.float64), **options)


VOCABULARY = vocabulary_of(character_tokenizer(), 258, [256])


def shown(outputs: Sequence[RequestOutput]) -> list[Any]:
    return [(c.token_ids, c.text, c.finish_reason, c.logprobs, c.error) for o in outputs for c in o.outputs]


def state_of(asked: dict[str, Any]) -> GrammarState:
    read = read_structured_outputs(asked)
    return compile_grammar(read, VOCABULARY).start(read.after)


def mask_of(state: GrammarState) -> list[int]:
    return MaskPool().fill([state], [False])[0].tolist()


@pytest.mark.parametrize("kind", ASKED)
@pytest.mark.parametrize(
    "params", [{"temperature": 0}, {"seed": 3}, {"seed": 4, "logprobs": 1, "presence_penalty": 0.5}], ids=str
)
def test_forced_tokens_change_nothing_but_the_steps(kind: str, params: dict[str, Any]) -> None:
    asked = SamplingParams(max_tokens=400, structured_outputs=ASKED[kind], **params)
    plain = make_engine(draft_forced_tokens=False)
    expected = plain.generate([[65], [66, 67]], asked)
    engine = make_engine()
    assert shown(engine.generate([[65], [66, 67]], asked)) == shown(expected)
    stats = engine.stats()
    if kind in ("schema", "choice"):
        assert stats["spec_decode_num_accepted_tokens"] > 0.8 * stats["spec_decode_num_draft_tokens"]


def test_ten_fields_take_a_fourth_of_the_steps() -> None:
    asked = SamplingParams(max_tokens=400, temperature=0, structured_outputs={"json": SCHEMA})
    plain, engine = make_engine(draft_forced_tokens=False), make_engine()
    assert shown(engine.generate([[65]], asked)) == shown(plain.generate([[65]], asked))
    assert engine.stats()["steps"] * 4 <= plain.stats()["steps"]
    assert engine.stats()["generated_tokens"] == plain.stats()["generated_tokens"] > 200


@pytest.mark.parametrize("kind", ASKED)
@pytest.mark.parametrize("right", [1.0, 0.6])
def test_masks_follow_the_drafts_of_any_drafter(kind: str, right: float) -> None:
    """Also where the reasoning in front of the grammar ends inside a draft."""
    params = SamplingParams(max_tokens=300, seed=3, structured_outputs=ASKED[kind])
    prompts = [[65], [66, 67]]
    expected = make_engine(draft_forced_tokens=False).generate(prompts, params)
    engine = make_engine(draft_forced_tokens=False)
    answers = {(tuple(p), 3): o.outputs[0].token_ids for p, o in zip(prompts, expected, strict=True)}
    draft(engine, Oracle(answers, right, 258), 7)
    assert shown(engine.generate(prompts, params)) == shown(expected)
    assert engine.stats()["spec_decode_num_accepted_tokens"]


@pytest.mark.parametrize("kind", ASKED)
def test_a_trial_leaves_no_trace(kind: str) -> None:
    params = SamplingParams(max_tokens=60, seed=5, structured_outputs=ASKED[kind])
    (output,) = make_engine(draft_forced_tokens=False).generate([[65]], params)
    tokens = output.outputs[0].token_ids
    state, other = state_of(ASKED[kind]), state_of(ASKED[kind])
    for place, token in enumerate(tokens):
        with state.trial(tokens[:place]):
            for later in tokens[place : place + 5]:
                if state.consume(later):
                    break
        with state.trial(tokens[:place]):
            if not state.is_waiting:
                state.matcher.consume_token(255)  # which no grammar here allows
        assert mask_of(state) == mask_of(other)
        assert state.is_waiting == other.is_waiting and state.digits_left == other.digits_left
        if state.consume(token) | other.consume(token):
            break


@pytest.mark.parametrize(
    ("asked", "tokens", "count"),
    [
        ({"regex": "ab[cd]e"}, "abce", 4),
        ({"regex": "ab[cd]e"}, "abxe", 2),
        ({"regex": "ab[cd]e"}, "x", 0),
        ({"regex": "ab", "after": "!"}, "zz!abc", 5),
        ({"regex": "ab", "after": "!"}, "zz!b", 3),
    ],
    ids=str,
)
def test_a_draft_is_cut_where_the_grammar_forbids_it(asked: dict[str, Any], tokens: str, count: int) -> None:
    state = state_of(asked)
    ids = character_tokenizer()(tokens, add_special_tokens=False).input_ids
    assert state.num_allowed(ids, []) == count
    assert mask_of(state) == mask_of(state_of(asked))


def test_an_end_is_no_draft_while_the_grammar_waits() -> None:
    assert state_of({"regex": "ab", "after": "!"}).num_allowed([65, 256, 65], []) == 1


def test_a_draft_that_is_forbidden_takes_no_row() -> None:
    class Forbidden(Oracle):
        def propose(self, request: Request, most: int) -> Sequence[int]:
            self.asked += 1
            return [255] * most

    program = BigramProgram(vocab_size=258, max_model_len=1000)
    rows: list[int] = []
    program.before_call = lambda tokens: rows.append(len(tokens))
    engine = structured_engine(program, draft_forced_tokens=False)
    drafter = Forbidden({}, 0, 258)
    draft(engine, drafter, 7)
    engine.generate([[65]], SamplingParams(max_tokens=40, seed=1, structured_outputs={"regex": "[a-z]{30}"}))
    assert drafter.asked and set(rows) == {1}


def test_a_drafter_of_a_kind_behind_forced_tokens_is_asked_for_the_rest() -> None:
    engine = make_engine(speculative_config={"method": "ngram", "prompt_lookup_min": 2, "prompt_lookup_max": 3})
    names = [drafter.name for drafter in engine._core.state.drafting.drafters.drafters]  # type: ignore[union-attr]
    assert names == ["forced", "ngram"]
    assert make_engine(draft_forced_tokens=False)._core.state.drafting is None
    assert draft_with(engine._core.state, []) is None
