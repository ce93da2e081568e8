"""``LLM.shutdown`` and ``with LLM(...)``: what runs ends, memory is free, later calls say why they fail."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import torch_pagoda as pagoda

GREEDY = pagoda.SamplingParams(max_tokens=30, temperature=0, ignore_eos=True)


@pytest.fixture
def llm(checkpoint: Path, fast: dict[str, Any]) -> pagoda.LLM:
    return pagoda.LLM(checkpoint, **fast)


def test_what_is_pending_ends_as_cancelled(llm: pagoda.LLM) -> None:
    running, waiting = llm.submit([5, 6, 7], GREEDY), llm.submit([8, 9], GREEDY)
    stream = llm.stream([5, 6], GREEDY)
    first = next(stream)
    engine = llm.engine
    outputs = {output.request_id: output for output in llm.shutdown()}
    assert set(outputs) == {running, waiting}
    for output in outputs.values():
        assert output.finished and output.outputs[0].finish_reason == "cancelled"
    assert outputs[running].outputs[0].token_ids
    *_, last = [first, *stream]
    assert last.finished and last.finish_reason == "cancelled"
    assert engine.block_manager.num_available_blocks == engine.block_manager.num_blocks
    with pytest.raises(RuntimeError, match="shut down"):
        engine.submit([5], GREEDY)
    assert llm.shutdown() == [] and engine.shutdown() == []


def test_a_generate_that_is_shut_down_from_its_callback_ends(llm: pagoda.LLM) -> None:
    outputs = llm.generate([[5, 6], [7]], GREEDY, on_progress=lambda _: llm.shutdown())
    assert [output.outputs[0].finish_reason for output in outputs] == ["cancelled", "cancelled"]


def test_later_calls_raise(llm: pagoda.LLM) -> None:
    llm.shutdown()
    calls: list[Callable[[], object]] = [
        lambda: llm.generate([[5]], GREEDY),
        lambda: llm.stream([5], GREEDY),
        lambda: llm.submit([5], GREEDY),
        lambda: llm.beam_search([5], pagoda.BeamSearchParams(2)),
        lambda: llm.step(),
        lambda: llm.cancel("0"),
        lambda: llm.has_unfinished(),
        lambda: llm.stats(),
        lambda: llm.profile(),
        lambda: llm.reset_prefix_cache(),
        lambda: llm.check_weights(),
        lambda: llm.max_model_len,
        lambda: llm.engine,
        lambda: llm.program,
    ]
    for call in calls:
        with pytest.raises(RuntimeError, match=r"LlamaForCausalLM, shut down\) is closed; create a new one"):
            call()
    with pytest.raises(AttributeError, match="nonsense"):
        llm.nonsense  # noqa: B018
    assert llm.get_tokenizer() is llm.tokenizer


def test_memory_is_free(checkpoint: Path, fast: dict[str, Any]) -> None:
    with pagoda.LLM(checkpoint, **fast) as llm:
        llm.generate([list(range(5, 90))], GREEDY)  # too long a step to be recorded
        engine = llm.engine  # whoever still has it does not keep the memory
        held = [weakref.ref(llm.program), weakref.ref(engine._core.steps.copier)]
        held += [weakref.ref(tensor) for tensors in engine._core.steps.copier._device.values() for tensor in tensors]
        assert len(held) > 2 and all(entry() is not None for entry in held)
    assert [entry() for entry in held] == [None] * len(held) and engine.batcher.num_unfinished == 0


def test_a_model_without_tokenizer_has_none_to_get(checkpoint: Path, fast: dict[str, Any], tmp_path: Path) -> None:
    from tiny_models import build_tiny_model

    with pytest.raises(ValueError, match="tokenizer="):
        pagoda.LLM(build_tiny_model("llama"), **fast).get_tokenizer()
