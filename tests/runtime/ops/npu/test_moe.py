"""Mixture of experts: gating, routing and grouped products, token by token and as one layer."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode

import torch_pagoda.runtime.ops.npu  # noqa: F401  registers the operators

npu = torch.ops.npu

TOKENS, EXPERTS, CHOICES, HIDDEN = 6, 16, 3, 8


def chosen_by_hand(scores, groups, kept_groups, worth, count):
    """Experts of one token: best groups first, then best experts in them; a list of scores in, indices out."""
    size = len(scores) // groups
    by_worth = sorted(range(groups), key=lambda g: -worth(sorted(scores[g * size : (g + 1) * size], reverse=True)))
    allowed = {g * size + i for g in by_worth[:kept_groups] for i in range(size)}
    return sorted(allowed, key=lambda expert: (-scores[expert], expert))[:count]


@pytest.mark.parametrize("norm_type", [0, 1])
@pytest.mark.parametrize("groups, kept_groups", [(1, 1), (4, 2), (2, 1)])
@pytest.mark.parametrize("group_select_mode", [0, 1])
@pytest.mark.parametrize("with_bias", [False, True])
def test_gating_top_k(norm_type, groups, kept_groups, group_select_mode, with_bias):
    x, bias = torch.randn(TOKENS, EXPERTS), torch.randn(EXPERTS) if with_bias else None
    weights, experts, probabilities = npu.npu_moe_gating_top_k(
        x,
        CHOICES,
        bias=bias,
        k_group=kept_groups,
        group_count=groups,
        group_select_mode=group_select_mode,
        norm_type=norm_type,
        out_flag=True,
        routed_scaling_factor=2.5,
    )
    wanted = x.double().softmax(-1) if norm_type == 0 else 1 / (1 + (-x.double()).exp())
    assert torch.allclose(probabilities.double(), wanted, atol=1e-6)
    for token in range(TOKENS):
        scores = (probabilities[token] + (bias if with_bias else 0)).tolist()
        by_hand = chosen_by_hand(
            scores, groups, kept_groups, lambda best: best[0] + (best[1] if group_select_mode else 0), CHOICES
        )
        assert experts[token].tolist() == by_hand
        picked = wanted[token, by_hand]
        picked = picked / picked.sum() if norm_type == 1 else picked
        assert torch.allclose(weights[token].double(), 2.5 * picked, atol=1e-6)
    assert experts.dtype is torch.int32 and probabilities.dtype is torch.float32


def test_equal_scores_go_to_the_first_expert():
    x = torch.zeros(2, EXPERTS)
    x[1, 7:] = 1
    assert npu.npu_moe_gating_top_k(x, 2)[1].tolist() == [[0, 1], [7, 8]]
    assert npu.npu_moe_gating_top_k_softmax(x, None, 2)[1].tolist() == [[0, 1], [7, 8]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_gating_top_k_softmax(dtype):
    x = torch.randn(2, 3, EXPERTS).to(dtype)
    weights, experts, rows = npu.npu_moe_gating_top_k_softmax(x, None, CHOICES)
    values, indices = x.float().softmax(-1).topk(CHOICES)
    assert torch.equal(weights, values.to(dtype)) and torch.equal(experts.long(), indices)
    assert rows.reshape(6, CHOICES).tolist() == [[j * 6 + i for j in range(CHOICES)] for i in range(6)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_gating_top_k_softmax_v2(dtype):
    """As op-plugin's golden test has it: with ``renorm`` the softmax over the chosen, in float32, rounded once."""
    x = torch.randn(2, 3, 40).to(dtype)
    values, indices = x.sort(descending=True, stable=True)
    weights, experts, rest = npu.npu_moe_gating_top_k_softmax_v2(x, k=CHOICES, renorm=1)
    assert torch.equal(weights, values[..., :CHOICES].float().softmax(-1).to(dtype)) and rest.shape == (0,)
    assert torch.equal(experts.long(), indices[..., :CHOICES])
    weights, _, whole = npu.npu_moe_gating_top_k_softmax_v2(x, k=CHOICES, output_softmax=True)
    assert torch.equal(weights, npu.npu_moe_gating_top_k_softmax(x, None, CHOICES)[0])
    assert torch.equal(whole, x.float().softmax(-1))


@pytest.mark.parametrize("experts, count, rounds", [(64, 8, False), (64, 9, True), (1256, 4, True), (100, 2, True)])
def test_half_precision_is_ranked_rounded_where_a_device_does(experts, count, rounds):
    """Two experts whose probabilities differ by less than half precision can tell."""
    x = torch.full((1, experts), -1.0, dtype=torch.float16)
    x[0, 5], x[0, 3] = 1e-4, 0.0
    probabilities = x.float().softmax(-1).half()
    assert probabilities[0, 5] == probabilities[0, 3]
    _, chosen, _ = npu.npu_moe_gating_top_k_softmax(x, None, count)
    assert chosen[0, :2].tolist() == ([3, 5] if rounds else [5, 3])


def routed(**changes):
    x = torch.randn(TOKENS, HIDDEN)
    experts = torch.stack([torch.randperm(EXPERTS)[:CHOICES] for _ in range(TOKENS)]).int()
    arguments = {"expert_num": EXPERTS, "expert_tokens_num_flag": True, "expert_tokens_num_type": 1, **changes}
    return x, experts, npu.npu_moe_init_routing_v2(x, experts, **arguments)


@pytest.mark.parametrize("active", [(0, EXPERTS), (5, 9)])
def test_init_routing(active):
    x, experts, (rows, places, counts, scales) = routed(active_expert_range=list(active))
    flat = experts.flatten().tolist()
    mine = [choice for choice in range(len(flat)) if active[0] <= flat[choice] < active[1]]
    order = sorted(mine, key=lambda choice: flat[choice])
    assert counts.tolist() == [flat.count(expert) for expert in range(*active)] and counts.dtype is torch.int64
    for place, choice in enumerate(order):
        assert torch.equal(rows[place], x[choice // CHOICES]) and places[choice] == place
    assert (rows[len(order) :] == 0).all() and (scales == 0).all()
    assert [choice for choice in range(len(flat)) if places[choice] == -1] == sorted(
        set(range(len(flat))) - set(mine)
    )


def test_init_routing_variants():
    scale = torch.rand(TOKENS)
    torch.manual_seed(1)
    x, experts, (_, places, counts, scales) = routed(scale=scale)
    ends = npu.npu_moe_init_routing_v2(x, experts, expert_num=EXPERTS, expert_tokens_num_flag=True)[2]
    assert torch.equal(ends, counts.cumsum(0))
    assert torch.equal(ends.int(), npu.npu_moe_compute_expert_tokens(experts.flatten().sort().values, EXPERTS))
    scatter = npu.npu_moe_init_routing_v2(x, experts, expert_num=EXPERTS, row_idx_type=1)
    assert torch.equal(scatter[1].argsort().int(), places) and scatter[2].shape == ()
    assert torch.equal(scales, scale[scatter[1].long() // CHOICES])
    pairs = npu.npu_moe_init_routing_v2(
        x,
        experts,
        expert_num=EXPERTS,
        expert_tokens_num_flag=True,
        expert_tokens_num_type=2,
        active_expert_range=[2, 9],
    )[2]
    busy = [[expert, n] for expert, n in enumerate(counts.tolist()) if n and 2 <= expert < 9]
    assert pairs.tolist() == busy + [[0, 0]] * (EXPERTS - len(busy))


@pytest.mark.parametrize("mode", [0, 1, 2, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_finalize_routing(mode, dtype, assert_close):
    padded = mode in (1, 3)
    rows = torch.randn(18, HIDDEN).to(dtype)
    skip1, skip2 = torch.randn(TOKENS, HIDDEN).to(dtype), torch.randn(TOKENS, HIDDEN).to(dtype)
    bias, scales = torch.randn(EXPERTS, HIDDEN).to(dtype), torch.rand(TOKENS, CHOICES).to(dtype)
    experts = torch.randint(0, EXPERTS, (TOKENS, CHOICES), dtype=torch.int32)
    places = torch.randperm(18).int()
    if padded:
        places[4] = -1
    given = rows.view(2, 9, HIDDEN) if padded else rows
    result = npu.npu_moe_finalize_routing(given, skip1, skip2, bias, scales, places, experts, mode)
    wanted = skip1.double() + skip2.double()
    for token in range(TOKENS):
        for choice in range(CHOICES):
            place = places[token * CHOICES + choice if mode >= 2 else choice * TOKENS + token]
            row = rows[place].double() if place >= 0 else torch.zeros(HIDDEN).double()
            wanted[token] += scales[token, choice].double() * (row + bias[experts[token, choice]].double())
    assert_close(result, wanted.to(dtype))
    unscaled = npu.npu_moe_finalize_routing(given, None, None, None, None, places, None, mode, CHOICES)
    ones = npu.npu_moe_finalize_routing(given, None, None, None, torch.ones_like(scales), places, None, mode)
    assert torch.equal(unscaled, ones)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("choices", [1, CHOICES])
def test_token_unpermute(dtype, choices, assert_close):
    """Rows that init_routing sorted come back weighted, whichever of the two operators adds them up."""
    x = torch.randn(TOKENS, HIDDEN).to(dtype)
    experts = torch.randint(0, EXPERTS, (TOKENS, choices), dtype=torch.int32)
    rows, places, *_ = npu.npu_moe_init_routing_v2(x, experts, expert_num=EXPERTS)
    rows = rows + torch.arange(len(rows))[:, None].to(dtype)  # each row its own
    scales = torch.rand(TOKENS, choices).to(dtype)
    found = torch.ops.npu.npu_moe_token_unpermute(rows, places, scales)
    assert found.dtype is dtype
    assert_close(found, npu.npu_moe_finalize_routing(rows, None, None, None, scales, places, None, 2))
    wanted = torch.zeros(TOKENS, HIDDEN, dtype=torch.float64)
    for i, place in enumerate(places.tolist()):
        wanted[i // choices] += scales.flatten()[i].double() * rows[place].double()
    assert_close(found, wanted.to(dtype))
    if choices == 1:
        assert torch.equal(torch.ops.npu.npu_moe_token_unpermute(rows, places), rows[places.long()])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("form", ["cumsum", "counts", "list of weights", "transposed"])
def test_grouped_matmul(dtype, form, assert_close):
    sizes = [4, 0, 1, 7]
    rows, weight = torch.randn(12, HIDDEN).to(dtype), torch.randn(4, HIDDEN, 5).to(dtype)
    bias = torch.randn(4, 5).to(torch.float32 if dtype is torch.bfloat16 else dtype)
    weights, biases = [weight], [bias]
    if form == "list of weights":
        weights, biases = list(weight), list(bias)
    if form == "transposed":
        weights = [weight.transpose(1, 2).contiguous().transpose(1, 2)]
    counts = torch.tensor(sizes)
    options = {"split_item": 3, "group_type": 0, "group_list_type": int(form == "counts")}
    groups = counts if form == "counts" else counts.cumsum(0)
    (result,) = npu.npu_grouped_matmul([rows], weights, bias=biases, group_list=groups, **options)
    parts = [
        part.double() @ weight[expert].double() + bias[expert].double()
        for expert, part in enumerate(rows.split(sizes))
    ]
    assert_close(result, torch.cat(parts).to(dtype))
    (wide,) = npu.npu_grouped_matmul([rows], weights, bias=biases, group_list=groups, output_dtype=6, **options)
    assert wide.dtype is torch.float32


def test_a_whole_layer_of_experts(assert_close):
    x, logits = torch.randn(TOKENS, HIDDEN), torch.randn(TOKENS, EXPERTS)
    up, down = torch.randn(EXPERTS, HIDDEN, 10), torch.randn(EXPERTS, 5, HIDDEN)
    weights, experts, _ = torch.ops.npu.npu_moe_gating_top_k_softmax(logits, None, CHOICES)
    rows, places, ends, _ = torch.ops.npu.npu_moe_init_routing_v2(
        x, experts, expert_num=EXPERTS, expert_tokens_num_flag=True, active_expert_range=[0, EXPERTS]
    )
    options = {"group_list": ends, "split_item": 2, "group_type": 0}
    (middle,) = torch.ops.npu.npu_grouped_matmul([rows], [up], **options)
    (outputs,) = torch.ops.npu.npu_grouped_matmul([torch.ops.npu.npu_swiglu(middle)], [down], **options)
    result = torch.ops.npu.npu_moe_finalize_routing(outputs, None, None, None, weights, places, None, 2)
    wanted = torch.zeros(TOKENS, HIDDEN)
    for token in range(TOKENS):
        for weight, expert in zip(weights[token], experts[token], strict=True):
            gate, linear = (x[token] @ up[expert]).chunk(2)
            wanted[token] += weight * ((F.silu(gate) * linear) @ down[expert])
    assert_close(result, wanted)


X, CHOSEN = torch.zeros(TOKENS, HIDDEN), torch.zeros(TOKENS, CHOICES, dtype=torch.int32)
LOGITS = torch.zeros(TOKENS, EXPERTS)
GROUPED = {"split_item": 2, "group_type": 0, "group_list": torch.tensor([2, 6])}
WEIGHT = torch.zeros(2, HIDDEN, 4)
ONES = torch.ones(513, 2)
PLACES = torch.arange(18, dtype=torch.int32)


@pytest.mark.parametrize(
    "call, match",
    [
        (
            lambda: npu.npu_moe_gating_top_k(LOGITS, 2, bias=torch.zeros(EXPERTS).half()),
            "dtypes differ: x torch.float32, bias torch.float16",
        ),
        (lambda: npu.npu_moe_gating_top_k(LOGITS, 2, group_count=3), "16 experts in 3 groups"),
        (lambda: npu.npu_moe_gating_top_k(LOGITS, 2, group_count=8, k_group=2), "groups of 2 experts; more than 2"),
        (lambda: npu.npu_moe_gating_top_k(LOGITS, 5, group_count=4), "k is 5, of 1 groups of 4"),
        (lambda: npu.npu_moe_gating_top_k(LOGITS[None], 2), "x has 3 dims"),
        (lambda: npu.npu_moe_gating_top_k_softmax(LOGITS, None, 17), "k is 17"),
        (lambda: npu.npu_moe_gating_top_k_softmax_v2(LOGITS, k=2, renorm=1), "16 experts; at least 32"),
        (lambda: npu.npu_moe_gating_top_k_softmax_v2(LOGITS, k=2, renorm=2), "renorm is 2"),
        (
            lambda: npu.npu_moe_gating_top_k_softmax_v2(torch.zeros(1, 32).half(), k=2, renorm=1),
            "in which the softmax",
        ),
        (lambda: npu.npu_moe_init_routing_v2(X, CHOSEN), "-1 experts"),
        (lambda: npu.npu_moe_init_routing_v2(X, CHOSEN.long(), expert_num=4), "int32"),
        (lambda: npu.npu_moe_init_routing_v2(X, CHOSEN + 4, expert_num=4), r"expert_idx lies in \[4, 4\]"),
        (lambda: npu.npu_moe_init_routing_v2(X, CHOSEN, expert_num=4, active_expert_range=[2, 5]), r"\[2, 5\]"),
        (
            lambda: npu.npu_moe_init_routing_v2(X, CHOSEN, expert_num=4, scale=torch.zeros(2)),
            r"scale \(2,\) do not fit",
        ),
        (
            lambda: npu.npu_grouped_matmul([X], [WEIGHT], **{**GROUPED, "group_list": torch.tensor([2, 7])}),
            "within the 6 rows",
        ),
        (
            lambda: npu.npu_grouped_matmul([X], [WEIGHT], **{**GROUPED, "group_list": torch.tensor([8, 6])}),
            "within the 6 rows",
        ),
        (lambda: npu.npu_grouped_matmul([X], [WEIGHT], **{**GROUPED, "group_list": None}), "group_list is None"),
        (lambda: npu.npu_grouped_matmul([X], [WEIGHT], **{**GROUPED, "group_type": None}), "group_type must be 0"),
        (lambda: npu.npu_grouped_matmul([X], [], **GROUPED), "weight is an empty list"),
        (lambda: npu.npu_grouped_matmul([X.to(torch.int8)], [], **GROUPED), "weight is an empty list"),
        (lambda: npu.npu_grouped_matmul([X], [WEIGHT[:, :7]], **GROUPED), "must be .M, K."),
        (
            lambda: npu.npu_grouped_matmul([X], [WEIGHT], bias=[torch.zeros(2, 4).half()], **GROUPED),
            "bias has shapes",
        ),
        (lambda: npu.npu_moe_finalize_routing(X, None, None, None, None, PLACES, None, 4), "drop_pad_mode is 4"),
        (lambda: npu.npu_moe_finalize_routing(X, None, X, None, None, PLACES[:6], None), "skip2 is given"),
        (lambda: npu.npu_moe_finalize_routing(X, None, None, X, None, PLACES[:6], None), "bias is given"),
        (lambda: npu.npu_moe_finalize_routing(X, None, None, None, None, PLACES[:6] - 1, None), r"lies in \[-1, 4\]"),
        (lambda: npu.npu_moe_finalize_routing(X, None, None, None, None, PLACES, None, 0, 3), r"lies in \[0, 17\]"),
        (lambda: npu.npu_moe_finalize_routing(X, None, None, None, None, PLACES[:6], None, 1), "must be"),
        (
            lambda: npu.npu_moe_finalize_routing(X, X.half(), None, None, None, PLACES[:6], None),
            "skip1 torch.float16",
        ),
        (lambda: npu.npu_moe_gating_top_k(torch.zeros(1, 2), 1), "groups of 2 experts; more than 2"),
        (lambda: npu.npu_moe_gating_top_k(torch.zeros(1, 2049), 1), "2049 experts in 1 groups"),
        (lambda: npu.npu_moe_gating_top_k(torch.zeros(1, 325), 1, group_count=65), "filled up to multiples of 32"),
        (
            lambda: npu.npu_moe_gating_top_k_softmax(torch.zeros(1, 1100), None, 1025),
            "k is 1025, of 1100 experts; at most 1024",
        ),
        (lambda: npu.npu_moe_init_routing_v2(X, CHOSEN, expert_num=10241), "at most 10240"),
        (lambda: npu.npu_moe_init_routing_v2(X, CHOSEN, expert_num=5121, expert_tokens_num_type=2), "at most 5120"),
        (lambda: npu.npu_moe_token_unpermute(X, PLACES[:5]), r"sorted_indices \(5,\) do not fit"),
        (lambda: npu.npu_moe_token_unpermute(X, PLACES[:6].long()), "int32"),
        (lambda: npu.npu_moe_token_unpermute(X, PLACES[:6] + 1), r"lies in \[1, 6\]; there are 6 rows"),
        (lambda: npu.npu_moe_token_unpermute(X, PLACES[:6], torch.rand(2, 2)), r"probs \(2, 2\), .* do not fit"),
        (
            lambda: npu.npu_moe_token_unpermute(ONES, ONES[:, 0].int() - 1, torch.rand(1, 513)),
            "dim 1 of probs is 513; it must be below 513",
        ),
    ],
)
def test_refusals(call, match):
    with pytest.raises(ValueError, match=match):
        call()


@pytest.mark.parametrize(
    "call, name",
    [
        (lambda: npu.npu_moe_gating_top_k(LOGITS, 2, input_ids=X), "input_ids"),
        (lambda: npu.npu_moe_gating_top_k(LOGITS, 2, renorm=1), "renorm=1"),
        (lambda: npu.npu_moe_gating_top_k_softmax(LOGITS, X), "finished"),
        (lambda: npu.npu_moe_init_routing_v2(X, CHOSEN, expert_num=4, drop_pad_mode=1), "drop_pad_mode"),
        (lambda: npu.npu_moe_init_routing_v2(X, CHOSEN, expert_num=4, quant_mode=2), "quant_mode"),
        (lambda: npu.npu_moe_init_routing_v2(X, CHOSEN, expert_num=4, active_num=5), "active_num"),
        (lambda: npu.npu_moe_token_unpermute(X, PLACES[:6], padded_mode=True), "padded_mode"),
        (lambda: npu.npu_moe_token_unpermute(X, PLACES[:6], restore_shape=[6, 8]), "restore_shape"),
        (lambda: npu.npu_grouped_matmul([X], [WEIGHT]), "split_item"),
        (lambda: npu.npu_grouped_matmul([X], [WEIGHT], **{**GROUPED, "group_type": 2}), "group_type"),
        (lambda: npu.npu_grouped_matmul([X], [WEIGHT], group_list_type=2, **GROUPED), "group_list_type"),
        (lambda: npu.npu_grouped_matmul([X], [WEIGHT], act_type=5, **GROUPED), "act_type"),
        (lambda: npu.npu_grouped_matmul([X], [WEIGHT], scale=[X], **GROUPED), "scale"),
        (lambda: npu.npu_grouped_matmul([X.to(torch.int8)], [WEIGHT], **GROUPED), "int8 by int8"),
        (lambda: npu.npu_grouped_matmul([X, X], [WEIGHT], **GROUPED), "x holds 2"),
    ],
)
def test_what_has_no_kernel_is_named(call, name):
    with pytest.raises(NotImplementedError, match=name):
        call()


@pytest.mark.parametrize(
    "changes, name",
    [({"group_type": 2}, "group_type"), ({"scale": True}, "scale"), ({"split_item": 0}, "split_item")],
)
def test_traced_calls_of_it_are_refused_likewise(changes, name):
    """A fake that guessed would give graphs another shape than the device does."""
    with FakeTensorMode():
        x, weight = torch.empty(6, 8), torch.empty(2, 8, 4)
        arguments = {**GROUPED, "group_list": torch.empty(2, dtype=torch.int64), **changes}
        if "scale" in changes:
            arguments["scale"] = [torch.empty(2, 4)]
        with pytest.raises(NotImplementedError, match=name):
            torch.ops.npu.npu_grouped_matmul([x], [weight], **arguments)


def test_a_traced_scale_of_a_batched_product_is_refused():
    with FakeTensorMode(), pytest.raises(NotImplementedError, match="scale"):
        x, weight = torch.empty(16, 2, 32), torch.empty(2, 32, 16)
        torch.ops.npu.npu_transpose_batchmatmul(x, weight, scale=torch.empty(32), perm_x1=[1, 0, 2])


def int8(*shape, seed=0):
    return torch.randint(-128, 128, shape, generator=torch.Generator().manual_seed(seed), dtype=torch.int8)


@pytest.mark.parametrize("code", [15, 5, 6])
@pytest.mark.parametrize("bias", [False, True])
def test_products_of_int8_in_groups(code, bias):
    rows, weight, counts = int8(7, 40), int8(3, 40, 6, seed=1), torch.tensor([2, 0, 5])
    scale = ((torch.rand(3, 6) + 0.5) / 64).to(torch.bfloat16 if code == 15 else torch.float32)
    of_rows, biases = torch.rand(7) + 0.5, torch.randint(-9999, 9999, (3, 6), dtype=torch.int32)
    given = {"split_item": 3, "group_type": 0, "group_list_type": 1, "group_list": counts}
    (found,) = npu.npu_grouped_matmul(
        [rows],
        [weight],
        scale=[scale],
        per_token_scale=[of_rows],
        bias=[biases] if bias else None,
        output_dtype=code,
        **given,
    )
    group = torch.tensor([0, 0, 2, 2, 2, 2, 2])
    sums = torch.einsum("mk,mkn->mn", rows.double(), weight.double()[group])
    sums = sums + biases.double()[group] if bias else sums
    exact = sums * scale.double()[group] * of_rows.double()[:, None]
    torch.testing.assert_close(found.double(), exact, rtol=2**-8 if code == 15 else 2**-10, atol=1e-3)
    for change in ({"per_token_scale": [of_rows.roll(1)]}, {"scale": [scale.roll(1, 0)]}):
        more = {"scale": [scale], "per_token_scale": [of_rows], "output_dtype": code, **change}
        (other,) = npu.npu_grouped_matmul([rows], [weight], **given, **more)
        assert not torch.allclose(other.double(), exact, rtol=0.05)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"scale": [torch.rand(3, 6)]}, r"scale is torch.float32 \(3, 6\); torch.bfloat16"),
        ({"scale": [torch.rand(6).bfloat16()]}, r"scale is torch.bfloat16 \(6,\)"),
        ({"per_token_scale": [torch.rand(6)]}, r"per_token_scale is torch.float32 \(6,\)"),
        ({"bias": [torch.rand(3, 6)]}, "a bias of torch.float32"),
    ],
)
def test_scales_of_groups_that_do_not_fit(change, words):
    given = {
        "scale": [torch.rand(3, 6).bfloat16()],
        "per_token_scale": [torch.rand(7)],
        "output_dtype": 15,
        "split_item": 3,
        "group_type": 0,
        "group_list_type": 1,
        "group_list": torch.tensor([2, 0, 5]),
        **change,
    }
    with pytest.raises(ValueError, match=words):
        npu.npu_grouped_matmul([int8(7, 40)], [int8(3, 40, 6)], **given)


@pytest.mark.parametrize("code", [None, 1, 3])
def test_products_of_int8_need_a_float_result(code):
    given = {"split_item": 3, "group_type": 0, "group_list_type": 1, "group_list": torch.tensor([2, 0, 5])}
    given |= {"scale": [torch.rand(3, 6)], "per_token_scale": [torch.rand(7)]}
    with pytest.raises(NotImplementedError, match="output_dtype"):
        npu.npu_grouped_matmul([int8(7, 40)], [int8(3, 40, 6)], output_dtype=code, **given)


def test_routing_that_rounds_its_rows():
    x = torch.randn(5, 16, generator=torch.Generator().manual_seed(0)).bfloat16()
    experts = torch.tensor([[0, 3], [3, 1], [0, 1], [2, 3], [1, 0]], dtype=torch.int32)
    given = {"expert_num": 4, "expert_tokens_num_type": 1, "expert_tokens_num_flag": True}
    plain = npu.npu_moe_init_routing_v2(x, experts, active_expert_range=[0, 4], **given)
    rows, places, counts, scale = npu.npu_moe_init_routing_v2(
        x, experts, quant_mode=1, active_expert_range=[0, 4], **given
    )
    assert rows.dtype is torch.int8 and torch.equal(places, plain[1]) and torch.equal(counts, plain[2])
    torch.testing.assert_close(scale.double(), plain[0].double().abs().amax(-1) / 127, rtol=1e-6, atol=0)
    off = (rows.double() * scale.double()[:, None] - plain[0].double()).abs()
    assert (off <= 0.5001 * scale.double()[:, None]).all()
    # Rows behind those of the active experts are not numbers.
    some = npu.npu_moe_init_routing_v2(x, experts, quant_mode=1, active_expert_range=[0, 2], **given)
    active = int(some[2].sum())
    assert 0 < active < 10 and some[3][active:].isnan().all() and some[3][:active].isfinite().all()
    with pytest.raises(NotImplementedError, match="quant_mode"):
        npu.npu_moe_init_routing_v2(x, experts, quant_mode=0, active_expert_range=[0, 4], **given)


def test_rows_behind_the_groups_would_show():
    """What no expert is chosen for is NaN from the routing to the end; all rows of a step have one."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(5, 128, generator=generator)
    experts = torch.stack([torch.randperm(4, generator=generator)[:2] for _ in range(5)]).int()
    up = int8(4, 128, 256)

    def run(end):
        given = {"expert_num": 4, "expert_tokens_num_type": 1, "expert_tokens_num_flag": True}
        rows, places, counts, scale = npu.npu_moe_init_routing_v2(
            x, experts, quant_mode=1, active_expert_range=[0, end], **given
        )
        groups = {"split_item": 3, "group_type": 0, "group_list_type": 1}
        used = int(counts.sum())
        (hidden,) = npu.npu_grouped_matmul(
            [rows[:used]],
            [up[:end]],
            scale=[torch.ones(end, 256)],
            per_token_scale=[scale[:used]],
            output_dtype=6,
            group_list=counts,
            **groups,
        )
        hidden = torch.cat([hidden, torch.zeros(len(rows) - used, 256)])
        whole, unit = npu.npu_dequant_swiglu_quant(hidden, group_index=counts, activate_left=True, quant_mode=1)
        return unit, whole, places

    assert run(4)[0].isfinite().all()
    assert run(3)[0].isnan().any()
