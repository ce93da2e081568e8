"""Rotary embedding against complex numbers."""

from __future__ import annotations

import pytest
import torch

import torch_pagoda.runtime.ops.npu  # noqa: F401  registers the operators

npu = torch.ops.npu

DIM, TOKENS, HEADS = 64, 5, 3
WIDE = torch.zeros(1, 1, 896)


def angles():
    return torch.arange(TOKENS)[:, None] * 10.0 ** -(torch.arange(DIM // 2) / 4)


def turned(pairs):
    """Pairs [T, N, D/2, 2] turned by the angle of their token and place."""
    numbers = torch.view_as_complex(pairs.double().contiguous())
    turn = torch.polar(torch.ones(TOKENS, DIM // 2).double(), angles().double())[:, None]
    return torch.view_as_real(numbers * turn)


def in_halves(x):
    return torch.stack(x.chunk(2, -1), -1)


def tables(repeat):
    full = angles().repeat(1, 2) if repeat == "halves" else angles().repeat_interleave(2, -1)
    return full.cos()[:, None], full.sin()[:, None]


def test_half_mode_turns_pairs_of_halves(assert_close):
    x = torch.randn(TOKENS, HEADS, DIM)
    wanted = turned(in_halves(x)).movedim(-1, -2).flatten(-2).float()
    cos, sin = tables("halves")
    assert_close(npu.npu_rotary_mul(x, cos, sin), wanted)
    assert_close(npu.npu_rotary_mul(x[None], cos[None], sin[None], "half"), wanted[None])


def test_interleave_mode_turns_neighbors(assert_close):
    x = torch.randn(TOKENS, HEADS, DIM)
    cos, sin = tables("neighbors")
    wanted = turned(x.unflatten(-1, (-1, 2))).flatten(-2).float()
    assert_close(npu.npu_rotary_mul(x, cos, sin, "interleave"), wanted)
    # The same as a matrix, as graphs on A2 and A3 need it, whatever the mode says.
    matrix = torch.zeros(DIM, DIM)
    for even in range(0, DIM, 2):
        matrix[even + 1, even], matrix[even, even + 1] = -1, 1
    assert_close(npu.npu_rotary_mul(x, cos, sin, "half", matrix), wanted)


def test_interleave_rope_leaves_halves(assert_close):
    x = torch.randn(TOKENS, HEADS, DIM)
    cos, sin = tables("halves")
    wanted = turned(x.unflatten(-1, (-1, 2))).movedim(-1, -2).flatten(-2).float()
    arguments = (t.transpose(0, 1)[None].contiguous() for t in (x, cos, sin))
    assert_close(npu.npu_interleave_rope(*arguments), wanted.transpose(0, 1)[None])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_rounds_once(dtype):
    x, cos, sin = (t.to(dtype) for t in (torch.randn(TOKENS, HEADS, DIM), *tables("halves")))
    wide = npu.npu_rotary_mul(x.double(), cos.double(), sin.double())
    assert torch.equal(
        npu.npu_rotary_mul(x, cos, sin), npu.npu_rotary_mul(x.float(), cos.float(), sin.float()).to(dtype)
    )
    assert (
        (npu.npu_rotary_mul(x, cos, sin).double() - wide).abs() <= wide.abs() * torch.finfo(dtype).eps + 1e-6
    ).all()


@pytest.mark.parametrize(
    "call, match",
    [
        (lambda x, t: npu.npu_rotary_mul(x[0], t, t), "input has 2 dims; it must have 3 or 4"),
        (lambda x, t: npu.npu_rotary_mul(x, t[..., :8], t), "r1 has 8 entries, a head 64 dims"),
        (lambda x, t: npu.npu_rotary_mul(x, t, t[:2]), r"r2 \(2, 1, 64\) do not fit"),
        (lambda x, t: npu.npu_rotary_mul(x, t.half(), t), "dtypes differ.* r1 torch.float16"),
        (
            lambda x, t: npu.npu_rotary_mul(x, t, t, "half", torch.eye(8)),
            r"rotate \(8, 8\) do not fit .* rotate \[D, D\]",
        ),
        (lambda x, t: npu.npu_interleave_rope(x, t, t), "x has 3 dims; it must have 4"),
        (
            lambda x, t: npu.npu_interleave_rope(x[None, ..., :32], t[None, ..., :32], t[None]),
            "dim -1 of x is 32; it must be 64",
        ),
        (lambda x, t: npu.npu_rotary_mul(WIDE, WIDE, WIDE), "dim -1 of input is 896; it must be below 896"),
        (
            lambda x, t: npu.npu_interleave_rope(x[None], t[None].expand(1, 5, 3, 64), t[None]),
            "dim 1 of cos is 5; it must be 1",
        ),
    ],
)
def test_refusals(call, match):
    with pytest.raises(ValueError, match=match):
        call(torch.randn(TOKENS, HEADS, DIM), torch.randn(TOKENS, 1, DIM))


@pytest.mark.parametrize("mode", ["quarter", "neox"])
def test_modes_without_a_kernel(mode):
    x = torch.randn(TOKENS, HEADS, DIM)
    with pytest.raises(NotImplementedError, match=f"rotary_mode='{mode}'; it takes 'half' or 'interleave'"):
        npu.npu_rotary_mul(x, x, x, mode)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_apply_rotary_pos_emb_writes_into_its_inputs(dtype):
    query, key = (torch.randn(1, 5, heads, 128).to(dtype) for heads in (4, 2))
    angles = torch.randn(1, 5, 1, 64).repeat(1, 1, 1, 2)
    tables = angles.cos().to(dtype), angles.sin().to(dtype)
    expected = [npu.npu_rotary_mul(x, *tables) for x in (query, key)]
    found = npu.npu_apply_rotary_pos_emb(query, key, *tables)
    assert all(map(torch.equal, found, expected)) and all(map(torch.equal, (query, key), expected))


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"layout": "TND"}, "layout='TND'"),
        ({"rotary_mode": "interleave"}, "rotary_mode='interleave'"),
        ({"query": torch.zeros(1, 5, 4, 32)}, "do not fit"),
        ({"cos": torch.zeros(1, 1, 1, 64)}, "do not fit"),
        ({"key": torch.zeros(1, 5, 2, 64).half()}, "dtypes differ"),
    ],
)
def test_apply_rotary_pos_emb_refuses(changes, reason):
    given = {"query": torch.zeros(1, 5, 4, 64), "key": torch.zeros(1, 5, 2, 64), "cos": torch.zeros(1, 5, 1, 64)}
    given["sin"] = given["cos"]
    with pytest.raises((ValueError, NotImplementedError), match=reason):
        npu.npu_apply_rotary_pos_emb(**{**given, **changes})
