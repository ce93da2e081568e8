"""Ends of completions under a grammar, and what else may be asked beside one."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from structured_engine import EOS, VOCAB, BigramProgram, structured_engine

from torch_pagoda.runtime.engine.engine import Engine
from torch_pagoda.runtime.requests.outputs import CompletionOutput
from torch_pagoda.runtime.requests.sampling_params import SamplingParams

from toy_program import ToyProgram

DIGIT = {chr(48 + i): 15 + i for i in range(10)}
"""The tests' tokenizer has a token for each byte; these are the digits."""


def ask(regex: str, engine: Engine | None = None, **options: Any) -> CompletionOutput:
    given = {"temperature": 0, "max_tokens": 40, "structured_outputs": {"regex": regex}, **options}
    (output,) = (engine or structured_engine()).generate(["Hello"], SamplingParams(**given))
    return output.outputs[0]


def favoring(*tokens: int) -> Engine:
    """A model that likes these tokens best, the first one most."""
    program = BigramProgram(vocab_size=VOCAB, max_model_len=1000)

    def change(logits: torch.Tensor, last: torch.Tensor) -> torch.Tensor:
        for place, token in enumerate(tokens):
            logits[:, token] = 1000.0 - place
        return logits

    program.change_logits = change
    return structured_engine(program)


def test_a_finished_grammar_ends_it() -> None:
    output = ask("[0-9]{3}")
    assert re.fullmatch("[0-9]{3}", output.text) and len(output.token_ids) == 3
    assert output.finish_reason == "stop" and output.stop_reason is None
    assert ask("[0-9]{3}", ignore_eos=True) == output
    assert ask("[0-9]{3}", min_tokens=30) == output


def test_the_model_may_end_it_where_the_text_is_complete() -> None:
    output = ask("[0-9]{3,}", favoring(EOS, DIGIT["7"]))
    assert output.text == "777" and output.token_ids == [DIGIT["7"]] * 3 + [EOS] and output.finish_reason == "stop"


def test_what_holds_the_end_back() -> None:
    engine = favoring(EOS, DIGIT["7"])
    assert ask("[0-9]{3,}", engine, min_tokens=5).text == "7" * 5
    output = ask("[0-9]{3,}", engine, ignore_eos=True, max_tokens=9)
    assert output.text == "7" * 9 and output.finish_reason == "length"
    drawn = ask("[0-9]{3,}", engine, ignore_eos=True, max_tokens=9, temperature=0.5, seed=1, presence_penalty=0.1)
    assert len(drawn.text) == 9 and drawn.finish_reason == "length"
    # Where nothing but the end can come it is not held back.
    assert ask("[0-9]{3,5}", engine, ignore_eos=True).text == "7" * 5
    assert ask("[0-9]{3,5}", engine, min_tokens=20).text == "7" * 5


def test_no_room_is_left() -> None:
    output = ask("[0-9]{9}", max_tokens=4)
    assert len(output.text) == 4 and output.finish_reason == "length"
    program = ToyProgram(vocab_size=VOCAB, max_model_len=12)
    assert ask("[0-9]{90}", structured_engine(program), max_tokens=None).finish_reason == "length"
    # The last token that there is room for completes it.
    assert ask("[0-9]{4}", max_tokens=4).finish_reason == "stop"


def test_stop_strings_and_stop_tokens_count() -> None:
    seven, eight = DIGIT["7"], DIGIT["8"]
    output = ask("[0-9]{9}", favoring(seven), stop=["777"])
    assert output.text == "" and output.finish_reason == "stop" and output.stop_reason == "777"
    output = ask("[0-9]{9}", favoring(seven), stop=["777"], include_stop_str_in_output=True)
    assert output.text == "777"
    output = ask("7*8", favoring(eight), stop_token_ids=[eight])
    assert output.text == "" and output.stop_reason == eight
    # Both at once: the stop string is what is reported.
    assert ask("7{3}", favoring(seven), stop=["777"]).stop_reason == "777"


def test_other_rules_hold_within_the_grammar() -> None:
    seven, eight = DIGIT["7"], DIGIT["8"]
    engine = favoring(seven, eight)
    assert ask("[0-9]{3}", engine, allowed_token_ids=[eight, 3]).text == "888"
    assert ask("[0-9]{3}", engine, logit_bias={seven: -100, eight: 100}).text == "888"
    assert ask("[0-9]{3}", engine, bad_words=["77"]).text == "787"
    failed = ask("[0-9]{3}", engine, allowed_token_ids=[3])
    assert failed.finish_reason == "error" and failed.error is not None and "allow no choice" in failed.error
    assert failed.text == ""
    reported = ask("[0-9]{3}", engine, logprobs=2)
    assert reported.text == "777" and reported.logprobs is not None and len(reported.logprobs[0]) == 2


def test_reported_log_probabilities_are_the_model_s() -> None:
    output = ask("[0-9]{3}", logprobs=3)
    free = structured_engine().generate(["Hello"], SamplingParams(temperature=0, max_tokens=1, logprobs=3))
    best = free[0].outputs[0].logprobs
    assert output.logprobs is not None and best is not None
    assert next(iter(best[0])) in output.logprobs[0] and output.logprobs[0][output.token_ids[0]].rank > 1


def test_logits_that_are_no_numbers() -> None:
    """Those of tokens that may not come do not count; those of tokens that may end the request and no other."""
    program = BigramProgram(vocab_size=VOCAB, max_model_len=1000)
    engine = structured_engine(program)
    for token, wanted in ((EOS, "stop"), (DIGIT["3"], "error")):
        program.change_logits = lambda logits, last, token=token: logits.index_fill(
            1, torch.tensor([token]), torch.nan
        )
        for temperature in (0, 1.5):
            output = ask("[0-9]{3}", engine, temperature=temperature)
            assert output.finish_reason == wanted
    program.change_logits = None
    assert ask("[0-9]{3}", engine).finish_reason == "stop"


def test_too_much_work_ends_one_request() -> None:
    """Found while it runs: the others of the batch and the engine go on."""
    engine = structured_engine()
    costly = {"grammar": 'start: "abc" ' + "t? " * 1500 + '\nt: "x" | "y"'}
    drawn = SamplingParams(temperature=1.5, max_tokens=40, structured_outputs=costly)
    costly_too = {"grammar": costly["grammar"].replace("abc", "abcd")}
    likeliest = SamplingParams(temperature=0, max_tokens=40, structured_outputs=costly_too)
    fine = SamplingParams(temperature=0, max_tokens=40, structured_outputs={"regex": "[0-9]{8}"})
    outputs = [o.outputs[0] for o in engine.generate(["a", "b", "c", "d"], [likeliest, fine, drawn, fine])]
    assert [o.finish_reason for o in outputs] == ["error", "stop", "error", "stop"]
    for output in (outputs[0], outputs[2]):
        assert output.error is not None and re.match(
            r"the grammar of structured_outputs cannot continue \(.*items; max is 2000", output.error
        )
    assert engine.generate(["a"], fine)[0].outputs[0].text == outputs[1].text
    assert engine.block_manager.num_used_blocks == 0


@pytest.mark.parametrize(
    "asked",
    [{"regex": "(a{1000}){1000}"}, {"grammar": 'start: A{1000}\nA: B{1000}\nB: "a"{1000}'}],
    ids=["regex", "grammar"],
)
def test_repetitions_of_repetitions_run_as_far_as_is_asked(asked: dict[str, str]) -> None:
    engine = structured_engine()
    params = SamplingParams(temperature=0, max_tokens=40, structured_outputs=asked)
    output = engine.generate(["b"], params)[0].outputs[0]
    assert output.finish_reason == "length" and output.error is None
    assert set(output.text) == {"a"} and len(output.text) >= 40


@pytest.mark.parametrize("after", ["</think>", ["</", "hi", "k>"], [DIGIT["7"], DIGIT["7"]], [EOS + 1]], ids=str)
@pytest.mark.parametrize("temperature", [0, 1.5])
def test_a_grammar_begins_after_reasoning(after: Any, temperature: float) -> None:
    program = BigramProgram(vocab_size=VOCAB, max_model_len=1000)
    engine = structured_engine(program)
    closer = list(engine.tokenizer("</think>", add_special_tokens=False).input_ids)  # type: ignore[misc]
    wanted = after if isinstance(after[0], int) else closer
    script = [40, 41, *wanted[:1], 42, *wanted]
    calls = 0

    def change(logits: torch.Tensor, last: torch.Tensor) -> torch.Tensor:
        nonlocal calls
        if calls < len(script):
            logits[:] = -torch.inf
            logits[:, script[calls]] = 0.0
        calls += 1
        return logits

    if len(wanted) == 1:
        del script[2]  # it would be the closer already
    program.change_logits = change
    asked = {"regex": "[0-9]{3}", "after": after}
    params = SamplingParams(
        temperature=temperature, seed=1, max_tokens=40, structured_outputs=asked, skip_special_tokens=False
    )
    (output,) = engine.generate(["Hello"], params)[0].outputs
    assert output.token_ids[:-3] == script and output.finish_reason == "stop"
    assert re.search(r"[0-9]{3}$", output.text)


@pytest.mark.parametrize("options", [{}, {"ignore_eos": True}, {"min_tokens": 4}, {"logprobs": 1}], ids=str)
@pytest.mark.parametrize("stops", [[], [DIGIT["8"], 10**6]], ids=str)
@pytest.mark.parametrize("is_ahead", [False, True])
def test_nothing_ends_it_before_the_grammar_begins(options: dict[str, Any], stops: list[int], is_ahead: bool) -> None:
    """A model that would rather end than go on goes on until the text that the grammar waits for has come."""
    seven, eight = DIGIT["7"], DIGIT["8"]
    program = BigramProgram(vocab_size=VOCAB, max_model_len=1000)
    calls = 0

    def change(logits: torch.Tensor, last: torch.Tensor) -> torch.Tensor:
        nonlocal calls
        calls += 1
        logits[:] = -torch.inf
        logits[:, [EOS, eight, 40 if calls < 5 else 30, seven]] = torch.tensor([9.0, 8.0, 7.0, 1.0])
        return logits

    program.change_logits = change
    engine = structured_engine(program, async_scheduling=is_ahead)
    asked = {"regex": "[79]{3}", "after": [30]}
    output = ask("", engine, structured_outputs=asked, stop_token_ids=stops, **options)
    first = [40] * 4 if stops else [eight] * 40
    assert output.token_ids == ([*first, 30, seven, seven, seven] if stops else first)
    assert output.finish_reason == ("stop" if stops else "length") and output.stop_reason is None
    calls = 0
    drawn = ask("", engine, structured_outputs=asked, stop_token_ids=[eight], temperature=0.1, seed=1, **options)
    assert drawn.token_ids == [40] * 4 + [30, seven, seven, seven] and drawn.finish_reason == "stop"


def test_numbers_do_not_go_on_for_ever() -> None:
    engine = favoring(DIGIT["7"])
    for schema in ({"type": "number"}, {"type": "array"}, {"type": "object"}):
        output = ask("", engine, structured_outputs={"json": schema}, max_tokens=200, min_tokens=1)
        longest = max((len(run) for run in re.findall("[0-9]+", re.sub('"[^"]*"?', "", output.text))), default=0)
        assert longest <= 20
    # A schema that says otherwise is obeyed.
    output = ask("", engine, structured_outputs={"json": {"type": "integer", "minimum": 10**12}})
    assert output.text == "7" * 20
    assert ask("", engine, structured_outputs={"json": {"pattern": "^7{40}$"}}, max_tokens=90).finish_reason == "stop"
    strings = ask("", engine, structured_outputs={"json": {"type": "string", "pattern": "^7{40}$"}}, max_tokens=90)
    assert strings.text == '"' + "7" * 40 + '"'


def test_refusals_leave_the_engine_alone() -> None:
    engine = structured_engine()
    bad = SamplingParams(structured_outputs={"json": {"not": {}}})
    with pytest.raises(ValueError, match=r"^sampling_params\[1\]\.structured_outputs\.json cannot be enforced"):
        engine.generate(["a", "b"], [SamplingParams(), bad])
    with pytest.raises(ValueError, match=r"^structured_outputs\.json cannot be enforced"):
        engine.submit("a", bad)
    with pytest.raises(ValueError, match="cannot be enforced"):
        engine.stream("a", bad)
    assert not engine.has_unfinished()
    with pytest.raises(ValueError, match="needs a tokenizer"):
        Engine(ToyProgram()).generate([[1]], SamplingParams(structured_outputs={"regex": "a"}))
