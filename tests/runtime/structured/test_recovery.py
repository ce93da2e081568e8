"""What becomes of grammars when the engine rebuilds its state, and of text that a token brings along."""

from __future__ import annotations

from typing import Any

import pytest
from structured_engine import BigramProgram, structured_engine
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from torch_pagoda.runtime.engine.engine import Engine
from torch_pagoda.runtime.requests.sampling_params import SamplingParams
from torch_pagoda.runtime.structured.state import GrammarError, GrammarState

from toy_program import character_tokenizer


def test_a_completion_that_failed_does_not_keep_the_engine_from_recovering(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = structured_engine()
    engine.submit([65], SamplingParams(structured_outputs={"regex": "[a-z]{40}"}, max_tokens=40, n=2, seed=1))
    engine.submit([66], SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True), request_id="other")
    consume, left = GrammarState.consume, [3]

    def fails_once(state: GrammarState, token: int) -> bool:
        left[0] -= 1
        if left[0] == 0:
            raise GrammarError("too much work")
        return consume(state, token)

    monkeypatch.setattr(GrammarState, "consume", fails_once)
    for _ in range(3):
        engine.step()
    monkeypatch.setattr(GrammarState, "consume", consume)
    refused = GrammarState.restore

    def restore(state: GrammarState, tokens: Any) -> None:
        if len(tokens) == 2:  # those of the completion that failed, which replayed would fail again
            raise GrammarError("too much work")
        refused(state, tokens)

    monkeypatch.setattr(GrammarState, "restore", restore)
    engine.in_turn(engine.compute_again)
    reasons = {o.request_id: [c.finish_reason for c in o.outputs] for o in iter_outputs(engine)}
    assert sorted(reasons["0"], key=str).count("error") == 1
    assert reasons["other"] == ["length"]


def test_a_grammar_that_cannot_return_to_its_tokens_ends_its_own_completion(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = structured_engine()
    asked = {"regex": "[a-z]{40}"}
    engine.submit([65], SamplingParams(structured_outputs=asked, max_tokens=40, seed=1), request_id="held")
    engine.submit([66], SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True), request_id="other")
    for _ in range(3):
        engine.step()

    def fails(state: GrammarState, tokens: Any) -> None:
        raise GrammarError("too much work")

    monkeypatch.setattr(GrammarState, "restore", fails)
    engine.in_turn(engine.compute_again)
    outputs = {output.request_id: output.outputs[0] for output in iter_outputs(engine)}
    assert (outputs["held"].finish_reason, outputs["held"].error) == ("error", "too much work")
    assert (outputs["other"].finish_reason, len(outputs["other"].token_ids)) == ("length", 8)


def iter_outputs(engine: Engine) -> list[Any]:
    last: dict[str, Any] = {}
    for _ in range(100):
        if not engine.has_unfinished():
            break
        for output in engine.step():
            last[output.request_id] = output
    assert all(output.finished for output in last.values())
    return list(last.values())


@pytest.mark.parametrize(("choice", "stop"), [("b", "b"), ("bc", "c")])
def test_a_stop_token_that_is_also_text_of_the_grammar_stays_out_after_an_interrupt(choice: str, stop: str) -> None:
    stops = character_tokenizer()(stop, add_special_tokens=False).input_ids
    asked = {"choice": [choice]}
    params = SamplingParams(structured_outputs=asked, stop_token_ids=stops, max_tokens=6, temperature=0)
    expected = structured_engine().generate([[65]], params)[0].outputs[0]
    engine = structured_engine()
    engine.submit([65], params)
    output, interrupts = engine._core.output, [1]

    def interrupted(submission: Any) -> Any:
        result = output(submission)
        if submission.is_finished and interrupts:
            interrupts.pop()
            raise KeyboardInterrupt
        return result

    engine._core.output = interrupted  # type: ignore[method-assign]
    outputs: list[Any] = []
    while engine.has_unfinished():
        try:
            outputs = engine.step() or outputs
        except KeyboardInterrupt:
            continue
    found = outputs[0].outputs[0]
    assert interrupts == [] and expected.text == choice.removesuffix(stop)
    assert (found.text, found.token_ids) == (expected.text, expected.token_ids)


def test_ids_of_several_prompts_are_all_given_or_none() -> None:
    engine = structured_engine()
    with pytest.raises(ValueError, match="request_ids contains None"):
        engine.submit_many([[65], [66]], SamplingParams(max_tokens=2), [None, "0"])  # type: ignore[list-item]
    (output,) = engine.generate([[65]], SamplingParams(max_tokens=2, ignore_eos=True))
    assert output.outputs[0].finish_reason == "length"


def test_several_prompts_are_taken_all_or_none_whatever_interrupts(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = structured_engine()
    add, calls = engine.batcher.add, []

    def interrupted(*arguments: Any, **keywords: Any) -> None:
        calls.append(1)
        if len(calls) == 2:
            raise KeyboardInterrupt
        add(*arguments, **keywords)

    monkeypatch.setattr(engine.batcher, "add", interrupted)
    params = SamplingParams(max_tokens=2, ignore_eos=True)
    with pytest.raises(KeyboardInterrupt):
        engine.submit_many([[65], [66], [67]], params, ["a", "b", "c"])
    assert sorted(output.request_id for output in iter_outputs(engine)) == ["a", "b", "c"]


def after_marker(regex: str, bias: dict[int, float]) -> Any:
    """The answer of a model whose vocabulary has a token ">a"."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: i for i, letter in enumerate(letters)} | {">a": 256, ">Ċ": 257}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[(">", "a"), (">", "Ċ")]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("</s>", special=True)])
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>")
    program = BigramProgram(vocab_size=259, max_model_len=100)
    engine = Engine(program, fast, eos_token_ids=[258], block_size=16, num_blocks=100, max_num_seqs=8)
    asked = {"regex": regex, "after": ">"}
    params = SamplingParams(structured_outputs=asked, logit_bias=bias, max_tokens=8, temperature=0.0)
    return engine.generate([[65]], params)[0].outputs[0]


def test_text_in_the_token_that_ends_the_wait_counts() -> None:
    assert after_marker("ab", {256: 100.0}).text == ">ab"
    refused = after_marker("bb", {256: 100.0})
    assert refused.finish_reason == "error" and "cannot continue" in refused.error
    assert after_marker("bb", {257: 100.0}).text == ">\nbb"
