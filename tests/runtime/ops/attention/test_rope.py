"""pagoda::rope: the reference against the models' spellings, the kernel against the reference, to the last bit."""

from __future__ import annotations

import pytest
import torch

from torch_pagoda.runtime.ops.attention import rope as rope_module
from torch_pagoda.runtime.ops.attention.rope import rope, rope_cpu, rope_reference

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
MODES = ["half", "interleaved", "interleaved_to_half"]


def rotate_half(x):
    x1 = x[..., : x.shape[-1] // 2]
    x2 = x[..., x.shape[-1] // 2 :]
    return torch.cat((-x2, x1), dim=-1)


def apply_rotary_pos_emb(q, k, cos, sin):
    """As in Llama and most others."""
    cos = cos.unsqueeze(1)
    sin = sin.unsqueeze(1)
    return (q * cos) + (rotate_half(q) * sin), (k * cos) + (rotate_half(k) * sin)


def apply_rotary_pos_emb_interleave(q, k, cos, sin):
    """As in DeepSeek-V3 (transformers 4)."""
    cos = cos.unsqueeze(1)
    sin = sin.unsqueeze(1)
    b, h, s, d = q.shape
    q = q.view(b, h, s, d // 2, 2).transpose(4, 3).reshape(b, h, s, d)
    b, h, s, d = k.shape
    k = k.view(b, h, s, d // 2, 2).transpose(4, 3).reshape(b, h, s, d)
    return (q * cos) + (rotate_half(q) * sin), (k * cos) + (rotate_half(k) * sin)


def apply_rotary_pos_emb_even_odd(q, k, cos, sin):
    """As in DeepSeek-V3 (transformers 5)."""
    cos = cos[..., : cos.shape[-1] // 2].unsqueeze(1)
    sin = sin[..., : sin.shape[-1] // 2].unsqueeze(1)
    q1, q2 = q[..., 0::2], q[..., 1::2]
    k1, k2 = k[..., 0::2], k[..., 1::2]
    q_embed = torch.cat([q1 * cos - q2 * sin, q2 * cos + q1 * sin], dim=-1)
    k_embed = torch.cat([k1 * cos - k2 * sin, k2 * cos + k1 * sin], dim=-1)
    return q_embed, k_embed


def rotate_every_two(x):
    x1 = x[..., ::2]
    x2 = x[..., 1::2]
    return torch.stack((-x2, x1), dim=-1).flatten(-2)


def tables(batch, tokens, rotary, dtype, *, repeat_pairs=False):
    """cos and sin of [batch, tokens] positions, each frequency twice."""
    positions = torch.arange(tokens)[None] + 7 * torch.arange(batch)[:, None]
    angles = positions[..., None] * 10000.0 ** (-torch.arange(0, rotary, 2) / rotary)
    whole = angles.repeat_interleave(2, -1) if repeat_pairs else torch.cat((angles, angles), -1)
    return whole.cos().to(dtype), whole.sin().to(dtype)


def heads(batch, heads, tokens, dim, dtype=torch.float32):
    return torch.randn(batch, tokens, heads, dim).to(dtype).transpose(1, 2)


def check(ours, theirs):
    assert len(ours) == len(theirs)
    for a, b in zip(ours, theirs, strict=True):
        assert a.dtype == b.dtype and a.stride() == b.stride()
        assert torch.equal(a, b)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_reference_is_what_models_write(dtype):
    q, k = heads(2, 4, 5, 16, dtype), heads(2, 2, 5, 16, dtype)
    for batch in (1, 2):
        cos, sin = tables(batch, 5, 16, dtype)
        for ours, theirs in (
            (rope_reference([q, k], cos, sin, "half", 0, True), apply_rotary_pos_emb(q, k, cos, sin)),
            (
                rope_reference([q, k], cos, sin, "interleaved_to_half", 0, True),
                apply_rotary_pos_emb_interleave(q, k, cos, sin),
            ),
            (
                rope_reference([q, k], cos, sin, "interleaved_to_half", 0, True),
                apply_rotary_pos_emb_even_odd(q, k, cos, sin),
            ),
        ):
            assert torch.equal(ours[0], theirs[0]) and torch.equal(ours[1], theirs[1])
            assert ours[0].transpose(1, 2).is_contiguous()
        cos, sin = tables(batch, 5, 16, dtype, repeat_pairs=True)
        (ours,) = rope_reference([q], cos, sin, "interleaved", 0, True)
        assert torch.equal(ours, q * cos[:, None] + rotate_every_two(q) * sin[:, None])


def test_reference_in_fp32_rounds_once():
    q, (cos, sin) = heads(1, 2, 5, 16, torch.bfloat16), tables(1, 5, 16, torch.float32)
    (ours,) = rope_reference([q], cos, sin, "half", 0, False)
    assert torch.equal(ours, apply_rotary_pos_emb(q.float(), q.float(), cos, sin)[0].bfloat16())


def test_dims_outside_are_copied():
    x, (cos, sin) = heads(1, 2, 5, 20), tables(1, 5, 8, torch.float32)
    (ours,) = rope_reference([x], cos, sin, "half", 4, True)
    assert torch.equal(ours[..., :4], x[..., :4]) and torch.equal(ours[..., 12:], x[..., 12:])
    middle = x[..., 4:12]
    assert torch.equal(ours[..., 4:12], apply_rotary_pos_emb(middle, middle, cos, sin)[0])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("round_products", [True, False])
def test_kernel_is_the_reference(dtype, mode, round_products):
    for dim, rotary, start in (
        (2, 2, 0),
        (16, 16, 0),
        (64, 64, 0),
        (80, 32, 0),
        (96, 64, 32),
        (50, 22, 5),
        (256, 256, 0),
    ):
        for table_dtype in {dtype, torch.float32}:
            cos, sin = tables(2, 9, rotary, table_dtype)
            # What an interleaved kernel must not assume: the two entries of a pair are alike.
            cos += 0.1 * torch.rand(rotary).to(table_dtype)
            inputs = [heads(2, 3, 9, dim, dtype), heads(2, 1, 9, dim + 3, dtype)]
            arguments = (inputs, cos, sin, mode, start, round_products)
            check(rope(*arguments), rope_reference(*arguments))


STRIDED = {
    "slices of a merged product": lambda p: [
        p[..., :128].view(2, 6, 4, 32).transpose(1, 2),
        p[..., 128:192].view(2, 6, 2, 32).transpose(1, 2),
    ],
    "heads before tokens": lambda p: [p[..., :128].reshape(2, 4, 6, 32)],
    "part of each head": lambda p: [p[..., :192].view(2, 6, 4, 48)[..., 16:].transpose(1, 2)],
    "one head for all": lambda p: [p[..., :32].view(2, 6, 1, 32).transpose(1, 2).expand(2, 4, 6, 32)],
    "every other element": lambda p: [p.view(2, 6, 3, 64)[..., ::2].transpose(1, 2)],
    "dims before tokens": lambda p: [p.view(2, 6, 32, 6).permute(0, 3, 1, 2)],
    "three inputs": lambda p: [p[..., i * 64 : (i + 1) * 64].view(2, 6, 2, 32).transpose(1, 2) for i in range(3)],
}


@pytest.mark.parametrize("name", STRIDED)
@pytest.mark.parametrize("mode", MODES)
def test_any_strides(name, mode):
    for dtype in (torch.float32, torch.bfloat16):
        inputs = STRIDED[name](torch.randn(2, 6, 192).to(dtype))
        for cos, sin in (
            tables(1, 6, 24, dtype),
            tables(2, 6, 24, dtype),
            [t.transpose(1, 2).contiguous().transpose(1, 2) for t in tables(2, 6, 24, dtype)],
            [t[:, :1].expand(1, 6, 24) for t in tables(1, 6, 24, torch.float32)],
            [t.repeat_interleave(2, -1)[..., ::2] for t in tables(1, 6, 24, torch.float32)],
        ):
            arguments = (inputs, cos, sin, mode, 4, True)
            check(rope(*arguments), rope_reference(*arguments))


def test_nothing_to_rotate():
    cos, sin = tables(1, 0, 8, torch.float32)
    inputs = [torch.randn(2, 4, 0, 16), torch.randn(2, 2, 0, 8)]
    check(rope(inputs, cos, sin, "half", 0, True), rope_reference(inputs, cos, sin, "half", 0, True))
    assert rope([], cos, sin, "half", 0, True) == []


def test_threads_change_nothing():
    inputs, (cos, sin) = [heads(1, 8, 300, 64), heads(1, 2, 300, 64)], tables(1, 300, 64, torch.float32)
    before = torch.get_num_threads()
    try:
        for threads in (1, 3):
            torch.set_num_threads(threads)
            check(rope_cpu(inputs, cos, sin, "half", 0, True), rope_reference(inputs, cos, sin, "half", 0, True))
    finally:
        torch.set_num_threads(before)


def test_the_reference_runs_where_the_kernel_does_not(monkeypatch):
    x, (cos, sin) = heads(1, 2, 5, 16, torch.float64), tables(1, 5, 16, torch.float64)
    (result,) = rope_cpu([x], cos, sin, "half", 0, False)
    assert torch.equal(result, apply_rotary_pos_emb(x, x, cos, sin)[0])
    monkeypatch.setattr(rope_module, "kernel_function", lambda name: None)
    arguments = ([x.float()], cos.float(), sin.float(), "half", 0, True)
    check(rope_cpu(*arguments), rope_reference(*arguments))


@pytest.mark.parametrize("function", [rope, rope_cpu, rope_reference])
def test_what_does_not_fit_is_refused(function):
    x, (cos, sin) = heads(2, 4, 5, 16, torch.bfloat16), tables(1, 5, 8, torch.bfloat16)
    for arguments, message in (
        (([x], cos, sin, "halves", 0, True), "mode is 'halves'; it must be one of half, interleaved"),
        (([x], cos[..., :7], sin[..., :7], "half", 0, True), "7 entries per token; .* must be even"),
        (([x], cos, sin, "half", 9, True), r"start is 9 .* inputs\[0\] have 16 dims"),
        (([x], cos, sin, "half", -1, True), "start is -1"),
        (([x], cos[:, :3], sin[:, :3], "half", 0, True), r"inputs\[0\] has shape \(2, 4, 5, 16\), cos and sin"),
        (([x], cos.expand(3, 5, 8), sin.expand(3, 5, 8), "half", 0, True), r"make them \[B, H, T, D\]"),
        (([x, x[0]], cos, sin, "half", 0, True), r"inputs\[1\] has shape \(4, 5, 16\)"),
        (([x, x[:1]], cos, sin, "half", 0, True), r"inputs\[1\] has batch 1 .* batch and dtype must agree"),
        (([x, x.half()], cos, sin, "half", 0, True), r"inputs\[1\] has batch 2 and dtype torch.float16"),
        (([x], cos[0], sin[0], "half", 0, True), r"cos has shape \(5, 8\)"),
        (([x], cos, sin.float(), "half", 0, True), "sin .* and torch.float32; make both"),
        (([x], cos.half(), sin.half(), "half", 0, True), "cos and sin have dtype torch.float16, the inputs"),
    ):
        with pytest.raises(ValueError, match=message):
            function(*arguments)
