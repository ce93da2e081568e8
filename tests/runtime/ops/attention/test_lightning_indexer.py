"""The keys that an indexer chooses, and attention that reads no others."""

from __future__ import annotations

import pytest
import torch

from torch_pagoda.runtime.ops import paged_attention_reference
from torch_pagoda.runtime.ops.attention import lightning_indexer as module
from torch_pagoda.runtime.ops.attention.attention import attention
from torch_pagoda.runtime.ops.attention.lightning_indexer import (
    IndexerArguments,
    lightning_indexer,
    lightning_indexer_seq,
)
from torch_pagoda.runtime.ops.attention.paged_attention import paged_attention
from torch_pagoda.runtime.ops.attention.selected_keys import mask_of_selected

HEADS, DIM = 8, 16


def indexer_inputs(tokens, heads=HEADS, dim=DIM, dtype=torch.float32):
    return (
        torch.randn(1, tokens, heads, dim).to(dtype),
        torch.randn(1, tokens, dim).to(dtype),
        torch.randn(1, tokens, heads).to(dtype),
    )


def spelled_out(query, key, weights, topk, scale):
    """``[T, T]`` bool, as models do it."""
    tokens = query.shape[1]
    scores = torch.relu(torch.matmul(query.float(), key.transpose(-1, -2).float().unsqueeze(1)) * scale)
    scores = torch.matmul(weights.float().unsqueeze(-2), scores).squeeze(-2)[0]
    causal = torch.ones(tokens, tokens).tril().bool()
    chosen = scores.masked_fill(~causal, -torch.inf).topk(min(topk, tokens), dim=-1).indices
    return torch.zeros(tokens, tokens, dtype=torch.bool).scatter(-1, chosen, True) & causal


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("tokens", [1, 7, 8, 9, 40, 150])
def test_a_sequence_chooses_as_models_do(tokens, dtype):
    given = indexer_inputs(tokens, dtype=dtype)
    selected = lightning_indexer_seq(*given, 8, 0.25)
    assert selected.shape == (1, tokens, 8) and selected.dtype is torch.int32
    assert torch.equal(mask_of_selected(selected, tokens), spelled_out(*given, 8, 0.25))
    assert all(torch.equal(row, row.sort().values) for row in selected[0].where(selected[0] >= 0, 1 << 20))


def test_rows_are_scored_a_few_at_a_time(monkeypatch):
    given = indexer_inputs(61)
    whole = lightning_indexer_seq(*given, 8, 0.25)
    monkeypatch.setattr(module, "MOST_SCORES", 3 * HEADS * 61)
    assert torch.equal(lightning_indexer_seq(*given, 8, 0.25), whole)


def paged_step(sequences, heads=HEADS, dim=DIM, block_size=4, topk=8, dtype=torch.float32):
    """Whole sequences, and the arguments of a step that goes on with the last tokens of each.

    ``sequences`` are pairs (new tokens, context length). Slots of no sequence hold NaN.
    """
    whole = [indexer_inputs(context, heads, dim, dtype) for _, context in sequences]
    width = max(-(-context // block_size) for _, context in sequences) + 1
    blocks = torch.randperm(width * len(sequences)).view(len(sequences), width).to(torch.int32)
    cache = torch.full((blocks.numel(), block_size, 1, dim), torch.nan, dtype=dtype)
    slots, parts, starts = [], [], [0]
    for table, (new, context), given in zip(blocks, sequences, whole, strict=True):
        at = torch.arange(context)
        places = table[at // block_size].long() * block_size + at % block_size
        cache.view(-1, dim)[places[: context - new]] = given[1][0, : context - new]
        table[-(-context // block_size) :] = -7  # nobody may look at these
        slots.append(places[context - new :])
        parts.append([part[:, context - new :] for part in given])
        starts.append(starts[-1] + new)
    pad = torch.full((2,), -1)
    query, key, weights = (
        (
            torch.cat([*part, torch.full_like(part[0][:, :1], torch.nan).expand(-1, 2, *part[0].shape[2:])], 1)
            for part in zip(*parts, strict=True)
        )
        if parts[0][0].shape[1]
        else (None, None, None)
    )
    return whole, IndexerArguments(
        query,
        key,
        weights,
        topk,
        0.25,
        cache,
        torch.cat([*slots, pad]),
        blocks,
        torch.tensor(starts, dtype=torch.int32),
        torch.tensor([context for _, context in sequences], dtype=torch.int32),
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("block_size", [1, 4, 16])
def test_a_step_goes_on_from_cached_keys(block_size, dtype):
    sequences = [(3, 5), (1, 40), (30, 30), (5, 150), (1, 8), (1, 1), (2, 9)]
    whole, call = paged_step(sequences, block_size=block_size, dtype=dtype)
    selected = lightning_indexer(*call)
    for start, (new, context), given in zip(call.query_start_loc.tolist(), sequences, whole, strict=False):
        expected = lightning_indexer_seq(*given, 8, 0.25)[0, context - new :]
        assert torch.equal(selected[0, start : start + new], expected)
        at = torch.arange(context)
        row = sequences.index((new, context))
        stored = call.key_cache[call.block_table[row, at // block_size].long(), at % block_size, 0]
        assert torch.equal(stored, given[1][0])
    assert (selected[0, -2:] == -1).all()  # padding


def test_of_equal_scores_the_earlier_keys_are_taken_however_a_sequence_is_cut():
    query, key, weights = indexer_inputs(60)
    weights = -weights.abs()  # no score is positive, and those that relu made zero are the highest
    key = key.round()
    weights[0, 30:] = 0.0  # all scores are equal
    selected = lightning_indexer_seq(query, key, weights, 8, 0.25)
    assert torch.equal(selected[0, 30:], torch.arange(8, dtype=torch.int32).expand(30, 8))
    scores = torch.einsum("tsh,th->ts", torch.relu(torch.einsum("thd,sd->tsh", query[0], key[0])), weights[0])
    for i in range(30):
        best = sorted(range(i + 1), key=lambda j: (-float(scores[i, j]), j))[:8]
        assert [j for j in selected[0, i].tolist() if j >= 0] == sorted(best)
    for cut in (9, 31, 59):
        part = lightning_indexer_seq(query[:, :cut], key[:, :cut], weights[:, :cut], 8, 0.25)
        assert torch.equal(part, selected[:, :cut])


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("key", lambda x: x[:, :, :5], "do not fit query"),
        ("weights", lambda x: x[:, :-1], "do not fit query"),
        ("query", lambda x: x[0], "make it \\[1, T, H, D\\]"),
        ("query", lambda x: x.long(), "give floating point"),
        ("topk", lambda x: 0, "have to be positive"),
        ("scale", lambda x: -1.0, "have to be positive"),
        ("key_cache", lambda x: x[..., :3], "key_cache has shape"),
        ("slot_mapping", lambda x: x + 10_000, "not one of"),
        ("seq_lens", lambda x: x + 1000, "seq_lens\\[0\\] is"),
        ("seq_lens", lambda x: x * 0, "seq_lens\\[0\\] is 0"),
        ("block_table", lambda x: x * 0 + 999, "holds a block"),
        ("query_start_loc", lambda x: x[:-1], "query_start_loc"),
    ],
)
def test_what_does_not_fit_is_refused(name, change, message):
    _, call = paged_step([(3, 12), (1, 20)])
    with pytest.raises(ValueError, match=message):
        lightning_indexer(*call._replace(**{name: change(getattr(call, name))}))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_operators_are_registered_rightly(dtype):
    _, call = paged_step([(3, 12), (1, 20)], dtype=dtype)
    clean = [x.nan_to_num() if isinstance(x, torch.Tensor) and x.is_floating_point() else x for x in call]
    torch.library.opcheck(lightning_indexer, clean)
    torch.library.opcheck(lightning_indexer_seq, (*indexer_inputs(9, dtype=dtype), 4, 0.25))


# Attention over the chosen keys


def selected_of(case, count):
    """For each token of a paged case ``count`` keys that it sees, at random; all where there are no more."""
    rows = []
    for new, context in case.sequences:
        for p in range(context - new, context):
            chosen = torch.randperm(p + 1)[:count].sort().values.tolist()
            rows.append(chosen + [-1] * (count - len(chosen)))
    rows += [[-1] * count] * case.padding
    return torch.tensor(rows, dtype=torch.int32)[None]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("options", [{}, {"window": 50}, {"sinks": True, "softcap": 3.0}], ids=str)
@pytest.mark.parametrize("count", [1, 40])
@pytest.mark.parametrize("heads, kv_heads, dim, value_dim", [(8, 2, 64, 64), (4, 4, 192, 128), (6, 1, 24, 12)])
def test_the_kernel_attends_the_chosen_keys(
    assert_close, paged_case, dtype, options, count, heads, kv_heads, dim, value_dim
):
    sequences = [(5, 7), (1, 200), (0, 9), (130, 131), (1, 1), (64, 150), (1, 17)]
    case = paged_case(sequences, heads=heads, kv_heads=kv_heads, dim=dim, value_dim=value_dim, dtype=dtype, **options)
    selected = selected_of(case, count)
    arguments = [*case.copy(), *[None] * (17 - len(case.arguments)), selected]
    result = paged_attention(*arguments)
    expected = paged_attention_reference(*[*case.copy(), *[None] * (17 - len(case.arguments)), selected])
    assert_close(result, expected)
    if not options and count == 1:
        assert (result - paged_attention(*case.copy())).abs().max() > 0.05  # the choice matters


def test_all_keys_chosen_is_dense_attention(assert_close, paged_case):
    case = paged_case([(5, 7), (1, 40), (30, 31)], dim=64)
    selected = selected_of(case, 40)
    arguments = [*case.copy(), *[None] * (17 - len(case.arguments)), selected]
    assert_close(paged_attention(*arguments), paged_attention(*case.copy()))


def test_dense_attention_over_the_chosen_keys():
    query, key, value = torch.randn(1, 4, 20, 8), torch.randn(1, 2, 20, 8), torch.randn(1, 2, 20, 6)
    selected = torch.stack([torch.randperm(20)[:5] for _ in range(20)]).to(torch.int32)[None]
    mask = mask_of_selected(selected, 20)
    result = attention(query, key, value, None, None, None, 0.3, True, 0, 0, 0.0, selected)
    expected = attention(query, key, value, mask, None, None, 0.3, True, 0, 0, 0.0)
    torch.testing.assert_close(result, expected)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda s: s[:, :-1], "make it \\[1, "),
        (lambda s: s.float(), "make it int32"),
        (lambda s: s + 100_000, "selected holds positions"),
        (lambda s: s - 5, "selected holds positions"),
    ],
)
def test_a_choice_that_does_not_fit_is_refused(paged_case, change, message):
    case = paged_case([(5, 7), (1, 40)])
    selected = change(selected_of(case, 4))
    with pytest.raises(ValueError, match=message):
        paged_attention(*case.copy(), *[None] * (17 - len(case.arguments)), selected)
