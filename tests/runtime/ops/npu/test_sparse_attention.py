"""The indexer and the attention over chosen keys of Ascend: kernels against the formulas written out in fp64."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

import torch_pagoda.runtime.ops.npu  # noqa: F401  registers the operators
from torch_pagoda.runtime.ops.npu import sparse_attention

choose = torch.ops.npu.npu_lightning_indexer
attend = torch.ops.npu.npu_sparse_flash_attention
HEADS, DIM, LATENT, ROPE, BLOCK = 3, 128, 32, 8, 16
# New tokens and context of each sequence: a prompt, a chunk across a block's end, one that rests, a decoded token.
COUNTS, CONTEXTS = [20, 5, 0, 1], [20, 35, 16, 33]


class Step:
    """One flat step of queries over keys in blocks, of which those that nobody owns are NaN.

    Attributes:
        keys: of each sequence, ``[L, 1, dim]`` for each cache.
        options: lengths, block table and layouts of both operators; ``kv`` names the attention's.
    """

    def __init__(self, *dims: int, dtype: torch.dtype = torch.float64) -> None:
        self.generator = torch.Generator().manual_seed(3)
        self.dtype, blocks = dtype, [-(-n // BLOCK) for n in CONTEXTS]
        order = torch.randperm(16, generator=self.generator).int()
        self.table = torch.full((len(COUNTS), max(blocks)), 15, dtype=torch.int32)
        self.caches = [torch.full((16, BLOCK, 1, dim), math.nan, dtype=dtype) for dim in dims]
        self.keys: list[list[torch.Tensor]] = []
        for sequence, (count, context) in enumerate(zip(blocks, CONTEXTS, strict=True)):
            own = order[4 * sequence : 4 * sequence + count]
            self.table[sequence, :count] = own
            self.keys.append([self.normal(context, 1, dim) for dim in dims])
            for cache, rows in zip(self.caches, self.keys[-1], strict=True):
                for at, row in enumerate(rows):
                    cache[own[at // BLOCK], at % BLOCK] = row

    def normal(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=self.generator, dtype=torch.float64).to(self.dtype)

    def options(self, keys: str) -> dict[str, Any]:
        layout = "layout_key" if keys == "key" else "layout_kv"
        return {
            "actual_seq_lengths_query": torch.tensor(COUNTS).cumsum(0).int(),
            f"actual_seq_lengths_{keys}": torch.tensor(CONTEXTS).int(),
            "block_table": self.table,
            "layout_query": "TND",
            layout: "PA_BSND",
        }

    def rows(self) -> list[tuple[int, int, int]]:
        """Row of the step, sequence and position of each token."""
        places = [(s, c - n + i) for s, (n, c) in enumerate(zip(COUNTS, CONTEXTS, strict=True)) for i in range(n)]
        return [(row, *place) for row, place in enumerate(places)]


def chosen(step: Step, mode: int, count: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    query, weights = step.normal(sum(COUNTS), HEADS, DIM), step.normal(sum(COUNTS), HEADS)
    indices, values = choose(
        query, step.caches[0], weights, sparse_count=count, sparse_mode=mode, **step.options("key")
    )
    assert indices.shape == (sum(COUNTS), 1, count) and indices.dtype is torch.int32 and values.numel() == 0
    return query, weights, indices[:, 0]


@pytest.mark.parametrize("mode", [0, 3])
@pytest.mark.parametrize("count", [4, 18, 64])
def test_the_highest_scores_are_chosen(mode: int, count: int) -> None:
    step = Step(DIM)
    query, weights, indices = chosen(step, mode, count)
    for row, sequence, position in step.rows():
        seen = position + 1 if mode == 3 else CONTEXTS[sequence]
        scores = [
            sum(float(w) * max(0.0, float(q @ key[0])) for q, w in zip(query[row], weights[row], strict=True))
            for key in step.keys[sequence][0][:seen]
        ]
        best = sorted(range(seen), key=lambda j: -scores[j])[:count]
        assert indices[row].tolist() == best + [-1] * (count - len(best))


def test_of_real_sizes_the_canonical_operator_chooses_the_same() -> None:
    """2048 of 2600 keys in blocks of 128, by 64 heads: the last tokens of a prompt and one decoded token."""
    generator = torch.Generator().manual_seed(1)
    counts, contexts = [5, 1], [2600, 2111]
    query, weights = (torch.randn(1, 6, *s, generator=generator, dtype=torch.float64) for s in ((64, DIM), (64,)))
    cache = torch.randn(48, 128, 1, DIM, generator=generator, dtype=torch.float64)
    table = torch.randperm(48, generator=generator).view(2, 24).int()
    positions = [(s, c - n + i) for s, (n, c) in enumerate(zip(counts, contexts, strict=True)) for i in range(n)]
    slots = torch.tensor([int(table[s, p // 128]) * 128 + p % 128 for s, p in positions])
    starts, lens = torch.tensor([0, 5, 6]).int(), torch.tensor(contexts).int()
    key = cache.flatten(0, 1)[slots, 0][None]
    given = query, key, weights, 2048, DIM**-0.5, cache.clone(), slots, table, starts, lens
    expected = torch.ops.pagoda.lightning_indexer(*given)
    options = {"actual_seq_lengths_query": starts[1:], "actual_seq_lengths_key": lens, "block_table": table}
    found, _ = choose(query[0], cache, weights[0], layout_query="TND", layout_key="PA_BSND", **options)
    assert torch.equal(found[:, 0].sort(-1).values, expected[0].sort(-1).values)


def test_of_equal_scores_the_first_are_chosen() -> None:
    step = Step(DIM)
    step.caches[0].fill_(-1)
    options = {**step.options("key"), "sparse_count": 4}
    indices, _ = choose(step.normal(26, HEADS, DIM).abs(), step.caches[0], step.normal(26, HEADS), **options)
    for row, _, position in step.rows():
        assert indices[row, 0].tolist() == [j if j <= position else -1 for j in range(4)]


def test_halves_score_in_float32() -> None:
    step = Step(DIM, dtype=torch.bfloat16)
    query, weights = step.normal(26, HEADS, DIM), step.normal(26, HEADS)
    options = {**step.options("key"), "sparse_count": 9}
    indices, _ = choose(query, step.caches[0], weights, **options)
    wide, _ = choose(query.float(), step.caches[0].float(), weights.float(), **options)
    same, _ = choose(query, step.caches[0], weights.float(), **options)
    assert torch.equal(indices, wide) and torch.equal(indices, same)


@pytest.mark.parametrize("layout", ["BSND", "TND"])
def test_keys_that_are_not_paged(layout: str) -> None:
    generator = torch.Generator().manual_seed(0)
    query, key = (torch.randn(2, 6, n, DIM, generator=generator) for n in (HEADS, 1))
    weights = torch.randn(2, 6, HEADS, generator=generator)
    parts = (
        torch.randn(2, 6, n, d, generator=generator) for n, d in ((2, LATENT), (2, ROPE), (1, LATENT), (1, ROPE))
    )
    q, q_rope, latent, rope = parts
    table = torch.tensor([[0], [1]], dtype=torch.int32)
    pages = [torch.cat((x, torch.full((2, 10, *x.shape[2:]), math.nan)), 1) for x in (key, latent, rope)]
    ends, lens = torch.tensor([6, 12]).int(), torch.tensor([6, 6]).int()
    paged = {"layout_query": "TND", "actual_seq_lengths_query": ends, "block_table": table}
    flat = [x.flatten(0, 1) for x in (query, weights, q, q_rope)]
    options = {"sparse_count": 3}
    wanted, _ = choose(
        flat[0], pages[0], flat[1], **paged, actual_seq_lengths_key=lens, layout_key="PA_BSND", **options
    )
    out, *_ = attend(
        *(flat[2], pages[1], pages[1], wanted, 0.3),
        **{**paged, "actual_seq_lengths_kv": lens, "layout_kv": "PA_BSND", "attention_mode": 2},
        query_rope=flat[3],
        key_rope=pages[2],
    )
    given: dict[str, Any] = {"layout_query": layout}
    if layout == "TND":
        query, key, weights, q, q_rope, latent, rope = (
            x.flatten(0, 1) for x in (query, key, weights, q, q_rope, latent, rope)
        )
        given["actual_seq_lengths_query"] = ends
    lengths = {} if layout == "BSND" else {"actual_seq_lengths_key": ends}
    indices, _ = choose(query, key, weights, layout_key=layout, **given, **lengths, **options)
    assert torch.equal(indices.flatten(0, -3), wanted)
    lengths = {} if layout == "BSND" else {"actual_seq_lengths_kv": ends}
    found, *_ = attend(
        *(q, latent, None, indices, 0.3),
        **{**given, **lengths, "layout_kv": layout, "attention_mode": 2},
        query_rope=q_rope,
        key_rope=rope,
    )
    torch.testing.assert_close(found.flatten(0, -3), out)


@pytest.mark.parametrize("mode", [0, 3])
@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("held", [1 << 24, 1 << 9])
def test_attention_is_a_softmax_over_the_chosen(
    mode: int, sinks: bool, held: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sparse_attention, "_MOST_NUMBERS", held)
    step = Step(LATENT, ROPE)
    query, rope = step.normal(26, HEADS, LATENT), step.normal(26, HEADS, ROPE)
    extra = step.normal(HEADS).float() if sinks else None
    places = torch.full((26, 1, 7), -1, dtype=torch.int32)
    for row, sequence, _ in step.rows():  # keys behind the query among them, and places behind the first -1
        given = torch.randperm(CONTEXTS[sequence], generator=step.generator)[: row % 8]
        places[row, 0, : len(given)] = given
        if row % 8 < 6:
            places[row, 0, row % 8 + 1] = 0
    options = {**step.options("kv"), "attention_mode": 2, "sparse_mode": mode, "sinks": extra}
    found, largest, total = attend(
        *(query, step.caches[0], step.caches[0], places, 0.2),
        query_rope=rope,
        key_rope=step.caches[1],
        **options,
    )
    assert found.dtype is torch.float64 and largest.numel() == total.numel() == 0
    for row, sequence, position in step.rows():
        read = [int(j) for j in places[row, 0, : row % 8] if mode == 0 or j <= position]
        for head in range(HEADS):
            keys = [torch.cat([part[j, 0] for part in step.keys[sequence]]) for j in read]
            whole = torch.cat((query[row, head], rope[row, head]))
            powers = [math.exp(0.2 * float(whole @ key)) for key in keys]
            sink = math.exp(float(extra[head])) if extra is not None else 0.0
            wanted = sum(
                (p * key[:LATENT] for p, key in zip(powers, keys, strict=True)), torch.zeros(LATENT).double()
            )
            wanted = wanted / ((sum(powers) + sink) or 1.0)
            torch.testing.assert_close(found[row, head], wanted, rtol=1e-10, atol=1e-10)


def test_large_scores_do_not_overflow_and_halves_are_rounded_once() -> None:
    step = Step(LATENT, ROPE)
    places = torch.zeros(26, 1, 2, dtype=torch.int32)
    places[:, :, 1] = -1
    query, rope = (1e4 * step.normal(26, HEADS, d) for d in (LATENT, ROPE))
    for dtype in (torch.float64, torch.bfloat16):
        caches = [cache.to(dtype) for cache in step.caches]
        options = {**step.options("kv"), "attention_mode": 2, "key_rope": caches[1], "query_rope": rope.to(dtype)}
        found, *_ = attend(query.to(dtype), caches[0], caches[0], places, 1.0, **options)
        for row, sequence, _ in step.rows():
            assert torch.equal(found[row], step.keys[sequence][0][0].to(dtype).expand(HEADS, -1))


def indexer(**changes: Any) -> Any:
    step = Step(DIM)
    given = {"query": step.normal(26, HEADS, DIM), "key": step.caches[0], "weights": step.normal(26, HEADS)}
    return choose(**{**given, **step.options("key"), **changes})


def attention(**changes: Any) -> Any:
    step = Step(LATENT, ROPE)
    given = {
        "query": step.normal(26, HEADS, LATENT),
        "query_rope": step.normal(26, HEADS, ROPE),
        "key": step.caches[0],
        "value": None,
        "key_rope": step.caches[1],
        "sparse_indices": torch.zeros(26, 1, 2, dtype=torch.int32),
        "scale_value": 1.0,
        "attention_mode": 2,
    }
    return attend(**{**given, **step.options("kv"), **changes})


REFUSED = [
    (indexer, {"sparse_mode": 1}, ValueError, "sparse_mode is 1"),
    (indexer, {"pre_tokens": 5}, NotImplementedError, "pre_tokens=5"),
    (indexer, {"sparse_count": 0}, ValueError, "0 keys are chosen"),
    (indexer, {"return_value": True}, NotImplementedError, "return_value"),
    (indexer, {"weights": torch.zeros(26, 2).double()}, ValueError, "do not fit"),
    (indexer, {"weights": torch.zeros(26, HEADS).half()}, ValueError, "weights is torch.float16"),
    (indexer, {"layout_key": "BSND"}, ValueError, "layout_query is 'TND'"),
    (indexer, {"block_table": None}, ValueError, "block_table is not right"),
    (indexer, {"actual_seq_lengths_key": torch.tensor(CONTEXTS)}, ValueError, "key is not right"),
    (indexer, {"actual_seq_lengths_query": torch.tensor([20, 25, 27]).int()}, ValueError, "3 sequences of queries"),
    (indexer, {"actual_seq_lengths_query": torch.tensor([20, 25, 25, 27]).int()}, ValueError, "rows 25 to 27"),
    (indexer, {"actual_seq_lengths_query": torch.tensor([20, 5, 0, 1]).int()}, ValueError, "sums of those before"),
    (attention, {"attention_mode": 0}, NotImplementedError, "attention_mode=0"),
    (attention, {"query_rope": None}, ValueError, "query_rope is None"),
    (attention, {"sparse_block_size": 2}, NotImplementedError, "sparse_block_size"),
    (attention, {"return_softmax_lse": True}, NotImplementedError, "return_softmax_lse"),
    (attention, {"sparse_indices": torch.zeros(26, 1, 2).long()}, ValueError, "sparse_indices is torch.int64"),
    (attention, {"sparse_indices": torch.full((26, 1, 2), 35).int()}, ValueError, "sparse_indices holds 35"),
    (attention, {"sparse_indices": torch.full((26, 1, 2), -2).int()}, ValueError, "sparse_indices holds -2"),
    (attention, {"sinks": torch.zeros(HEADS).double()}, ValueError, "sinks is torch.float64"),
]


@pytest.mark.parametrize(
    ("call", "changes", "error", "message"),
    REFUSED,
    ids=lambda given: (
        getattr(given, "__name__", None) or (",".join(given) if isinstance(given, dict) else str(given))
    ),
)
def test_what_is_refused(call: Any, changes: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call(**changes)
