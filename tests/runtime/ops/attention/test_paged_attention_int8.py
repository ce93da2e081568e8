"""pagoda::paged_attention over int8 caches: kernel against reference, and both against caches of full precision."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

from torch_pagoda.runtime.cache.kv_cache import allocate_kv_cache
from torch_pagoda.runtime.ops import paged_attention_reference
from torch_pagoda.runtime.ops.attention.paged_attention import paged_attention
from torch_pagoda.runtime.program import CacheSpec

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
MIXED = [(5, 7), (1, 200), (0, 9), (130, 131), (1, 1), (64, 150)]
WRITTEN = (3, 4, 15, 16)
kernel = torch.ops.pagoda.paged_attention.default


@pytest.fixture
def check(assert_close):
    """Run kernel and reference on copies of a case: equal results, identical caches and scales."""

    def run(case):
        ours, theirs = case.copy(), case.copy()
        result = kernel(*ours)
        assert_close(result, paged_attention_reference(*theirs))
        assert all(torch.equal(ours[i], theirs[i]) for i in WRITTEN)
        return ours

    return run


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dim, value_dim", [(64, 64), (80, 96), (130, 16), (192, 128), (576, 512), (6, 10), (7, 3)])
def test_head_dims(check, paged_case, dtype, dim, value_dim):
    check(paged_case(MIXED, heads=4, kv_heads=2, dim=dim, value_dim=value_dim, dtype=dtype, cache_dtype=torch.int8))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "options",
    [
        {"heads": 8, "kv_heads": 8},
        {"heads": 6, "kv_heads": 1, "block_size": 1},
        {"block_size": 7, "window": 20},
        {"block_size": 64, "chunk": 32},
        {"softcap": 3.0, "sinks": True},
        {"alibi": True, "cache_by_heads": False},
        {"sinks": True, "alibi": True, "window": 33, "softcap": 5.0, "padding": 0},
    ],
    ids=str,
)
def test_options(check, paged_case, dtype, options):
    check(paged_case(MIXED, dtype=dtype, cache_dtype=torch.int8, **options))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_strides(check, paged_case, dtype):
    """Caches, scales, keys and values may lie in memory in any way."""
    case = paged_case(MIXED, dtype=dtype, cache_dtype=torch.int8)
    for i in (1, 2, 3, 4, 15, 16):
        tensor = case.arguments[i]
        wide = torch.zeros(*tensor.shape[:-1], 2 * tensor.shape[-1], dtype=tensor.dtype)
        wide[..., ::2] = tensor
        case.arguments[i] = wide[..., ::2]
    check(case)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("options", [{}, {"window": 20}, {"chunk": 32}], ids=str)
def test_what_nobody_sees_is_not_read(paged_case, dtype, options):
    """Scales past the context, of other blocks and behind the window may be NaN."""
    case = paged_case([(1, 75), (3, 50), (20, 20)], dtype=dtype, cache_dtype=torch.int8, **options)
    clean = kernel(*case.copy())
    arguments = case.copy()
    seen = torch.zeros(arguments[3].shape[:2], dtype=torch.bool).flatten()
    for s, (tokens, context) in enumerate(case.sequences):
        first = context - tokens
        low = max(0, first - case.window + 1) if case.window else 0
        low = max(low, first // case.chunk * case.chunk) if case.chunk else low
        for position in range(low, context):
            seen[int(arguments[6][s, position // 16]) * 16 + position % 16] = True
    for i in (15, 16):
        arguments[i].masked_fill_(~seen.view(arguments[i].shape[:2])[:, :, None], torch.nan)
    assert torch.equal(kernel(*arguments), clean)


@pytest.mark.parametrize("run", [kernel, paged_attention_reference], ids=["kernel", "reference"])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("index", [1, 2])
def test_what_is_no_number_reaches_whoever_attends_it(paged_case, run, bad, index):
    case = paged_case([(1, 20), (1, 40)], heads=4, kv_heads=2, padding=0, cache_dtype=torch.int8)
    case.arguments[index][0, 1, 1, 3] = bad  # second sequence, second KV head
    result = run(*case.copy())
    assert result[0, 2:, 1].isnan().all()
    assert result[0, :2].isfinite().all() and result[0, 2:, 0].isfinite().all()


def test_rows_of_zeros_stay_zeros(paged_case):
    case = paged_case([(20, 20)], cache_dtype=torch.int8, padding=0)
    case.arguments[2].zero_()
    assert not kernel(*case.copy()).any()


def test_scales_must_come_with_int8(paged_case):
    arguments = paged_case([(1, 20)], cache_dtype=torch.int8).arguments
    with pytest.raises(ValueError, match=r"value_scale is None; caches of torch\.int8 need"):
        kernel(*arguments[:16], None)
    with pytest.raises(ValueError, match=r"key_scale is .* torch.float64"):
        kernel(*arguments[:15], arguments[15].double(), arguments[16])
    arguments = paged_case([(1, 20)]).arguments
    with pytest.raises(ValueError, match=r"key_scale is for caches of torch\.int8, not torch\.float32"):
        kernel(*arguments[:15], torch.zeros(1), None)
    with pytest.raises(ValueError, match="each group must share one"):
        kernel(*arguments[:3], arguments[3].to(torch.int8), *arguments[4:])


class Served:
    """Sequences that grow step by step over a cache of one layer."""

    def __init__(self, spec: CacheSpec, block_size: int, sequences: int, longest: int) -> None:
        width = -(-longest // block_size)
        (cache,) = allocate_kv_cache([spec], width * sequences + 2, block_size)
        for tensor in cache:
            tensor.fill_(torch.nan if tensor.is_floating_point() else 99)
        self.key_cache, self.value_cache, *scales = cache
        self.scales = scales or (None, None)
        self.table = torch.arange(width * sequences, dtype=torch.int32).view(width, sequences).T.flip(1).contiguous()
        self.block_size, self.done = block_size, [0] * sequences

    def run(self, step, query, key, value, **options):
        """A step in which each sequence adds so many tokens."""
        slots, counts = [], []
        for s, n in enumerate(step):
            positions = torch.arange(self.done[s], self.done[s] + n)
            self.done[s] += n
            slots.append(
                self.table[s][positions // self.block_size].long() * self.block_size + positions % self.block_size
            )
            counts.append(n)
        starts = torch.tensor([0, *counts]).cumsum(0).int()
        return paged_attention(
            *(query, key, value, self.key_cache, self.value_cache, torch.cat(slots), self.table, starts),
            torch.tensor(self.done, dtype=torch.int32),
            **options,
            key_scale=self.scales[0],
            value_scale=self.scales[1],
        )


@settings(deadline=None, max_examples=60)
@given(st.data())
def test_results_stay_within_the_bound_of_rounding(data):
    """With scores off by at most d, softmax weights change by e^(2d) - 1 in all, and values by half a scale."""
    kv_heads, group = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 4))
    dim, value_dim = data.draw(st.sampled_from([(16, 16), (24, 8), (64, 64), (40, 72), (7, 3)]))
    block_size = data.draw(st.sampled_from([1, 3, 16, 32]))
    sequences = data.draw(st.integers(1, 3))
    steps = data.draw(st.lists(st.lists(st.integers(1, 40), min_size=sequences, max_size=sequences), max_size=2))
    steps += [[1] * sequences] * 2  # chunks of the prompts first, then they decode
    torch.manual_seed(data.draw(st.integers(0, 10**6)))
    heads = kv_heads * group
    window, chunk = data.draw(st.sampled_from([(0, 0), (9, 0), (0, 16)]))
    options = {
        "scale": dim**-0.5,
        "sliding_window": window,
        "chunk": chunk,
        "softcap": data.draw(st.sampled_from([0.0, 4.0])),
        "sinks": torch.randn(heads) if data.draw(st.booleans()) else None,
        "alibi_slopes": torch.rand(heads) if data.draw(st.booleans()) else None,
    }
    longest = sum(max(step) for step in steps)
    exact, rounded = (
        Served(CacheSpec(kv_heads, dim, value_dim, dtype), block_size, sequences, longest)
        for dtype in (torch.float32, torch.int8)
    )
    largest_key_scale = largest_value = largest_value_scale = 0.0
    for step in steps:
        tokens = sum(step)
        query, key, value = (
            torch.randn(1, h, tokens, d) for h, d in ((heads, dim), (kv_heads, dim), (kv_heads, value_dim))
        )
        largest_key_scale = max(largest_key_scale, key.abs().max().item() / 127)
        largest_value = max(largest_value, value.abs().max().item())
        largest_value_scale = largest_value / 127
        right, found = (served.run(step, query, key, value, **options) for served in (exact, rounded))
        score_error = options["scale"] * query.abs().sum(-1) * largest_key_scale / 2  # [1, H, T]
        bound = largest_value_scale / 2 + torch.expm1(2 * score_error) * largest_value
        assert ((found - right).abs() <= bound[..., None] * 1.001 + 1e-5).all()
        assert (found - right).abs().mean() < 0.02  # the bound is loose; rounding errors average out
