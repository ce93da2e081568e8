"""What ``npu_models.py`` counts, serves and writes down."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import npu_models
import pytest
from npu_models import Lowered, Served, cut_config, lowered, published_config, served, table

import hf_reference
from hf_reference import Greedy

TINY = {
    **{"hidden_size": 256, "intermediate_size": 64, "num_hidden_layers": 4, "num_attention_heads": 2},
    **{"num_key_value_heads": 1, "head_dim": 128, "vocab_size": 128, "max_position_embeddings": 2048},
}


@pytest.fixture(autouse=True)
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(npu_models.PUBLISHED, "tiny", ("mistral", {**TINY, "sliding_window": 24}))


def test_operators_of_a_layer_and_what_is_kept_are_noted() -> None:
    found = lowered("tiny", ["Ascend910B3", "Ascend310P3"])
    counts = {(row.soc, row.graph_mode): row.decode for row in found}
    assert counts == {("Ascend910B3", "ge"): [10], ("Ascend910B3", "aclgraph"): [12], ("Ascend310P3", "ge"): [11]}
    assert [bool(row.others) for row in found] == [False, False, True]
    text = table({"tiny": found})
    assert "| tiny | 10 | 12 | 11 (others " in text and "| Ascend910B3 |\n" in text
    assert "- tiny, Ascend310P3 ge: kept: paged_attention: npu_fused_infer_attention_score TND: " in text
    assert "- tiny, Ascend310P3 ge: no static decode graphs: " in text


def test_columns_that_agree_share_a_note() -> None:
    rows = [Lowered("A", "ge", refused="why"), Lowered("A", "aclgraph", refused="why"), Lowered("B", "ge", [9])]
    text = table({"model": rows})
    assert "| model | rejected | rejected | 9 | B |" in text
    assert "- model, A ge, A aclgraph: rejected: why" in text
    assert "- model, everywhere: rejected: why" in table({"model": rows[:2]})


def test_tokens_are_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    of_model = hf_reference.greedy_with_cache

    def greedy(model: Any, prompt: list[int], steps: int) -> Greedy:
        found = of_model(model, prompt, steps)
        found.tokens[-1] += len(prompt) == 60
        return found

    monkeypatch.setattr(hf_reference, "greedy_with_cache", greedy)
    monkeypatch.setattr(npu_models, "PROMPT_LENGTHS", (37, 60))
    row = served("tiny")
    assert row.lengths == [37, 60, 94] and row.differ == [60] and row.error < 1e-3
    assert row.said.startswith("other tokens for prompts of 60 tokens, ")
    assert replace(row, differ=[]).said.startswith("same tokens, prompts of 37, 60, 94, error ")


def test_a_rejected_model_says_why() -> None:
    assert Served("it cannot be traced").said == "rejected: it cannot be traced"


@pytest.mark.parametrize("name", ["phi-3-mini", "gemma-3-4b"])
def test_a_served_model_keeps_heads_and_windows(name: str) -> None:
    config, cut = published_config(name), cut_config(name)
    kept = ("num_attention_heads", "num_key_value_heads", "sliding_window")
    assert all(getattr(cut, size) == getattr(config, size) for size in kept)
    # Phi-3's heads are as wide as its hidden size makes them.
    assert cut.hidden_size == (3072 if name == "phi-3-mini" else 1024)
    assert cut.num_hidden_layers < config.num_hidden_layers
