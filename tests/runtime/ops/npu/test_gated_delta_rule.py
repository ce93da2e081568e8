"""The gated delta rule of Ascend: kernels against matrices written out in fp64, slots, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import torch_pagoda.runtime.ops.npu  # noqa: F401  registers the operators

chunked = torch.ops.npu.npu_chunk_gated_delta_rule
recurrent = torch.ops.npu.npu_recurrent_gated_delta_rule
COUNTS = [3, 1, 8]


def inputs(
    counts: list[int] = COUNTS, key_heads: int = 2, heads: int = 4, dim: int = 16, value_dim: int = 8
) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    tokens = sum(counts)
    query, key = torch.nn.functional.normalize(torch.randn(2, tokens, key_heads, dim, dtype=torch.float64), dim=-1)
    return {
        "query": query,
        "key": key,
        "value": torch.randn(tokens, heads, value_dim, dtype=torch.float64),
        "beta": torch.rand(tokens, heads, dtype=torch.float64),
        "g": -torch.rand(tokens, heads, dtype=torch.float64),
        "gk": -torch.rand(tokens, heads, dim, dtype=torch.float64),
        "state": torch.randn(len(counts), heads, value_dim, dim, dtype=torch.float64),
    }


def written_out(x: dict[str, torch.Tensor], counts: list[int], scale: float, by_channel: bool) -> tuple[Any, Any]:
    """Results, and the state after each token: S is multiplied by whole matrices, decay and 1 - beta k kᵀ."""
    heads, dim = x["value"].shape[1], x["key"].shape[2]
    groups = heads // x["key"].shape[1]
    results, states, first = torch.empty_like(x["value"]), [], 0
    for sequence, count in enumerate(counts):
        for h in range(heads):
            state = x["state"][sequence, h]
            for t in range(first, first + count):
                k, q = x["key"][t, h // groups], x["query"][t, h // groups]
                logarithms = x["g"][t, h].expand(dim) + (x["gk"][t, h] if by_channel else 0)
                decay = torch.diag(torch.exp(logarithms))
                erase = torch.eye(dim, dtype=torch.float64) - x["beta"][t, h] * torch.outer(k, k)
                state = state @ decay @ erase + x["beta"][t, h] * torch.outer(x["value"][t, h], k)
                results[t, h] = scale * state @ q
                states.append((t, h, state))
        first += count
    after = torch.empty(sum(counts), *x["state"].shape[1:], dtype=torch.float64)
    for t, h, state in states:
        after[t, h] = state
    return results, after


@pytest.mark.parametrize("scale", [None, 0.25])
def test_chunks_are_the_rule(scale: float | None) -> None:
    x = inputs()
    given = (x["query"], x["key"], x["value"])
    options = {"initial_state": x["state"], "actual_seq_lengths": torch.tensor(COUNTS).int(), "scale": scale}
    result, final = chunked(*given, beta=x["beta"], g=x["g"], **options)
    expected, after = written_out(x, COUNTS, 1.0 if scale is None else scale, False)
    torch.testing.assert_close(result, expected, atol=1e-12, rtol=1e-12)
    torch.testing.assert_close(final, after[[2, 3, 11]], atol=1e-12, rtol=1e-12)
    assert not torch.equal(result, chunked(*given, beta=x["beta"], **options)[0])


def test_a_sequence_without_tokens_keeps_its_state() -> None:
    x = inputs()
    lengths = torch.tensor([4, 0, 8]).int()
    given = (x["query"], x["key"], x["value"])
    _, final = chunked(*given, beta=x["beta"], initial_state=x["state"], actual_seq_lengths=lengths, g=x["g"])
    assert torch.equal(final[1], x["state"][1])


@pytest.mark.parametrize("by_channel", [False, True])
@pytest.mark.parametrize("scale", [None, 0.5])
def test_a_recurrence_keeps_the_state_after_each_token(by_channel: bool, scale: float | None) -> None:
    x = inputs()
    accepted = torch.tensor([2, 1, 5]).int()
    slots = torch.tensor([14, 3, 2, 0, *range(4, 12)]).int()
    pool = torch.randn(16, *x["state"].shape[1:], dtype=torch.float64)
    before = pool.clone()
    for sequence, first in enumerate([0, 3, 4]):
        x["state"][sequence] = pool[slots[first + accepted[sequence] - 1]]
    result = recurrent(
        *(x["query"], x["key"], x["value"], pool),
        beta=x["beta"],
        scale=scale,
        actual_seq_lengths=torch.tensor(COUNTS).int(),
        ssm_state_indices=slots,
        num_accepted_tokens=accepted,
        g=x["g"],
        gk=x["gk"] if by_channel else None,
    )
    expected, after = written_out(x, COUNTS, 16**-0.5 if scale is None else scale, by_channel)
    torch.testing.assert_close(result, expected, atol=1e-12, rtol=1e-12)
    torch.testing.assert_close(pool[slots.long()], after, atol=1e-12, rtol=1e-12)
    others = [i for i in range(16) if i not in slots.tolist()]
    assert torch.equal(pool[others], before[others])


def test_half_precision_computes_in_float32() -> None:
    x = inputs()
    half = {name: tensor.bfloat16() for name, tensor in x.items()}
    given = (half["query"], half["key"], half["value"])
    options = {"actual_seq_lengths": torch.tensor(COUNTS).int()}
    result, final = chunked(*given, beta=half["beta"], initial_state=half["state"], g=x["g"].float(), **options)
    wide = {name: tensor.double() for name, tensor in half.items()} | {"g": x["g"].float().double()}
    expected, after = written_out(wide, COUNTS, 1.0, False)
    assert result.dtype is final.dtype is torch.bfloat16
    # Rounded once, not after every token.
    assert float(((result.double() - expected).abs() / expected.abs().clamp(min=0.1)).max()) < 2**-8 * 1.01
    torch.testing.assert_close(final.double(), after[[2, 3, 11]], atol=1e-3, rtol=2**-8 * 1.01)


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "no beta": ({"beta": None}, "needed"),
    "lengths": ({"actual_seq_lengths": torch.tensor([3, 1, 7]).int()}, "3 lengths of 12 tokens"),
    "heads": ({"value": torch.zeros(12, 3, 8).double()}, "do not fit"),
    "state": ({"initial_state": torch.zeros(3, 4, 16, 8)}, "do not fit"),
    "beta": ({"beta": torch.zeros(12, 2).double()}, "do not fit"),
    "integers": ({"beta": torch.zeros(12, 4, dtype=torch.int64)}, "dtypes differ.* beta torch.int64"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_does_not_fit(name: str) -> None:
    changes, message = WRONG[name]
    x = inputs()
    given = {name: x[name] for name in ("query", "key", "value", "beta", "g")}
    given |= {"initial_state": x["state"], "actual_seq_lengths": torch.tensor(COUNTS).int(), **changes}
    with pytest.raises(ValueError, match=message):
        chunked(**given)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"actual_seq_lengths": torch.tensor([3, 9]).int()}, "1 to 8 tokens"),
        ({"ssm_state_indices": torch.arange(12).int() + 5}, "of the 16 slots"),
        ({"num_accepted_tokens": torch.tensor([4, 1, 1]).int()}, "one of its tokens"),
    ],
)
def test_slots_that_do_not_fit(changes: dict[str, torch.Tensor], message: str) -> None:
    x = inputs()
    options = {"actual_seq_lengths": torch.tensor(COUNTS).int(), "ssm_state_indices": torch.arange(12).int()}
    with pytest.raises(ValueError, match=message):
        recurrent(
            *(x["query"], x["key"], x["value"], torch.zeros(16, 4, 8, 16, dtype=torch.float64)),
            beta=x["beta"],
            **{**options, **changes},
        )
