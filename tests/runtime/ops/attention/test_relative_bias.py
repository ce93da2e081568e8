"""A bias of attention scores by the distance back to a key: the reference spelled out, and the kernel against it."""

from __future__ import annotations

import itertools

import pytest
import torch

from torch_pagoda.runtime.ops.attention.attention import attention
from torch_pagoda.runtime.ops.attention.paged_attention import paged_attention
from torch_pagoda.runtime.ops.reference import paged_attention_reference

SEQUENCES = [(5, 5), (1, 300), (70, 200), (3, 64), (1, 1), (20, 20)]


def bias_of(case, extent, dtype=torch.float32, heads=8):
    tokens = sum(new for new, _ in case.sequences) + case.padding
    return torch.randn(1, heads, tokens, extent).to(dtype)


def arguments_with(case, relative, invariant=False):
    given = case.copy()
    return [*given, *[None] * (18 - len(given)), relative, invariant]


def test_what_is_added() -> None:
    tokens, heads, extent = 13, 4, 5
    query, key, value = (torch.randn(1, h, tokens, 16) for h in (heads, 2, 2))
    relative = torch.randn(1, heads, tokens, extent)
    mask = torch.full((1, heads, tokens, tokens), -torch.inf)
    for h in range(heads):
        for i in range(tokens):
            for j in range(i + 1):
                mask[0, h, i, j] = relative[0, h, i, i - j] if i - j < extent else 0.0
    expected = torch.nn.functional.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, scale=0.3, enable_gqa=True
    )
    found = attention(query, key, value, None, None, None, 0.3, True, 0, 0, 0.0, None, relative)
    assert torch.allclose(found, expected, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("extent", [1, 16, 63, 64, 100, 1000])
@pytest.mark.parametrize("options", [{}, {"window": 40}, {"softcap": 3.0, "sinks": True}], ids=str)
def test_the_kernel(paged_case, assert_close, dtype, extent, options) -> None:
    case = paged_case(SEQUENCES, dtype=dtype, cache_dtype=dtype, **options)
    relative = bias_of(case, extent, dtype)
    assert_close(
        paged_attention(*arguments_with(case, relative)), paged_attention_reference(*arguments_with(case, relative))
    )


def test_other_layouts_and_dtypes(paged_case, assert_close) -> None:
    case = paged_case(SEQUENCES)
    relative = bias_of(case, 33).permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2)
    for given in (relative, relative.to(torch.bfloat16), relative.double(), relative[..., ::2]):
        found = paged_attention(*arguments_with(case, given))
        assert_close(found, paged_attention_reference(*arguments_with(case, given)))


def test_few_long_sequences_are_split(paged_case, assert_close) -> None:
    case = paged_case([(1, 3000), (2, 5000)])
    relative = bias_of(case, 4000)
    found = paged_attention(*arguments_with(case, relative))
    assert_close(found, paged_attention_reference(*arguments_with(case, relative)))


def test_batch_mates_change_no_bit(paged_case) -> None:
    """Each sequence in a step of its own, token by token, gives the bits of the shared step."""
    case = paged_case([(70, 200), (1, 300), (20, 20)])
    relative = bias_of(case, 50)
    together = paged_attention(*arguments_with(case, relative, True))
    starts = case.arguments[7].tolist()
    for s, (start, end) in enumerate(itertools.pairwise(starts)):
        length = int(case.arguments[8][s])
        for at in {start, (start + end) // 2, end - 1}:
            given = arguments_with(case, relative, True)
            given[0], given[1], given[2], given[18] = (x[:, :, at : at + 1] for x in (*given[:3], relative))
            # All later keys of the sequence lie in the cache already; a token sees what is up to it.
            given[3], given[4] = written(case)
            given[5], given[6] = given[5][at : at + 1], given[6][s : s + 1]
            given[7] = torch.tensor([0, 1], dtype=torch.int32)
            given[8] = torch.tensor([length - (end - 1 - at)], dtype=torch.int32)
            assert torch.equal(paged_attention(*given)[0, :, 0], together[0, :, at])


def written(case):
    """The caches behind the step."""
    given = case.copy()
    paged_attention(*given)
    return given[3], given[4]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda b: b[:, :-1], r"relative_bias has shape \(1, 7, "),
        (lambda b: b[:, :, :-1], "relative_bias has shape"),
        (lambda b: b[0], "relative_bias has shape"),
        (lambda b: b[..., :0], "relative_bias has shape"),
        (lambda b: b.int(), "relative_bias has dtype torch.int32"),
    ],
)
def test_what_does_not_fit(paged_case, change, message) -> None:
    case = paged_case([(3, 40)])
    relative = change(bias_of(case, 8))
    with pytest.raises(ValueError, match=message):
        paged_attention(*arguments_with(case, relative))


def test_not_with_chosen_keys(paged_case) -> None:
    case = paged_case([(3, 40)])
    given = arguments_with(case, bias_of(case, 8))
    given[17] = torch.zeros(1, given[0].shape[2], 4, dtype=torch.int32)
    with pytest.raises(ValueError, match="selected and relative_bias cannot be combined"):
        paged_attention(*given)
