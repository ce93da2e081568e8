"""Kernels of batch-invariant programs: a row's bits are the same alone and in company, on one thread and on two."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from torch_pagoda.runtime.ops.attention.paged_attention import paged_attention, paged_attention_cpu
from torch_pagoda.runtime.ops.linear import invariant_linear as module
from torch_pagoda.runtime.ops.linear.invariant_linear import invariant_linear_cpu, invariant_linear_reference
from torch_pagoda.runtime.ops.native import load_kernels

pytestmark = pytest.mark.skipif(load_kernels() is None, reason="there are no C++ kernels")

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def on_threads() -> Iterator[int]:
    """One thread, then two; what was set before comes back."""
    before = torch.get_num_threads()
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            yield threads
    finally:
        torch.set_num_threads(before)


def numbers(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@functools.cache
def drawn(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> torch.Tensor:
    return numbers(*shape, dtype=dtype, seed=seed)


def close(found: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
    """Within a rounding to the dtype of the exact sum, and what fp32 sums lose of their terms."""
    exact = torch.nn.functional.linear(x.double(), weight.double(), None if bias is None else bias.double())
    terms = torch.nn.functional.linear(x.double().abs(), weight.double().abs()) + 2
    bound = exact.abs() * torch.finfo(x.dtype).eps + terms * (weight.shape[1] + 2) * 2**-23
    assert found.dtype is x.dtype and ((found.double() - exact).abs() <= bound).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("transposed", [False, True], ids=["rows", "columns"])
@pytest.mark.parametrize(
    ("inputs", "outputs"), [(33, 7), (1, 16), (40, 130), (1030, 50), (2048, 33), (4, 1), (64, 260)]
)
def test_a_product_does_not_depend_on_other_rows(dtype, transposed, inputs, outputs):
    x, bias = numbers(40, inputs, dtype=dtype), numbers(outputs, dtype=dtype, seed=1)
    weight = numbers(outputs, inputs, dtype=dtype, seed=2)
    if transposed:
        weight = weight.t().contiguous().t()
    whole = invariant_linear_cpu(x, weight, bias)
    close(whole, x, weight, bias)
    for _ in on_threads():
        for rows in (1, 2, 3, 4, 5, 6, 7, 13, 40):
            for first in {0, 1, 40 - rows}:
                if first + rows <= 40:
                    found = invariant_linear_cpu(x[first : first + rows], weight, bias)
                    assert torch.equal(found, whole[first : first + rows]), (rows, first)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_a_product_of_a_real_size(dtype):
    x, weight = numbers(512, 2048, dtype=dtype), numbers(5632, 2048, dtype=dtype, seed=1)
    whole = invariant_linear_cpu(x, weight)
    close(whole[:8], x[:8], weight)
    for _ in on_threads():
        for rows in (*range(1, 9), 12, 17, 40):
            assert torch.equal(invariant_linear_cpu(x[100 : 100 + rows], weight), whole[100 : 100 + rows]), rows


def test_a_product_of_strided_rows_and_none():
    weight = numbers(24, 40, dtype=torch.bfloat16)
    wide = numbers(2, 6, 90, dtype=torch.bfloat16)
    for x in (wide[..., :40], wide[..., 1:81:2], wide[:, ::2, :40], wide[0, 0, :40]):
        assert torch.equal(invariant_linear_cpu(x, weight), invariant_linear_cpu(x.contiguous(), weight))
    assert invariant_linear_cpu(wide[:0, 0, :40], weight).shape == (0, 24)
    strided = numbers(48, 80, dtype=torch.bfloat16)[::2, ::2]
    close(invariant_linear_cpu(wide[0, :, :40], strided), wide[0, :, :40], strided)


def test_torch_products_would_fail():
    """The comparison sees what it is for: torch's own products change with the number of rows."""
    changed = 0
    for inputs, outputs in ((2048, 512), (1030, 50), (512, 2048)):
        x, weight = numbers(40, inputs), numbers(outputs, inputs, seed=1)
        whole = torch.nn.functional.linear(x, weight)
        for rows in (1, 2, 7, 13):
            changed += not torch.equal(torch.nn.functional.linear(x[:rows], weight), whole[:rows])
    assert changed


def test_a_product_without_kernels_is_refused(monkeypatch):
    with pytest.raises(RuntimeError, match=r"kernel for torch\.float64; compile without batch_invariant"):
        invariant_linear_cpu(torch.ones(1, 2, dtype=torch.float64), torch.ones(3, 2, dtype=torch.float64))
    with pytest.raises(ValueError, match=r"input \(1, 2\) .* do not fit"):
        invariant_linear_cpu(torch.ones(1, 2), torch.ones(3, 4))
    monkeypatch.setattr(module, "kernel_function", lambda name: None)
    with pytest.raises(RuntimeError, match="needs the C"):
        invariant_linear_cpu(torch.ones(1, 2), torch.ones(3, 2))


def test_a_product_in_graphs():
    x, weight, bias = numbers(2, 3, 8), numbers(5, 8, seed=1), numbers(5, seed=2)
    torch.library.opcheck(module.invariant_linear, (x, weight, bias), test_utils=("test_schema", "test_faketensor"))
    torch.testing.assert_close(
        module.invariant_linear(x, weight, bias), invariant_linear_reference(x, weight, bias), rtol=1e-5, atol=1e-5
    )


@dataclass
class Conversation:
    """A sequence whose tokens attend in steps of any sizes, its blocks scattered; ``mates`` share the steps."""

    length: int
    heads: int = 4
    kv_heads: int = 2
    dim: int = 32
    dtype: torch.dtype = torch.bfloat16
    block_size: int = 16
    cached: int = 0  # tokens whose keys and values lie in the cache before the first step
    int8: bool = False
    options: dict[str, Any] = field(default_factory=dict)

    def attend(self, steps: list[int], mates: int = 0) -> torch.Tensor:
        """Results of all tokens that are not cached, ``[length - cached, H, D]``, in steps of so many tokens."""
        per_sequence = -(-self.length // self.block_size)
        blocks = per_sequence * (1 + mates)
        order = torch.randperm(blocks, generator=torch.Generator().manual_seed(3)).int().view(1 + mates, -1)
        dtype = torch.int8 if self.int8 else self.dtype
        caches = [torch.zeros(blocks, self.block_size, self.kv_heads, self.dim, dtype=dtype) for _ in range(2)]
        scales = [torch.zeros(blocks, self.block_size, self.kv_heads) for _ in range(2)] if self.int8 else [None] * 2
        found, first = [], self.cached
        for cache, seed in zip(caches, (1, 2), strict=True) if self.cached else ():
            places = order[0][torch.arange(self.cached) // self.block_size].long()
            rows = drawn((self.length, self.kv_heads, self.dim), self.dtype, seed)[: self.cached]
            cache[places, torch.arange(self.cached) % self.block_size] = rows
        for count in steps:
            # Mates are at other places, and one takes several tokens.
            places = [(first, count)] + [(7 * m % max(1, self.length - 3), 1 + m % 3) for m in range(mates)]
            found.append(self._step(places, order, caches, scales)[:count])
            first += count
        assert first == self.length
        return torch.cat(found)

    def _step(self, places, order, caches, scales) -> torch.Tensor:
        tensors = [[], [], []]
        slots, starts, lengths = [], [0], []
        for s, (first, count) in enumerate(places):
            for i, heads in enumerate((self.heads, self.kv_heads, self.kv_heads)):
                whole = drawn((self.length, heads, self.dim), self.dtype, 10 * s + i)
                tensors[i].append(whole[first : first + count])
            positions = torch.arange(first, first + count)
            slots.append(
                order[s][positions // self.block_size].long() * self.block_size + positions % self.block_size
            )
            starts.append(starts[-1] + count)
            lengths.append(first + count)
        query, key, value = (torch.cat(t)[None].transpose(1, 2) for t in tensors)
        arguments = (torch.tensor(starts, dtype=torch.int32), torch.tensor(lengths, dtype=torch.int32))
        options = {"sliding_window": 0, "chunk": 0, "softcap": 0.0, "sinks": None, "alibi_slopes": None}
        options |= {"scale": self.dim**-0.5, "batch_invariant": True, **self.options}
        result = paged_attention(
            query, key, value, *caches, torch.cat(slots), order, *arguments,
            key_scale=scales[0], value_scale=scales[1], **options,
        )  # fmt: skip
        return result[0].transpose(0, 1)


KINDS = {
    "plain": {},
    "window": {"sliding_window": 37},
    "chunk": {"chunk": 50},
    "softcap": {"softcap": 20.0},
    "sinks": {"sinks": numbers(4, seed=7)},
    "alibi": {"alibi_slopes": numbers(4, seed=8).abs()},
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_attention_does_not_depend_on_the_step(dtype, kind):
    conversation = Conversation(150, dtype=dtype, options=KINDS[kind])
    whole = conversation.attend([150])
    for _ in on_threads():
        assert torch.equal(conversation.attend([1] * 150), whole)
        assert torch.equal(conversation.attend([64, 3, 63, 1, 19], mates=5), whole)


@pytest.mark.parametrize("changes", [{"heads": 16}, {"kv_heads": 4}, {"dim": 40}, {"block_size": 64}, {"int8": True}])
def test_attention_of_other_shapes_does_not_depend_on_the_step(changes):
    conversation = Conversation(100, **changes, options={"sliding_window": 70})
    whole = conversation.attend([100])
    for _ in on_threads():
        assert torch.equal(conversation.attend([33] + [1] * 10 + [57], mates=2), whole)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("window", [0, 1500])
def test_attention_over_long_contexts_splits_keys_by_their_places(dtype, window):
    """Heads of 128 and 4096 keys: alone the keys are shared out among threads, among mates they are not."""
    conversation = Conversation(
        4096, heads=4, kv_heads=1, dim=128, dtype=dtype, cached=4088, options={"sliding_window": window}
    )
    whole = conversation.attend([8])
    for _ in on_threads():
        assert torch.equal(conversation.attend([1] * 8), whole)
        assert torch.equal(conversation.attend([5, 3], mates=12), whole)


def test_attention_that_is_not_asked_to_depends_on_the_step():
    """The comparison sees what it is for."""
    conversation = Conversation(150, dtype=torch.float32, options={"batch_invariant": False})
    assert not torch.equal(conversation.attend([1] * 150), conversation.attend([150]))


def test_attention_across_the_border_of_pieces():
    conversation = Conversation(1040, heads=2, kv_heads=1, cached=1000)
    whole = conversation.attend([40])
    for _ in on_threads():
        assert torch.equal(conversation.attend([24, 1, 1, 14], mates=9), whole)


def test_attention_without_kernels_is_refused(monkeypatch, paged_case):
    from torch_pagoda.runtime.ops.attention import paged_attention as attention

    monkeypatch.setattr(attention, "kernel_function", lambda name: None)
    case = paged_case([(3, 40)])
    with pytest.raises(RuntimeError, match=r"needs the C.* compile without batch_invariant"):
        paged_attention_cpu(*case.arguments, None, None, True)
    assert paged_attention_cpu(*case.arguments).isfinite().all()
