"""Outputs under a grammar: always valid, whatever happens to the requests on the way."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable
from typing import Any

import jsonschema
import pytest
from random_schemas import random_object, random_schema
from structured_engine import EOS, VOCAB, structured_engine

from torch_pagoda.runtime.engine.engine import Engine
from torch_pagoda.runtime.engine.submission import Completion, Submission
from torch_pagoda.runtime.requests.outputs import CompletionOutput
from torch_pagoda.runtime.requests.sampling_params import SamplingParams
from torch_pagoda.runtime.structured.masks import MaskPool
from torch_pagoda.runtime.structured.state import GrammarState

from toy_program import ToyProgram

Schema = dict[str, Any]


def params_for(schema: Schema, seed: int, **options: Any) -> SamplingParams:
    given = {"temperature": 1.5, "max_tokens": 300, "structured_outputs": {"json": schema}, **options}
    return SamplingParams(seed=seed, **given)


def assert_valid(schema: Schema, output: CompletionOutput) -> bool:
    """Hold a finished output against its schema; returns whether it is finished."""
    assert output.error is None and output.finish_reason in ("stop", "length")
    if output.finish_reason == "length":
        return False
    kind = jsonschema.Draft202012Validator
    kind(schema, format_checker=kind.FORMAT_CHECKER).validate(json.loads(output.text))
    return True


def finished_share(count: int, seed: int) -> float:
    """Run so many random schemas; all outputs that finish are valid."""
    rng = random.Random(seed)
    schemas = [random_schema(rng) if i % 2 else random_object(rng) for i in range(count)]
    engine = structured_engine()
    finished = 0
    for first in range(0, count, 64):
        part = schemas[first : first + 64]
        each = [params_for(s, first + i, temperature=0 if i % 8 == 0 else 1.5) for i, s in enumerate(part)]
        outputs = engine.generate([f"Hello {i}" for i in range(len(part))], each)
        finished += sum([assert_valid(s, o.outputs[0]) for s, o in zip(part, outputs, strict=True)])
    return finished / count


def test_random_outputs_of_random_schemas_are_valid() -> None:
    assert finished_share(192, seed=1) > 0.85


@pytest.mark.slow
def test_two_thousand_random_outputs_are_valid() -> None:
    assert finished_share(2048, seed=2) > 0.85


@pytest.mark.parametrize(
    "pattern", [r"[0-9]{3}-[a-z]{2}", r"(ab|c[de]*){1,4}x?", r"[^a-z\x00-\x1f]{2,9}", r"a{2,5}(?:b|\.)\+[^b]?"]
)
@pytest.mark.parametrize("temperature", [0.0, 1.5])
def test_a_regex_is_matched_in_full(pattern: str, temperature: float) -> None:
    params = SamplingParams(
        n=4 if temperature else 1,
        temperature=temperature,
        seed=5,
        max_tokens=80,
        structured_outputs={"regex": pattern},
    )
    for output in structured_engine().generate(["a", "b"], params):
        for completion in output.outputs:
            assert completion.finish_reason == "stop" and re.fullmatch(pattern, completion.text), completion.text


def test_choices_and_grammars() -> None:
    engine = structured_engine()
    choices = ["yes", "no", "né\n", '"q"', "yesterday"]
    params = SamplingParams(n=16, temperature=5.0, seed=1, structured_outputs={"choice": choices})
    texts = [completion.text for completion in engine.generate("a", params)[0].outputs]
    assert set(texts) <= set(choices) and len(set(texts)) >= 4
    lark = 'start: "[" pair ("," pair)* "]"\npair: KEY "=" /[0-9]+/\nKEY: /[a-z]{1,3}/'
    gbnf = 'root ::= "[" pair ("," pair)* "]"\npair ::= [a-z]+ "=" [0-9]+'
    for grammar in (lark, gbnf):
        params = SamplingParams(n=8, temperature=1.5, seed=1, max_tokens=400, structured_outputs={"grammar": grammar})
        for completion in engine.generate("a", params)[0].outputs:
            assert completion.finish_reason == "stop"
            assert re.fullmatch(r"\[[a-z]+=[0-9]+(,[a-z]+=[0-9]+)*\]", completion.text), completion.text


# Disturbances: each way of running gives the same bytes as running in peace.

PROMPTS = ["Hello", "a", "Some longer prompt", "b" * 20]


def disturbed_schemas() -> list[Schema]:
    rng = random.Random(7)
    return [random_object(rng) for _ in PROMPTS]


def in_peace(**options: Any) -> list[list[CompletionOutput]]:
    engine = structured_engine(ToyProgram(vocab_size=VOCAB, max_model_len=400))
    each = [params_for(s, i, max_tokens=60, **options) for i, s in enumerate(disturbed_schemas())]
    return [output.outputs for output in engine.generate(PROMPTS, each)]


def run(engine: Engine, **options: Any) -> list[list[CompletionOutput]]:
    """Submit all, and step until they end, whatever is raised meanwhile."""
    each = [params_for(s, i, max_tokens=60, **options) for i, s in enumerate(disturbed_schemas())]
    names = [engine.submit(prompt, params) for prompt, params in zip(PROMPTS, each, strict=True)]
    found: dict[str, list[CompletionOutput]] = {}
    while engine.has_unfinished():
        try:
            outputs = engine.step()
        except KeyboardInterrupt:
            continue
        found.update({output.request_id: output.outputs for output in outputs if output.finished})
    return [found[name] for name in names]


def assert_same(found: list[list[CompletionOutput]], expected: list[list[CompletionOutput]]) -> None:
    for schema, ours, theirs in zip(disturbed_schemas(), found, expected, strict=True):
        assert [(o.token_ids, o.text, o.finish_reason) for o in ours] == [
            (o.token_ids, o.text, o.finish_reason) for o in theirs
        ]
        for output in ours:
            assert_valid(schema, output)


@pytest.mark.parametrize("many", [{}, {"n": 4}, {"n": 2, "best_of": 3}], ids=str)
@pytest.mark.parametrize("preemption", ["recompute", "swap"])
def test_preempted(preemption: str, many: dict[str, int]) -> None:
    expected = in_peace(**many)
    engine = structured_engine(
        ToyProgram(vocab_size=VOCAB, max_model_len=120),
        block_size=4,
        num_blocks=40,
        max_num_seqs=8,
        preemption=preemption,
        swap_space="1MiB" if preemption == "swap" else 0,
    )
    assert_same(run(engine, **many), expected)
    assert engine.stats()["preemptions"] > 0
    assert engine.stats()["swaps"] > 0 or preemption != "swap"


def interrupted_engine(interrupt: Callable[[Engine], None], every: int = 3) -> Engine:
    """One whose n-th step is interrupted, at a place that goes on through the runtime."""
    program = ToyProgram(vocab_size=VOCAB, max_model_len=400)
    engine = structured_engine(program)
    calls = 0

    def before(tokens: Any) -> None:
        nonlocal calls
        calls += 1
        if calls % every == 0:
            interrupt(engine)

    program.before_call = before
    return engine


@pytest.mark.parametrize("many", [{}, {"n": 4}], ids=str)
def test_interrupted_in_the_model(many: dict[str, int]) -> None:
    def interrupt(engine: Engine) -> None:
        raise KeyboardInterrupt

    assert_same(run(interrupted_engine(interrupt), **many), in_peace(**many))


def interrupt_after(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, every: int) -> list[int]:
    """Raise KeyboardInterrupt behind every n-th call of a method; returns a list with the number of calls."""
    original = getattr(owner, name)
    calls = [0]

    def method(*args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        calls[0] += 1
        if calls[0] % every == 0:
            raise KeyboardInterrupt
        return result

    monkeypatch.setattr(owner, name, method)
    return calls


@pytest.mark.parametrize("place", ["consume", "fill", "append"])
@pytest.mark.parametrize("many", [{}, {"n": 3}], ids=str)
def test_interrupted_while_a_token_is_settled(
    monkeypatch: pytest.MonkeyPatch, place: str, many: dict[str, int]
) -> None:
    """A token may be consumed and not settled: it is sampled again, from a grammar that has not seen it."""
    expected = in_peace(**many)
    owner = {"consume": GrammarState, "fill": MaskPool, "append": Completion}[place]
    with monkeypatch.context() as patch:
        if place == "consume":  # not while it restores, which would never end
            interrupt_after(patch, Completion, "append", 5)
            original, calls = GrammarState.consume, [0]

            def consume(state: GrammarState, token: int) -> bool:
                done = original(state, token)
                calls[0] += 1
                if calls[0] % 997 == 0:
                    raise KeyboardInterrupt
                return done

            patch.setattr(owner, place, consume)
        else:
            interrupt_after(patch, owner, place, 5)
        found = run(structured_engine(ToyProgram(vocab_size=VOCAB, max_model_len=400)), **many)
    assert_same(found, expected)


def test_a_step_that_fails_for_one_runs_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """A batch whose model call raises is run one by one, with the grammars as they were."""
    expected = in_peace()
    program = ToyProgram(vocab_size=VOCAB, max_model_len=400)

    def fail_together(tokens: Any) -> None:
        if program.steps[-1][1] > 1:
            raise RuntimeError("too many")

    program.before_call = fail_together
    assert_same(run(structured_engine(program)), expected)


# What would make these checks fail.


def share_matchers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Followers of a prompt's first completion follow its grammar, too."""
    begin = Submission.begin_completions

    def shared(self: Submission, *args: Any) -> None:
        begin(self, *args)
        for completion in self.completions:
            completion.request.grammar = self.completions[0].request.grammar

    monkeypatch.setattr(Submission, "begin_completions", shared)


def restore_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(GrammarState, "restore", lambda self, tokens: None)


def forget_the_tail(monkeypatch: pytest.MonkeyPatch) -> None:
    """Masks of a word too few: the last tokens, EOS among them, are cut off or left over from the last step."""
    fill = MaskPool.fill

    def shifted(self: MaskPool, *args: Any) -> Any:
        masks = fill(self, *args)
        masks.copy_(masks.roll(1, 1))
        return masks

    monkeypatch.setattr(MaskPool, "fill", shifted)


def always_allow_eos(monkeypatch: pytest.MonkeyPatch) -> None:
    fill = MaskPool.fill

    def with_eos(self: MaskPool, *args: Any) -> Any:
        masks = fill(self, *args)
        masks[:, EOS // 32] |= 1 << EOS % 32
        return masks

    monkeypatch.setattr(MaskPool, "fill", with_eos)


@pytest.mark.parametrize("mutant", [forget_the_tail, always_allow_eos])
def test_a_wrong_mask_is_found(monkeypatch: pytest.MonkeyPatch, mutant: Callable[[pytest.MonkeyPatch], None]) -> None:
    mutant(monkeypatch)
    with pytest.raises((AssertionError, jsonschema.ValidationError, json.JSONDecodeError)):
        assert finished_share(64, seed=1) > 0.85


def test_a_shared_matcher_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = in_peace(n=4)
    share_matchers(monkeypatch)
    with pytest.raises(AssertionError):
        assert_same(run(structured_engine(ToyProgram(vocab_size=VOCAB, max_model_len=400)), n=4), expected)


def test_a_state_that_is_not_restored_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = in_peace()
    restore_nothing(monkeypatch)
    interrupt_after(monkeypatch, Completion, "append", 5)
    with pytest.raises(AssertionError):
        assert_same(run(structured_engine(ToyProgram(vocab_size=VOCAB, max_model_len=400))), expected)


def test_other_requests_are_not_touched() -> None:
    """Free requests beside structured ones get the tokens that they get alone."""
    free = SamplingParams(temperature=1.5, seed=9, max_tokens=20, logprobs=1)
    greedy = SamplingParams(temperature=0, max_tokens=20)
    alone = structured_engine().generate(["x", "y"], [free, greedy])
    mixed = structured_engine().generate(
        ["x", "a", "y", "b"], [free, params_for({"type": "string"}, 1), greedy, params_for({}, 2, temperature=0)]
    )
    assert [mixed[0].outputs[0].token_ids, mixed[2].outputs[0].token_ids] == [o.outputs[0].token_ids for o in alone]


def test_streams_and_submits_give_what_generate_gives() -> None:
    params = params_for(disturbed_schemas()[0], 3)
    (expected,) = structured_engine().generate(["Hello"], params)[0].outputs
    pieces = list(structured_engine().stream("Hello", params))
    assert "".join(piece.text for piece in pieces) == expected.text and pieces[-1].finish_reason == "stop"
    engine = structured_engine()
    engine.submit("Hello", params, priority=1)
    outputs = []
    while engine.has_unfinished():
        outputs += engine.step()
    assert outputs[-1].outputs[0].text == expected.text
