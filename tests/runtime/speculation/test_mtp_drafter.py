"""A toy head drafts for an engine: its drafts are those without a cache, and it runs only where it drafts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from drafters import always, noted_drafts
from toy_head import TappedStates, TappedToy, ToyHead

from torch_pagoda.runtime.engine.engine import Engine
from torch_pagoda.runtime.requests.sampling_params import SamplingParams
from torch_pagoda.runtime.speculation import mtp

PROMPTS = [[5, 6, 7], [8], list(range(20, 45)), [1, 2, 3, 4, 5, 6, 7, 8, 9, 10]]
PROGRAMS = {"dense": TappedToy, "states": TappedStates}
PARAMS: dict[str, dict[str, Any]] = {"greedy": {"temperature": 0}, "several": {"seed": 3, "n": 3}}
SIZES: dict[str, dict[str, Any]] = {
    "chunks": {"num_blocks": 64, "max_num_batched_tokens": 12},
    "tight": {"num_blocks": 22, "max_num_batched_tokens": 12, "enable_prefix_caching": False},
    "swapping": {"num_blocks": 22, "swap_space": 1 << 18, "preemption": "swap"},
}


def make_engine(program: Any, length: int | Callable[[], int], **options: Any) -> tuple[Engine, ToyHead]:
    """An engine, and its head, which computed nothing yet."""
    head = ToyHead(program.vocab_size)
    options = {"block_size": 4, "max_num_seqs": 4, "speculative_config": {"method": "mtp"}, **options}
    engine = Engine(program, draft_program=head, **options)
    always(engine._core.state.drafting, length)  # type: ignore[arg-type]
    head.steps.clear()
    return engine, head


@pytest.mark.parametrize("program", PROGRAMS)
@pytest.mark.parametrize("kind", PARAMS)
@pytest.mark.parametrize("sizes", SIZES)
def test_drafts_are_those_without_a_cache(
    sizes: str, kind: str, program: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Behind prompts in chunks, rejected drafts, steps without drafts, preemptions, forks and prefix hits."""
    params, make = SamplingParams(max_tokens=14, ignore_eos=True, **PARAMS[kind]), PROGRAMS[program]
    plain = Engine(make(), block_size=4, max_num_seqs=4, **SIZES[sizes])
    noted, lengths = noted_drafts(monkeypatch), iter([7, 3, 0, 3, 1, 0] * 1000)
    engine, _ = make_engine(make(), lambda: next(lengths), **SIZES[sizes])
    prompts = PROMPTS
    for _ in range(2):
        outputs, expected = engine.generate(prompts, params), plain.generate(prompts, params)
        tokens = [[own.token_ids for own in output.outputs] for output in outputs]
        assert tokens == [[own.token_ids for own in output.outputs] for output in expected]
        prompts = [[*prompt, *own[0], 11] for prompt, own in zip(prompts, tokens, strict=True)]
    engine.batcher.check()
    stats = engine.stats()
    assert stats["spec_decode_num_draft_tokens"] > 10 and not stats["drafters_failed"]
    assert (stats["preemptions"] > 0) == (sizes != "chunks") and (stats["swaps"] > 0) == (sizes == "swapping")
    model, head = make(), ToyHead(make().vocab_size)
    for tokens, drafts in list(noted.items())[::2]:
        assert drafts == head.dense_drafts(model, tokens, len(drafts))


def test_the_head_runs_only_where_it_drafts() -> None:
    """What it has not computed of a turn, it computes with its first drafts of the next one."""
    lengths: list[int] = []
    engine, head = make_engine(TappedToy(), lambda: lengths[-1], num_blocks=64)
    turn = list(range(3, 24))
    for length, rows in ((0, None), (3, 43), (3, 4)):
        lengths.append(length)
        head.steps.clear()
        before = engine.stats()["spec_decode_num_drafts"]
        (output,) = engine.generate([turn], SamplingParams(temperature=0, max_tokens=20, ignore_eos=True))
        assert output.num_cached_tokens == (0 if rows is None else (len(turn) - 1) // 4 * 4)
        assert len(head.steps) == length * (engine.stats()["spec_decode_num_drafts"] - before)
        assert head.steps[:1] == ([] if rows is None else [(rows, 1, 1)])
        assert all(tokens <= 4 for tokens, *_ in head.steps[1:])
        turn = [*turn, *output.outputs[0].token_ids, 7]


def test_blocks_that_are_computed_anew_have_no_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mtp, "_MOST_HASHES", 4)
    lengths: list[int] = []
    engine, head = make_engine(TappedToy(), lambda: lengths[-1], num_blocks=64)
    for length in (3, 0, 3):
        lengths.append(length)
        head.steps.clear()
        engine.generate([list(range(3, 24))], SamplingParams(temperature=0, max_tokens=8, ignore_eos=True))
        assert head.steps[:1] == ([(22, 1, 1)] if length else [])
        (drafter,) = engine._core.state.drafting.drafters.drafters  # type: ignore[union-attr]
        assert len(drafter._complete) == (4 if length else 0)  # type: ignore[attr-defined]
        if len(lengths) == 1:
            engine.block_manager.forget_prefixes()


def test_a_request_that_is_computed_anew_gets_new_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its hidden rows may be others."""
    program, noted = TappedToy(), noted_drafts(monkeypatch)
    program.restart_length = 17
    engine, head = make_engine(program, 3, num_blocks=64)
    (output,) = engine.generate(PROMPTS[:1], SamplingParams(temperature=0, max_tokens=30, ignore_eos=True))
    assert output.outputs[0].token_ids == TappedToy().dense_greedy(PROMPTS[0], 30)
    assert max([tokens for tokens, *_ in head.steps[1:]]) > 17
    for tokens, drafts in noted.items():
        assert drafts == ToyHead().dense_drafts(TappedToy(), tokens, len(drafts))


def test_a_preempted_request_gets_new_keys() -> None:
    engine, head = make_engine(TappedToy(), 1, num_blocks=12, max_num_seqs=2, enable_prefix_caching=False)
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    engine.generate([list(range(3, 11)), list(range(20, 28))], params)
    assert engine.stats()["preemptions"] == 1
    assert head.steps[0][0] == 18 and [tokens > 12 for tokens, *_ in head.steps[1:]].count(True) == 1


def test_what_is_computed_again_for_its_state_has_rows() -> None:
    """So there are drafts behind rejected ones, three times."""
    engine, _ = make_engine(TappedStates(), 3, num_blocks=64)
    engine.generate(PROMPTS[:1], SamplingParams(temperature=0, max_tokens=20, ignore_eos=True))
    stats = engine.stats()
    assert not stats["spec_decode_num_accepted_tokens"] and stats["spec_decode_num_drafts"] > 0.6 * stats["steps"]
