"""Our `npu::` operators beside the real torch_npu: its schemas, its meta functions, our kernels under its names."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
from torch._functorch.aot_autograd import aot_module_simplified
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_flatten, tree_map_only, tree_unflatten

from torch_pagoda.runtime.ops.npu import OPERATORS
from torch_pagoda.runtime.ops.npu.registration import by_schema
from torch_pagoda.runtime.ops.npu.schemas import SCHEMAS

from npu_operator_samples import Sample, all_samples

pytestmark = pytest.mark.torchair

SAMPLES = all_samples()
OPERATOR = {operator.name: operator for operator in OPERATORS}
# torch_npu has no meta function for these; ours is what traces them.
WITHOUT_META = {"npu_format_cast"}


def overload(name: str) -> torch._ops.OpOverload:
    return getattr(torch.ops.npu, name).default


def described(tree: Any) -> list[tuple[Any, ...]]:
    tensors = [leaf for leaf in tree_flatten(tree)[0] if isinstance(leaf, torch.Tensor)]
    return [(tuple(t.shape), t.dtype, t.stride()) for t in tensors]


def run(sample: Sample, name: str) -> Any:
    args, kwargs = tree_map_only(torch.Tensor, torch.clone, (sample.args, sample.kwargs))
    return overload(name)(*args, **kwargs)


def test_torch_npu_was_there_first():
    torch_npu = sys.modules["torch_npu"]
    assert torch_npu.__version__.partition(".post")[0] == torch.__version__.partition("+")[0]
    # Only torch_npu defines its private operators.
    assert hasattr(torch.ops.npu, "npu_fusion_attention")


@pytest.mark.parametrize("schema", SCHEMAS, ids=lambda schema: schema[: schema.index("(")])
def test_schemas_are_those_of_torch_npu(schema):
    assert str(overload(schema[: schema.index("(")])._schema) == f"npu::{schema}"


@pytest.mark.parametrize("sample", SAMPLES, ids=str)
def test_our_fakes_say_what_the_meta_functions_say(sample):
    operator = OPERATOR[sample.operator]
    with FakeTensorMode() as mode:
        args, kwargs = tree_map_only(torch.Tensor, mode.from_tensor, (sample.args, sample.kwargs))
        theirs = described(overload(sample.operator)(*args, **kwargs))
        ours = by_schema(operator, operator.fake, overload(sample.operator)._schema)
        assert described(ours(*args, **kwargs)) == theirs
    assert described(run(sample, sample.operator)) == theirs


@pytest.mark.parametrize("sample", [s for s in SAMPLES if OPERATOR[s.operator].functional], ids=str)
def test_functional_twins_agree_with_their_meta_functions(sample):
    name = OPERATOR[sample.operator].functional
    assert name is not None
    with FakeTensorMode() as mode:
        args, kwargs = tree_map_only(torch.Tensor, mode.from_tensor, (sample.args, sample.kwargs))
        theirs = described(overload(name)(*args, **kwargs))
    assert described(run(sample, name)) == theirs


@pytest.mark.parametrize("sample", [s for s in SAMPLES if OPERATOR[s.operator].functional], ids=str)
def test_torch_npu_traces_writes_to_the_same_functional_operators(sample):
    leaves, spec = tree_flatten(tree_map_only(torch.Tensor, torch.clone, (sample.args, sample.kwargs)))
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    targets: list[Any] = []

    class Step(torch.nn.Module):
        def forward(self, *inputs):
            remaining = iter(inputs)
            filled = [next(remaining) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
            args, kwargs = tree_unflatten(filled, spec)
            overload(sample.operator)(*args, **kwargs)
            return (inputs[0] + 1,)

    def compiler(graph, _):
        targets.extend(node.target for node in graph.graph.nodes if node.op == "call_function")
        return graph

    with torch.no_grad():
        aot_module_simplified(Step(), tensors, fw_compiler=compiler, keep_inference_input_mutations=True)
    written = sum(argument.is_write for argument in overload(sample.operator)._schema.arguments)
    assert targets.count(overload(OPERATOR[sample.operator].functional)) == 1
    assert targets.count(torch.ops.aten.copy_.default) == written


def test_the_meta_functions_compared_are_torch_npus():
    for name in OPERATOR:
        table = torch._C._dispatch_dump_table(f"npu::{name}")
        meta = next(line for line in table.splitlines() if line.startswith("Meta:"))
        assert ("torch_npu" in meta) == (name not in WITHOUT_META), meta
