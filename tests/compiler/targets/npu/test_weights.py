"""Weights laid out at load: what is planned for each and why, what is freed, and that the numbers stay."""

from __future__ import annotations

import pytest
import torch
from lowered_models import assert_same, lowered, served
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode

import torch_pagoda.runtime.ops.npu  # noqa: F401  registers the operators
from torch_pagoda.compiler.link.linker import link
from torch_pagoda.compiler.targets.npu.weights import weights
from torch_pagoda.compiler.targets.npu.weights.weights import plan_weights, prepare_weights
from torch_pagoda.compiler.weights.weight_guard import WeightGuard
from torch_pagoda.passes import TracedGraph
from torch_pagoda.passes.graph.notes import GraphNotes
from torch_pagoda.runtime.cache.kv_cache import allocate_kv_cache

npu, aten = torch.ops.npu, torch.ops.aten


def graph_of(function, *, merged=None, **constants: torch.Tensor) -> TracedGraph:
    """The calls that ``function`` makes on ``x`` and on constants."""
    module = fx.GraphModule(torch.nn.Module(), fx.Tracer().trace(function))
    mode = FakeTensorMode()
    traced = TracedGraph(module, mode, dict(constants), paged=False, notes=GraphNotes(merged or {}))
    for node in traced.placeholders:
        node.meta["example_value"] = mode.from_tensor(constants.get(node.name, torch.ones(4, 32)))
    return traced


def bf16(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0)).bfloat16()


def cast_by_copying(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stand in for the NPU's cast of formats, which makes another tensor."""
    monkeypatch.setattr(weights, "cast_to_nz", lambda weight: weight.detach().clone())


def linear(x, weight):
    return npu.npu_linear.default(x, weight, None)


def tied(x, weight):
    return npu.npu_linear.default(aten.embedding.default(weight, x), weight, None)


def sliced(x, weight):
    return npu.npu_linear.default(x, aten.slice.Tensor(weight, 0, 0, 16), None)


def squared(x, weight):
    return npu.npu_linear.default(weight, weight, None)


def transposed(x, weight):
    return aten.mm.default(x, aten.t.default(weight))


def grouped(x, weight):
    return npu.npu_grouped_matmul.default([x], [weight], split_item=3, group_type=0)


def quantized(x, weight):
    return npu.npu_quant_matmul.default(x, weight, x, pertoken_scale=x, output_dtype=15)


def weight_only(x, weight):
    return npu.npu_weight_quant_batchmatmul.default(x, weight, x)


def int8(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.int8)


def added(x, weight, bias):
    return npu.npu_linear.default(x, weight, bias)


@pytest.mark.parametrize(
    ("function", "weight", "reason"),
    [
        (linear, bf16(32, 32), ""),
        (grouped, bf16(32, 32), ""),
        (linear, bf16(32, 32).half(), ""),
        (linear, bf16(32, 32).float(), "it is torch.float32, not float16, bfloat16 or int8"),
        (linear, bf16(24, 32), "its sizes (24, 32) are not multiples of 16"),
        (linear, bf16(32, 40), "its sizes (32, 40) are not multiples of 16"),
        (grouped, bf16(4, 32, 32), "it has 3 dims, not 2"),
        (quantized, int8(32, 32), ""),
        (quantized, int8(32, 48), "its sizes (32, 48) are not multiples of (16, 32)"),
        (quantized, int8(24, 32), "its sizes (24, 32) are not multiples of (16, 32)"),
        (grouped, int8(4, 32, 32), ""),
        (weight_only, int8(32, 32).int(), "it is torch.int32, not float16, bfloat16 or int8"),
        (tied, bf16(32, 32), "embedding_default reads it too, and is not a matrix product of the whole"),
        (sliced, bf16(32, 32), "slice_tensor reads it too, and is not a matrix product of the whole"),
        (transposed, bf16(32, 32), "t_default reads it too, and is not a matrix product of the whole"),
        (squared, bf16(32, 32), "npu_linear_default reads it too, and is not a matrix product of the whole"),
    ],
)
def test_formats_and_why_not(function, weight, reason):
    (plan,) = plan_weights(graph_of(function, weight=weight))
    assert (plan.name, plan.contiguous, plan.fractal_nz, plan.reason) == ("weight", False, not reason, reason)


def test_weights_that_nothing_reads_are_not_planned():
    assert plan_weights(graph_of(lambda x, weight: aten.relu.default(x), weight=bf16(32, 32))) == []


def test_views_become_tensors_of_their_own():
    source = bf16(4, 32, 16)
    view = source.transpose(1, 2)
    traced = graph_of(grouped, weight=view)
    (plan,) = plan_weights(traced)
    assert plan.contiguous and not plan.fractal_nz
    assert prepare_weights(traced, fractal_nz=True, release=False) == source.numel() * 2
    new = traced.constants["weight"]
    assert new.is_contiguous() and torch.equal(new, view)
    assert traced.placeholder("weight").meta["example_value"].is_contiguous()
    assert prepare_weights(traced, fractal_nz=True, release=False) == 0, "again: nothing is left to do"


@pytest.mark.parametrize("release", [False, True])
def test_the_source_of_a_copy_is_freed_only_by_its_owner(release):
    source = bf16(4, 32, 16)
    traced = graph_of(lambda x, weight, source: grouped(x, weight), weight=source.transpose(1, 2), source=source)
    kept = source.clone()
    prepare_weights(traced, fractal_nz=False, release=release)
    assert source.numel() == (0 if release else kept.numel())
    assert traced.notes.folded == ([] if release else ["source"])
    assert torch.equal(traced.constants["weight"], kept.transpose(1, 2))


@pytest.mark.parametrize("merged", [None, {"weight": ("rows", "more")}])
def test_weights_that_are_widened_are_made_of_what_stays(merged):
    traced = graph_of(lambda x, weight: aten.relu.default(weight), merged=merged, weight=bf16(32, 32))
    traced.notes.widened["wide"] = "weight"
    prepare_weights(traced, fractal_nz=False, release=False)
    wide = traced.constants["wide"]
    assert wide.dtype is torch.float32 and torch.equal(wide.bfloat16(), traced.constants["weight"])
    assert traced.notes.folded == (["weight"] if merged is None else ["rows", "more"])


def test_a_source_that_is_read_is_never_freed():
    source = bf16(4, 32, 16)

    def both(x, weight, source):
        return grouped(x, weight), aten.relu.default(source)

    prepare_weights(graph_of(both, weight=source.transpose(1, 2), source=source), fractal_nz=True, release=True)
    assert source.numel()


@pytest.mark.parametrize("release", [False, True])
def test_cast_matrices_take_the_place_of_merged_ones(release, monkeypatch):
    cast_by_copying(monkeypatch)
    parts = {"q": torch.nn.Parameter(bf16(32, 32)), "k": torch.nn.Parameter(bf16(16, 32))}
    expected = torch.cat([part.detach() for part in parts.values()])

    def merged_linear(x, q, k, whole):
        return npu.npu_linear.default(x, whole, None)

    traced = graph_of(merged_linear, merged={"whole": ("q", "k")}, **parts)
    assert prepare_weights(traced, fractal_nz=True, release=release) == expected.numel() * 2
    assert torch.equal(traced.constants["whole"], expected)
    assert [part.numel() for part in parts.values()] == ([0, 0] if release else [1024, 512])
    assert traced.notes.merged == {}, "the program no longer reads rows of them"
    assert sorted(traced.notes.folded) == ([] if release else ["k", "q"])


def test_without_casting_nothing_but_views_is_copied(monkeypatch):
    cast_by_copying(monkeypatch)
    weight = bf16(32, 32)
    traced = graph_of(added, weight=weight, bias=bf16(32))
    assert prepare_weights(traced, fractal_nz=False, release=True) == 0
    assert traced.constants["weight"] is weight and weight.numel()


def prolog(x, dq, uq_qr, uk, dkv_kr, gamma, caches):
    return npu.npu_mla_prolog_v3.default(x, dq, uq_qr, uk, dkv_kr, gamma, gamma, x, x, caches, caches)


PROLOG = {
    **{name: bf16(32, 32) for name in ("dq", "uq_qr", "dkv_kr")},
    "uk": bf16(4, 32, 32),
    "gamma": bf16(32),
    "caches": bf16(4, 16, 1, 32),
}


def test_what_an_operator_demands_is_cast_in_any_case(monkeypatch):
    cast_by_copying(monkeypatch)
    traced = graph_of(prolog, **PROLOG)
    demanded = {plan.name for plan in plan_weights(traced) if plan.demanded}
    assert demanded == {"dq", "uq_qr", "dkv_kr"}
    assert prepare_weights(traced, fractal_nz=False, release=False) == 3 * 32 * 32 * 2
    assert {name for name, t in traced.constants.items() if t is not PROLOG[name]} == demanded


def test_what_is_demanded_and_cannot_be_is_said(caplog):
    prepare_weights(graph_of(prolog, **{**PROLOG, "dq": bf16(32, 24)}), fractal_nz=False, release=False)
    assert "dq keeps its format, although its operator needs FRACTAL_NZ" in caplog.text


def test_a_cpu_casts_no_format():
    weight = bf16(32, 32)
    traced = graph_of(linear, weight=weight)
    assert prepare_weights(traced, fractal_nz=True, release=True) == 0
    assert traced.constants["weight"] is weight


def test_experts_are_turned_once_and_the_numbers_stay():
    model, shared = lowered("qwen3_moe")
    turned = [node.name for node in shared.placeholders if node.name.startswith("turned_") and node.users]
    assert len(turned) == 4
    traced = shared.copy()
    assert prepare_weights(traced, fractal_nz=True, release=False)
    assert all(traced.constants[name].is_contiguous() for name in turned)
    assert not any(shared.constants[name].is_contiguous() for name in turned)
    assert_same(served(traced, traced.module), served(shared, shared.module))
    # Who changes the experts afterwards is told, since the program reads copies.
    program = link(traced, traced.module)
    program.bind(allocate_kv_cache(program.caches, 2, 16))
    guard = WeightGuard(model, program.copied_weights, program.merged_weights)
    guard.check()
    experts = next(p for name, p in model.named_parameters() if name.endswith("experts.down_proj"))
    with torch.no_grad():
        experts.add_(0)
    with pytest.raises(RuntimeError, match=r"experts\.down_proj' of .* was written to"):
        guard.check()
