"""Parts of a graph are run within a bound of memory, and only where nothing depends on the tokens."""

from __future__ import annotations

import pytest
from torch.nn import functional as F

from torch_pagoda.passes.graph import evaluate
from torch_pagoda.passes.graph.attention_node import AttentionCall, attention_nodes
from torch_pagoda.passes.graph.evaluate import Evaluation, TooLarge
from torch_pagoda.passes.graph.fx_nodes import callee
from torch_pagoda.passes.recognize import mask_kind
from torch_pagoda.passes.recognize.classify_masks import classify_masks
from torch_pagoda.passes.recognize.mask_kind import UnknownMask, probe
from torch_pagoda.passes.recognize.sdpa import recognize_sdpa

from toy_lm import HEADS, ToyLM, repeat_kv, traced

TOKENS = 40
ONE = TOKENS * TOKENS * 8
"""Bytes of the distances between the tokens."""


def in_steps(model, q, k, v, pos):
    """Causal attention; its mask is made by way of nine tensors of distances, and of a tensor made like ``q``."""
    distance = pos[:, None, :, None] - pos[:, None, None, :]
    for _ in range(8):
        distance = distance + 1
    mask = (distance >= 8) | q.new_zeros(1, 1, 1, 1).bool()
    return F.scaled_dot_product_attention(q, repeat_kv(k), repeat_kv(v), attn_mask=mask)


@pytest.fixture(scope="module")
def captured():
    graph = traced(ToyLM(in_steps))
    recognize_sdpa(graph)
    return graph


def test_what_takes_too_much_memory_is_refused(captured, monkeypatch):
    monkeypatch.setattr(evaluate, "MOST_BYTES", ONE - 1)
    record = classify_masks(captured.copy())
    (rejection,) = record.rejections
    assert record.matches == 0
    assert f"(1, 1, {TOKENS}, {TOKENS}) takes it above" in rejection.reason
    assert "lower max_position_embeddings in config.json" in rejection.reason


def test_values_that_nothing_reads_any_more_are_not_counted(captured, monkeypatch):
    monkeypatch.setattr(evaluate, "MOST_BYTES", 3 * ONE)
    graph = captured.copy()
    record = classify_masks(graph)
    assert (record.matches, record.rejections) == (1, [])


def test_nothing_is_made_of_what_only_lends_its_shape(captured):
    """At these many tokens no machine can hold the queries."""
    (zeros,) = (node for node in captured.graph.nodes if callee(node) == "new_zeros")
    assert Evaluation(captured, {captured.token_symbol: 1 << 45})(zeros).tolist() == [[[[0.0]]]]
    (minus,) = (node for node in captured.graph.nodes if callee(node) == "sub")
    with pytest.raises(TooLarge):
        Evaluation(captured, {captured.token_symbol: 1 << 20})(minus)


def test_weights_are_not_searched_for_the_limits_of_what_depends_on_the_tokens(captured, monkeypatch):
    def search(*given):
        raise AssertionError("the weights were read")

    monkeypatch.setattr(mask_kind, "find_limits", search)
    (attention,) = attention_nodes(captured)
    with pytest.raises(UnknownMask, match=f"depends on the tokens .*{captured.input_ids}"):
        probe(captured, AttentionCall.of(attention).query, HEADS)
    with pytest.raises(AssertionError, match="weights were read"):
        probe(captured, AttentionCall.of(attention).attn_mask, HEADS)
