"""Masks of many states at once: llguidance's own, narrowed, one row for each."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from random_schemas import random_object

from torch_pagoda.runtime.structured.asked import read_structured_outputs
from torch_pagoda.runtime.structured.grammar import compile_grammar
from torch_pagoda.runtime.structured.masks import MaskPool
from torch_pagoda.runtime.structured.state import GrammarError, GrammarState
from torch_pagoda.runtime.structured.vocabulary import Vocabulary, vocabulary_of

from chat_families import chat_tokenizer
from toy_program import character_tokenizer

TOKENIZER: Any = character_tokenizer()
EOS = 256


def allowed(row: torch.Tensor) -> list[int]:
    bits = np.unpackbits(row.numpy().view(np.uint8), bitorder="little")
    return [int(token) for token in np.flatnonzero(bits)]


def own_mask(state: GrammarState) -> list[int]:
    return allowed(torch.from_numpy(np.frombuffer(state.matcher.compute_bitmask(), np.int32).copy()))


@pytest.fixture(scope="module", params=[258, 300, 1000], ids=lambda size: f"{size} columns")
def vocabulary(request: pytest.FixtureRequest) -> Vocabulary:
    return vocabulary_of(TOKENIZER, request.param, [EOS])


def start(vocabulary: Vocabulary, text: str = "", **asked: Any) -> GrammarState:
    state = compile_grammar(read_structured_outputs(asked), vocabulary).start()
    state.restore(TOKENIZER(text, add_special_tokens=False).input_ids if text else [])
    return state


@pytest.mark.parametrize("threads", [1, 2])
def test_masks_are_llguidance_s_own(vocabulary: Vocabulary, threads: int, two_threads: None) -> None:
    """Along random walks through random schemas, in batches of changing sizes."""
    torch.set_num_threads(threads)
    rng = random.Random(3)
    pool = MaskPool()
    states = [start(vocabulary, json=random_object(rng)) for _ in range(12)]
    twins = [GrammarState(state.grammar) for state in states]
    for _ in range(60):
        running = [i for i, state in enumerate(states) if not state.is_finished]
        rng.shuffle(running)
        running = running[: rng.randint(1, 12)]
        if not running:
            break
        masks = pool.fill([states[i] for i in running], [False] * len(running))
        assert masks.shape == (len(running), -(-vocabulary.size // 32)) and masks.dtype is torch.int32
        for i, row in zip(running, masks, strict=True):
            tokens = allowed(row)
            assert states[i].error is None and tokens
            if states[i].digits_left is None:
                assert tokens == own_mask(twins[i])
            token = rng.choice(tokens)
            states[i].consume(token)
            twins[i].consume(token)


def test_the_end_is_held_back_where_anything_else_may_come(vocabulary: Vocabulary) -> None:
    open_end, closed = start(vocabulary, "7", regex="7*"), start(vocabulary, "77", regex="7{2}|7{2}")
    pool = MaskPool()
    assert allowed(pool.fill([open_end], [False])[0]) == [22, EOS]
    masks = pool.fill([open_end, closed], [True, True])
    assert allowed(masks[0]) == [22] and allowed(masks[1]) == [EOS]


def test_digits_run_out(vocabulary: Vocabulary) -> None:
    state = start(vocabulary, "[" + "1" * 20, json={"type": "array"})
    assert not {15, 16, 24} & set(allowed(MaskPool().fill([state], [False])[0]))
    state = start(vocabulary, "[" + "1" * 19, json={"type": "array"})
    assert {15, 16, 24} <= set(allowed(MaskPool().fill([state], [False])[0]))


def test_a_state_in_error_allows_nothing(vocabulary: Vocabulary) -> None:
    good, bad = start(vocabulary, regex="[0-9]"), start(vocabulary, regex="[0-9]")
    with pytest.raises(GrammarError, match=r"cannot continue .*token"):
        bad.consume(3)
    masks = MaskPool().fill([bad, good], [False, True])
    assert allowed(masks[0]) == [] and len(allowed(masks[1])) == 10
    assert bad.error is not None and bad.error.startswith("the grammar of structured_outputs cannot continue (")
    bad.restore([15])
    assert bad.error is None and bad.is_finished and bad.ended_in_text


def test_states_of_one_grammar_are_their_own(vocabulary: Vocabulary) -> None:
    grammar = compile_grammar(read_structured_outputs({"regex": "ab|cd"}), vocabulary)
    first, second = grammar.start(), grammar.start()
    first.consume(TOKENIZER("a").input_ids[0])
    masks = MaskPool().fill([first, second], [False, False])
    assert len(allowed(masks[0])) == 1 and len(allowed(masks[1])) == 2


def test_restoring_is_consuming(vocabulary: Vocabulary) -> None:
    schema = random_object(random.Random(5))
    state, twin = start(vocabulary, json=schema), start(vocabulary, json=schema)
    tokens: list[int] = []
    pool, rng = MaskPool(), random.Random(1)
    while not state.is_finished and len(tokens) < 80:
        token = rng.choice(allowed(pool.fill([state], [True])[0]))
        tokens.append(token)
        state.consume(token)
        twin.restore(tokens)
        assert (twin.is_finished, twin.digits_left) == (state.is_finished, state.digits_left)
        if not state.is_finished:
            assert own_mask(twin) == own_mask(state)


@pytest.mark.parametrize("threads", [1, 2])
def test_states_that_wait_stand_among_those_that_do_not(
    vocabulary: Vocabulary, threads: int, two_threads: None
) -> None:
    torch.set_num_threads(threads)
    running = [start(vocabulary, regex="[0-9]{3}"), start(vocabulary, regex="[a-c]")]
    waiting = [running[0].grammar.start((7, 8), stops) for stops in ((), (9, 10**6))]
    masks = MaskPool().fill([waiting[0], running[0], waiting[1], running[1]], [False, True, True, False])
    free = set(range(vocabulary.size)) - {EOS}
    rows = [[token for token in allowed(row) if token < vocabulary.size] for row in masks]
    assert set(rows[0]) == free and set(rows[2]) == free - {9}
    assert [rows[1], rows[3]] == [own_mask(state) for state in running]
    waiting[0].restore([9, 7, 8])
    assert allowed(MaskPool().fill(waiting[:1], [False])[0]) == rows[1]


@pytest.mark.parametrize("text", ["</think>", "<|im_start|>"])
def test_a_token_that_a_vocabulary_holds_whole_is_the_text_that_ends_the_wait(text: str) -> None:
    tokenizer = chat_tokenizer("hermes")
    grammar = compile_grammar(read_structured_outputs({"regex": "a"}), vocabulary_of(tokenizer))
    for parts in ([text], list(text)):
        ids = tokenizer.convert_tokens_to_ids(parts)
        state, waits = grammar.start(text), []
        for token in ids:
            state.consume(token)
            waits.append(state.is_waiting)
        assert waits == [True] * (len(ids) - 1) + [False]
