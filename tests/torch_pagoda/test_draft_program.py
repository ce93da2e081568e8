"""``LLM`` with a draft model: loaded, compared, refused, freed."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from drafters import always
from tokenizers import AddedToken
from transformers import PreTrainedTokenizerFast

import torch_pagoda as pagoda
from torch_pagoda.compiler import CompileOptions
from torch_pagoda.draft_program import draft_program
from torch_pagoda.load_options import LoadOptions

from tiny_models import build_tiny_model

PROMPTS = ["Return the value", "the", "If the list is empty, the list of the list is"]
PARAMS = pagoda.SamplingParams(temperature=0, max_tokens=25, ignore_eos=True)


def config_of(folder: Path) -> dict[str, Any]:
    return {"method": "draft_model", "model": str(folder), "num_speculative_tokens": 3}


def test_a_model_drafts_for_itself(checkpoint: Path, fast: dict[str, Any]) -> None:
    expected = [o.outputs[0].token_ids for o in pagoda.LLM(checkpoint, **fast).generate(PROMPTS, PARAMS)]
    with pagoda.LLM(checkpoint, speculative_config=config_of(checkpoint), **fast) as llm:
        always(llm._core.state.drafting, 3)  # type: ignore[arg-type]
        assert [o.outputs[0].token_ids for o in llm.generate(PROMPTS, PARAMS)] == expected
        stats = llm.stats()
        assert stats["spec_decode_num_accepted_tokens"] == stats["spec_decode_num_draft_tokens"] > 0
        assert stats["steps"] == 1 + 24 // 4
        drafter = llm._core.state.drafting.drafters.drafters[-1]  # type: ignore[union-attr]
        drafts = weakref.ref(drafter.program)  # type: ignore[attr-defined]
        assert drafts() is not llm.program
        del drafter
    gc.collect()
    assert drafts() is None, "the draft model outlives its engine"


@pytest.fixture
def other(tmp_path: Path, tokenizer: PreTrainedTokenizerFast, checkpoint: Path) -> Path:
    """The same model, with another added token."""
    own = PreTrainedTokenizerFast.from_pretrained(checkpoint)
    own.add_tokens([AddedToken("<tool>")])
    build_tiny_model("llama").save_pretrained(tmp_path)
    own.save_pretrained(tmp_path)
    return tmp_path


def test_another_vocabulary_is_refused(checkpoint: Path, other: Path, fast: dict[str, Any]) -> None:
    with pytest.raises(
        ValueError, match=r"speculative_config: model='.*' has another vocabulary: id \d+ is '<tool>'"
    ):
        pagoda.LLM(checkpoint, speculative_config=config_of(other), **fast)


def test_a_model_with_states_is_refused(
    checkpoint: Path, tmp_path: Path, tokenizer: PreTrainedTokenizerFast, fast: dict[str, Any]
) -> None:
    build_tiny_model("mamba").save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"speculative_config: model='.*' keeps a state for each sequence"):
        pagoda.LLM(checkpoint, speculative_config=config_of(tmp_path), **fast)


def test_a_missing_draft_model_is_named(checkpoint: Path, tmp_path: Path, fast: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="nowhere"):
        pagoda.LLM(checkpoint, speculative_config=config_of(tmp_path / "nowhere"), **fast)


@pytest.mark.parametrize(
    "ranks",
    [
        {"tensor_parallel_size": 4, "expert_parallel_size": 2},
        {"tensor_parallel_size": 2, "enable_expert_parallel": True},
        {"pipeline_parallel_size": 2},
    ],
)
def test_the_draft_model_has_one_rank(ranks: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    class Asked(Exception):
        pass

    def compiled(model: str, tokenizer: object, loading: LoadOptions, compiling: CompileOptions, *_: object) -> None:
        assert (model, compiling.world_size, compiling.expert_parallel_size) == ("small", 1, None)
        raise Asked

    monkeypatch.setattr("torch_pagoda.draft_program.compiled_model", compiled)
    given, cpu = {"method": "draft_model", "model": "small"}, torch.device("cpu")
    with pytest.raises(Asked):
        draft_program(given, "model", None, LoadOptions(), CompileOptions(target="cpu", **ranks), cpu, frozenset())  # type: ignore[arg-type]
