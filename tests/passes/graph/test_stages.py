"""Stages of a pipeline in one process: where a graph is parted, what crosses, and that a mistake is refused."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from torch_pagoda.compiler.capture.trace import Captured, capture
from torch_pagoda.compiler.link import stages as link_stages
from torch_pagoda.compiler.link.linkage import Linkage
from torch_pagoda.compiler.link.linker import link_stage
from torch_pagoda.compiler.link.stages import stage_of
from torch_pagoda.compiler.options import CompileOptions
from torch_pagoda.compiler.pipeline import References, rewrite
from torch_pagoda.compiler.report import CompileReport
from torch_pagoda.compiler.verify import lockstep
from torch_pagoda.compiler.verify.self_check import Reference, check
from torch_pagoda.passes import TracedGraph, UnsupportedModel
from torch_pagoda.passes.graph import stages
from torch_pagoda.passes.graph.stages import Piece, choose_boundaries, deal, most_stages
from torch_pagoda.runtime.cache.kv_cache import allocate_kv_cache
from torch_pagoda.runtime.parallel.stage_values import pack_values, unpack_values

from tiny_models import build_tiny_model

Made = tuple[Captured, Reference]


def parted(made: Made, count: int, ranks: int = 1) -> TracedGraph:
    """The finished graph, once its stages have been compared with the model in lockstep."""
    found, reference = made
    report = CompileReport("tiny")
    options = CompileOptions(
        codegen="none", target="cpu", pipeline_parallel_size=count, tensor_parallel_size=ranks, pack_weights=True
    )
    traced = rewrite(found, options, References(reference), report).traced
    assert report.verdict is not None
    assert report.verdict.ok
    return traced


def stages_of(traced: TracedGraph) -> list[Linkage]:
    linkage = Linkage.of(traced)
    return [stage_of(traced.graph, linkage, i)[1] for i in range(len(linkage.boundaries) + 1)]


TIED = {"tie_word_embeddings": True}
WINDOWS = {
    "num_hidden_layers": 4,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"],
}


@pytest.mark.parametrize(
    ("kind", "overrides", "ranks", "crossing"),
    [
        ("llama", TIED, 1, 2),  # the residual, and what its norm reads
        ("llama", {}, 2, 2),
        ("olmo2", {}, 1, 1),  # norms behind the layers
        ("gemma3_text", WINDOWS, 1, 2),
        ("mamba", {}, 1, 2),
        ("nemotron_h", {}, 1, 2),
        ("qwen3_5_text", {}, 2, 2),
        ("qwen3_moe", {}, 2, 2),
        ("deepseek_v3", {}, 1, 2),
        ("gpt2", {}, 1, 2),
        ("gemma4_text", {}, 1, 2),  # with the second embedding of all layers
        ("zamba2", {}, 1, 3),  # with the embedding, which shared blocks read
    ],
)
def test_stages_one_after_the_other_are_exact(
    kind: str, overrides: dict[str, Any], ranks: int, crossing: int, captured: Callable[..., Made]
) -> None:
    traced = parted(captured(kind, **overrides), 2, ranks)
    (boundary,) = traced.notes.boundaries
    assert len(boundary.values) == crossing
    first, last = stages_of(traced)
    assert first.sent == last.received == boundary.values
    held = [own.held or frozenset() for own in (first, last)]
    assert held[0] | held[1] == set(range(len(traced.caches)))
    assert not held[0] & held[1]
    assert "logits_rows" in last.step_inputs
    assert "logits_rows" not in first.step_inputs
    weights = [{n for n in own.read if n in traced.constants} for own in (first, last)]
    shared = [name for name in weights[0] & weights[1] if traced.constants[name].dim() > 1]
    assert bool(shared) == (overrides is TIED)


def test_layers_are_dealt_by_bytes(captured: Callable[..., Made]) -> None:
    """The head and a wide embedding count: the middle stage gets more layers."""
    traced = parted(captured("llama", num_hidden_layers=8, vocab_size=512), 3)
    counts = [len(own.held or ()) for own in stages_of(traced)]
    assert counts == [2, 4, 2]


def test_dealing() -> None:
    def pieces(*sizes: int, without: int = 0) -> list[Piece]:
        return [Piece("", (), n, frozenset([i][: i >= without]), (i,)) for i, n in enumerate(sizes)]

    assert deal(pieces(5, 1, 1, 5), 2) == [2]
    assert deal(pieces(1, 1, 1, 9), 2) == [3]
    assert deal(pieces(9, 1, 1, 1, without=2), 2) == [3]
    assert most_stages(pieces(1, 1, 9, without=1)) == 2


@pytest.mark.parametrize("kind", ["llama", "qwen3_moe", "gemma3_text"])
def test_modules_are_where_the_plan_of_transformers_has_them(kind: str) -> None:
    """What stands there in front of the layers is in the first stage alone, what stands behind them in the last."""
    model = build_tiny_model(kind, tie_word_embeddings=False)
    plan = list(model.config.base_model_pp_plan)
    names = {id(tensor): name for name, tensor in model.named_parameters()}
    report = CompileReport("tiny")
    options = CompileOptions(codegen="none", target="cpu", verify="off", pipeline_parallel_size=2)
    traced = rewrite(capture(model), options, References(None), report).traced
    held = [{names.get(id(traced.constants.get(name)), "") for name in own.inputs} for own in stages_of(traced)]
    for at, module in enumerate(plan):
        if module != "layers":
            weights = {name for name in names.values() if name.startswith(f"model.{module}.")}
            assert [weights <= own for own in held] == [at < plan.index("layers"), at > plan.index("layers")]
    assert ["lm_head.weight" in own for own in held] == [False, True]
    assert ["model.layers.1.mlp" in " ".join(own) for own in held] == [False, True]


def test_fewer_layers_than_stages_are_refused(captured: Callable[..., Made]) -> None:
    with pytest.raises(UnsupportedModel, match="pipeline_parallel_size=3: its layers can be parted into 2 stages"):
        parted(captured("llama"), 3)


def test_layers_that_share_a_cache_stay_together(captured: Callable[..., Made]) -> None:
    with pytest.raises(UnsupportedModel, match="cannot be parted into stages, as some of them share a cache"):
        parted(captured("gemma3n_text"), 2)


# Mistakes


def refused(made: Made, stages: int = 2) -> str:
    with pytest.raises((UnsupportedModel, ValueError)) as raised:
        parted(made, stages)
    return str(raised.value)


def test_a_value_that_is_left_out_is_refused(captured: Callable[..., Made], monkeypatch: pytest.MonkeyPatch) -> None:
    def forgetful(traced: TracedGraph, stages: int) -> Any:
        (boundary,) = choose_boundaries(traced, stages)
        return (replace(boundary, values=boundary.values[:1]),)

    monkeypatch.setattr(stages, "choose_boundaries", forgetful)
    assert "of another one, which does not pass it on" in refused(captured("llama"))


def test_values_in_another_order_are_refused(captured: Callable[..., Made], monkeypatch: pytest.MonkeyPatch) -> None:
    def exchanged(graph: Any, linkage: Linkage, stage: int) -> Any:
        if stage:
            (boundary,) = linkage.boundaries
            linkage = replace(linkage, boundaries=(replace(boundary, values=boundary.values[::-1]),))
        return stage_of(graph, linkage, stage)

    monkeypatch.setattr(lockstep, "stage_of", exchanged)
    assert "the ranks together are not exact" in refused(captured("llama"))


class Passing:
    """Stands for the group of all stages in one process."""

    def __init__(self) -> None:
        self.passed: list[Any] = []

    def pass_on(self, values: Any) -> None:
        self.passed.append(unpack_values(pack_values(values), self.values, self.tokens))

    def receive(self, values: Any, tokens: int) -> Any:
        return self.passed.pop(0)


class Chained:
    """All stages of a graph as one program, each over caches of its own."""

    def __init__(self, traced: TracedGraph) -> None:
        report = CompileReport("tiny")
        count = len(traced.notes.boundaries) + 1
        self.stages = [link_stage(traced, stage, report) for stage in range(count)]
        self.last = self.stages[-1]
        self.caches = self.last.whole_caches
        self.device, self.block_size = self.last.device, None
        self.group = Passing()
        for program in self.stages:
            program.group = self.group  # type: ignore[assignment]

    def reserve(self, *sizes: int) -> int:
        return 0

    def bind(self, kv_cache: Any) -> None:
        counts = {spec.group: layer[0].shape[0] for spec, layer in zip(self.caches, kv_cache, strict=True)}
        size = next((t[0].shape[1] for s, t in zip(self.caches, kv_cache, strict=True) if hasattr(s, "key_dim")), 1)
        for program in self.stages:
            program.bind(allocate_kv_cache(program.caches, [counts[g] for g in sorted(counts)], size))

    def __call__(self, ids: torch.Tensor, positions: torch.Tensor, step: Any) -> torch.Tensor:
        for program in self.stages:
            self.group.values, self.group.tokens = program.linkage.sent, ids.shape[1]
            found = program(ids, positions, step)
        return found


@pytest.mark.parametrize(
    ("kind", "overrides", "stages"), [("llama", {"num_hidden_layers": 4}, 2), ("nemotron_h", {}, 2)]
)
def test_linked_stages_hold_their_own_caches(
    kind: str, overrides: dict[str, Any], stages: int, captured: Callable[..., Made]
) -> None:
    made = captured(kind, **overrides)
    program = Chained(parted(made, stages))
    sizes = [sum(map(spec_bytes, each.caches)) for each in program.stages]
    assert all(sizes)
    assert sum(sizes) == sum(map(spec_bytes, program.caches))
    assert check(program, made[1]).ok  # type: ignore[arg-type]
    # Each size of step comes again, and is replayed then.
    assert check(program, made[1]).ok  # type: ignore[arg-type]


def spec_bytes(spec: Any) -> int:
    return sum(part.unit_bytes for part in spec.parts())


def test_a_cache_of_another_layer_is_seen(captured: Callable[..., Made]) -> None:
    made = captured("llama", num_hidden_layers=4)
    program = Chained(parted(made, 2))
    at = program.stages[0]._at
    at["key_cache_0"] = at["key_cache_1"]
    assert not check(program, made[1]).ok  # type: ignore[arg-type]


def test_stages_in_another_order_are_refused(captured: Callable[..., Made], monkeypatch: pytest.MonkeyPatch) -> None:
    real = link_stages.stage_of
    monkeypatch.setattr(lockstep, "stage_of", lambda graph, linkage, stage: real(graph, linkage, 1 - stage))
    assert refused(captured("llama"))
