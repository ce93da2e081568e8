"""A bias of scores by the distance back to a key: spellings, near misses, numbers in shared steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from torch_pagoda.compiler import CompileOptions
from torch_pagoda.compiler.build import build_program
from torch_pagoda.compiler.link.linker import link
from torch_pagoda.compiler.verify.self_check import STATE_SCHEDULE, check, reference_of_model
from torch_pagoda.passes import TracedGraph, UnsupportedModel
from torch_pagoda.passes.graph.attention_node import AttentionCall, PagedAttentionCall, attention_nodes
from torch_pagoda.passes.graph.attention_node import paged_attention_nodes as paged_nodes
from torch_pagoda.passes.proof.token_axis import mixers
from torch_pagoda.passes.recognize.relative_bias import recognize_relative_bias

from tiny_models import build_tiny_model
from toy_lm import DIM, DYNAMO_PASSES, HIDDEN, ToyLM, causal_mask, repeat_kv, traced

EXTENT = 5


def rows(m: ToyLM, q: torch.Tensor, extent: int = EXTENT) -> torch.Tensor:
    """``[1, H, T, extent]``."""
    return q @ m.position_table[:DIM, :extent]


def by_distance(rel: torch.Tensor, pos: torch.Tensor, *, late: int = 0, hide: bool = True) -> torch.Tensor:
    """The bias as Inkling spells it; ``late``: distances are counted from there."""
    extent = rel.shape[-1]
    places = torch.arange(rel.shape[2])
    distance = (places[:, None] - places[None, :] - late)[None, None]
    bias = rel.gather(-1, distance.clamp(0, extent - 1).expand(*rel.shape[:2], -1, -1))
    return bias.masked_fill((distance < 0) | (distance >= extent), 0.0) if hide else bias


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.scaled_dot_product_attention(q, repeat_kv(k), repeat_kv(v), attn_mask=mask)


def where_seen(m: ToyLM, q: Any, k: Any, v: Any, pos: torch.Tensor) -> torch.Tensor:
    bias = by_distance(rows(m, q), pos)
    return attend(q, k, v, torch.where(causal_mask(pos), bias, torch.finfo(bias.dtype).min).contiguous())


def added(m: ToyLM, q: Any, k: Any, v: Any, pos: torch.Tensor) -> torch.Tensor:
    hidden = torch.where(causal_mask(pos, window=9), 0.0, torch.finfo(q.dtype).min)
    return attend(q, k, v, hidden + by_distance(rows(m, q), pos))


def scaled_by_positions(m: ToyLM, q: Any, k: Any, v: Any, pos: torch.Tensor) -> torch.Tensor:
    tau = 1.0 + 0.3 * torch.log((torch.arange(q.shape[2]) + 1).float()).view(1, 1, -1, 1)
    bias = (by_distance(rows(m, q), pos).float() * tau).to(q.dtype)
    return attend(q, k, v, torch.where(causal_mask(pos), bias, torch.finfo(bias.dtype).min))


def many_distances(m: ToyLM, q: Any, k: Any, v: Any, pos: torch.Tensor) -> torch.Tensor:
    """So many that the mask is run as if there were fewer; as many as the window is long."""
    bias = by_distance(rows(m, q, HIDDEN), pos)
    return attend(q, k, v, torch.where(causal_mask(pos, window=HIDDEN), bias, torch.finfo(bias.dtype).min))


def passed(attention: Any) -> tuple[ToyLM, TracedGraph, list[Any]]:
    model = ToyLM(attention)
    graph = traced(model)
    return model, graph, [entry.apply(graph) for entry in DYNAMO_PASSES]


@pytest.mark.parametrize(
    ("attention", "extent", "window"),
    [(where_seen, EXTENT, 0), (added, EXTENT, 9), (scaled_by_positions, EXTENT, 0), (many_distances, HIDDEN, HIDDEN)],
)
def test_spellings(attention: Any, extent: int, window: int) -> None:
    model, graph, records = passed(attention)
    (record,) = [r for r in records if r.name == "recognize_relative_bias"]
    assert record.matches == 1 and not record.rejections
    (node,) = paged_nodes(graph)
    call = PagedAttentionCall.of(node)
    assert call.relative_bias is not None and call.sliding_window == window
    assert call.relative_bias.meta["example_value"].shape[3] == extent
    assert mixers(graph) == []
    graph.recompile()
    verdict = check(link(graph, graph.module), reference_of_model(model, STATE_SCHEDULE))
    assert verdict.ok and verdict.error < 1e-3, verdict


def test_twice_and_in_a_call_of_the_users_own() -> None:
    graph = traced(ToyLM(where_seen))
    for entry in DYNAMO_PASSES[:3]:
        entry.apply(graph)
    assert recognize_relative_bias(graph).matches == 1
    (node,) = attention_nodes(graph)
    before = AttentionCall.of(node)
    assert recognize_relative_bias(graph).matches == 0 and AttentionCall.of(node) == before
    own = traced(ToyLM(where_seen))
    own.paged = False
    for entry in DYNAMO_PASSES[:3]:
        entry.apply(own)
    assert recognize_relative_bias(own).matches == 0


def lowest(bias: torch.Tensor) -> float:
    return torch.finfo(bias.dtype).min


Bias = Callable[[ToyLM, torch.Tensor, torch.Tensor], torch.Tensor]
NEAR_MISSES: dict[str, tuple[Bias, str]] = {
    "one distance late": (lambda m, q, pos: by_distance(rows(m, q), pos, late=1), "not one by the distance"),
    "the last entry for all that is further": (
        lambda m, q, pos: by_distance(rows(m, q), pos, hide=False),
        "not one by the distance",
    ),
    "the last entry for all that is further, of many": (
        lambda m, q, pos: by_distance(rows(m, q, HIDDEN), pos, hide=False),
        "not one by the distance",
    ),
    "distances from the end": (
        lambda m, q, pos: by_distance(rows(m, q).flip(-1), pos).flip(-1),
        "flip makes something else",
    ),
    "by the key's place": (
        lambda m, q, pos: rows(m, q, HIDDEN).gather(
            -1, torch.arange(q.shape[2]).clamp(0, HIDDEN - 1).expand(1, 4, q.shape[2], -1)
        ),
        "not one by the distance",
    ),
    "by what the tokens are": (
        lambda m, q, pos: rows(m, q).gather(-1, (q @ q.transpose(2, 3)).abs().long().clamp(0, EXTENT - 1)),
        "depends on the tokens",
    ),
    "one head's for all": (lambda m, q, pos: by_distance(rows(m, q)[:, :1], pos), "a bias of 1 heads for 4"),
    "two of them": (
        lambda m, q, pos: by_distance(rows(m, q), pos) + by_distance(rows(m, -q * q), pos),
        "2 gathers of rows by distance",
    ),
    "squared": (lambda m, q, pos: by_distance(rows(m, q), pos).square(), "square makes something else"),
}


@pytest.mark.parametrize("name", NEAR_MISSES)
def test_near_misses(name: str) -> None:
    make, reason = NEAR_MISSES[name]

    def attention(m: ToyLM, q: Any, k: Any, v: Any, pos: torch.Tensor) -> torch.Tensor:
        bias = make(m, q, pos)
        return attend(q, k, v, torch.where(causal_mask(pos), bias, lowest(bias)))

    _, graph, records = passed(attention)
    (record,) = [r for r in records if r.name == "recognize_relative_bias"]
    assert record.matches == 0
    assert any(reason in rejection.reason for rejection in record.rejections), record.rejections
    assert not list(paged_nodes(graph)), "the mask is left, and the model refused"


def test_the_self_check_sees_rows_of_other_distances() -> None:
    model, graph, _ = passed(where_seen)
    (node,) = paged_nodes(graph)
    call = PagedAttentionCall.of(node)
    with graph.before(node):
        rolled = graph.call(torch.roll, call.relative_bias, 1, -1)
    node.replace_input_with(call.relative_bias, rolled)
    graph.recompile()
    assert not check(link(graph, graph.module), reference_of_model(model, STATE_SCHEDULE)).ok


def test_there_is_no_lowering_for_an_npu() -> None:
    with pytest.raises(UnsupportedModel, match=r"adds a bias by distance .* which Ascend NPUs do not support yet"):
        build_program(build_tiny_model("inkling_text"), CompileOptions(target="npu", verify="off"))
