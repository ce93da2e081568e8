"""Layers that were not compiled themselves: weights and caches of another layer are found without running them."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from quantized_checkpoints import quantize_folder

from torch_pagoda.checkpoint.loading import load_model
from torch_pagoda.compiler import CompileOptions, UnsupportedModel
from torch_pagoda.compiler.build import build_program, build_unpacked
from torch_pagoda.compiler.capture import layer_repeat
from torch_pagoda.compiler.capture.layer_repeat import CannotRepeat, LayerRepeat
from torch_pagoda.compiler.link.linker import LinkedProgram
from torch_pagoda.compiler.verify.copied_layers import check_order
from torch_pagoda.passes import TracedGraph
from torch_pagoda.runtime.ops.linear.packed_linear import can_pack

from tiny_models import build_tiny_model

DEPTH = 7
OPTIONS = CompileOptions(codegen="none", target="cpu")


@pytest.fixture(scope="module")
def deep() -> tuple[LayerRepeat, TracedGraph]:
    """A llama of 7 layers, 4 of them compiled, and its graph."""
    model = build_tiny_model("llama", num_hidden_layers=DEPTH)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(layer_repeat, "LEAST_SAVED", 1)
        repeat = LayerRepeat.of(model)
        built = build_unpacked(model, OPTIONS)
    assert repeat is not None and built.program.report.layers_compiled == 4
    return repeat, built.traced


def of_layer(graph: TracedGraph, layer: int, what: str = "") -> list[str]:
    """Inputs that receive tensors of a layer."""
    return [name for name in graph.constants if re.search(rf"layers_(modules_)?{layer}_.*{what}", name)]


def exchange(graph: TracedGraph, ones: list[str], others: list[str]) -> None:
    assert ones and len(ones) == len(others)
    for one, other in zip(ones, others, strict=True):
        graph.constants[one], graph.constants[other] = graph.constants[other], graph.constants[one]


def exchanged_layers(graph: TracedGraph) -> None:
    exchange(graph, of_layer(graph, 4), of_layer(graph, 6))


def exchanged_matrices(graph: TracedGraph) -> None:
    exchange(graph, of_layer(graph, 4, "down_proj"), of_layer(graph, 5, "down_proj"))


def compiled_and_copied(graph: TracedGraph) -> None:
    exchange(graph, of_layer(graph, 2, "down_proj"), of_layer(graph, 5, "down_proj"))


def rows_of_a_merged_one(graph: TracedGraph) -> None:
    exchange(graph, of_layer(graph, 4, "k_proj"), of_layer(graph, 5, "k_proj"))


def within_a_layer(graph: TracedGraph) -> None:
    exchange(graph, of_layer(graph, 5, "k_proj"), of_layer(graph, 5, "v_proj"))


def read_twice(graph: TracedGraph) -> None:
    (one,), (other,) = of_layer(graph, 5, "o_proj"), of_layer(graph, 4, "o_proj")
    graph.constants[one] = graph.constants[other]


def norm_of_another_layer(graph: TracedGraph) -> None:
    exchange(graph, of_layer(graph, 4, "input_layernorm"), of_layer(graph, 5, "input_layernorm"))


def caches(graph: TracedGraph) -> None:
    for node in graph.placeholders:
        if (index := node.meta.get("cache_index")) in (4, 5):
            node.meta["cache_index"] = 9 - index


FAULTS = [
    exchanged_layers,
    exchanged_matrices,
    compiled_and_copied,
    rows_of_a_merged_one,
    within_a_layer,
    read_twice,
    norm_of_another_layer,
    caches,
]


@pytest.mark.parametrize("fault", FAULTS)
def test_a_layer_reads_its_own_weights_in_its_turn(deep: tuple[LayerRepeat, TracedGraph], fault: Any) -> None:
    repeat, traced = deep
    check_order(repeat, traced)
    changed = traced.copy()
    fault(changed)
    with pytest.raises(CannotRepeat, match="order"):
        check_order(repeat, changed)


def of_few_layers(model: Any, options: CompileOptions) -> tuple[LayerRepeat, TracedGraph]:
    repeat = LayerRepeat.of(model)
    built = build_unpacked(model, options)
    assert repeat is not None and built.program.report.layers_compiled == repeat.kept < DEPTH
    return repeat, built.traced


def test_copies_follow_the_layer_before(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    def shifted(self: Any, periods: int, copies: Any, newest: Any, old: Any) -> Any:
        if old.op == "placeholder":
            return self._input(old, periods)
        if self.at[old] > self.middle:
            return copies[old]
        return self.calls[self.at[old] + self.length] if self.at[old] > self.start else old  # never a copy

    monkeypatch.setattr(layer_repeat, "LEAST_SAVED", 1)
    monkeypatch.setattr(layer_repeat._Unrolling, "_shifted", shifted)
    with caplog.at_level("INFO"):
        built = build_unpacked(build_tiny_model("llama", num_hidden_layers=DEPTH), OPTIONS)
    assert built.program.report.layers_compiled is None and "differ" in caplog.text


@pytest.mark.parametrize("is_wrong", [False, True])
def test_copies_have_caches_of_their_own(is_wrong: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two layers that share one compute the same as others in one step, and forget in the next."""
    bind = LinkedProgram.bind

    def bound(program: LinkedProgram, kv_cache: Any) -> None:
        shares = is_wrong and len(kv_cache) == DEPTH
        bind(program, [*kv_cache[:5], kv_cache[4], *kv_cache[6:]] if shares else kv_cache)

    monkeypatch.setattr(layer_repeat, "LEAST_SAVED", 1)
    monkeypatch.setattr(LinkedProgram, "bind", bound)
    model = build_tiny_model("llama", num_hidden_layers=DEPTH)
    if is_wrong:
        with pytest.raises(UnsupportedModel, match="in chunks and decode steps give other logits"):
            build_program(model, OPTIONS)
    else:
        assert build_program(model, OPTIONS).report.layers_compiled == 4


def test_what_is_computed_from_weights_is_the_layers_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layer_repeat, "LEAST_SAVED", 1)
    model = build_tiny_model("mamba", num_hidden_layers=DEPTH)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("A_log"):
                parameter += torch.randn(parameter.shape, generator=generator)
    repeat, traced = of_few_layers(model, OPTIONS)
    folded = [name for name in traced.constants if name.startswith("folded_")]
    assert len(folded) >= DEPTH
    check_order(repeat, traced)
    exchange(traced, folded[-1:], folded[-2:-1])
    with pytest.raises(CannotRepeat, match="order"):
        check_order(repeat, traced)


def test_the_order_of_inputs_is_the_layers_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layer_repeat, "LEAST_SAVED", 1)
    build_tiny_model("llama", num_hidden_layers=DEPTH).save_pretrained(tmp_path)
    quantize_folder(tmp_path, "gptq-4-order")
    model = load_model(tmp_path, "float32", False, torch.device("cpu"))
    repeat, traced = of_few_layers(model, replace(OPTIONS, pack_weights=True))
    orders = [name for name in traced.constants if name.startswith("order_") and "down_proj" in name]
    assert len(orders) == DEPTH
    check_order(repeat, traced)
    traced.constants[orders[-1]] = traced.constants[orders[-1]].flip(0)
    with pytest.raises(CannotRepeat, match="order"):
        check_order(repeat, traced)


PACKED = {
    "as they are": ("llama", {"pack_weights": True}),
    "int8": ("llama", {"quantization": "int8"}),
    "int4": ("llama", {"quantization": "int4"}),
    "transposed": ("gpt2", {"quantization": "int8"}),
}


@pytest.mark.parametrize("how", PACKED)
def test_what_is_packed_is_the_layers_own(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if how == "as they are" and not can_pack(torch.bfloat16):
        pytest.skip("no packed bf16 products on this CPU")
    monkeypatch.setattr(layer_repeat, "LEAST_SAVED", 1)
    kind, given = PACKED[how]
    model = build_tiny_model(kind, num_hidden_layers=DEPTH, dtype=torch.bfloat16)
    built = build_unpacked(model, replace(OPTIONS, **given))  # type: ignore[arg-type]
    program, products = built.program, built.products
    assert products is not None and len(products.expected) >= 4 * DEPTH + 1
    program.pack_weights(release=False)
    assert products.fault(program) == ""
    places = [program.linkage.inputs.index(name) for name in products.expected]
    tried = 0
    for one in places:
        for other in places:
            held = program._args[one]
            if one == other or program._args[other].shape != held.shape:
                continue
            program._args[one] = program._args[other]
            assert program.linkage.inputs[one] in products.fault(program)
            program._args[one] = held
            tried += 1
            break
    assert tried >= 4 * DEPTH


def test_experts_and_zeros_are_compared_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layer_repeat, "LEAST_SAVED", 1)
    model = build_tiny_model("mixtral", num_hidden_layers=DEPTH)
    with torch.no_grad():
        model.model.layers[5].self_attn.o_proj.weight.zero_()
    built = build_unpacked(model, replace(OPTIONS, quantization="int8"))
    program, products = built.program, built.products
    assert products is not None
    program.pack_weights(release=False)
    assert products.fault(program) == ""
    stacks = [name for name, parts in products.expected.items() if None not in parts]
    for names in (stacks[:1] + stacks[2:3], [n for n in products.expected if "o_proj" in n][4:6]):
        one, other = map(program.linkage.inputs.index, names)
        given = program._args[one], program._args[other]
        assert given[0].shape == given[1].shape
        program._args[one], program._args[other] = reversed(given)
        assert "is not" in products.fault(program)
        program._args[one], program._args[other] = given
