"""Masks are classified by running them."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from torch_pagoda.compiler import CompileOptions
from torch_pagoda.compiler.build import build_program
from torch_pagoda.passes.graph.attention_node import AttentionCall, attention_nodes
from torch_pagoda.passes.graph.fx_nodes import callee
from torch_pagoda.passes.recognize.classify_masks import classify_masks
from torch_pagoda.passes.recognize.mask_kind import UnknownMask, classify
from torch_pagoda.passes.recognize.sdpa import recognize_sdpa

from toy_lm import HEADS, ToyLM, causal_mask, repeat_kv, traced


def indices(tokens):
    return torch.arange(tokens)[:, None], torch.arange(tokens)[None]


def causal(tokens):
    i, j = indices(tokens)
    return j <= i


def test_classify_tells_the_kinds_apart():
    i, j = indices(30)
    seen = j <= i
    assert classify(seen, 4).sliding_window == 0
    assert classify(seen & (i - j < 7), 4).sliding_window == 7
    assert classify(seen & (i // 6 == j // 6), 4).chunk == 6
    kind = classify(seen[None, None].expand(1, 4, 30, 30), 4)
    assert (kind.sliding_window, kind.chunk, kind.alibi_slopes) == (0, 0, None)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("anchor", ["first", "last", "query"])
def test_classify_reads_alibi_slopes(dtype, anchor):
    tokens, slopes = 40, torch.tensor([0.5, 0.25, 0.0625])
    i, j = indices(tokens)
    distance = {"first": j + 0 * i, "last": j - tokens + 1 + 0 * i, "query": j - i}[anchor]
    bias = (slopes[:, None, None] * distance).to(dtype).masked_fill(~causal(tokens), torch.finfo(dtype).min)
    kind = classify(bias, 3)
    torch.testing.assert_close(kind.alibi_slopes, slopes)


@pytest.mark.parametrize(
    ("mask", "reason"),
    [
        (torch.ones(20, 20).bool(), "later tokens"),
        (causal(20) | (indices(20)[1] < 5), "later tokens"),
        (torch.stack([causal(20), causal(20) & (indices(20)[0] - indices(20)[1] < 3)]), "between heads"),
        (causal(20) & ((indices(20)[0] - indices(20)[1]) % 2 == 0), "neither"),
        (torch.randn(20, 20).masked_fill(~causal(20), -1e9), "not an ALiBi"),
    ],
    ids=["bidirectional", "prefix", "per head", "strided", "learned bias"],
)
def test_classify_refuses_what_it_does_not_know(mask, reason):
    with pytest.raises(UnknownMask, match=reason):
        classify(mask, HEADS)


def back(pos):
    """How far each key lies behind each query."""
    return pos[:, None, :, None] - pos[:, None, None, :]


def key(pos):
    return pos[:, None, None, :]


def attention_with(make_mask):
    def attention(m, q, k, v, pos):
        return F.scaled_dot_product_attention(q, repeat_kv(k), repeat_kv(v), attn_mask=make_mask(m, q, pos))

    return attention


def model_with(make_mask):
    model = ToyLM(attention_with(make_mask))
    model.register_buffer("windows", torch.tensor([128, 128, 128, 130]))
    model.register_buffer("long_windows", torch.full((HEADS,), 16384))
    model.register_buffer("positions", torch.arange(512)[None])
    model.register_buffer("seen_by_all", torch.arange(400) == 300)
    return model


MASKS = {
    "causal": (lambda m, q, pos: causal_mask(pos), (0, 0)),
    "window 8": (lambda m, q, pos: causal_mask(pos, window=8), (8, 0)),
    "chunk 8": (lambda m, q, pos: causal_mask(pos, chunk=8), (0, 8)),
    "window 4096": (lambda m, q, pos: causal_mask(pos, window=4096), (4096, 0)),
    "window 4096 by <=": (
        lambda m, q, pos: causal_mask(pos) & (pos[:, None, :, None] - pos[:, None, None, :] <= 4096),
        (4097, 0),
    ),
    "chunk 8192": (lambda m, q, pos: causal_mask(pos, chunk=8192), (0, 8192)),
    "window 4096 of floats": (lambda m, q, pos: causal_mask(pos) & (back(pos).float() < 4096.0), (4096, 0)),
    "window 16384 of floats": (lambda m, q, pos: causal_mask(pos) & (-back(pos).float() > -16384.0), (16384, 0)),
    "window 128 of a tensor": (lambda m, q, pos: causal_mask(pos) & (back(pos) < m.windows[:1]), (128, 0)),
    "window 64 of a size": (lambda m, q, pos: causal_mask(pos) & (back(pos) < min(64, q.shape[2])), (64, 0)),
    "table of literals": (
        lambda m, q, pos: torch.ones(512, 512).tril().triu(-299).bool()[: q.shape[2], : q.shape[2]],
        (300, 0),
    ),
    "table of distances": (  # MPT's
        lambda m, q, pos: torch.where(
            m.causal_table[: q.shape[2], : q.shape[2]],
            m.slopes[:, None, None] * torch.arange(-4095, 1).view(1, 1, 4096)[..., -q.shape[2] :],
            -1e9,
        ),
        (0, 0),
    ),
    "filled with -65504": (
        lambda m, q, pos: (1.0 - causal_mask(pos, window=4096).float()) * -65504.0,
        (4096, 0),
    ),
    "integers that are limits of nothing": (
        lambda m, q, pos: causal_mask(pos, window=4096) & (pos[:, None, None, :] >= -300),
        (4096, 0),
    ),
    "positions of a table": (lambda m, q, pos: causal_mask(m.positions[:, : q.shape[2]], window=300), (300, 0)),
    "table": (lambda m, q, pos: m.causal_table[: q.shape[2], : q.shape[2]], (0, 0)),
    "filled": (
        lambda m, q, pos: torch.zeros(1, 1, 1, 1).masked_fill(~causal_mask(pos, window=8), -torch.inf),
        (8, 0),
    ),
}


@pytest.mark.parametrize("name", MASKS)
def test_mask_tensors_become_attributes(name):
    make_mask, (window, chunk) = MASKS[name]
    graph = traced(model_with(make_mask))
    recognize_sdpa(graph)
    record = classify_masks(graph)
    assert (record.matches, record.rejections) == (1, [])
    (node,) = attention_nodes(graph)
    call = AttentionCall.of(node)
    assert (call.attn_mask, call.is_causal) == (None, True)
    assert (call.sliding_window, call.chunk) == (window, chunk)
    assert not [n for n in graph.graph.nodes if callee(n) in ("le", "and_", "arange")]
    assert classify_masks(graph).matches == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_bias_that_the_model_rounds_is_remarked_on(dtype, caplog):
    def slope(m, q, pos):
        return torch.where(causal_mask(pos), m.slopes[:, None, None] * -back(pos), -1e9)

    report = build_program(ToyLM(attention_with(slope)).to(dtype), CompileOptions(codegen="none")).report
    (remarks,) = (record.remarks for record in report.passes if record.name == "classify_masks")
    said = [record.getMessage() for record in caplog.records]
    if dtype is torch.float32:
        assert remarks == []
    else:
        (remark,) = remarks
        assert "rounds its ALiBi bias to bfloat16" in remark
        assert f"{report.model}: {remark}" in said


def test_a_window_that_does_not_move_with_its_constant_is_no_window():
    """A large constant that leaves the mask as it is (a table's size) does not become a window."""
    graph = traced(ToyLM(attention_with(lambda m, q, pos: causal_mask(pos) & (pos[:, None, None, :] >= -4096))))
    recognize_sdpa(graph)
    classify_masks(graph)
    (node,) = attention_nodes(graph)
    assert AttentionCall.of(node).sliding_window == 0


LIMITS = {
    "window or prefix": (lambda m, q, pos: causal_mask(pos) & ((back(pos) < 256) | (key(pos) < 128)), "128 and 256"),
    "window or short prefix": (
        lambda m, q, pos: causal_mask(pos) & ((back(pos) < 256) | (key(pos) < 100)),
        "neither causal, nor a sliding window",
    ),
    "window or window": (
        lambda m, q, pos: causal_mask(pos) & ((back(pos) < 256) | (back(pos) < 128)),
        "128 and 256",
    ),
    "window and window": (lambda m, q, pos: causal_mask(pos, 256) & (back(pos) < 600), "256 and of 600"),
    "window and chunk": (lambda m, q, pos: causal_mask(pos, 256, 600), "256 and of 600"),
    "short window and long chunk": (lambda m, q, pos: causal_mask(pos, 8, 600), "neither causal"),
    "window of not an integer": (lambda m, q, pos: causal_mask(pos) & (back(pos).float() < 255.5), "255.5"),
    "a tensor's windows for each head": (
        lambda m, q, pos: causal_mask(pos) & (back(pos) < m.windows[:, None, None]),
        "differs between heads",
    ),
    "a tensor's long windows": (
        lambda m, q, pos: causal_mask(pos) & (pos[:, None, :, None] - m.long_windows[:, None, None] < key(pos)),
        "run at 32771 tokens",
    ),
    "a window or a tensor's prefix": (
        lambda m, q, pos: causal_mask(pos) & ((back(pos) < 4096) | (key(pos) < m.windows[0])),
        "neither causal",
    ),
    "a window or a table of tokens that all see": (
        lambda m, q, pos: causal_mask(pos) & ((back(pos) < 4096) | m.seen_by_all[key(pos)]),
        "neither causal",
    ),
    "blocks": (
        lambda m, q, pos: causal_mask(pos) & (pos[:, None, :, None] // 64 - key(pos) // 64 < 16),
        "neither causal",
    ),
    "many blocks": (
        lambda m, q, pos: causal_mask(pos) & (pos[:, None, :, None] // 64 - key(pos) // 64 < 4096),
        "run at 8848 tokens",
    ),
    "a table of tokens that all see": (
        lambda m, q, pos: causal_mask(pos) & ((back(pos) < 8) | m.seen_by_all[key(pos)]),
        "neither causal",
    ),
}


@pytest.mark.parametrize("name", LIMITS)
def test_limits_beyond_the_tokens_that_are_run_are_refused(name):
    """The mask of a few tokens is causal, or a window that another limit joins."""
    make_mask, reason = LIMITS[name]
    graph = traced(model_with(make_mask))
    recognize_sdpa(graph)
    record = classify_masks(graph)
    assert record.matches == 0
    assert reason in record.rejections[0].reason


@pytest.mark.parametrize(
    ("make_mask", "reason"),
    [
        (lambda m, q, pos: causal_mask(pos) & (q[:, :, :, :1] > 0), "depends on the tokens"),
        (lambda m, q, pos: causal_mask(pos) | (pos[:, None, None, :] < 3), "later tokens"),
    ],
    ids=["data", "prefix"],
)
def test_masks_that_cannot_be_classified_stay_with_the_reason(make_mask, reason):
    graph = traced(model_with(make_mask))
    recognize_sdpa(graph)
    record = classify_masks(graph)
    assert record.matches == 0
    assert reason in record.rejections[0].reason
    (node,) = attention_nodes(graph)
    assert AttentionCall.of(node).attn_mask is not None
