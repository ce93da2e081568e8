"""The checkpoint's generation config gives the default sampling parameters, as in vLLM."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedModel

import torch_pagoda as pagoda

RECOMMENDED = {
    "do_sample": True,
    "temperature": 0.5,
    "top_k": 7,
    "top_p": 0.75,
    "min_p": 0.25,
    "repetition_penalty": 1.5,
    "max_new_tokens": 5,
    "eos_token_id": 3,
}
AS_PARAMS = pagoda.SamplingParams(
    temperature=0.5, top_k=7, top_p=0.75, min_p=0.25, repetition_penalty=1.5, max_tokens=5
)


@pytest.fixture(scope="session")
def chatty(tmp_path_factory: pytest.TempPathFactory, checkpoint: Path) -> Path:
    """The checkpoint with recommendations."""
    folder = Path(shutil.copytree(checkpoint, tmp_path_factory.mktemp("recommends") / "model"))
    (folder / "generation_config.json").write_text(json.dumps(RECOMMENDED))
    return folder


def test_the_checkpoint_gives_the_defaults_and_they_are_logged_once(
    chatty: Path, fast: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "torch_pagoda"):
        llm = pagoda.LLM(chatty, **fast)
        assert llm.get_default_sampling_params() == AS_PARAMS
        given = [5, 6, 7]
        expected = llm.generate(given, pagoda.SamplingParams(temperature=0, repetition_penalty=1.5, max_tokens=5))
        for entry in (None, [None]):
            assert len(llm.generate([given], entry)[0].outputs[0].token_ids) == 5
        assert sum(len(piece.token_ids) for piece in llm.stream(given)) == 5
        name = llm.submit(given)
        outputs = [output for _ in range(9) if llm.has_unfinished() for output in llm.step()]
        assert outputs[-1].request_id == name and len(outputs[-1].outputs[0].token_ids) == 5
    said = [record.getMessage() for record in caplog.records if "generation_config" in record.getMessage()]
    assert len(said) == 1 and "temperature=0.5" in said[0] and '"vllm"' in said[0]
    assert expected[0].outputs[0].token_ids  # explicit ones replace the defaults and are not mixed with them
    replaced = llm.generate(given, pagoda.SamplingParams(temperature=0))[0].outputs[0]
    assert len(replaced.token_ids) == 16 or replaced.finish_reason == "stop"


def test_vllm_and_folders(
    chatty: Path, checkpoint: Path, fast: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "torch_pagoda"):
        neutral = pagoda.LLM(chatty, generation_config="vllm", **fast)
        assert neutral.get_default_sampling_params() == pagoda.SamplingParams()
        assert pagoda.LLM(checkpoint, **fast).get_default_sampling_params() == pagoda.SamplingParams()
    assert not [record for record in caplog.records if "generation_config" in record.getMessage()]
    assert neutral.engine.eos_token_ids == {0, 3}  # and the tokenizer's: what ends a text is no matter of taste
    other = pagoda.LLM(checkpoint, generation_config=str(chatty), **fast)
    assert other.get_default_sampling_params() == AS_PARAMS


@pytest.mark.parametrize(
    ("config", "temperature"),
    [
        ({"do_sample": False}, 0.0),
        ({"do_sample": False, "temperature": 0.6}, 0.0),
        ({"do_sample": True}, 1.0),
        ({"temperature": 0.6}, 0.6),
        ({}, 1.0),  # not a word about it, as in most checkpoints: vLLM's own default
    ],
)
def test_do_sample_false_is_greedy_only_where_it_is_said(
    checkpoint: Path, fast: dict[str, Any], tmp_path: Path, config: dict[str, Any], temperature: float
) -> None:
    (tmp_path / "generation_config.json").write_text(json.dumps(config))
    llm = pagoda.LLM(checkpoint, generation_config=tmp_path, **fast)
    assert llm.get_default_sampling_params() == pagoda.SamplingParams(temperature=temperature)


def test_a_live_module_gives_its_own(llama: PreTrainedModel, fast: dict[str, Any]) -> None:
    llama.generation_config.update(**{name: value for name, value in RECOMMENDED.items() if name != "eos_token_id"})
    assert pagoda.LLM(llama, **fast).get_default_sampling_params() == AS_PARAMS


@pytest.mark.parametrize(
    ("file", "words"),
    [
        ('{"temperature": "hot"}', ["temperature='hot'", "vllm"]),
        ('{"top_p": 7}', ["top_p=7", "vllm"]),
        ('{"max_new_tokens": 0}', ["max_new_tokens", "vllm"]),
        ("{", ["could not be read"]),
        (None, ["generation_config=", "could not be read", "vllm"]),
    ],
)
def test_what_cannot_be_used_is_refused(
    checkpoint: Path,
    fast: dict[str, Any],
    tmp_path: Path,
    file: str | None,
    words: list[str],
    one_line: Callable[[BaseException], str],
) -> None:
    if file is not None:
        (tmp_path / "generation_config.json").write_text(file)
    with pytest.raises(ValueError) as error:
        pagoda.LLM(checkpoint, generation_config=tmp_path, **fast)
    message = one_line(error.value)
    assert all(word in message for word in words), message


def test_other_kinds_are_refused(checkpoint: Path, fast: dict[str, Any]) -> None:
    with pytest.raises(TypeError, match="generation_config=3 is"):
        pagoda.LLM(checkpoint, generation_config=3, **fast)


FAST = ["--verify", "off", "--codegen", "none", "--block-size", "4", "--num-blocks", "64", "--json"]


def test_flags_of_the_command_stay_the_users(
    chatty: Path, checkpoint: Path, run: Callable[..., tuple[int, str, str]]
) -> None:
    def tokens(*arguments: object) -> list[int]:
        status, out, err = run("generate", *arguments, "-p", "the", *FAST)
        assert status == 0, err
        return json.loads(out)["outputs"][0]["token_ids"]

    llm = pagoda.LLM(chatty, verify="off", codegen="none", block_size=4, num_blocks=64)
    recommended = pagoda.SamplingParams(
        temperature=0.5, top_k=7, top_p=0.75, min_p=0.25, repetition_penalty=1.5, max_tokens=5, seed=3
    )
    assert tokens(chatty, "--seed", 3) == llm.generate("the", recommended)[0].outputs[0].token_ids
    greedy = pagoda.SamplingParams(temperature=0, repetition_penalty=1.5, max_tokens=4)
    assert (
        tokens(chatty, "--temperature", 0, "--max-tokens", 4) == llm.generate("the", greedy)[0].outputs[0].token_ids
    )
    plain = pagoda.SamplingParams(temperature=0, max_tokens=64)
    assert tokens(chatty, "--generation-config", "vllm") == llm.generate("the", plain)[0].outputs[0].token_ids
    assert len(tokens(checkpoint)) == 64
