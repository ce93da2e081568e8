"""From recognized attention to a flat step over paged caches: cache insertion, positions, rope length, logits."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from torch_pagoda.compiler.link.linker import link
from torch_pagoda.compiler.verify.self_check import check, reference_of_model
from torch_pagoda.passes.graph.attention_node import paged_attention_nodes
from torch_pagoda.passes.graph.fx_nodes import callee, shape
from torch_pagoda.passes.proof.token_axis import mixers
from torch_pagoda.passes.recognize.classify_masks import classify_masks
from torch_pagoda.passes.recognize.sdpa import recognize_sdpa
from torch_pagoda.passes.rewrite.gather_logits import gather_logits
from torch_pagoda.passes.rewrite.insert_paged_cache import insert_paged_cache

from toy_lm import DYNAMO_PASSES, HIDDEN, KV_HEADS, ToyLM, causal_mask, repeat_kv, sdpa, traced


def apply_all(graph):
    """Run the whole pipeline; the records by pass name."""
    return {p.name: p.apply(graph) for p in DYNAMO_PASSES}


def verdict_of(model, graph):
    graph.recompile()
    return check(link(graph, graph.module), reference_of_model(model))


def test_cache_insertion_describes_each_cache():
    def windowed(m, q, k, v, pos):
        return F.scaled_dot_product_attention(q, repeat_kv(k), repeat_kv(v), attn_mask=causal_mask(pos, window=8))

    graph = traced(ToyLM(windowed))
    for entry in (recognize_sdpa, classify_masks):
        entry(graph)
    record = insert_paged_cache(graph)
    assert (record.matches, record.rejections) == (1, [])
    (spec,) = graph.caches
    assert (spec.num_kv_heads, spec.key_dim, spec.value_dim, spec.sliding_window) == (KV_HEADS, 8, 8, 8)
    assert set(graph.step_inputs) == {"slot_mapping", "block_table", "query_start_loc", "seq_lens"}
    (node,) = paged_attention_nodes(graph)
    assert [str(s) for s in shape(node.args[3])[2:]] == [str(KV_HEADS), "8"]
    assert insert_paged_cache(graph).matches == 0


def test_layers_that_share_keys_and_values_share_a_cache():
    def twice(m, q, k, v, pos):
        first = sdpa(m, q, k, v, pos)
        return first + sdpa(m, q * 0.5, k, v, pos)

    model = ToyLM(twice)
    graph = traced(model)
    records = apply_all(graph)
    assert records["insert_paged_cache"].matches == 2
    assert len(graph.caches) == 1
    assert verdict_of(model, graph).ok


@pytest.mark.parametrize(
    ("attention", "reason"),
    [
        (lambda m, q, k, v, pos: F.scaled_dot_product_attention(q, repeat_kv(k), repeat_kv(v)), "not causal"),
        (
            lambda m, q, k, v, pos: F.scaled_dot_product_attention(
                q, repeat_kv(k[:, :, :5]), repeat_kv(v[:, :, :5]), is_causal=True
            ),
            "attends from",
        ),
    ],
    ids=["bidirectional", "other keys"],
)
def test_attention_that_cannot_be_paged_is_refused(attention, reason):
    graph = traced(ToyLM(attention))
    records = apply_all(graph)
    assert not graph.caches
    assert reason in records["insert_paged_cache"].rejections[0].reason


def test_the_plain_model_is_exact_and_its_head_is_gathered():
    model = ToyLM(sdpa)
    graph = traced(model)
    records = apply_all(graph)
    assert records["gather_logits"].matches == 1
    head = next(n for n in reversed(graph.graph.nodes) if callee(n) == "linear")
    assert callee(head.args[0]) == "index_select"
    assert gather_logits(graph).matches == 0
    assert not mixers(graph)
    verdict = verdict_of(model, graph)
    assert verdict.ok and verdict.error < 1e-4
    assert verdict.rows > 80


def test_softcapped_and_scaled_logits_are_gathered_before_the_head():
    model = ToyLM(sdpa, finish=lambda x: torch.tanh(x.float() / 30.0) * 30.0)
    graph = traced(model)
    assert apply_all(graph)["gather_logits"].matches == 1
    assert verdict_of(model, graph).ok


def test_logits_without_a_linear_head_are_gathered_at_the_end():
    model = ToyLM(sdpa, finish=lambda x: torch.log_softmax(x, dim=-1))
    graph = traced(model)
    record = apply_all(graph)["gather_logits"]
    assert (record.matches, len(record.rejections)) == (0, 1)
    assert verdict_of(model, graph).ok


def embed_positions(offset):
    def before(m, hidden, pos):
        at = torch.arange(hidden.shape[1]) + offset
        return hidden + F.embedding(at, m.position_table)

    return before


def slice_table(m, hidden, pos):
    return hidden + m.position_table[: hidden.shape[1]]


def count_ones(m, hidden, pos):
    ones = torch.ones(1, hidden.shape[1], dtype=torch.long)
    return hidden + F.embedding(torch.cumsum(ones, 1) - 1, m.position_table)


def sinusoids(m, hidden, pos):
    angle = torch.arange(hidden.shape[1], dtype=torch.float32)[:, None] * torch.linspace(0.01, 1.0, HIDDEN // 2)
    return hidden + torch.cat([angle.sin(), angle.cos()], dim=-1)[None]


def grow(m, hidden, pos):
    """Factors that are one for the first tokens, as those for lengths beyond the trained one."""
    return hidden * m.factors[:, : hidden.shape[1]]


def embed_a_table(m, hidden, pos):
    return hidden + F.embedding(m.places[:, : hidden.shape[1]], m.position_table)


@pytest.mark.parametrize(
    "before",
    [embed_positions(0), embed_positions(2), slice_table, count_ones, sinusoids, grow, embed_a_table],
    ids=[
        "arange",
        "arange + 2",
        "table slice",
        "cumsum",
        "sinusoids",
        "table of ones at first",
        "table with a limit",
    ],
)
def test_positions_made_from_the_number_of_tokens_are_fed(before):
    model = ToyLM(sdpa, before=before)
    model.register_buffer("factors", torch.cat([torch.ones(14), torch.linspace(1.0, 4.0, 242)])[None, :, None])
    model.register_buffer("places", torch.arange(256).clamp(max=14)[None])
    graph = traced(model)
    record = apply_all(graph)["feed_positions"]
    assert record.matches >= 1
    assert not mixers(graph)
    assert not [n for n in graph.graph.nodes if callee(n) in ("arange", "cumsum")]
    verdict = verdict_of(model, graph)
    assert verdict.ok, verdict.reason


def longrope(limit):
    def before(m, hidden, pos):
        length = torch.max(pos) + 1
        short = torch.linspace(0.01, 1.0, HIDDEN // 2)
        frequencies = torch.where(length > limit, short / 4, short)
        angle = pos[..., None].float() * frequencies
        return hidden + torch.cat([angle.sin(), angle.cos()], dim=-1)

    return before


def test_rope_chosen_by_the_longest_position_is_chosen_per_sequence():
    model = ToyLM(sdpa, before=longrope(20))
    graph = traced(model)
    record = apply_all(graph)["choose_rope_per_sequence"]
    assert (record.matches, record.rejections) == (1, [])
    assert "token_lengths" in graph.step_inputs
    assert not mixers(graph)
    verdict = verdict_of(model, graph)
    assert verdict.ok, verdict.reason


def test_without_the_rope_pass_the_mixing_is_found():
    graph = traced(ToyLM(sdpa, before=longrope(20)))
    for entry in DYNAMO_PASSES:
        if entry.name != "choose_rope_per_sequence":
            entry.apply(graph)
    assert [r.reason for r in mixers(graph)] == ["max runs over all tokens"]


def test_rope_that_depends_smoothly_on_the_length_is_found_to_mix():
    def before(m, hidden, pos):
        scale = (torch.max(pos) + 1).float() / 20.0
        return hidden * scale

    graph = traced(ToyLM(sdpa, before=before))
    assert apply_all(graph)["choose_rope_per_sequence"].matches == 0
    assert mixers(graph)
