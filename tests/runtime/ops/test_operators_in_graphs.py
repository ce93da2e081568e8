"""The operators as torch sees them: registration, fakes, autograd, and compiled graphs that mutate the caches."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch
from torch._inductor.compile_fx import compile_fx
from torch._inductor.utils import run_and_get_code
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

import torch_pagoda.runtime.ops
from torch_pagoda.runtime.ops.arguments import AttentionArguments, MoeArguments, PagedAttentionArguments
from torch_pagoda.runtime.ops.attention.attention import attention
from torch_pagoda.runtime.ops.attention.paged_attention import paged_attention
from torch_pagoda.runtime.ops.moe.moe import moe

HEADS, KV_HEADS, DIM = 8, 2, 16


def dense_arguments(dtype=torch.float32):
    query = torch.randn(2, 4, 9, 8).to(dtype)
    key, value = torch.randn(2, 2, 11, 8).to(dtype), torch.randn(2, 2, 11, 6).to(dtype)
    return query, key, value, torch.rand(9, 11) > 0.3, torch.randn(4), torch.rand(4), 0.3, False, 0, 0, 0.0


def test_import_is_idempotent():
    overload = torch.ops.pagoda.attention.default
    importlib.reload(importlib.import_module("torch_pagoda.runtime.ops.attention.attention"))
    importlib.reload(torch_pagoda.runtime.ops)
    assert torch.ops.pagoda.attention.default is overload
    torch.ops.pagoda.attention.default(*dense_arguments())


@pytest.mark.parametrize(
    "overload, record",
    [(attention, AttentionArguments), (paged_attention, PagedAttentionArguments), (moe, MoeArguments)],
    ids=str,
)
def test_records_name_the_arguments_of_the_schemas(overload, record):
    arguments = overload._schema.arguments
    assert [argument.name for argument in arguments] == list(record._fields)
    defaults = {argument.name: argument.default_value for argument in arguments if argument.has_default_value()}
    assert defaults.items() <= record._field_defaults.items()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_opcheck(paged_case, dtype):
    torch.library.opcheck(torch.ops.pagoda.attention.default, dense_arguments(dtype))
    case = paged_case([(3, 5), (1, 20)], dtype=dtype, sinks=True)
    torch.library.opcheck(torch.ops.pagoda.paged_attention.default, case.arguments)
    case = paged_case([(3, 20), (1, 5)], cache_dtype=torch.int8)
    torch.library.opcheck(torch.ops.pagoda.paged_attention.default, case.arguments)


def test_fake_strides_are_the_real_ones(paged_case):
    case = paged_case([(3, 5), (1, 20)])
    for op, arguments in [
        (torch.ops.pagoda.attention.default, dense_arguments()),
        (torch.ops.pagoda.paged_attention.default, case.arguments),
    ]:
        real = op(*arguments)
        with FakeTensorMode() as mode:
            fake = op(*[mode.from_tensor(a) if isinstance(a, torch.Tensor) else a for a in arguments])
        assert fake.shape == real.shape and fake.stride() == real.stride() and fake.dtype == real.dtype


def test_fake_keeps_symbolic_sizes():
    shapes = ShapeEnv()
    with FakeTensorMode(shape_env=shapes):
        tokens = shapes.create_unbacked_symint()
        query, key = torch.empty(1, 4, tokens, 8), torch.empty(1, 2, tokens, 8)
        result = torch.ops.pagoda.attention.default(query, key, key, None, None, None, 1.0, True, 0, 0, 0.0)
    assert str(result.shape[2]) == str(tokens)
    assert [str(stride) for stride in result.stride()[1:]] == ["8", "32", "1"]


@pytest.mark.parametrize("argument", ["query", "value", "sinks"])
def test_gradients_are_refused(paged_case, argument):
    query, key, value, _, sinks, *_ = dense_arguments()
    {"query": query, "value": value, "sinks": sinks}[argument].requires_grad_()
    arguments = (query, key, value, None, sinks, None, 1.0, False, 0, 0, 0.0)
    with pytest.raises(RuntimeError, match=f"{argument} requires grad; call it under torch.inference_mode"):
        attention(*arguments)
    with torch.no_grad():
        assert not attention(*arguments).requires_grad

    case = paged_case([(3, 5)], sinks=True)
    case.arguments[{"query": 0, "value": 2, "sinks": 9}[argument]].requires_grad_()
    with pytest.raises(RuntimeError, match=f"{argument} requires grad"):
        paged_attention(*case.arguments)
    with torch.inference_mode():
        paged_attention(*case.arguments)


def test_gradients_are_refused_while_tracing():
    query, *others = dense_arguments()
    compiled = torch.compile(lambda q: attention(q, *others).sum() * q.sum(), backend="aot_eager")
    with pytest.raises(Exception, match="query requires grad"):
        compiled(query.requires_grad_())


class TwoLayers(torch.nn.Module):
    """Two layers on one step's metadata, each with a cache of its own, and work around them."""

    def forward(self, x, caches, slots, table, starts, lengths):
        tokens = x.shape[1]
        for layer in range(2):
            q, k, v = (x * 1.5).split([HEADS * DIM, KV_HEADS * DIM, KV_HEADS * DIM], dim=-1)
            heads = [t.view(1, tokens, -1, DIM).transpose(1, 2) for t in (q, k, v)]
            attended = torch.ops.pagoda.paged_attention.default(
                *heads, *caches[layer], slots, table, starts, lengths, None, None, 0.25, 0, 0, 0.0, None, None
            )
            x = x + torch.nn.functional.pad(
                attended.transpose(1, 2).reshape(1, tokens, HEADS * DIM), (0, 2 * KV_HEADS * DIM)
            )
        return x


def step(paged_case, sequences):
    """(x, caches, metadata) of a step in which sequences are (new tokens, context)."""
    case = paged_case(sequences, heads=HEADS, kv_heads=KV_HEADS, dim=DIM, padding=0)
    caches = [[c.clone(memory_format=torch.preserve_format) for c in case.arguments[3:5]] for _ in range(2)]
    tokens = sum(n for n, _ in sequences)
    return torch.randn(1, tokens, (HEADS + 2 * KV_HEADS) * DIM), caches, *case.arguments[5:9]


def twice(arguments):
    x, caches, *metadata = arguments
    copies = [[c.clone(memory_format=torch.preserve_format) for c in pair] for pair in caches]
    return (x, copies, *metadata)


STEPS = [[(5, 5), (2, 9)], [(1, 6), (0, 9)], [(1, 16), (9, 9)], [(1, 1), (1, 1)]]


@pytest.mark.parametrize("grad_free", [torch.inference_mode, torch.no_grad])
def test_compiled_graph_writes_the_caches_in_place(paged_case, grad_free):
    torch._dynamo.reset()
    compiled = torch.compile(TwoLayers(), dynamic=True, fullgraph=True)
    with grad_free():
        for sequences in STEPS:
            arguments = step(paged_case, sequences)
            eager, graph = twice(arguments), twice(arguments)
            expected = TwoLayers()(*eager)
            torch.testing.assert_close(compiled(*graph), expected)
            for ours, theirs, before in zip(graph[1], eager[1], arguments[1], strict=True):
                for cache, reference, old in zip(ours, theirs, before, strict=True):
                    assert torch.equal(cache, reference) and not torch.equal(cache, old)


def test_one_compiled_graph_serves_every_number_of_tokens(paged_case):
    """What the runtime does: call what compile_fx returns directly, without guards, one token included."""
    torch._dynamo.reset()
    graphs: list[Any] = []
    names: list[str] = []

    def backend(graph, examples):
        names.extend(node.name for node in graph.graph.find_nodes(op="placeholder"))
        graphs.append(compile_fx(graph, examples))
        return graphs[-1]

    with torch.inference_mode():
        first = step(paged_case, STEPS[0])
        torch._dynamo.mark_dynamic(first[0], 1)
        torch._dynamo.mark_dynamic(first[2], 0)
        torch.compile(TwoLayers(), backend=backend, dynamic=False, fullgraph=True)(*first)
        for sequences in STEPS[1:]:
            arguments = step(paged_case, sequences)
            eager, (x, caches, *metadata) = twice(arguments), twice(arguments)
            tensors = {"l_x_": x}
            tensors |= {f"l_caches_{i}_{j}_": caches[i][j] for i in range(2) for j in range(2)}
            tensors |= dict(zip(["l_slots_", "l_table_", "l_starts_", "l_lengths_"], metadata, strict=True))
            # The only symbols are the number of tokens.
            (result,) = graphs[0](*[tensors.get(name, x.shape[1]) for name in names])
            torch.testing.assert_close(result, TwoLayers()(*eager))
            for ours, theirs in zip(caches, eager[1], strict=True):
                assert torch.equal(ours[0], theirs[0]) and torch.equal(ours[1], theirs[1])


def test_compiled_graph_copies_no_cache(paged_case):
    torch._dynamo.reset()
    compiled = torch.compile(TwoLayers(), dynamic=True, fullgraph=True)
    with torch.inference_mode():
        _, code = run_and_get_code(compiled, *step(paged_case, STEPS[0]))
    (source,) = code
    body = source[source.index("def call(") :]
    assert body.count("torch.ops.pagoda.paged_attention.default(") == 2
    assert "copy_" not in body and "clone" not in body and "auto_functionalized" not in body
