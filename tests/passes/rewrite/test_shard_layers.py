"""shard_layers: all ranks together compute what the model does, and a mistake in the cuts is refused."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from aten_graphs import aten_of_module, run_graph

from torch_pagoda.compiler.capture.trace import Captured
from torch_pagoda.compiler.options import CompileOptions
from torch_pagoda.compiler.pipeline import References, rewrite
from torch_pagoda.compiler.report import CompileReport
from torch_pagoda.compiler.verify.self_check import Reference
from torch_pagoda.passes import SHARDING, TracedGraph, UnsupportedModel
from torch_pagoda.passes.graph.cut import ZERO, Cut
from torch_pagoda.passes.graph.data_movement import MOVES
from torch_pagoda.passes.graph.fx_nodes import callee, shape
from torch_pagoda.passes.rewrite import shard_layers, shard_vocabulary
from torch_pagoda.passes.sharding import attention, walk

pagoda = torch.ops.pagoda
Made = tuple[Captured, Reference]


def cut(made: Made, ranks: int) -> tuple[TracedGraph, CompileReport]:
    """The graph of rank 0, once all ranks have been compared with the model."""
    found, reference = made
    report = CompileReport("tiny")
    options = CompileOptions(codegen="none", target="cpu", tensor_parallel_size=ranks)
    return rewrite(found, options, References(reference), report).traced, report


def reductions(traced: TracedGraph) -> int:
    return sum(node.target is pagoda.all_reduce.default for node in traced.graph.nodes)


def test_one_rank_changes_nothing(captured: Callable[..., Made]) -> None:
    traced, report = cut(captured("llama"), 1)
    assert reductions(traced) == 0
    assert not traced.notes.parts
    assert SHARDING not in {record.name for record in report.passes}


@pytest.mark.parametrize(
    ("kind", "overrides", "per_layer"),
    [
        ("llama", {}, 2),
        (
            "llama",
            {"hidden_size": 60, "intermediate_size": 97, "num_attention_heads": 5, "num_key_value_heads": 5},
            2,
        ),
        ("gpt_neox", {}, 1),  # attention and MLP are added to one residual
        ("qwen3_moe", {}, 2),
        ("olmo2", {}, 4),  # its norms of queries and keys run over all heads
    ],
)
def test_ranks_together_are_exact(
    kind: str, overrides: dict[str, Any], per_layer: int, captured: Callable[..., Made]
) -> None:
    traced, report = cut(captured(kind, **overrides), 2)
    assert report.verdict is not None
    assert report.verdict.ok
    assert reductions(traced) == per_layer * 2
    assert not next(record for record in report.passes if record.name == SHARDING).rejections


def test_ranks_hold_kv_heads_and_repeat_the_only_one(captured: Callable[..., Made]) -> None:
    traced, _ = cut(captured("llama"), 2)
    assert [spec.num_kv_heads for spec in traced.caches] == [1, 1]
    traced, _ = cut(captured("llama"), 4)  # has two
    assert [spec.num_kv_heads for spec in traced.caches] == [1, 1]


def test_parts_are_views_of_the_parameters_where_a_rank_holds_one_run(captured: Callable[..., Made]) -> None:
    traced, _ = cut(captured("llama"), 2)
    for name, part in traced.notes.parts.items():
        held, of = traced.constants[name], part.whole
        assert held.untyped_storage().data_ptr() == of.untyped_storage().data_ptr(), name


@pytest.mark.parametrize(
    "kind", ["gpt2", "falcon", "deepseek_v3", "qwen3_5_text", "mamba2", "mixtral", "gemma3_text"]
)
@pytest.mark.parametrize("ranks", [2, 4])
def test_more_architectures_are_exact(kind: str, ranks: int, captured: Callable[..., Made]) -> None:
    _, report = cut(captured(kind), ranks)
    assert report.verdict is not None
    assert report.verdict.ok


def of_folded_heads(x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    rows, gates = x.reshape(-1, 16), gate.reshape(-1, 16).double()
    return (rows * torch.sigmoid(gates).float() + torch.arange(16)).view(1, -1, 64)


def of_heads_side_by_side(x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    return x.reshape(-1, 16) * torch.sigmoid(gate.flatten(2).reshape(-1, 16))


def of_two_heads_in_one(x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    return x.reshape(-1, 32) * torch.sigmoid(gate.reshape(-1, 32))


def of_half_heads(x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    return x.reshape(-1, 8) * torch.sigmoid(gate.reshape(-1, 8))


def of_tokens(x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    return x.flatten(2).reshape(-1, 64) * torch.sigmoid(gate.flatten(2).reshape(-1, 64))


def of_groups(x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    x, gate = x.view(1, -1, 2, 2, 16), gate.view(1, -1, 2, 2, 16)
    return x.reshape(1, -1, 4, 16) * torch.sigmoid(gate.reshape(1, -1, 4, 16))


def of_heads_in_two_orders(x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    return (x.reshape(-1, 16) * torch.sigmoid(gate.transpose(1, 2).reshape(-1, 16))).view(1, -1, 64)


def of_whole_columns(x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    return torch.softmax(x.reshape(-1, 16) * gate.reshape(-1, 16), 0).view(1, -1, 64)


@pytest.mark.parametrize(
    ("function", "dynamic", "late"),
    [
        (of_folded_heads, (1,), ["_to_copy", "sigmoid", "_to_copy", "mul.Tensor", "add.Tensor"]),
        (of_heads_side_by_side, (1,), ["sigmoid", "mul.Tensor"]),
        (of_two_heads_in_one, (1,), []),
        (of_half_heads, (1, 2), []),
        (of_tokens, (1,), []),
        (of_groups, (1,), []),
        (of_heads_in_two_orders, (1,), ["sigmoid"]),
        (of_whole_columns, (1,), ["mul.Tensor"]),
    ],
)
def test_heads_are_folded_into_tokens_behind_what_works_on_rows(
    function: Callable[..., torch.Tensor], dynamic: tuple[int, ...], late: list[str]
) -> None:
    """``late`` are the operators that read heads now."""

    class Call(torch.nn.Module):
        def forward(self, x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
            return function(x, gate)

    def ranks() -> Counter[tuple[str, int]]:
        names = [(callee(node), len(shape(node))) for node in traced.graph.nodes if node.op == "call_function"]
        return Counter((name, rank) for name, rank in names if name not in MOVES)

    traced = aten_of_module(Call(), torch.randn(1, 5, 4, 16), torch.randn(1, 5, 4, 16), dynamic=dynamic)
    before = ranks()
    shard_layers._fold_heads_late(traced)
    assert ranks() - before == Counter((name, 4) for name in late)
    given = torch.randn(1, 7, 4, 16), torch.randn(1, 7, 4, 16)
    assert torch.equal(run_graph(traced, *given), function(*given))


def test_what_is_read_whole_stays_whole_with_the_reason(captured: Callable[..., Made]) -> None:
    _, report = cut(captured("gpt_bigcode"), 2)
    record = next(record for record in report.passes if record.name == SHARDING)
    assert record.matches == 2
    assert {rejection.reason for rejection in record.rejections} == {"parts of a split are cut along different dims"}


@pytest.mark.parametrize(("overrides", "count"), [({"vocab_size": 251}, 2), ({"tie_word_embeddings": True}, 1)])
def test_a_large_vocabulary_is_held_in_parts(
    overrides: dict[str, Any], count: int, captured: Callable[..., Made], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shard_vocabulary, "LEAST_PARAMETERS", 2**13)
    traced, report = cut(captured("llama", **overrides), 2)
    assert report.verdict is not None
    assert report.verdict.ok
    rows = traced.constants
    tables = {
        id(part.whole) for name, part in traced.notes.parts.items() if rows[name].shape in ((126, 64), (128, 64))
    }
    assert len(tables) == count
    assert sum(node.target is pagoda.all_gather.default for node in traced.graph.nodes) == 1


# What must not pass


def no_reduction(made: list[Any], traced: TracedGraph, node: Any) -> None:
    """All but the second reduction."""
    made.append(node)
    if len(made) != 2:
        REDUCE(traced, node)


def two_reductions(made: list[Any], traced: TracedGraph, node: Any) -> None:
    REDUCE(traced, node)
    if not made:
        made.append(node)
        REDUCE(traced, node.next)


REDUCE = shard_layers._reduce


@pytest.mark.parametrize("wrong", [no_reduction, two_reductions])
def test_a_reduction_too_few_or_too_many_is_refused(
    wrong: Callable[..., None], captured: Callable[..., Made], monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Any] = []
    monkeypatch.setattr(shard_layers, "_reduce", lambda traced, node: wrong(made, traced, node))
    refused(captured("llama"))


def test_a_bias_that_all_ranks_add_is_refused(captured: Callable[..., Made], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(walk, "first_only", lambda size, ranks: tuple(np.arange(size) for _ in range(ranks)))
    refused(captured("gpt2"))


def test_a_kv_head_of_another_group_is_refused(
    captured: Callable[..., Made], monkeypatch: pytest.MonkeyPatch
) -> None:
    read = attention.groups_read

    def next_head(indices: Any, many: int, few: int) -> Any:
        return tuple((part + 1) % few for part in read(indices, many, few))

    monkeypatch.setattr(attention, "groups_read", next_head)
    refused(captured("llama"))


def test_exchanged_pieces_of_one_matrix_are_refused(
    captured: Callable[..., Made], monkeypatch: pytest.MonkeyPatch
) -> None:
    hold = shard_layers.part_of

    def turned(tensor: torch.Tensor, held: Cut, rank: int) -> torch.Tensor:
        pieces = len(held.runs[0]) == 3  # query, key and value in one matrix
        return hold(
            tensor, Cut(held.dim, tuple(np.roll(p, held.local // 3) for p in held.indices)) if pieces else held, rank
        )

    monkeypatch.setattr(shard_layers, "part_of", turned)
    refused(captured("gpt2"))


def test_experts_counted_from_the_next_one_are_refused(
    captured: Callable[..., Made], monkeypatch: pytest.MonkeyPatch
) -> None:
    constant = shard_layers._constant

    def later(traced: TracedGraph, name: str, whole: torch.Tensor, held: Cut) -> Any:
        return constant(traced, name, whole + name.startswith("first_expert"), held)

    monkeypatch.setattr(shard_layers, "_constant", later)
    refused(captured("qwen3_moe"))


def test_a_column_that_counts_twice_in_a_norm_is_refused(
    captured: Callable[..., Made], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shard_layers, "counted_once", lambda held: Cut(0, held.indices))
    refused(captured("olmo2", num_key_value_heads=1))


def test_a_norm_of_this_ranks_features_alone_is_refused(
    captured: Callable[..., Made], monkeypatch: pytest.MonkeyPatch
) -> None:
    def own(held: Cut) -> Cut:
        return Cut(0, tuple(np.where(part < held.local, part, ZERO) for part in held.indices))

    monkeypatch.setattr(shard_layers, "counted_once", own)
    refused(captured("olmo2"))


def refused(made: Made) -> None:
    with pytest.raises(UnsupportedModel, match="the ranks together are not exact"):
        cut(made, 2)
