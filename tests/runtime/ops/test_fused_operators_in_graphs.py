"""The operators of norms, rope and activations as torch sees them: fakes, autograd, compiled graphs."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from torch_pagoda.runtime.ops import OPERATORS
from torch_pagoda.runtime.ops.attention.attention import attention_cpu
from torch_pagoda.runtime.ops.registration import Facts

pagoda = torch.ops.pagoda


def arguments_of(name, dtype=torch.float32, tokens=5):
    x, product = torch.randn(2, tokens, 16).to(dtype), torch.randn(2, tokens, 48).to(dtype)
    weight = torch.randn(16).to(dtype)
    return {
        "rms_norm": (product[..., 16:32], weight, 1e-5, 1.0, False),
        "add_rms_norm": (x, product[..., :16], weight, 1e-5, 0.0, True),
        "layer_norm": (product[..., 16:32], weight, None, 1e-5),
        "add_layer_norm": (x, product[..., :16], weight, weight, 1e-5),
        "rope": (
            [
                product[..., :32].view(2, tokens, 4, 8).transpose(1, 2),
                product[..., 32:].reshape(2, 2, tokens, 8),
            ],
            torch.randn(1, tokens, 4).to(dtype),
            torch.randn(1, tokens, 4).to(dtype),
            "half",
            2,
            True,
        ),
        "gated_activation": (product[..., :24], product[..., 24:], "clipped_swiglu", 1.7, 7.0),
        "activation": (product[..., ::2], "gelu_tanh"),
        "gated_rms_norm": (x, product[..., 16:32], weight, 1e-5, 0.0, True, "silu", False, 8),
    }[name]


NAMES = [
    *("rms_norm", "add_rms_norm", "gated_rms_norm", "layer_norm", "add_layer_norm", "rope"),
    *("gated_activation", "activation"),
]


def flat(results):
    return [results] if isinstance(results, torch.Tensor) else list(results)


@pytest.mark.parametrize("name", NAMES)
def test_opcheck(name):
    torch.library.opcheck(getattr(pagoda, name).default, arguments_of(name, torch.bfloat16))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("tokens", [0, 1, 5])
def test_fake_strides_are_the_real_ones(name, tokens):
    arguments = arguments_of(name, tokens=tokens)
    with FakeTensorMode() as mode:
        fakes = torch.utils._pytree.tree_map_only(torch.Tensor, mode.from_tensor, arguments)
        promised = flat(getattr(pagoda, name).default(*fakes))
    for dtype in (torch.float32, torch.float64):  # the kernel and the reference
        for result, fake in zip(
            flat(getattr(pagoda, name).default(*arguments_of(name, dtype, tokens))), promised, strict=True
        ):
            assert result.shape == fake.shape and result.stride() == fake.stride()
    assert all(fake.dtype == torch.float32 for fake in promised)


def test_fakes_keep_symbolic_sizes():
    shapes = ShapeEnv()
    with FakeTensorMode(shape_env=shapes):
        tokens = shapes.create_unbacked_symint()
        (turned,) = pagoda.rope.default(
            [torch.empty(1, 4, tokens, 8)], torch.empty(1, tokens, 8), torch.empty(1, tokens, 8), "half", 0, True
        )
        normed = pagoda.rms_norm.default(torch.empty(1, tokens, 8), None, 1e-5, 0.0, True)
        gated = pagoda.gated_activation.default(
            torch.empty(1, tokens, 8), torch.empty(1, tokens, 8), "silu", 0.0, 0.0
        )
    assert str(turned.shape[2]) == str(normed.shape[1]) == str(gated.shape[1]) == str(tokens)
    assert [str(stride) for stride in turned.stride()[1:]] == ["8", "32", "1"]


@pytest.mark.parametrize("name", NAMES)
def test_gradients_are_refused(name):
    arguments = list(arguments_of(name))
    first = arguments[0][0] if name == "rope" else arguments[0]
    first.requires_grad_()
    operator = getattr(pagoda, name).default
    with pytest.raises(RuntimeError, match=r"requires grad; call it under torch.inference_mode"):
        operator(*arguments)
    with torch.no_grad():
        assert not any(result.requires_grad for result in flat(operator(*arguments)))


def test_every_operator_has_its_cpu_function():
    assert OPERATORS[pagoda.attention.default].cpu is attention_cpu
    assert {overload._schema.name.removeprefix("pagoda::") for overload in OPERATORS} >= {
        *NAMES,
        "attention",
        "paged_attention",
        "packed_linear",
    }
    for name in NAMES:
        overload = getattr(pagoda, name).default
        arguments = arguments_of(name, torch.bfloat16)
        direct, dispatched = flat(OPERATORS[overload].cpu(*arguments)), flat(overload(*arguments))
        assert all(map(torch.equal, direct, dispatched))


def test_an_operator_has_to_declare_every_fact():
    facts = {"over": "rows", "invariant": True, "kind": "", "spelled_out": False}
    for missing in facts:
        with pytest.raises(TypeError, match=missing):
            Facts(**{name: fact for name, fact in facts.items() if name != missing})


@pytest.mark.parametrize("name", [name for name in NAMES if name != "rope"])
def test_results_depend_on_what_is_declared(name):
    """A change of one row, or of one element, changes no other."""
    facts = OPERATORS[getattr(pagoda, name).default].facts
    arguments = arguments_of(name)
    before = flat(getattr(pagoda, name).default(*arguments))
    changed = arguments[0].clone()
    changed[1, 3, 0] += 1
    after = flat(getattr(pagoda, name).default(changed, *arguments[1:]))
    for old, new in zip(before, after, strict=True):
        expected = torch.zeros_like(old, dtype=torch.bool)
        expected[1, 3] = facts.over == "rows"
        expected[1, 3, 0] = True
        assert not ((old != new) & ~expected).any()
    assert facts.over in ("elements", "rows") and any((o != n).any() for o, n in zip(before, after, strict=True))


def layer(x, residual, weight, product, cos, sin):
    """One of everything, in the order of a decoder layer, with some work between for inductor to fuse."""
    normed, total = pagoda.add_rms_norm.default(x, residual, weight, 1e-5, 0.0, True)
    merged = normed @ product
    query, key = (merged[..., i * 16 : (i + 1) * 16].view(*x.shape[:2], 2, 8).transpose(1, 2) for i in range(2))
    query, key = pagoda.rope.default([query, key], cos, sin, "interleaved_to_half", 0, True)
    mixed = (query + key).transpose(1, 2).flatten(2)
    gated = pagoda.gated_activation.default(merged[..., :16], merged[..., 16:32], "silu", 0.0, 0.0)
    plain = pagoda.activation.default(merged[..., 1:33:2], "relu2")
    mixed = pagoda.gated_rms_norm.default(mixed, merged[..., 32:], weight, 1e-5, 0.0, True, "sigmoid", True, 4)
    normed = pagoda.layer_norm.default(mixed + gated + plain, weight, None, 1e-5)
    return pagoda.rms_norm.default(normed, weight, 1e-5, 1.0, False), total


def test_compiled_graph_with_every_operator():
    torch._dynamo.reset()
    compiled = torch.compile(layer, dynamic=True, fullgraph=True)
    weight, product = torch.randn(16), torch.randn(16, 48)
    with torch.inference_mode():
        for tokens in (5, 9):
            x, residual = torch.randn(2, tokens, 16), torch.randn(2, tokens, 16)
            cos, sin = torch.randn(1, tokens, 8), torch.randn(1, tokens, 8)
            arguments = (x, residual, weight, product, cos, sin)
            torch.testing.assert_close(compiled(*arguments), layer(*arguments), rtol=1e-4, atol=1e-5)
