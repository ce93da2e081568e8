"""End tokens below zero, autocast around the engine, weights that are NaN, models that keep state."""

from __future__ import annotations

import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerFast

import torch_pagoda as pagoda
from torch_pagoda.compiled_model import eos_token_ids
from torch_pagoda.compiler import CompileOptions, build

from tiny_models import build_tiny_model

PROMPT = [4, 5, 6]
GREEDY = pagoda.SamplingParams(max_tokens=6, temperature=0)


def tokens(model: PreTrainedModel) -> list[int]:
    ids = torch.tensor([PROMPT])
    return model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=6, do_sample=False)[0, 3:].tolist()


@pytest.mark.parametrize("end", [-1, [-1, -2]], ids=str)
def test_end_tokens_below_zero_end_nothing(
    end: int | list[int], llama: PreTrainedModel, reference: PreTrainedModel, fast: dict[str, Any]
) -> None:
    """With ``min_tokens``, too, which holds end tokens back: -1 is not the last of the vocabulary."""
    llama.generation_config.eos_token_id = end
    engine = pagoda.LLM(llama, **fast)
    assert not engine.engine.eos_token_ids
    for params in (GREEDY, pagoda.SamplingParams(max_tokens=6, min_tokens=3, temperature=0)):
        found = engine.generate([PROMPT], params)[0].outputs[0]
        assert found.token_ids == tokens(reference) and found.finish_reason == "length"
    ids = torch.tensor([PROMPT])
    compiled = pagoda.compile(llama, **fast)
    more = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": end, "pad_token_id": 1}
    assert compiled.generate(ids, attention_mask=torch.ones_like(ids), **more)[0, 3:].tolist() == tokens(reference)


def test_the_tokenizers_end_token_ends_beside_those_of_the_config(
    llama: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, fast: dict[str, Any]
) -> None:
    llama.generation_config.eos_token_id = [200]
    engine = pagoda.LLM(llama, tokenizer, **fast)
    assert engine.engine.eos_token_ids == {0, 200}

    def run(**more: Any) -> tuple[int, str | None]:
        params = pagoda.SamplingParams(max_tokens=4, temperature=0, logit_bias={0: 100.0}, **more)
        found = engine.generate([PROMPT], params)[0].outputs[0]
        return len(found.token_ids), found.finish_reason

    assert run() == (1, "stop")
    assert run(ignore_eos=True) == (4, "length")
    assert run(min_tokens=3) == (3 + 1, "stop")


@pytest.mark.parametrize(
    ("generation", "config", "tokenizers", "expected"),
    [
        (None, None, 2, [2]),
        (None, 7, 2, [2, 7]),
        (5, 7, 2, [2, 5]),
        ([5, 6], 7, None, [5, 6]),
        (-1, 7, 2, [2]),
        (None, None, None, []),
    ],
)
def test_ends_are_those_of_the_first_config_and_of_the_tokenizer(
    generation: Any, config: Any, tokenizers: Any, expected: list[int]
) -> None:
    owner = SimpleNamespace
    module = owner(generation_config=owner(eos_token_id=generation), config=owner(eos_token_id=config))
    assert eos_token_ids(module, owner(eos_token_id=tokenizers)) == expected


def test_autocast_around_the_engine_changes_nothing(
    llama: PreTrainedModel, reference: PreTrainedModel, fast: dict[str, Any]
) -> None:
    with torch.autocast("cpu", torch.bfloat16):
        found = pagoda.LLM(llama, **fast).generate([PROMPT], GREEDY)[0].outputs[0]
    assert found.token_ids == tokens(reference), found.error


def test_the_drop_in_leaves_graphs_under_autocast_to_inductor(
    llama: PreTrainedModel, caplog: pytest.LogCaptureFixture
) -> None:
    ids = torch.tensor([PROMPT])
    # Inductor's own code is not what is tested, and takes seconds to build.
    with caplog.at_level(logging.WARNING, "torch_pagoda"), pytest.MonkeyPatch.context() as patch:
        patch.setattr("torch_pagoda.compiler.backend.compile_fx", lambda gm, inputs: gm.forward)
        with torch.inference_mode(), torch.autocast("cpu", torch.bfloat16):
            expected = llama(ids, use_cache=False).logits
            found = torch.compile(llama, backend="pagoda")(ids, use_cache=False).logits
    assert torch.equal(found, expected) and found.dtype == torch.bfloat16
    messages = [record.getMessage() for record in caplog.records]
    assert messages and all("runs under torch.autocast" in message for message in messages), messages


@pytest.mark.parametrize(
    ("value", "word"), [(float("nan"), "NaN"), (float("inf"), "an infinity")], ids=["nan", "inf"]
)
def test_broken_weights_are_named(value: float, word: str, llama: PreTrainedModel) -> None:
    llama.model.layers[1].mlp.up_proj.weight.data[0, 0] = value
    with pytest.raises(ValueError, match=rf"'model\.layers\.1\.mlp\.up_proj\.weight' of .* holds {word}"):
        build.build_unpacked(llama, CompileOptions(target="cpu"))


@pytest.mark.parametrize(
    ("model_type", "words"),
    [
        ("recurrent_gemma", "2 of its 2 layers keep recurrent or convolutional state"),
        ("rwkv", "keep recurrent state"),
        ("xlstm", "keep recurrent state"),
    ],
)
def test_models_with_state_are_refused_before_they_are_traced(
    model_type: str, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def trace(*args: Any) -> None:
        raise AssertionError("traced")

    monkeypatch.setattr(build, "capture", trace)
    monkeypatch.setattr(build, "reference_of_model", trace)
    with pytest.raises(ValueError, match=words):
        build.build_unpacked(build_tiny_model(model_type), CompileOptions(target="cpu"))


@pytest.mark.parametrize("value", [float("nan"), 3e38], ids=["nan", "overflow"])
def test_nobody_is_sent_elsewhere_with_weights_that_nothing_runs(value: float, llama: PreTrainedModel) -> None:
    llama.model.layers[1].mlp.up_proj.weight.data[:] = value
    with pytest.raises(ValueError, match=r"cannot be served: .*(NaN|infinite)") as raised:
        pagoda.LLM(llama)
    assert "use transformers' own generate" not in str(raised.value)


@pytest.mark.parametrize("model_type", ["recurrent_gemma", "rwkv", "xlstm"])
def test_checkpoints_of_models_with_state_are_refused_before_their_weights_are_read(
    model_type: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def read(*args: Any) -> None:
        raise AssertionError("weights were read")

    build_tiny_model(model_type).config.save_pretrained(tmp_path)
    monkeypatch.setattr("torch_pagoda.compiled_model.load_model", read)
    with pytest.raises(ValueError, match=r"cannot be served: .* is not served yet: .*state.*transformers' own"):
        pagoda.LLM(tmp_path)


@pytest.mark.parametrize("end", [["2"], "2", 2.5, [2, True]], ids=str)
def test_end_tokens_that_are_no_ids_are_named(end: Any) -> None:
    module = SimpleNamespace(generation_config=SimpleNamespace(eos_token_id=end), config=SimpleNamespace())
    with pytest.raises(ValueError, match=r"eos_token_id=.* of SimpleNamespace holds"):
        eos_token_ids(module, None)  # type: ignore[arg-type]
