"""Compares a small call of each gated delta rule operator on the device with the unfused path, before graphs use it.

Documents and sources do not say which kernels a release of CANN has (``runtime.ops.npu.limits.states``): one yields
NaN for strong decays, one takes states in bfloat16 alone. If the device rejects an operator or computes it wrongly,
the lowering reports it by name and uses the unfused path instead.
"""

from __future__ import annotations

import functools
import logging

import torch

from ....runtime.npu_errors.device_lost import raise_if_lost
from ....runtime.ops.state.linear_recurrence import recurrence

log = logging.getLogger(__name__)
_npu = torch.ops.npu
_KEY_HEADS, _VALUE_HEADS, _DIM = 2, 4, 128
_STRONGEST = -8.0
"""Logarithm of a decay: its sums over a chunk of 64 are beyond what float32 has exponentials of."""
_LIMIT = 2**-5
"""Of a number, relative to itself plus the root mean square of all. bfloat16 rounds to 2**-9, and a chunk adds up."""
_FLOAT32_LIMIT = 2**-11
"""The same of states that the recurrent operator keeps in float32, made of products of bfloat16 numbers."""


@functools.cache
def why_wrong(name: str, device: str) -> str:
    """The reason why a device must not be given ``npu_chunk_gated_delta_rule`` or ``npu_recurrent_gated_delta_rule``:
    what it raises, or by how much it is off; "" where it is right.

    Raises:
        DeviceLost: the device computes nothing any more.
    """
    chunked = name == "npu_chunk_gated_delta_rule"
    try:
        with torch.inference_mode():
            result, state = _errors(chunked, torch.device(device))
    except Exception as raised:  # the toolkit's own, of any kind
        raise_if_lost(raised)
        reason = f"it refuses it: {(str(raised).strip() or repr(raised)).splitlines()[0]}"
    else:
        reason, limit = "", _LIMIT if chunked else _FLOAT32_LIMIT
        if not (result <= _LIMIT and state <= limit):
            reason = f"results are off by {result:.2g} and states by {state:.2g} of their root mean square"
    if reason:
        reason = f"the device was tried with decays down to exp({_STRONGEST:g}): {reason}"
        log.warning("%s is not used: %s", name, reason)
    return reason


def _errors(chunked: bool, device: torch.device) -> tuple[float, float]:
    """The largest errors of results and states, over sequences beyond a chunk or of one token each."""
    lengths = (150, 1, 64) if chunked else (1, 1, 1)
    tokens, generator = sum(lengths), torch.Generator().manual_seed(0)

    def drawn(*sizes: int) -> torch.Tensor:
        return torch.randn(sizes, generator=generator)

    query, key = (torch.nn.functional.normalize(drawn(tokens, _KEY_HEADS, _DIM), dim=-1).bfloat16() for _ in "qk")
    value, beta = drawn(tokens, _VALUE_HEADS, _DIM).bfloat16(), drawn(tokens, _VALUE_HEADS).sigmoid().bfloat16()
    # A head forgets everything, two forget some, and one almost nothing.
    g = torch.tensor([_STRONGEST, -1.5, -0.3, -1e-3]) * torch.rand(tokens, _VALUE_HEADS, generator=generator)
    g[:, 0] = _STRONGEST
    state = drawn(len(lengths), _VALUE_HEADS, _DIM, _DIM)
    state = state.bfloat16() if chunked else state
    scale, counts = _DIM**-0.5, torch.tensor(lengths, dtype=torch.int32)
    q, k, v, b, decay, before, lens = (x.to(device) for x in (query, key, value, beta, g, state.clone(), counts))
    if chunked:
        result, after = _npu.npu_chunk_gated_delta_rule(
            q, k, v, beta=b, initial_state=before, actual_seq_lengths=lens, scale=scale, g=decay
        )
    else:
        every, after = torch.arange(tokens, dtype=torch.int32, device=device), before
        result = _npu.npu_recurrent_gated_delta_rule(
            q, k, v, before, beta=b, scale=scale, actual_seq_lengths=lens, ssm_state_indices=every, g=decay
        )
    q, k, v, decay, b = (x.float()[None] for x in (query, key, value, g, beta))
    ends = counts.cumsum(0).tolist()
    parts = [slice(end - n, end) for end, n in zip(ends, lengths, strict=True)]
    expected = [
        recurrence(q, k, v, decay, b, scale, None, part, s.float()) for part, s in zip(parts, state, strict=True)
    ]
    results, states = zip(*expected, strict=True)
    return _error(result, torch.cat(results)), _error(after, torch.stack(states))


def _error(found: torch.Tensor, expected: torch.Tensor) -> float:
    size = expected.square().mean().sqrt() + expected.abs()
    return float(((found.cpu().float() - expected).abs() / size).nan_to_num(nan=torch.inf).max())
