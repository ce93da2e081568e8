"""Beam search through ``LLM`` and ``pagoda generate``, against transformers' own."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerFast

import torch_pagoda as pagoda
from torch_pagoda.runtime.requests.outputs import Progress

PROMPTS = [[5, 9, 11, 40, 41, 42, 7], [3], list(range(60, 83))]
FAST = ["--verify", "off", "--codegen", "none", "--block-size", "4", "--num-blocks", "64", "--max-tokens", "5"]


def searched(
    model: PreTrainedModel, prompt: list[int], width: int, count: int, eos: list[int], **options: Any
) -> tuple[list[list[int]], list[float]]:
    ids = torch.tensor([prompt])
    found = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        num_beams=width,
        num_return_sequences=width,
        max_new_tokens=count,
        do_sample=False,
        eos_token_id=eos or None,
        pad_token_id=1,
        return_dict_in_generate=True,
        output_scores=True,
        **options,
    )
    return found.sequences[:, len(prompt) :].tolist(), found.sequences_scores.tolist()


@pytest.mark.parametrize(
    "options", [{}, {"num_blocks": 12, "max_num_batched_tokens": 8}, {"block_size": 16, "max_num_seqs": 3}]
)
def test_finds_what_transformers_finds(
    checkpoint: Path, fast: dict[str, Any], reference: PreTrainedModel, options: dict[str, Any]
) -> None:
    llm = pagoda.LLM(checkpoint, **{**fast, **options})
    # The likeliest tokens of a greedy run, so that some beams end.
    eos = sorted({output.outputs[0].token_ids[4] for output in llm.generate(PROMPTS, greedy(8))})
    llm.engine.eos_token_ids = frozenset(eos)
    for width, penalty, early in ((2, 1.0, False), (4, 0.0, True), (3, 2.0, "never")):
        params = pagoda.BeamSearchParams(width, 10, length_penalty=penalty, early_stopping=early)  # type: ignore[arg-type]
        outputs = llm.beam_search(PROMPTS, params)
        assert [output.prompt_token_ids for output in outputs] == PROMPTS
        for output, prompt in zip(outputs, PROMPTS, strict=True):
            sequences, scores = searched(
                reference, prompt, width, 10, eos, length_penalty=penalty, early_stopping=early
            )
            assert output.error is None and len(output.sequences) == width
            for text, expected in zip(output.sequences, sequences, strict=True):
                assert text.token_ids == expected[: len(text.token_ids)]
                assert set(expected[len(text.token_ids) :]) <= {1}
            assert [text.score for text in output.sequences] == pytest.approx(scores, rel=1e-4, abs=1e-5)
    assert llm.stats()["blocks_used"] == 0 and llm.stats()["copies_on_write"] > 0


def greedy(count: int) -> pagoda.SamplingParams:
    return pagoda.SamplingParams(temperature=0, max_tokens=count, ignore_eos=True)


def test_a_beam_of_one_is_greedy(checkpoint: Path, fast: dict[str, Any], tokenizer: PreTrainedTokenizerFast) -> None:
    llm = pagoda.LLM(checkpoint, **fast)
    seen: list[Progress] = []
    (found,) = llm.beam_search("the cat", pagoda.BeamSearchParams(1, 6, ignore_eos=True), on_progress=seen.append)
    (output,) = llm.generate("the cat", greedy(6))
    assert found.prompt == "the cat"
    assert found.sequences[0].token_ids == output.outputs[0].token_ids
    assert found.sequences[0].text == tokenizer.decode(output.outputs[0].token_ids, skip_special_tokens=True)
    assert seen[-1] == Progress(finished=1, total=1, generated_tokens=6)


def test_options_reach_the_engine(checkpoint: Path, fast: dict[str, Any]) -> None:
    llm = pagoda.LLM(checkpoint, **fast)
    late, whole = llm.beam_search(PROMPTS[:2], pagoda.BeamSearchParams(2, 4), deadline=[1e-9, None])
    assert late.error == "its deadline has passed" and late.sequences == []
    assert whole.error is None and len(whole.sequences) == 2
    with pytest.raises(ValueError, match=r"client has 1 entries for 2 prompts"):
        llm.beam_search(PROMPTS[:2], pagoda.BeamSearchParams(2, 4), client=["a"])


def test_the_command_shows_the_best_texts(run: Callable[..., tuple[int, str, str]], checkpoint: Path) -> None:
    call = ("generate", checkpoint, "-p", "the cat", "-p", "one", "--beam-width", "3", *FAST)
    status, text, _ = run(*call)
    assert status == 0
    status, out, _ = run(*call, "--json", "-n", "2")
    lines = [json.loads(line) for line in out.splitlines()]
    assert status == 0 and [line["prompt"] for line in lines] == ["the cat", "one"]
    for line in lines:
        best, second = line["outputs"]
        assert len(best["token_ids"]) == 5 and best["score"] > second["score"]
        assert line["prompt"] + best["text"] in text
    _, out, _ = run(*call, "--json", "-n", "2", "--length-penalty", "0")
    sums = [entry["score"] for line in out.splitlines() for entry in json.loads(line)["outputs"]]
    means = [entry["score"] for line in lines for entry in line["outputs"]]
    assert sums == pytest.approx([5 * mean for mean in means], rel=1e-5)


def test_the_command_runs_best_of(run: Callable[..., tuple[int, str, str]], checkpoint: Path) -> None:
    call = ("generate", checkpoint, "-p", "the", "--temperature", "2", "--seed", "5", "--json", *FAST)
    _, out, _ = run(*call, "-n", "6")
    everything = [entry["token_ids"] for entry in json.loads(out)["outputs"]]
    _, out, _ = run(*call, "-n", "2", "--best-of", "6")
    best = [entry["token_ids"] for entry in json.loads(out)["outputs"]]
    assert len(best) == 2 and all(tokens in everything for tokens in best)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--beam-width", "0"], ["beam_width=0"]),
        (["--length-penalty", "1"], ["--length-penalty requires --beam-width"]),
        (["--beam-width", "2", "--length-penalty", "9"], ["length_penalty=9"]),
        (["--beam-width", "2", "-n", "3"], ["--n 3", "--beam-width 2"]),
        (["--beam-width", "2", "--temperature", "1"], ["--temperature", "--beam-width 2"]),
        (["--beam-width", "2", "--seed", "0"], ["--seed", "--beam-width 2"]),
        (["--beam-width", "2", "--stop", "x"], ["--stop", "--beam-width 2"]),
        (["--beam-width", "2", "--logit-bias", "5:1"], ["--logit-bias", "--beam-width 2"]),
        (["--beam-width", "2", "--top-k", "5"], ["--top-k", "--beam-width 2"]),
        (["--beam-width", "2", "--best-of", "2"], ["--best-of", "--beam-width 2"]),
        (["--best-of", "2"], ["best_of=2", "temperature"]),
        (["--best-of", "2", "-n", "3", "--temperature", "1"], ["best_of=2", "n=3"]),
    ],
    ids=lambda value: " ".join(value),
)
def test_combinations_without_a_sense_are_refused(
    run: Callable[..., tuple[int, str, str]], checkpoint: Path, arguments: list[str], words: list[str]
) -> None:
    status, out, err = run("generate", checkpoint, "-p", "the", *arguments)
    assert status == 2 and out == ""
    assert all(word in err for word in words) and "Traceback" not in err
