"""What one request may ask for, and that its errors stay short."""

from __future__ import annotations

from typing import Any

import pytest

from torch_pagoda.runtime.batching import QueueFull
from torch_pagoda.runtime.engine.engine import Engine
from torch_pagoda.runtime.requests.request_limits import (
    MAX_BAD_WORDS,
    MAX_BAD_WORDS_CHARACTERS,
    MAX_COMPLETIONS,
    MAX_LOGPROBS,
    MAX_PRIORITY,
    MAX_STOP_CHARACTERS,
    MAX_STOP_STRINGS,
    MAX_TOKEN_IDS,
)
from torch_pagoda.runtime.requests.request_options import RequestOptions
from torch_pagoda.runtime.requests.sampling_params import SamplingParams

from toy_program import ToyProgram


def words(count: int) -> list[str]:
    return [f"{number:05}" for number in range(count)]


@pytest.mark.parametrize(
    ("name", "value", "limit"),
    [
        ("n", MAX_COMPLETIONS + 1, MAX_COMPLETIONS),
        ("best_of", MAX_COMPLETIONS + 1, MAX_COMPLETIONS),
        ("logprobs", MAX_LOGPROBS + 1, MAX_LOGPROBS),
        ("prompt_logprobs", MAX_LOGPROBS + 1, MAX_LOGPROBS),
        ("max_tokens", 10**400, 2**64 - 1),
        ("stop", words(MAX_STOP_STRINGS + 1), MAX_STOP_STRINGS),
        ("stop", "x" * (MAX_STOP_CHARACTERS + 1), MAX_STOP_CHARACTERS),
        ("bad_words", words(MAX_BAD_WORDS + 1), MAX_BAD_WORDS),
        ("bad_words", ["x" * MAX_BAD_WORDS_CHARACTERS, "y"], MAX_BAD_WORDS_CHARACTERS),
        ("stop_token_ids", [1] * (MAX_TOKEN_IDS + 1), MAX_TOKEN_IDS),
        ("allowed_token_ids", range(MAX_TOKEN_IDS + 1), MAX_TOKEN_IDS),
        ("temperature", 10**400, "inf"),
        ("stop_token_ids", [*range(10_000), "x"], "holds 'x'"),
        ("bad_words", ["x" * 10_000, 3], "holds 3"),
        ("logit_bias", "x" * 10_000, "is not a mapping"),
    ],
)
def test_what_is_too_much_is_refused_in_a_short_line(name: str, value: Any, limit: object) -> None:
    with pytest.raises(ValueError, match=f"^{name}") as caught:
        SamplingParams(**{name: value})
    message = str(caught.value)
    assert str(limit) in message and len(message) < 250


def test_what_is_just_within_the_limits_is_taken() -> None:
    params = SamplingParams(
        n=MAX_COMPLETIONS, logprobs=MAX_LOGPROBS, stop=words(MAX_STOP_STRINGS), bad_words=words(MAX_BAD_WORDS)
    )
    assert len(params.stop_strings) == MAX_STOP_STRINGS and len(params.bad_words or ()) == MAX_BAD_WORDS


@pytest.mark.parametrize("value", [MAX_PRIORITY + 1, -MAX_PRIORITY - 1, 10**400])
def test_a_priority_that_no_rank_can_stand_for_is_refused(value: int) -> None:
    with pytest.raises(ValueError, match=f"^priority=.*{MAX_PRIORITY}"):
        RequestOptions(priority=value)
    with pytest.raises(ValueError, match=r"^deadline="):
        RequestOptions(deadline=10**400)


def test_completions_share_what_was_built_for_their_parameters() -> None:
    params = SamplingParams(n=3, stop=["x"], bad_words=["y"]).with_bad_words_token_ids([(1, 2)])
    second = params.completion(1)
    assert second.n == 1
    assert second.stop_automaton is params.stop_automaton is not None
    assert second.banned_sequences is params.banned_sequences is not None


def test_every_completion_counts_against_the_queue() -> None:
    engine = Engine(ToyProgram(), num_blocks=64, max_num_seqs=1, max_queue=3)
    engine.submit([1, 2], SamplingParams(n=2, max_tokens=2))
    with pytest.raises(QueueFull, match="2 new requests, 2 waiting, max_queue=3"):
        engine.submit([3], SamplingParams(n=2, max_tokens=2))
    engine.submit([3], SamplingParams(max_tokens=2))
    while engine.has_unfinished():
        engine.step()
    assert len(engine.generate([1], SamplingParams(n=3, max_tokens=2))[0].outputs) == 3
