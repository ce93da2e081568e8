"""The operators as torch sees them: schemas, fakes, aliases, in-place writes and their functional twins."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import logging
import re
import subprocess
import sys
import warnings
from typing import Any

import pytest
import torch
from torch._functorch.aot_autograd import aot_module_simplified
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils._pytree import tree_flatten, tree_map_only, tree_unflatten

import torch_pagoda.runtime.ops.npu
from torch_pagoda.runtime.ops.npu import OPERATORS, registration
from torch_pagoda.runtime.ops.npu.schemas import COMMON_NAMES, SCHEMAS

from npu_operator_samples import Sample, all_samples

SAMPLES = all_samples()
FUNCTIONAL = {operator.name: operator.functional for operator in OPERATORS if operator.functional}


def overload(name: str) -> torch._ops.OpOverload:
    return getattr(torch.ops.npu, name).default


def copied(sample: Sample) -> Sample:
    args, kwargs = tree_map_only(torch.Tensor, torch.clone, (sample.args, sample.kwargs))
    return Sample(sample.operator, sample.label, args, kwargs)


def tensors_of(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_flatten(tree)[0] if isinstance(leaf, torch.Tensor)]


def twin_samples() -> list[Sample]:
    return [Sample(FUNCTIONAL[s.operator], s.label, s.args, s.kwargs) for s in SAMPLES if s.operator in FUNCTIONAL]


@pytest.mark.parametrize("schema", SCHEMAS, ids=lambda schema: schema[: schema.index("(")])
def test_schemas_are_what_torch_parsed(schema):
    name = schema[: schema.index("(")]
    assert str(overload(name)._schema) == f"npu::{schema}"


def test_every_schema_has_a_kernel_and_every_operator_a_sample():
    names = {schema[: schema.index("(")] for schema in SCHEMAS}
    assert names == {operator.name for operator in OPERATORS} | set(FUNCTIONAL.values())
    assert {sample.operator for sample in SAMPLES} == {operator.name for operator in OPERATORS}
    for name in names:
        assert torch._C._dispatch_has_kernel_for_dispatch_key(f"npu::{name}", "CPU")


@pytest.mark.parametrize("operator", OPERATORS, ids=lambda operator: operator.name)
def test_kernels_name_arguments_of_the_schema(operator):
    arguments = {argument.name: argument for argument in overload(operator.name)._schema.arguments}
    common = COMMON_NAMES.get(operator.name, {})
    assert {*operator.takes, *operator.ignores, *common} <= arguments.keys()
    named = {common.get(name, name) for name in arguments}
    reads = {}
    for function in (operator.record or operator.kernel, operator.fake):
        parameters = inspect.signature(function).parameters
        needed = {name for name, p in parameters.items() if p.default is p.empty and name != "names"}
        assert needed <= named, "it gets them all"
        reads |= parameters
    for name, argument in arguments.items():
        known = common.get(name, name) in reads or name in (*operator.ignores, *operator.takes)
        assert known or argument.has_default_value(), f"nothing says what {name} may be"
    assert not {*operator.ignores} & {*reads}


def test_what_a_kernel_does_not_name_keeps_its_default():
    x = torch.randn(2, 8)
    quantized = torch.ops.npu.npu_dynamic_quant(x, dst_type=1, quant_mode="pertoken", group_index=None)
    assert all(map(torch.equal, quantized, torch.ops.npu.npu_dynamic_quant(x)))
    for name, given, known in (
        ("dst_type", 2, "=2; it takes None or 1"),
        ("quant_mode", "pertensor", "='pertensor'; it takes 'pertoken'"),
        ("group_index", torch.ones(1), "; it takes None"),
    ):
        with pytest.raises(NotImplementedError, match=f"npu_dynamic_quant does not implement {name}{known}"):
            torch.ops.npu.npu_dynamic_quant(x, **{name: given})


@pytest.mark.parametrize("sample", [*SAMPLES, *twin_samples()], ids=str)
def test_fakes_have_the_shapes_dtypes_and_strides_of_the_results(sample):
    real = overload(sample.operator)(*copied(sample).args, **copied(sample).kwargs)
    with FakeTensorMode() as mode:
        args, kwargs = tree_map_only(torch.Tensor, mode.from_tensor, (sample.args, sample.kwargs))
        fake = overload(sample.operator)(*args, **kwargs)
    real, fake = tensors_of(real), tensors_of(fake)
    assert [(t.shape, t.dtype, t.stride()) for t in fake] == [(t.shape, t.dtype, t.stride()) for t in real]


SILENTLY_WRITTEN = {"npu_apply_rotary_pos_emb": (0, 1)}  # arguments, as on a device


@pytest.mark.parametrize("sample", [*SAMPLES, *twin_samples()], ids=str)
def test_kernels_write_and_alias_only_what_the_schema_says(sample):
    op = overload(sample.operator)
    given = copied(sample)
    written = [i for i, argument in enumerate(op._schema.arguments) if argument.is_write]
    written += SILENTLY_WRITTEN.get(sample.operator, ())
    kept = [t for i, arg in enumerate(given.args) if i not in written for t in tensors_of(arg)]
    kept += tensors_of(given.kwargs)
    before = [t.clone() for t in kept]
    results = tensors_of(op(*given.args, **given.kwargs))
    assert all(torch.equal(old, new) for old, new in zip(before, kept, strict=True))
    for i in SILENTLY_WRITTEN.get(sample.operator, ()):
        assert torch.equal(given.args[i], results[i])
    if any(result.alias_info for result in op._schema.returns):
        assert results[0] is given.args[written[0]]
        return
    inputs = {t.untyped_storage().data_ptr() for t in tensors_of((given.args, given.kwargs)) if t.numel()}
    storages = [t.untyped_storage().data_ptr() for t in results if t.numel()]
    assert not inputs & set(storages) and len(set(storages)) == len(storages)


@pytest.mark.parametrize("sample", [s for s in SAMPLES if s.operator in FUNCTIONAL], ids=str)
def test_functional_twins_return_what_the_operator_writes(sample):
    op = overload(sample.operator)
    written = [i for i, argument in enumerate(op._schema.arguments) if argument.is_write]
    given = copied(sample)
    returned = op(*given.args, **given.kwargs)
    others = [] if any(result.alias_info for result in op._schema.returns) else tensors_of(returned)
    twin = tensors_of(overload(FUNCTIONAL[sample.operator])(*sample.args, **sample.kwargs))
    wanted = [*others, *(given.args[i] for i in written)]
    assert len(twin) == len(wanted)
    for ours, theirs in zip(twin, wanted, strict=True):
        assert torch.equal(ours.nan_to_num(7), theirs.nan_to_num(7))
    changed = [not torch.equal(sample.args[i], given.args[i]) for i in written]
    assert all(changed)


@pytest.mark.parametrize("sample", [s for s in SAMPLES if s.operator in FUNCTIONAL], ids=str)
def test_tracing_turns_writes_into_the_functional_operator_and_a_copy(sample):
    op = overload(sample.operator)
    written = [i for i, argument in enumerate(op._schema.arguments) if argument.is_write]
    given, wanted = copied(sample), copied(sample)
    leaves, spec = tree_flatten((given.args, given.kwargs))
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    targets = []

    class Step(torch.nn.Module):
        def forward(self, *inputs):
            remaining = iter(inputs)
            filled = [next(remaining) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
            args, kwargs = tree_unflatten(filled, spec)
            op(*args, **kwargs)
            return (args[written[-1]] * 2,)

    def compiler(graph, _):
        targets.extend(node.target for node in graph.graph.nodes if node.op == "call_function")
        return graph

    with torch.no_grad():
        step = aot_module_simplified(Step(), tensors, fw_compiler=compiler, keep_inference_input_mutations=True)
        doubled = step(*tensors)[0]
    assert overload(FUNCTIONAL[sample.operator]) in targets and op not in targets
    assert targets.count(torch.ops.aten.copy_.default) == len(written)
    op(*wanted.args, **wanted.kwargs)
    for index in written:
        assert torch.equal(given.args[index], wanted.args[index])
    assert torch.equal(doubled, wanted.args[written[-1]] * 2)


def test_fakes_keep_symbolic_sizes():
    shapes = ShapeEnv()
    with FakeTensorMode(shape_env=shapes):
        tokens = shapes.create_unbacked_symint()
        query, cache = torch.empty(tokens, 4, 16), torch.empty(5, 8, 32)
        output, lse = torch.ops.npu.npu_fused_infer_attention_score(
            query,
            cache,
            cache,
            atten_mask=torch.empty(2048, 2048, dtype=torch.int8),
            actual_seq_lengths=[shapes.create_unbacked_symint()],
            actual_seq_lengths_kv=[shapes.create_unbacked_symint()],
            block_table=torch.empty(1, 3, dtype=torch.int32),
            block_size=8,
            num_heads=4,
            num_key_value_heads=2,
            input_layout="TND",
            sparse_mode=3,
            softmax_lse_flag=True,
        )
        assert output.shape == (tokens, 4, 16) and lse.shape == (tokens, 4, 1)
        normed, rstd, total = torch.ops.npu.npu_add_rms_norm(
            output.flatten(1), query.flatten(1), torch.empty(64), 1e-6
        )
        assert normed.shape == total.shape == (tokens, 64) and rstd.shape == (tokens, 1)
        experts = torch.empty(tokens, 2, dtype=torch.int32)
        rows, places, counts, _ = torch.ops.npu.npu_moe_init_routing_v2(
            total, experts, expert_num=6, expert_tokens_num_flag=True
        )
        assert rows.shape == (tokens * 2, 64) and places.shape == (tokens * 2,) and counts.shape == (6,)
        assert torch.ops.npu.npu_swiglu(rows).shape == (tokens * 2, 32)


def test_importing_again_changes_nothing():
    before = overload("npu_rms_norm")
    with warnings.catch_warnings():
        # torch warns when a kernel takes the place of another.
        warnings.simplefilter("error")
        importlib.reload(torch_pagoda.runtime.ops.npu)
    assert overload("npu_rms_norm") is before
    torch.ops.npu.npu_rms_norm(torch.randn(2, 4), torch.randn(4))


def test_a_torch_npu_that_does_not_load_counts_as_absent(monkeypatch, caplog):
    monkeypatch.delitem(sys.modules, "torch_npu", raising=False)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())

    def fail(name):
        raise ImportError("libhccl.so: cannot open shared object file")

    monkeypatch.setattr(importlib, "import_module", fail)
    with caplog.at_level(logging.INFO, logger=registration.__name__):
        assert registration.import_torch_npu() is False
    assert "libhccl.so" in caplog.text


@pytest.mark.skipif(importlib.util.find_spec("torch_npu") is not None, reason="torch_npu aborts the process here")
def test_operators_of_somebody_else_are_not_defined_twice():
    code = """
import torch
library = torch.library.Library("npu", "DEF")
library.define("npu_rms_norm(Tensor input, Tensor gamma, float epsilon=9.9999999999999995e-07) -> (Tensor, Tensor)")
import torch_pagoda.runtime.ops.npu
print(torch.ops.npu.npu_rms_norm(torch.ones(1, 4), torch.ones(4))[0].tolist())
"""
    output = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert re.search(r"\[\[(1\.0|0\.99999\d*)", output.stdout), output.stderr
