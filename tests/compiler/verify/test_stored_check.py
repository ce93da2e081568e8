"""Checks of graphs over the model's own weights: what they find, and how often they unpack those of a quantized
checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from quantized_checkpoints import quantize_folder
from torch import nn

from torch_pagoda.checkpoint.loading import load_model
from torch_pagoda.compiler import CompileOptions, pipeline
from torch_pagoda.compiler.build import build_program
from torch_pagoda.compiler.capture.layer_repeat import LayerRepeat
from torch_pagoda.compiler.capture.trace import capture
from torch_pagoda.compiler.pipeline import run_pipeline
from torch_pagoda.compiler.report import CompileReport
from torch_pagoda.compiler.verify.graph_check import check_graph, check_own_weights
from torch_pagoda.compiler.verify.self_check import reference_of_model
from torch_pagoda.passes import TracedGraph
from torch_pagoda.passes.graph.attention_node import paged_attention_nodes
from torch_pagoda.runtime.ops.linear.stored_weight import StoredWeight

from tiny_models import build_tiny_model

PLAIN = CompileOptions(codegen="none", target="cpu")
DEPTH = 9
Loaded = Callable[..., Any]


@pytest.fixture
def loaded(tmp_path: Path) -> Loaded:
    """A function of a format, "" for none, and a number of layers: a tiny llama whose weights are stored so."""

    def load(name: str, depth: int) -> Any:
        build_tiny_model("llama", num_hidden_layers=depth).save_pretrained(tmp_path / "model")
        if name:
            quantize_folder(tmp_path / "model", name)
        return load_model(tmp_path / "model", "float32", False, torch.device("cpu"))

    return load


@contextmanager
def counted(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """The numbers that each unpacking makes."""
    made: list[int] = []
    dense = StoredWeight.dense
    with monkeypatch.context() as patch:
        patch.setattr(StoredWeight, "dense", lambda self: made.append(self.numel()) or dense(self))
        yield made


def stored(model: nn.Module) -> dict[str, StoredWeight]:
    return {name: p for name, p in model.named_parameters() if isinstance(p, StoredWeight)}


def test_weights_are_unpacked_a_few_times(loaded: Loaded, monkeypatch: pytest.MonkeyPatch) -> None:
    """By three prompts of the reference, and once by the check of the whole graph; the layers that stand for all
    others in float32 as well."""
    model = loaded("ct-w4a16", DEPTH)
    total = sum(weight.numel() for weight in stored(model).values())
    with counted(monkeypatch) as made:
        program = build_program(model, PLAIN, owns_weights=True)
    assert program.report.layers_compiled == 4
    assert sum(made) <= (3 + 1 + 8 * 4 / DEPTH) * total, sum(made) / total
    assert not program.has_stored_weights


def test_layers_that_are_stored_otherwise_are_other_layers(loaded: Loaded) -> None:
    model = loaded("gptq-4-order", DEPTH)
    repeat = LayerRepeat.of(model)
    assert repeat is not None and repeat.kept == 4
    layer = model.model.layers[DEPTH - 1].mlp
    weight = layer.up_proj.weight
    other = weight.replaced(order=weight.order.flip(0))  # gate and up no longer read their inputs in one order
    layer.up_proj.weight = nn.Parameter(other, requires_grad=False)
    again = LayerRepeat.of(model)
    assert again is None or again.kept == DEPTH
    plain = weight.replaced(form=replace(weight.form, ordered=False), order=None)
    layer.up_proj.weight = nn.Parameter(plain, requires_grad=False)
    again = LayerRepeat.of(model)
    assert again is None or again.kept == DEPTH


@pytest.fixture(params=["ct-w4a16-asym", ""])
def graphs(
    request: pytest.FixtureRequest, loaded: Loaded, monkeypatch: pytest.MonkeyPatch
) -> tuple[Any, TracedGraph, Any]:
    """The captured and the rewritten graph of a model with one layer, before its weights are packed; its logits."""
    monkeypatch.setattr(pipeline, "hold_weights", lambda *_: None)
    model = loaded(request.param, 1)
    found = capture(model)
    traced = run_pipeline(found, PLAIN, None, CompileReport("llama"))
    return found, traced, reference_of_model(model)


def test_a_right_graph_is_right(graphs: tuple[Any, TracedGraph, Any]) -> None:
    found, traced, reference = graphs
    verdict = check_own_weights(traced, reference)
    assert verdict.ok and verdict.rows == sum(map(len, reference.tokens)), verdict
    assert check_graph(found.traced, traced).ok
    assert not traced.notes.merged.keys() & traced.constants.keys(), "no rows were copied"


def test_rows_of_biases_keep_their_dtype(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pipeline, "hold_weights", lambda *_: None)
    model = build_tiny_model("qwen2").bfloat16()
    traced = run_pipeline(capture(model), PLAIN, None, CompileReport("qwen2"))
    assert any(traced.constants[sources[0]].dim() == 1 for sources in traced.notes.merged.values())
    verdict = check_own_weights(traced, reference_of_model(model))
    assert verdict.ok, verdict


def scale(traced: TracedGraph) -> None:
    for node in list(paged_attention_nodes(traced)):
        node.args = (*node.args[:11], node.args[11] * 3.0, *node.args[12:])


def exchange(traced: TracedGraph) -> None:
    """Let the up and gate of a layer stand for each other."""
    notes = traced.notes
    for name, sources in notes.merged.items():
        if len(sources) == 2:
            notes.merged[name] = sources[::-1]


def change_weight(traced: TracedGraph) -> None:
    """A weight of the rewritten graph is read with zeros that are one too large, or 1 % too large itself."""
    name = next(n for n in traced.constants if "down" in n)
    weight = traced.constants[name]
    if isinstance(weight, StoredWeight):
        assert weight.zeros is not None
        traced.constants[name] = weight.replaced(zeros=weight.zeros + 1)
    else:
        traced.constants[name] = nn.Parameter(weight * 1.01, requires_grad=False)


@pytest.mark.parametrize("mistake", [scale, exchange, change_weight])
def test_mistakes_are_seen(mistake: Callable[[TracedGraph], None], graphs: tuple[Any, TracedGraph, Any]) -> None:
    _, traced, reference = graphs
    assert traced.notes.merged
    mistake(traced)
    assert not check_own_weights(traced, reference).ok
