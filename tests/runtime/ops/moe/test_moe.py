"""pagoda::moe and moe_gating: references against loops over tokens and transformers, the kernel against them."""

from __future__ import annotations

import itertools
import types

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.nn import functional as F
from transformers.integrations.moe import grouped_mm_experts_forward

from torch_pagoda.runtime.ops.moe.moe import (
    LAYOUTS,
    WEIGHTINGS,
    moe,
    moe_cpu,
    moe_gating,
    moe_gating_reference,
    moe_reference,
)

HIDDEN, INNER, EXPERTS, CHOSEN = 24, 16, 6, 2
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
TOLERANCE = {torch.float32: 1e-6, torch.bfloat16: 0.015, torch.float16: 2e-3}


def arguments(
    tokens=5,
    dtype=torch.float32,
    layout="halves",
    transposed=False,
    biases=False,
    weight_input=False,
    activation="silu",
    limit=0.0,
    experts=EXPERTS,
    chosen=CHOSEN,
    weights_dtype=None,
):
    generator = torch.Generator().manual_seed(0)

    def draw(*shape, spread=1.0):
        return (spread * torch.randn(shape, generator=generator)).to(dtype)

    wide = INNER if layout == "plain" else 2 * INNER
    up, down = draw(experts, wide, HIDDEN, spread=0.2), draw(experts, HIDDEN, INNER, spread=0.2)
    if transposed:
        up, down = up.transpose(1, 2).contiguous(), down.transpose(1, 2).contiguous()
    ids = torch.rand(tokens, experts, generator=generator).topk(chosen, dim=1).indices
    weights = torch.rand(tokens, chosen, generator=generator).to(weights_dtype or dtype)
    return (
        draw(tokens, HIDDEN),
        weights,
        ids,
        up,
        down,
        draw(experts, wide) if biases else None,
        draw(experts, HIDDEN) if biases else None,
        activation,
        1.7,
        limit,
        layout,
        transposed,
        weight_input,
    )


def token_by_token(
    x, weights, ids, up, down, up_bias, down_bias, activation, alpha, limit, layout, transposed, first
):
    """In float64, one token and one expert at a time."""
    result = torch.zeros(len(x), down.shape[2 if transposed else 1], dtype=torch.float64)
    for n, k in itertools.product(range(ids.shape[0]), range(ids.shape[1])):
        e, weight = int(ids[n, k]), weights[n, k].double()
        matrices = [m[e].double().t() if transposed else m[e].double() for m in (up, down)]
        hidden = matrices[0] @ (x[n].double() * (weight if first else 1.0))
        hidden = hidden if up_bias is None else hidden + up_bias[e].double()
        if layout == "plain":
            middle = torch.square(torch.relu(hidden))
        else:
            gate, value = (hidden[::2], hidden[1::2]) if layout == "interleaved" else hidden.chunk(2)
            if limit:
                gate, value = gate.clamp(max=limit), value.clamp(-limit, limit)
            if activation == "clipped_swiglu":
                middle = gate * torch.sigmoid(alpha * gate) * (value + 1)
            else:
                middle = F.silu(gate) * value
        out = matrices[1] @ middle
        out = out if down_bias is None else out + down_bias[e].double()
        result[n] += out if first else out * weight
    return result


def assert_near(found, expected, dtype):
    assert found.dtype == dtype and found.is_contiguous()
    error = (found.double() - expected).abs().max() / expected.abs().max()
    assert error <= TOLERANCE[dtype], error


CASES = [
    {"layout": layout, "transposed": transposed, "biases": biases, "weight_input": weight_input}
    for layout, transposed, biases, weight_input in itertools.product(LAYOUTS, *[(False, True)] * 3)
]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("function", [moe_reference, moe_cpu], ids=["reference", "cpu"])
def test_every_layout_is_what_a_loop_over_tokens_yields(function, dtype):
    for case in CASES:
        kind = "relu2" if case["layout"] == "plain" else "silu"
        for tokens in (1, 30):
            given = arguments(tokens, dtype, activation=kind, **case)
            assert_near(function(*given), token_by_token(*given), dtype)


@pytest.mark.parametrize("function", [moe_reference, moe_cpu], ids=["reference", "cpu"])
@pytest.mark.parametrize("activation", ["silu", "clipped_swiglu"])
@pytest.mark.parametrize("layout", ["halves", "interleaved"])
def test_limits_cut_gate_and_up(function, activation, layout):
    given = arguments(30, layout=layout, activation=activation, limit=0.3, biases=True)
    assert_near(function(*given), token_by_token(*given), torch.float32)
    without = arguments(30, layout=layout, activation=activation, limit=50.0, biases=True)
    assert not torch.allclose(function(*given), function(*without), atol=1e-2)


@pytest.mark.parametrize("tokens", [0, 1, 2, 90])
@pytest.mark.parametrize(("experts", "chosen"), [(1, 1), (64, 8), (3, 3)])
def test_any_number_of_tokens_and_experts(tokens, experts, chosen):
    for dtype in DTYPES:
        given = arguments(tokens, dtype, experts=experts, chosen=chosen)
        found = moe(*given)
        assert found.shape == (tokens, HIDDEN)
        if tokens:
            assert_near(found, moe_reference(*given).double(), dtype)


def test_an_expert_may_be_chosen_by_all_or_none():
    given = list(arguments(12, biases=True))
    given[2] = torch.tensor([[5, 2]] * 12)
    assert_near(moe(*given), token_by_token(*given), torch.float32)


def test_other_dtypes_of_ids_and_weights():
    given = list(arguments(12, torch.bfloat16, weights_dtype=torch.float32))
    expected = token_by_token(*given)
    for function in (moe_reference, moe_cpu):
        assert_near(function(*given), expected, torch.bfloat16)
        assert torch.equal(function(*given), function(*given[:2], given[2].int(), *given[3:]))


@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
def test_reference_is_what_transformers_computes(dtype):
    x, weights, ids, up, down, *_ = given = arguments(33, dtype)
    module = types.SimpleNamespace(
        num_experts=EXPERTS,
        gate_up_proj=up,
        down_proj=down,
        has_gate=True,
        has_bias=False,
        is_transposed=False,
        has_post_expert_norm=False,
        _is_expert_parallel=False,
        _apply_gate=lambda y: F.silu(y.chunk(2, -1)[0]) * y.chunk(2, -1)[1],
    )
    expected = grouped_mm_experts_forward(module, x, ids, weights)
    torch.testing.assert_close(moe_reference(*given), expected, atol=1e-5, rtol=1.6e-2)
    if dtype is torch.bfloat16:  # terms are rounded before they are summed, as there
        assert (moe_reference(*given) != expected).float().mean() < 0.02


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({10: "thirds"}, "layout is 'thirds'"),
        ({0: torch.randn(1, 5, HIDDEN)}, "flatten batch and positions"),
        ({1: torch.rand(5, CHOSEN + 1)}, "flatten batch and positions"),
        ({3: torch.randn(EXPERTS + 1, 2 * INNER, HIDDEN)}, "one entry per expert"),
        ({11: True}, "do not fit an input of 24 features"),
        ({10: "plain"}, "do not fit an input of 24 features"),
        ({7: "soft"}, "activation is 'soft'"),
    ],
)
def test_wrong_arguments_are_named(change, message):
    given = [change.get(i, a) for i, a in enumerate(arguments())]
    for function in (moe_reference, moe_cpu):
        with pytest.raises(ValueError, match=message):
            function(*given)


def test_gradients_are_refused():
    given = list(arguments())
    given[3].requires_grad_()
    with pytest.raises(RuntimeError, match="up requires grad"):
        moe(*given)
    with torch.no_grad():
        assert moe(*given).shape == (5, HIDDEN)
    assert moe_cpu(*given).shape == (5, HIDDEN)


GATINGS = [
    {"scoring": scoring, "weighting": weighting, "bias": bias, "groups": groups, "scaling": scaling}
    for scoring, weighting, bias, groups, scaling in itertools.product(
        ("softmax", "sigmoid", "sqrt_softplus", "none"),
        ("none", "sum", "clamped_sum"),
        (False, True),
        (1, "max", "top2"),
        (1.0, 2.5),
    )
]


def gating_arguments(scoring, weighting, bias, groups, scaling, tokens=7, experts=12, dtype=torch.float32):
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(tokens, experts, generator=generator).to(dtype)
    logits = logits.abs() + 0.1 if scoring == "none" else logits
    correction = torch.randn(experts, generator=generator).to(dtype) if bias else None
    grouping = (1, 1, "max") if groups == 1 else (4, 2, groups)
    return (logits, correction, 3, scoring, *grouping, weighting, 1e-3, scaling)


def gate_token_by_token(logits, bias, top_k, scoring, groups, best, ranking, weighting, epsilon, scaling):
    weights, ids = [], []
    for row in logits:
        scores = {
            "softmax": lambda r: r.exp() / r.exp().sum(),
            "sigmoid": lambda r: 1 / (1 + (-r).exp()),
            "sqrt_softplus": lambda r: (1 + r.exp()).log() ** 0.5,
            "none": lambda r: r,
        }[scoring](row)
        choice = scores if bias is None else scores + bias
        size = len(row) // groups
        parts = [sorted(choice[g * size : (g + 1) * size].tolist(), reverse=True) for g in range(groups)]
        ranks = [part[0] if ranking == "max" else part[0] + part[1] for part in parts]
        kept = sorted(range(groups), key=lambda g: -ranks[g])[:best]
        allowed = [e for e in range(len(row)) if e // size in kept]
        experts = sorted(allowed, key=lambda e: -float(choice[e]))[:top_k]
        own = scores[experts]
        if weighting == "sum":
            own = own / (own.sum() + epsilon)
        elif weighting == "clamped_sum":
            own = own / max(float(own.sum()), epsilon)
        weights.append(own * scaling)
        ids.append(torch.tensor(experts))
    return torch.stack(weights), torch.stack(ids)


def test_gating_is_what_a_loop_over_tokens_yields():
    for case in GATINGS:
        given = gating_arguments(**case)
        weights, ids = moe_gating(*given)
        expected_weights, expected_ids = gate_token_by_token(*given)
        assert torch.equal(ids, expected_ids), case
        torch.testing.assert_close(weights, expected_weights)


def test_weights_of_the_chosen_alone():
    given = gating_arguments("none", "softmax", True, 1, 1.0)
    logits, bias = given[:2]
    weights, ids = moe_gating(*given)
    assert torch.equal(ids, (logits + bias).topk(3).indices)
    torch.testing.assert_close(weights, logits.gather(1, ids).softmax(-1))
    weights, again = moe_gating(*gating_arguments("none", "sigmoid", True, 1, 2.0))
    assert torch.equal(ids, again)
    torch.testing.assert_close(weights, 2 * torch.sigmoid(logits.gather(1, ids)))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({3: "tanh"}, "scoring is 'tanh'"),
        ({6: "mean"}, "group_scoring is 'mean'"),
        ({7: "norm"}, "weighting is 'norm'"),
        ({4: 5}, "groups=5 and topk_groups=2 do not fit 12 experts"),
        ({5: 9}, "groups=4 and topk_groups=9 do not fit"),
    ],
)
def test_wrong_gating_is_named(change, message):
    given = [change.get(i, a) for i, a in enumerate(gating_arguments("sigmoid", "sum", False, "max", 1.0))]
    with pytest.raises(ValueError, match=message):
        moe_gating_reference(*given)


@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
def test_opcheck(dtype):
    torch.library.opcheck(moe, arguments(4, dtype, biases=True))
    torch.library.opcheck(moe_gating, gating_arguments("sigmoid", "sum", True, "top2", 2.0, dtype=dtype))


@pytest.mark.parametrize("tokens", [0, 1, 6])
def test_fakes_promise_what_is_returned(tokens):
    calls = [(moe, arguments(tokens, torch.bfloat16, transposed=t)) for t in (False, True)]
    calls += [(moe_gating, gating_arguments("softmax", w, False, 1, 1.0, tokens)) for w in WEIGHTINGS]
    for operator, given in calls:
        with FakeTensorMode() as mode:
            promised = operator(*torch.utils._pytree.tree_map_only(torch.Tensor, mode.from_tensor, given))
        found = operator(*given)
        pairs = [(found, promised)] if operator is moe else zip(found, promised, strict=True)
        for result, fake in pairs:
            assert (result.shape, result.dtype, result.stride()) == (fake.shape, fake.dtype, fake.stride())


def test_fakes_keep_symbolic_sizes():
    shapes = ShapeEnv()
    with FakeTensorMode(shape_env=shapes) as mode:
        tokens = shapes.create_unbacked_symint()
        weights, ids = moe_gating(torch.empty(tokens, 8), None, 2, "softmax", 1, 1, "max", "sum", 0.0, 1.0)
        up, down = (mode.from_tensor(torch.empty(s)) for s in ((8, 12, 16), (8, 16, 6)))
        x = torch.empty(tokens, 16)
        out = moe(x, weights, ids, up, down, None, None, "silu", 0.0, 0.0, "halves", False, False)
    assert str(out.shape[0]) == str(ids.shape[0]) == str(tokens) and out.shape[1] == 16


def test_a_compiled_graph_runs_at_every_size():
    def block(x, logits, up, down):
        weights, ids = moe_gating(logits, None, 2, "softmax", 1, 1, "max", "sum", 0.0, 1.0)
        return moe(x * 2, weights, ids, up, down, None, None, "silu", 0.0, 0.0, "halves", False, False) + x

    compiled = torch.compile(block, backend="aot_eager", dynamic=True, fullgraph=True)
    for tokens in (5, 1, 8):
        x, _, _, up, down, *_ = arguments(tokens)
        logits = torch.randn(tokens, EXPERTS)
        torch.testing.assert_close(compiled(x, logits, up, down), block(x, logits, up, down))
