"""Attention over keys that an indexer chooses: which spellings are seen, which must not be, and the numbers."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch.nn import functional as F

from torch_pagoda.compiler.link.linker import link
from torch_pagoda.compiler.verify.graph_check import check_graph
from torch_pagoda.compiler.verify.long_windows import check_long_windows
from torch_pagoda.compiler.verify.self_check import MODEL_SCHEDULE, check, reference_of_model
from torch_pagoda.passes.graph.attention_node import AttentionCall, attention_nodes, paged_attention_nodes
from torch_pagoda.passes.graph.fx_nodes import callee
from torch_pagoda.passes.lower.cpu.batch_invariant import _refusal
from torch_pagoda.passes.proof.token_axis import mixers
from torch_pagoda.passes.recognize.eager_attention import recognize_eager_attention
from torch_pagoda.passes.recognize.indexed_attention import recognize_indexed_attention
from torch_pagoda.passes.recognize.sdpa import recognize_sdpa
from torch_pagoda.passes.rewrite.insert_index_cache import insert_index_cache
from torch_pagoda.runtime.ops.attention.lightning_indexer import lightning_indexer, lightning_indexer_seq

from toy_lm import DYNAMO_PASSES, ToyLM, causal_mask, repeat_kv, run, traced

TOPK = 6
FLOOR = torch.finfo(torch.float32).min


def lm(attention):
    """A model in which the same token elsewhere has another key: of equal scores any may be chosen."""
    return ToyLM(attention, before=lambda m, hidden, pos: hidden + m.position_table[pos])


def operands(q, k, v):
    """Of an indexer: ``[1, T, H, D]``, ``[1, T, D]`` and ``[1, T, H]``, positive: what relu makes zero comes last."""
    return q.transpose(1, 2), k[:, 0], v[:, 1, :, :4].sigmoid()


def score(query, key, weights, relu=F.relu, scale=0.25):
    scores = relu(torch.matmul(query.float(), key.transpose(-1, -2).float().unsqueeze(1)) * scale)
    return torch.matmul(weights.float().unsqueeze(-2), scores).squeeze(-2)


def choose(scores, base, topk=TOPK, **options):
    scores = scores.masked_fill(~base[:, 0], -torch.inf)
    return scores.topk(min(topk, scores.shape[-1]), **{"dim": -1, **options}).indices.to(torch.int32)


def left_out(chosen, tokens):
    return chosen.new_ones((1, tokens, tokens), dtype=torch.bool).scatter(-1, chosen.long(), False).unsqueeze(1)


def attend(q, k, v, mask):
    return F.scaled_dot_product_attention(q, repeat_kv(k), repeat_kv(v), attn_mask=mask)


def deepseek(m, q, k, v, pos, scores=score, choice=choose, window=0):
    base = causal_mask(pos, window)
    chosen = choice(scores(*operands(q, k, v)), causal_mask(pos))
    return attend(q, k, v, base & ~left_out(chosen, q.shape[2]))


def with_a_window(m, q, k, v, pos):
    return deepseek(m, q, k, v, pos, window=9)


def scale_in_the_weights(m, q, k, v, pos):
    def scores(query, key, weights):
        return score(query, key, weights * 0.5 * 0.25, scale=1.0)

    return deepseek(m, q, k, v, pos, scores)


def einsum_of_heads_first(m, q, k, v, pos):
    def scores(query, key, weights):
        products = torch.einsum("bhid,bjd->bhij", query.transpose(1, 2), key).clamp(min=0) * 0.7
        return (products * weights.transpose(1, 2).unsqueeze(-1)).sum(1)

    return deepseek(m, q, k, v, pos, scores)


def additive_masks_by_hand(m, q, k, v, pos):
    base = torch.where(causal_mask(pos), 0.0, FLOOR)
    scores = score(*operands(q, k, v)) + base[:, 0]
    chosen = torch.topk(scores, k=min(TOPK, scores.shape[-1]), sorted=False)[1]
    dropped = torch.ones_like(base[:, 0], dtype=torch.bool).scatter(-1, chosen, False)
    s = q @ repeat_kv(k).mT * 0.35 + base.masked_fill(dropped.unsqueeze(1), FLOOR)
    return torch.softmax(s, dim=-1) @ repeat_kv(v)


def keys_turned_first(m, q, k, v, pos):
    def scores(query, key, weights):
        products = F.relu(query @ key.mT.unsqueeze(1) * 0.25)
        return (weights.unsqueeze(-2) @ products).squeeze(-2)

    return deepseek(m, q, k, v, pos, scores)


def keys_that_are_kept(m, q, k, v, pos):
    tokens, base = q.shape[2], causal_mask(pos)
    chosen = choose(score(*operands(q, k, v)), base).long()
    kept = torch.zeros(1, tokens, tokens, dtype=torch.bool).scatter(-1, chosen, True)
    return attend(q, k, v, torch.logical_and(kept[:, None], base))


SPELLINGS = [
    deepseek,
    with_a_window,
    scale_in_the_weights,
    einsum_of_heads_first,
    additive_masks_by_hand,
    keys_turned_first,
    keys_that_are_kept,
]


def recognized(model):
    graph = traced(model)
    recognize_sdpa(graph)
    recognize_eager_attention(graph)
    return graph, recognize_indexed_attention(graph)


@pytest.mark.parametrize("spelling", SPELLINGS, ids=lambda f: f.__name__)
def test_spellings_are_recognized(spelling):
    model = lm(spelling)
    expected = run(traced(model), 33)
    graph, record = recognized(model)
    assert (record.matches, record.rejections) == (1, [])
    (indexer,) = [n for n in graph.graph.nodes if n.target is lightning_indexer_seq]
    assert indexer.args[3] == TOPK
    (node,) = attention_nodes(graph)
    call = AttentionCall.of(node)
    assert call.selected is indexer and call.attn_mask is not None
    assert not {"topk", "scatter", "relu"} & {callee(n) for n in graph.graph.nodes}
    for tokens in (3, 33):
        torch.testing.assert_close(run(graph, tokens), run(traced(model), tokens), atol=1e-4, rtol=1e-4)
    assert (run(graph, 33) - expected).abs().max() < 1e-3
    assert recognize_indexed_attention(graph).matches == 0


def two_layers_with_one_choice(m, q, k, v, pos):
    base = causal_mask(pos)
    chosen = choose(score(*operands(q, k, v)), base)
    first = attend(q, k, v, base & ~left_out(chosen, q.shape[2]))
    return attend(first, k.flip(1), v, base & ~left_out(chosen, q.shape[2]))


def test_layers_that_share_a_choice_share_the_operator_and_its_cache():
    graph, record = recognized(lm(two_layers_with_one_choice))
    assert record.matches == 2
    for entry in DYNAMO_PASSES:
        entry.apply(graph)
    assert len(list(paged_attention_nodes(graph))) == 2
    assert [spec.value_dim == 0 for spec in graph.caches] == [True, False, False]
    assert len({spec.group for spec in graph.caches}) == 1
    again = insert_index_cache(graph)
    assert (again.matches, len(graph.caches)) == (0, 3)


# Near misses


def scored_by(change):
    def spelling(m, q, k, v, pos):
        return deepseek(m, q, k, v, pos, scores=lambda *given: change(m, pos, *given))

    return spelling


def chosen_by(change):
    def spelling(m, q, k, v, pos):
        return deepseek(m, q, k, v, pos, choice=change)

    return spelling


def weights_before_relu(m, pos, query, key, weights):
    return torch.relu(torch.einsum("bihd,bjd,bih->bijh", query, key, weights - 0.5)).sum(-1)


def of_other_keys(m, q, k, v, pos, mask):
    base = causal_mask(pos)
    return attend(q, k, v, mask(base, left_out(choose(score(*operands(q, k, v)), base), q.shape[2]), q))


NEAR_MISSES = {
    "no relu": (scored_by(lambda m, pos, *given: score(*given, relu=lambda x: x)), "not a weighted sum of relu"),
    "relu squared": (
        scored_by(lambda m, pos, *given: score(*given, relu=lambda x: F.relu(x) ** 2)),
        "not a weighted",
    ),
    "gelu": (scored_by(lambda m, pos, *given: score(*given, relu=F.gelu)), "not a weighted sum of relu"),
    "negative scale": (scored_by(lambda m, pos, *given: score(*given, scale=-0.25)), "not a weighted sum of relu"),
    "weights before relu": (scored_by(weights_before_relu), "not a weighted sum of relu"),
    "negative sum": (scored_by(lambda m, pos, *given: -score(*given)), "not a weighted sum of relu"),
    "recency": (
        scored_by(lambda m, pos, *given: score(*given) + 0.1 * pos[:, None, :]),
        "4 tensors make the scores",
    ),
    "no weights": (
        scored_by(lambda m, pos, q, k, w: torch.relu(torch.einsum("bihd,bjd->bijh", q, k)).sum(-1)),
        "2 tensors make the scores",
    ),
    "lowest": (chosen_by(lambda s, b: choose(s, b, largest=False)), "lowest scores"),
    "among the queries": (chosen_by(lambda s, b: choose(s, b, dim=-2)), ""),
    "always as many": (
        chosen_by(lambda s, b: s.masked_fill(~b[:, 0], -torch.inf).topk(TOPK).indices.int()),
        "chosen keys, 6, is fixed",
    ),
    "half of them": (
        chosen_by(lambda s, b: s.masked_fill(~b[:, 0], -torch.inf).topk((s.shape[-1] + 1) // 2).indices.int()),
        "not the minimum of a constant",
    ),
    "later keys are chosen": (
        chosen_by(lambda s, b: s.topk(min(TOPK, s.shape[-1])).indices.int()),
        "does not hide just the later keys",
    ),
    "hidden weakly": (
        chosen_by(lambda s, b: s.masked_fill(~b[:, 0], -1e5).topk(min(TOPK, s.shape[-1])).indices.int()),
        "does not hide just the later keys",
    ),
    "the diagonal is hidden": (
        chosen_by(lambda s, b: choose(s, b.tril(-1))),
        "does not hide just the later keys",
    ),
    "all but the chosen": (
        lambda m, q, k, v, pos: of_other_keys(m, q, k, v, pos, lambda base, out, q: base & out),
        "just the keys that were not chosen",
    ),
    "or": (
        lambda m, q, k, v, pos: of_other_keys(m, q, k, v, pos, lambda base, out, q: base | ~out),
        "just the keys that were not chosen",
    ),
    "tokens in the base": (
        lambda m, q, k, v, pos: of_other_keys(
            m, q, k, v, pos, lambda base, out, q: (base & (q[:, :1, :, :1] < 9)) & ~out
        ),
        "depends on the tokens",
    ),
}


@pytest.mark.parametrize("name", NEAR_MISSES)
def test_near_misses_are_left_alone_with_the_reason(name):
    spelling, reason = NEAR_MISSES[name]
    graph, record = recognized(lm(spelling))
    assert record.matches == 0 and reason in record.rejections[0].reason, record.rejections
    assert not [n for n in graph.graph.nodes if n.target is lightning_indexer_seq]


# Whole steps


def passed(spelling):
    model = lm(spelling)
    graph = traced(model)
    for entry in DYNAMO_PASSES:
        entry.apply(graph)
    return model, graph


def verdict_of(model, graph):
    assert mixers(graph) == []
    return check(link(graph, graph.module), reference_of_model(model, MODEL_SCHEDULE))


@pytest.mark.parametrize("spelling", [deepseek, with_a_window, two_layers_with_one_choice], ids=lambda f: f.__name__)
def test_many_sequences_share_a_step(spelling):
    model, graph = passed(spelling)
    graph.recompile()
    verdict = verdict_of(model, graph)
    assert verdict.ok and verdict.error < 1e-3, verdict


def fewer_keys(indexer):
    indexer.args = (*indexer.args[:3], TOPK - 1, *indexer.args[4:])


def another_key(indexer):
    query, key, weights = indexer.args[:3]
    with indexer.graph.inserting_before(indexer):
        other = indexer.graph.call_method("roll", (key, 1, -1))
    indexer.args = (query, other, weights, *indexer.args[3:])


def equal_weights(indexer):
    with indexer.graph.inserting_before(indexer):
        other = indexer.graph.call_function(torch.ones_like, (indexer.args[2],))
    indexer.args = (*indexer.args[:2], other, *indexer.args[3:])


def all_keys(indexer):
    (attention,) = indexer.users
    attention.args = (*attention.args[:17], None, *attention.args[18:])


@pytest.mark.parametrize("mutant", [fewer_keys, another_key, equal_weights, all_keys], ids=lambda f: f.__name__)
def test_the_self_check_sees_another_choice(mutant):
    model, graph = passed(deepseek)
    (indexer,) = [n for n in graph.graph.nodes if n.target is lightning_indexer]
    mutant(indexer)
    graph.recompile()
    reference = reference_of_model(model, MODEL_SCHEDULE)
    assert not check(link(graph, graph.module), reference).ok


def many_keys(m, q, k, v, pos):
    return deepseek(m, q, k, v, pos, choice=lambda s, b: choose(s, b, topk=200))


def test_more_keys_than_a_check_has_are_checked_with_fewer():
    """The self-check's sequences have no more than 150 tokens: with 200 keys nothing is left out in them."""
    model = lm(many_keys)
    original = traced(model)
    graph = traced(model)
    for entry in DYNAMO_PASSES:
        entry.apply(graph)
    assert list(graph.notes.followed_literals) == [200]
    original.recompile()
    graph.recompile()
    assert check_graph(original, graph).ok
    verdict = check_long_windows(original, graph, reference_of_model(model))
    assert verdict is not None and verdict.ok
    (indexer,) = [n for n in graph.graph.nodes if n.target is lightning_indexer]
    all_keys(indexer)
    graph.recompile()
    assert check_graph(original, graph).ok  # which is why the other one is needed
    verdict = check_long_windows(original, graph, reference_of_model(model))
    assert verdict is not None and not verdict.ok


def test_an_indexer_depends_on_the_batch_by_its_rounding():
    _, graph = passed(deepseek)
    (indexer,) = [n for n in graph.graph.nodes if n.target is lightning_indexer]
    assert "an order that depends on sizes" in _refusal(indexer)


def test_drop_in_graphs_are_left_alone():
    graph = traced(lm(deepseek))
    recognize_sdpa(graph)
    assert recognize_indexed_attention(replace(graph, paged=False)).matches == 0
