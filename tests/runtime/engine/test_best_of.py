"""``best_of``: more completions run than are returned."""

from __future__ import annotations

import math
from typing import Any

import pytest

from torch_pagoda.runtime.engine.engine import Engine
from torch_pagoda.runtime.requests.outputs import RequestOutput
from torch_pagoda.runtime.requests.sampling_params import SamplingParams

from toy_program import ToyProgram, character_tokenizer

PROMPT = [5, 6, 7, 8, 9]


def make_engine(**options: Any) -> Engine:
    return Engine(ToyProgram(), **{"block_size": 4, "num_blocks": 64, "max_num_seqs": 8, **options})


def drawn(**options: Any) -> SamplingParams:
    return SamplingParams(**{"temperature": 1.5, "seed": 3, "max_tokens": 9, **options})


def dense_logprob(tokens: list[int]) -> float:
    """Of the tokens after the prompt."""
    rows = ToyProgram().dense_logits(PROMPT + tokens)[len(PROMPT) - 1 : -1].log_softmax(-1)
    return float(rows[range(len(tokens)), tokens].sum())


def test_the_likeliest_are_returned_best_first() -> None:
    everything = make_engine().generate([PROMPT], drawn(n=6, logprobs=0))[0].outputs
    ranked = sorted(everything, key=lambda output: -(output.cumulative_logprob or 0.0))
    assert [output.token_ids for output in ranked] != [output.token_ids for output in everything]
    engine = make_engine()
    (output,) = engine.generate([PROMPT], drawn(n=2, best_of=6))
    assert [best.token_ids for best in output.outputs] == [best.token_ids for best in ranked[:2]]
    assert [best.index for best in output.outputs] == [0, 1]
    assert all(best.logprobs is None and best.cumulative_logprob is None for best in output.outputs)
    assert output.metrics.num_generated_tokens == 6 * 9
    assert engine.stats()["copies_on_write"] > 0 and engine.block_manager.num_used_blocks == 0
    scores = [dense_logprob(completion.token_ids) for completion in everything]
    assert dense_logprob(output.outputs[0].token_ids) == max(scores)


def test_log_probabilities_are_reported_where_they_are_asked_for() -> None:
    (output,) = make_engine().generate([PROMPT], drawn(best_of=4, logprobs=2))
    (best,) = output.outputs
    assert best.logprobs is not None and [len(entry) for entry in best.logprobs] == [
        2 + (token not in dict(sorted(entry.items(), key=lambda item: item[1].rank)[:2]))
        for token, entry in zip(best.token_ids, best.logprobs, strict=True)
    ]
    assert best.cumulative_logprob == pytest.approx(dense_logprob(best.token_ids), abs=1e-4)


def test_as_many_as_are_returned_changes_nothing() -> None:
    plain = make_engine().generate([PROMPT], drawn(n=3))[0].outputs
    same = make_engine().generate([PROMPT], drawn(n=3, best_of=3))[0].outputs
    assert [output.token_ids for output in same] == [output.token_ids for output in plain]
    greedy = SamplingParams(temperature=0, best_of=1, max_tokens=4)
    assert make_engine().generate([PROMPT], greedy)[0].outputs[0].token_ids == ToyProgram().dense_greedy(PROMPT, 4)


def test_step_returns_the_best_and_preemption_changes_nothing() -> None:
    want = make_engine().generate([PROMPT], drawn(n=2, best_of=5))[0].outputs
    engine = make_engine(num_blocks=5, max_model_len=16)
    engine.submit(PROMPT, drawn(n=2, best_of=5))
    last: RequestOutput | None = None
    while engine.has_unfinished():
        for last in engine.step():
            assert len(last.outputs) == 2
    assert last is not None and last.finished and engine.stats()["preemptions"] > 0
    assert [output.token_ids for output in last.outputs] == [output.token_ids for output in want]


def test_text_and_stop_strings() -> None:
    tokenizer: Any = character_tokenizer()
    engine = Engine(ToyProgram(vocab_size=258), tokenizer, block_size=4, num_blocks=64, max_num_seqs=8)
    (output,) = engine.generate(["Hello"], drawn(n=2, best_of=4))
    assert all(best.text == tokenizer.decode(best.token_ids, skip_special_tokens=True) for best in output.outputs)


def test_a_stream_refuses_it() -> None:
    engine = make_engine()
    with pytest.raises(ValueError, match="best_of=3 with n=1 cannot be streamed"):
        engine.stream(PROMPT, drawn(best_of=3))
    assert len(list(engine.stream(PROMPT, drawn(best_of=1)))) == 9


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"best_of": 0}, "best_of=0"),
        ({"best_of": True}, "best_of=True"),
        ({"best_of": 1.0}, "best_of=1.0"),
        ({"n": 3, "best_of": 2}, "best_of=2 is below n=3"),
        ({"best_of": 2, "temperature": 0}, "best_of=2 with temperature=0"),
    ],
)
def test_bad_values_are_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words) as caught:
        drawn(**options)
    assert "\n" not in str(caught.value)


def test_each_completion_is_a_request_of_its_own() -> None:
    params = drawn(n=2, best_of=3, prompt_logprobs=1)
    each = [params.completion(i) for i in range(params.num_completions)]
    assert [(own.n, own.best_of, own.seed, own.logprobs) for own in each] == [(1, None, 3 + i, 0) for i in range(3)]
    assert [own.prompt_logprobs for own in each] == [1, None, None]
    assert drawn(n=2).completion(1).logprobs is None
    assert math.isclose(drawn(n=2, best_of=5).completion(4).temperature, 1.5)
