"""What transformers' plans say of a weight is how ranks hold it: ``colwise`` by outputs, ``rowwise`` by inputs."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from torch_pagoda.compiler.capture.trace import capture
from torch_pagoda.compiler.costs.skeleton import build_skeleton
from torch_pagoda.compiler.options import CompileOptions
from torch_pagoda.compiler.pipeline import References, rewrite
from torch_pagoda.compiler.report import CompileReport
from torch_pagoda.compiler.weights.tensor_contents import module_tensors

from tiny_models import build_tiny_model

RANKS = 2
DIMS = {"colwise": -2, "packed_colwise": -2, "rowwise": -1, "packed_rowwise": -1, "rowwise_split_input": -1}
"""Of a weight, by the plan's word for how it is cut. Others name what is gathered, replicated or reduced."""


def planned(model: Any) -> Iterator[tuple[str, int]]:
    """Weights inside the layers that the plan cuts, and the dim, counted from the last."""
    for name, tensor in model.named_parameters():
        # Llama 4's prefix is not the name of its base model.
        inner = name.removeprefix(f"{model.base_model_prefix}.").removeprefix("model.")
        module = inner.removesuffix(".weight")
        for pattern, style in model.config.base_model_tp_plan.items():
            wanted = re.escape(pattern).replace(r"\*", r"\d+")
            if style in DIMS and tensor.dim() > 1 and re.fullmatch(wanted, module):
                yield name, DIMS[style]


def held(model: nn.Module, ranks: int) -> dict[str, set[int]]:
    """Weights of which a rank holds a part, and the dims that are cut, counted from the last."""
    options = CompileOptions(
        codegen="none", target="cpu", verify="off", tensor_parallel_size=ranks, expert_parallel_size=1
    )
    traced = rewrite(capture(model), options, References(None), CompileReport("plans")).traced
    names = {id(tensor): name for name, tensor in module_tensors(model).items()}
    found: dict[str, set[int]] = {}
    for part in traced.notes.parts.values():
        if (name := names.get(id(part.whole))) is not None:
            found.setdefault(name, set()).update(each.dim - part.whole.dim() for each in part.cut.each())
    return found


def differences(kind: str) -> dict[str, tuple[int, set[int]]]:
    """Weights that the plan cuts otherwise: its dim, and ours."""
    tiny = build_tiny_model(kind)
    model: Any = build_skeleton(type(tiny), tiny.config, torch.float32).model
    ours = held(model, RANKS)
    plan = list(planned(model))
    assert {dim for _, dim in plan} == {-1, -2}
    return {name: (dim, ours.get(name, set())) for name, dim in plan if ours.get(name) != {dim}}


@pytest.mark.parametrize(
    "kind",
    [
        *("llama", "qwen3", "gemma3_text", "cohere2", "phi", "starcoder2", "gpt_neox"),
        *("mixtral", "qwen3_moe", "deepseek_v3", "glm4_moe", "llama4_text"),
    ],
)
def test_every_weight_is_cut_as_planned(kind: str) -> None:
    assert differences(kind) == {}
