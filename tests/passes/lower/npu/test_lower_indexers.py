"""Indexers on Ascend: the operator, its numbers in blocks, what is left out, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import fx, nn
from torch._dynamo.source import LocalSource
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

from torch_pagoda.passes import TracedGraph, UnsupportedModel
from torch_pagoda.passes.lower.npu.attention.indexers import lower_npu_indexers
from torch_pagoda.passes.lower.npu.call import Call
from torch_pagoda.runtime.npu_target import NpuTarget
from torch_pagoda.runtime.ops.attention.lightning_indexer import lightning_indexer
from torch_pagoda.runtime.ops.npu.limits import violations
from torch_pagoda.runtime.program import CacheSpec

from npu_graphs import AttentionGraph, assert_legal, operators

aten, npu = torch.ops.aten, torch.ops.npu
TARGET = NpuTarget(block_size=16, float32_as=torch.bfloat16)
A5 = replace(TARGET, soc="Ascend950PR")
WRITE, INDEXER = "npu.npu_scatter_nd_update_", "npu.npu_lightning_indexer"
STEPS = [[90, 1, 17], [1, 40, 0], [33, 1, 3], [1, 1, 1]]


class IndexerGraph(AttentionGraph):
    """A flat step of indexers: queries, keys and weights are inputs; ``calls`` of them over the same keys."""

    def __init__(
        self,
        heads: int = 8,
        dim: int = 128,
        topk: int = 12,
        *,
        target: NpuTarget = TARGET,
        dtype: torch.dtype = torch.float32,
        factors: tuple[float, ...] = (),
        widened: bool = False,
        calls: int = 1,
    ) -> None:
        self.shapes, self.dtype = {"q": (heads, dim), "k": (1, dim), "w": (1, heads)}, dtype
        module = fx.GraphModule(nn.Module(), fx.Graph())
        mode = FakeTensorMode(shape_env=ShapeEnv())
        self.traced = traced = TracedGraph(module, mode, {}, input_ids="input_ids")
        examples = {n: torch.empty(1, 29, *size, dtype=dtype) for n, size in self.shapes.items()}
        for name, example in {"input_ids": torch.zeros(1, 29, dtype=torch.int64), **examples}.items():
            sizes = [DimDynamic.DUCK if i == 1 else DimDynamic.STATIC for i in range(example.dim())]
            context = StatelessSymbolicContext(dynamic_sizes=sizes)
            node = traced.graph.placeholder(name)
            fake = mode.from_tensor(example, source=LocalSource(name), symbolic_context=context)
            node.meta["example_value"] = fake
        output = traced.graph.output(())
        (cache,) = traced.add_cache(CacheSpec(1, dim, 0, dtype))
        metadata = [traced.step_input(n) for n in ("slot_mapping", "block_table", "query_start_loc", "seq_lens")]
        query, key, weights = (traced.placeholder(name) for name in "qkw")
        results = []
        with traced.graph.inserting_before(output):
            key, weights = (traced.call(aten.squeeze.dim, node, 2) for node in (key, weights))
            if widened:
                weights = traced.call(aten._to_copy.default, weights, dtype=torch.float32)
            for factor in factors:
                weights = traced.call(aten.mul.Tensor, weights, factor)
            for _ in range(calls):
                given = query, key, weights, topk, dim**-0.5, cache
                results.append(traced.call(lightning_indexer, *given, *metadata))
        output.args = (tuple(results),)
        traced.npu = target


def lowered(**kwargs: Any) -> IndexerGraph:
    graph = IndexerGraph(**kwargs)
    assert lower_npu_indexers(graph.traced).matches == kwargs.get("calls", 1)
    assert not lower_npu_indexers(graph.traced).matches
    graph.traced.graph.lint()
    assert_legal(graph.traced)
    return graph


def call_of(graph: IndexerGraph) -> fx.Node:
    return [n for n in graph.traced.graph.nodes if "npu_lightning_indexer" in str(n.target)][-1]


@pytest.mark.parametrize("topk", [1, 12, 64, 2048])
def test_the_same_keys_are_chosen(topk: int) -> None:
    """Of contexts of 1 to 125 tokens, in chunks that end inside blocks; the operator names the best first."""
    graph, expected = lowered(topk=topk), IndexerGraph(topk=topk)
    names = [name for name in operators(graph.traced) if name != "aten.squeeze"]
    assert names == ["aten.clamp", "aten.div", "aten.remainder", "aten.stack", WRITE, INDEXER]
    fewer = 0
    for found, right in zip(graph.run(STEPS), expected.run(STEPS), strict=True):
        assert found.shape == right.shape and found.dtype is torch.int32
        assert torch.equal(found.sort(-1).values, right.sort(-1).values)
        none = found == -1
        assert torch.equal(none.sort(-1).values, none), "those that are none stand behind the others"
        fewer += int((~none.any(-1)).sum())
    assert bool(fewer) == (topk < 125)


def test_all_that_the_call_says() -> None:
    graph = lowered(topk=2048)
    call = call_of(graph)
    plain = {name: given for name, given in call.kwargs.items() if isinstance(given, int | str)}
    assert plain == {"layout_query": "TND", "layout_key": "PA_BSND", "sparse_count": 2048, "sparse_mode": 3}
    assert call.args[1] is graph.traced.placeholder("key_cache_0")
    assert not any(isinstance(argument, list) for argument in (*call.args, *call.kwargs.values()))


@pytest.mark.parametrize("soc", ["Ascend910B3", "Ascend950PR"])
def test_factors_and_casts_of_weights_are_left_out(soc: str) -> None:
    target = NpuTarget(soc, block_size=16)
    graph = lowered(dtype=torch.bfloat16, factors=(0.25, 0.125), widened=True, target=target)
    names = operators(graph.traced)
    assert "aten.mul" not in names and "aten._to_copy" not in names
    assert call_of(graph).args[2].args[0].target is aten.squeeze.dim


@pytest.mark.parametrize("factors", [(-1.0,), (0.0,)])
def test_factors_that_change_a_choice_stay(factors: tuple[float, ...]) -> None:
    graph = lowered(factors=factors, topk=5)
    assert "aten.mul" in operators(graph.traced)
    for found, right in zip(graph.run(STEPS), IndexerGraph(factors=factors, topk=5).run(STEPS), strict=True):
        assert torch.equal(found.sort(-1).values, right.sort(-1).values)


def test_weights_in_float32_are_rounded_where_the_chip_takes_no_others() -> None:
    options: dict[str, Any] = {"dtype": torch.bfloat16, "factors": (-1.0,), "widened": True}
    kept = lowered(**options, target=NpuTarget(block_size=16))
    assert operators(kept.traced).count("aten._to_copy") == 1
    rounded = lowered(**options, target=NpuTarget("Ascend950PR", block_size=16))
    assert operators(rounded.traced).count("aten._to_copy") == 2


def test_keys_that_two_indexers_read_are_written_once() -> None:
    graph = lowered(calls=2)
    assert operators(graph.traced).count(WRITE) == 1 and operators(graph.traced).count(INDEXER) == 2
    graph.run(STEPS)


REFUSED = [
    ({"heads": 65}, "65 heads of an indexer; at most 64"),
    ({"heads": 12, "target": A5}, "12 heads of an indexer; Ascend950PR takes 8 or 16 or 24 or 32 or 64"),
    ({"dim": 64}, r"query is (None, 8, 64), key (None, 16, 1, 64), weights (None, 8); one key head, of 128 dims"),
    ({"topk": 2049}, "2049 keys are chosen; at most 2048, or a multiple of 1024 up to 8192"),
    ({"topk": 9216}, "9216 keys are chosen"),
    ({"target": replace(TARGET, block_size=24)}, "blocks of 24; 16 … 1024, by 16"),
    ({"target": replace(TARGET, block_size=2048)}, "blocks of 2048; 16 … 1024, by 16"),
    ({"target": NpuTarget(block_size=16)}, "query is torch.float32; it must be torch.bfloat16 or torch.float16"),
    ({"target": NpuTarget("Ascend310P3", float32_as=torch.float16)}, "Ascend310P3 does not run it"),
]


@pytest.mark.parametrize(("kwargs", "reason"), REFUSED, ids=[reason for _, reason in REFUSED])
def test_what_the_operator_does_not_do_is_refused_by_name(kwargs: dict[str, Any], reason: str) -> None:
    with pytest.raises(UnsupportedModel) as raised:
        lower_npu_indexers(IndexerGraph(**kwargs).traced)
    assert f"chooses keys as lightning_indexer_default does: {INDEXER}: {reason}" in str(raised.value)
    assert str(raised.value).endswith("; use target='cpu'")


@pytest.mark.parametrize("topk", [1, 2048, 3072, 8192])
@pytest.mark.parametrize(("heads", "target"), [(1, TARGET), (64, TARGET), (64, A5), (24, A5)])
def test_sizes_that_are_taken(topk: int, heads: int, target: NpuTarget) -> None:
    lowered(topk=topk, heads=heads, target=target)


def test_what_only_direct_calls_can_get_wrong() -> None:
    def empty(*sizes: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.empty(*sizes, dtype=dtype, device="meta")

    lens, table = empty(3, dtype=torch.int32), empty(3, 5, dtype=torch.int32)
    common = {"layout_query": "TND", "actual_seq_lengths_query": lens, "block_table": table}
    indexer = {**common, "layout_key": "PA_BSND", "actual_seq_lengths_key": lens}
    sparse = {**common, "layout_kv": "PA_BSND", "actual_seq_lengths_kv": lens, "attention_mode": 2}
    sparse |= {"query_rope": empty(7, 4, 64), "key_rope": empty(9, 128, 1, 64)}
    given = {
        npu.npu_lightning_indexer: ((empty(7, 8, 128), empty(9, 128, 1, 128), empty(7, 8)), indexer),
        npu.npu_sparse_flash_attention: (
            (empty(7, 4, 512), empty(9, 128, 1, 512), None, empty(7, 1, 5, dtype=torch.int32), 1.0),
            sparse,
        ),
    }

    def found(operator: Any, target: NpuTarget | None = None, **changes: Any) -> str:
        args, kwargs = given[operator]
        target = target or NpuTarget()
        return "; ".join(violations(Call.make(operator.default, target, *args, **{**kwargs, **changes})))

    for operator in given:
        assert found(operator) == ""
        assert "sparse_mode is 1" in found(operator, sparse_mode=1)
        assert "layouts are 'BSND'" in found(operator, layout_query="BSND")
        wrong = found(operator, actual_seq_lengths_query=empty(3, dtype=torch.int64))
        assert "actual_seq_lengths_query is torch.int64; it must be torch.int32" in wrong
        assert "block_table is None" in found(operator, block_table=None)
    attend = npu.npu_sparse_flash_attention
    assert "attention_mode is 0" in found(attend, attention_mode=0)
    assert "sparse_block_size 4" in found(attend, sparse_block_size=4)
    assert "sums of exponentials" in found(attend, return_softmax_lse=True)
    assert "sinks are (4,) torch.bfloat16" in found(attend, NpuTarget("Ascend950PR"), sinks=empty(4))
    assert found(attend, NpuTarget("Ascend950PR"), sinks=empty(4, dtype=torch.float32)) == ""
    args, kwargs = given[attend]
    given[attend] = ((*args[:3], empty(7, 2, 5, dtype=torch.int32), 1.0), kwargs)
    assert "sparse_indices is (7, 2, 5); [tokens, 1, keys]" in found(attend)
