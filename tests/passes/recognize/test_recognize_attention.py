"""sdpa and hand-written attention become pagoda::attention: which spellings do, which must not, and the numbers."""

from __future__ import annotations

import math

import pytest
import torch
from torch.nn import functional as F

from torch_pagoda.passes.graph.attention_node import AttentionCall, attention_nodes
from torch_pagoda.passes.graph.fx_nodes import callee, shape
from torch_pagoda.passes.recognize.eager_attention import recognize_eager_attention
from torch_pagoda.passes.recognize.sdpa import recognize_sdpa

from toy_lm import DIM, HEADS, KV_HEADS, ToyLM, causal_mask, repeat_kv, run, sdpa, traced


def sdpa_gqa_flag(m, q, k, v, pos):
    return F.scaled_dot_product_attention(q, k, v, attn_mask=causal_mask(pos), enable_gqa=True)


def sdpa_is_causal(m, q, k, v, pos):
    return F.scaled_dot_product_attention(q, repeat_kv(k), repeat_kv(v), is_causal=True)


def sdpa_scale(m, q, k, v, pos):
    return F.scaled_dot_product_attention(q, repeat_kv(k), repeat_kv(v), is_causal=True, scale=0.3)


def sdpa_repeat_interleave(m, q, k, v, pos):
    n = HEADS // KV_HEADS
    return F.scaled_dot_product_attention(
        q, k.repeat_interleave(n, dim=1), v.repeat_interleave(n, dim=1), is_causal=True
    )


SDPA = [sdpa, sdpa_gqa_flag, sdpa_is_causal, sdpa_scale, sdpa_repeat_interleave]


@pytest.mark.parametrize("spelling", SDPA, ids=lambda f: f.__name__)
def test_sdpa_spellings_are_recognized_with_heads_unrepeated(spelling):
    graph = traced(ToyLM(spelling))
    before = run(graph, 13)
    record = recognize_sdpa(graph)
    assert (record.matches, record.rejections) == (1, [])
    (node,) = attention_nodes(graph)
    call = AttentionCall.of(node)
    assert [int(shape(x)[1]) for x in (call.query, call.key, call.value)] == [HEADS, KV_HEADS, KV_HEADS]
    assert call.scale == pytest.approx(0.3 if spelling is sdpa_scale else DIM**-0.5)
    assert not [n for n in graph.graph.nodes if callee(n) == "scaled_dot_product_attention"]
    torch.testing.assert_close(run(graph, 13), before, atol=1e-4, rtol=1e-4)


def test_sdpa_pass_is_idempotent_and_keeps_tokens_dynamic():
    graph = traced(ToyLM(sdpa))
    recognize_sdpa(graph)
    count = len(graph.graph.nodes)
    again = recognize_sdpa(graph)
    assert again.matches == 0
    assert len(graph.graph.nodes) == count
    assert run(graph, 3).shape[1] == 3
    assert run(graph, 29).shape[1] == 29


def test_sdpa_with_dropout_is_left_alone():
    def dropout(m, q, k, v, pos):
        return F.scaled_dot_product_attention(q, repeat_kv(k), repeat_kv(v), dropout_p=0.1, is_causal=True)

    graph = traced(ToyLM(dropout))
    count = len(graph.graph.nodes)
    record = recognize_sdpa(graph)
    assert record.matches == 0
    assert "dropout" in record.rejections[0].reason
    assert len(graph.graph.nodes) == count


def scores_of(q, k):
    return torch.matmul(q, repeat_kv(k).transpose(2, 3))


def eager_additive(m, q, k, v, pos):
    bias = torch.zeros((), dtype=q.dtype).masked_fill(~causal_mask(pos), torch.finfo(q.dtype).min)
    s = scores_of(q, k) * DIM**-0.5 + bias
    return F.softmax(s, dim=-1, dtype=torch.float32).to(q.dtype) @ repeat_kv(v)


def eager_where_divided(m, q, k, v, pos):
    s = scores_of(q, k) / math.sqrt(DIM)
    s = torch.where(causal_mask(pos), s, torch.full([], torch.finfo(s.dtype).min))
    return torch.matmul(F.dropout(s.softmax(-1), p=0.0, training=False), repeat_kv(v))


def eager_masked_fill(m, q, k, v, pos):
    s = (scores_of(q, k) * 0.25).masked_fill(~causal_mask(pos), float("-inf"))
    return torch.softmax(s, dim=-1) @ repeat_kv(v)


def eager_table(m, q, k, v, pos):
    t = q.shape[2]
    s = torch.where(m.causal_table[:t, :t], scores_of(q, k), -1e9)
    return torch.softmax(s, -1) @ repeat_kv(v)


def eager_softcap(m, q, k, v, pos):
    s = torch.tanh(scores_of(q, k) * 0.5 / 5.0) * 5.0
    s = s + torch.where(causal_mask(pos), 0.0, -torch.inf)
    return torch.softmax(s, dim=-1) @ repeat_kv(v)


def eager_floor(m, q, k, v, pos):
    s = scores_of(q, k) * 0.4 + torch.where(causal_mask(pos), 0.0, torch.finfo(q.dtype).min)
    return torch.softmax(torch.max(s, torch.full((), torch.finfo(s.dtype).min)), dim=-1) @ repeat_kv(v)


def eager_clamped_floor(m, q, k, v, pos):
    s = scores_of(q, k) * 0.4 + torch.where(causal_mask(pos), 0.0, -torch.inf)
    return torch.softmax(s.clamp(min=torch.finfo(s.dtype).min), dim=-1) @ repeat_kv(v)


def eager_sinks(m, q, k, v, pos):
    s = scores_of(q, k) * 0.4 + torch.where(causal_mask(pos), 0.0, torch.finfo(q.dtype).min)
    sinks = m.sinks.reshape(1, -1, 1, 1).expand(q.shape[0], -1, q.shape[2], -1)
    s = torch.cat([s, sinks], dim=-1)
    s = s - s.max(dim=-1, keepdim=True).values
    return torch.softmax(s, dim=-1)[..., :-1] @ repeat_kv(v)


def bmm_alibi(m, q, keys, values, pos):
    _, h, t, d = q.shape
    alibi = m.slopes[:, None, None] * torch.arange(t)[None, None, :]
    s = alibi.baddbmm(q.reshape(h, t, d), keys.reshape(h, t, d).transpose(1, 2), beta=1.0, alpha=0.35)
    s = s.view(1, h, t, t) + torch.where(causal_mask(pos), 0.0, torch.finfo(q.dtype).min)
    p = torch.softmax(s, dim=-1).view(h, t, t)
    return torch.bmm(p, values.reshape(h, t, d)).view(1, h, t, d)


def eager_bmm_alibi(m, q, k, v, pos):
    return bmm_alibi(m, q, repeat_kv(k), repeat_kv(v), pos)


def eager_bmm_with_values_of_all_heads(m, q, k, v, pos):
    return bmm_alibi(m, q, repeat_kv(k), repeat_kv(v) * 2.0, pos)


def eager_bmm_with_keys_of_all_heads(m, q, k, v, pos):
    return bmm_alibi(m, q, repeat_kv(k) * 2.0, repeat_kv(v), pos)


def gated(q, k, v, pos, gate):
    s = scores_of(q, k) * 0.4 + torch.where(causal_mask(pos), 0.0, torch.finfo(q.dtype).min)
    out = torch.softmax(s, dim=-1, dtype=torch.float32).to(q.dtype) @ repeat_kv(v)
    return gate(s, out)


def eager_sink_gate(m, q, k, v, pos):
    def gate(s, out):
        scale = (torch.logsumexp(s, dim=-1) - m.sinks.view(1, -1, 1)).to(torch.float32).sigmoid()
        return out * scale.unsqueeze(-1).to(out.dtype)

    return gated(q, k, v, pos, gate)


def eager_sink_gate_with_dims_kept(m, q, k, v, pos):
    def gate(s, out):
        return torch.sigmoid(s.float().logsumexp(-1, keepdim=True) - m.sinks[None, :, None, None]) * out

    return gated(q, k, v, pos, gate)


EAGER = [
    eager_additive,
    eager_where_divided,
    eager_masked_fill,
    eager_table,
    eager_softcap,
    eager_floor,
    eager_clamped_floor,
    eager_sinks,
    eager_sink_gate,
    eager_sink_gate_with_dims_kept,
    eager_bmm_alibi,
    eager_bmm_with_values_of_all_heads,
    eager_bmm_with_keys_of_all_heads,
]


@pytest.mark.parametrize("spelling", EAGER, ids=lambda f: f.__name__)
def test_eager_spellings_are_recognized(spelling):
    graph = traced(ToyLM(spelling))
    before = run(graph, 13)
    record = recognize_eager_attention(graph)
    assert (record.matches, record.rejections) == (1, [])
    (node,) = attention_nodes(graph)
    call = AttentionCall.of(node)
    assert int(shape(call.key)[1]) == (HEADS if "of_all_heads" in spelling.__name__ else KV_HEADS)
    assert (call.softcap == 5.0) == (spelling is eager_softcap)
    assert (call.sinks is not None) == ("sink" in spelling.__name__)
    assert not [n for n in graph.graph.nodes if callee(n) in ("softmax", "baddbmm", "bmm")]
    torch.testing.assert_close(run(graph, 13), before, atol=1e-4, rtol=1e-4)
    assert recognize_eager_attention(graph).matches == 0


def escaping_scores(m, q, k, v, pos):
    s = scores_of(q, k) + torch.where(causal_mask(pos), 0.0, -torch.inf)
    return torch.softmax(s, dim=-1) @ repeat_kv(v) + torch.logsumexp(s, dim=-1, keepdim=True)


def gate_of_the_wrong_sign(m, q, k, v, pos):
    def gate(s, out):
        return out * torch.sigmoid(m.sinks.view(1, -1, 1) - torch.logsumexp(s, dim=-1))[..., None]

    return gated(q, k, v, pos, gate)


def gate_by_half_the_logarithm(m, q, k, v, pos):
    def gate(s, out):
        return out * torch.sigmoid(0.5 * torch.logsumexp(s, dim=-1) - m.sinks.view(1, -1, 1))[..., None]

    return gated(q, k, v, pos, gate)


def gate_by_tanh(m, q, k, v, pos):
    def gate(s, out):
        return out * torch.tanh(torch.logsumexp(s, dim=-1) - m.sinks.view(1, -1, 1))[..., None]

    return gated(q, k, v, pos, gate)


def gate_over_the_queries(m, q, k, v, pos):
    def gate(s, out):
        return out * torch.sigmoid(torch.logsumexp(s, dim=-2) - m.sinks.view(1, -1, 1))[..., None]

    return gated(q, k, v, pos, gate)


def gate_that_escapes(m, q, k, v, pos):
    def gate(s, out):
        scale = torch.sigmoid(torch.logsumexp(s, dim=-1) - m.sinks.view(1, -1, 1))[..., None]
        return (out * scale) + scale

    return gated(q, k, v, pos, gate)


def gate_beside_the_ungated_result(m, q, k, v, pos):
    def gate(s, out):
        return out * torch.sigmoid(torch.logsumexp(s, dim=-1) - m.sinks.view(1, -1, 1))[..., None] + out

    return gated(q, k, v, pos, gate)


def gate_of_unmasked_scores(m, q, k, v, pos):
    s = scores_of(q, k) * 0.4
    scale = torch.sigmoid(torch.logsumexp(s, dim=-1) - m.sinks.view(1, -1, 1))[..., None]
    s = s + torch.where(causal_mask(pos), 0.0, torch.finfo(q.dtype).min)
    return (torch.softmax(s, dim=-1) @ repeat_kv(v)) * scale


def gate_without_sinks(m, q, k, v, pos):
    def gate(s, out):
        return out * torch.sigmoid(torch.logsumexp(s, dim=-1))[..., None]

    return gated(q, k, v, pos, gate)


def bias_from_tokens(m, q, k, v, pos):
    s = scores_of(q, k) + q.sum(-1, keepdim=True) * torch.where(causal_mask(pos), 0.0, -torch.inf)
    return torch.softmax(s * q.mean(), dim=-1) @ repeat_kv(v)


def scaled_by_a_tensor(m, q, k, v, pos):
    s = scores_of(q, k) * m.sinks.view(1, -1, 1, 1) + torch.where(causal_mask(pos), 0.0, -torch.inf)
    return torch.softmax(s, dim=-1) @ repeat_kv(v)


def wrong_softcap(m, q, k, v, pos):
    s = torch.tanh(scores_of(q, k) / 5.0) * 4.0 + torch.where(causal_mask(pos), 0.0, -torch.inf)
    return torch.softmax(s, dim=-1) @ repeat_kv(v)


def clamped_from_above(m, q, k, v, pos):
    s = scores_of(q, k).clamp(torch.finfo(q.dtype).min, 30) + torch.where(causal_mask(pos), 0.0, -torch.inf)
    return torch.softmax(s, dim=-1) @ repeat_kv(v)


def a_floor_that_scores_reach(m, q, k, v, pos):
    s = torch.clamp(scores_of(q, k), -50000) + torch.where(causal_mask(pos), 0.0, -torch.inf)
    return torch.softmax(s, dim=-1) @ repeat_kv(v)


def over_the_wrong_dim(m, q, k, v, pos):
    s = scores_of(q, k) + torch.where(causal_mask(pos), 0.0, -1e9)
    return torch.softmax(s, dim=-2) @ repeat_kv(v)


@pytest.mark.parametrize(
    ("spelling", "reason"),
    [
        (escaping_scores, "also read by"),
        (gate_of_the_wrong_sign, "into a gate by sinks"),
        (gate_by_half_the_logarithm, "into a gate by sinks"),
        (gate_by_tanh, "into a gate by sinks"),
        (gate_over_the_queries, "does not run over the keys"),
        (gate_that_escapes, "also read by"),
        (gate_beside_the_ungated_result, "is read 2 times"),
        (gate_of_unmasked_scores, "also read by"),
        (gate_without_sinks, "0 inputs"),
        (bias_from_tokens, "multiplied by a tensor"),
        (scaled_by_a_tensor, "multiplied by a tensor"),
        (wrong_softcap, "not a softcap"),
        (clamped_from_above, "clamp between the scores"),
        (a_floor_that_scores_reach, "clamp between the scores"),
        (over_the_wrong_dim, "softmax over dim"),
    ],
    ids=lambda x: getattr(x, "__name__", ""),
)
def test_near_misses_are_left_alone_with_the_reason(spelling, reason):
    graph = traced(ToyLM(spelling))
    before = run(graph, 9)
    record = recognize_eager_attention(graph)
    assert record.matches == 0
    assert reason in record.rejections[0].reason
    assert not list(attention_nodes(graph))
    torch.testing.assert_close(run(graph, 9), before, atol=0, rtol=0, equal_nan=True)
