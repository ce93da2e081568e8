"""Our counterparts of kernel packages' functions, and samples to compare them.

Each takes the arguments of transformers' own function of that name, for one sequence and without a cache.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from ...runtime.ops.state.causal_conv1d import causal_conv1d_seq
from ...runtime.ops.state.linear_recurrence import linear_recurrence_seq
from ...runtime.ops.state.selective_scan import selective_scan_seq

_L2NORM_EPS = 1e-6


@dataclass(frozen=True)
class Counterpart:
    """What stands for a kernel function while a model is traced.

    Attributes:
        parameters: names of transformers' own function's parameters, in order, without ``**kwargs``.
        traced: the function traced instead.
        sample: arguments for a sequence of so many tokens.
    """

    parameters: tuple[str, ...]
    traced: Callable[..., Any]
    sample: Callable[[int], dict[str, Any]]


def _refuse(name: str, **given: Any) -> None:
    for argument, value in given.items():
        if value is not None and value is not False:
            raise NotImplementedError(f"{name} with {argument} is not supported in a flat step")


def _causal_conv1d(
    hidden_states: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    activation: str | None = None,
    **kwargs: Any,
) -> torch.Tensor:
    _refuse_packed("causal_conv1d_fn", kwargs)
    rows = hidden_states.transpose(1, 2)
    activation = "silu" if activation == "swish" else activation or ""
    return causal_conv1d_seq(rows, weight, bias, activation).transpose(1, 2)


def _delta_rule(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    chunk_size: int = 64,
    initial_state: torch.Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    _refuse_packed("chunk_gated_delta_rule", kwargs)
    _refuse("chunk_gated_delta_rule", initial_state=initial_state, output_final_state=output_final_state)
    eps = _L2NORM_EPS if use_qk_l2norm_in_kernel else None
    return linear_recurrence_seq(query, key, value, g, beta, key.shape[-1] ** -0.5, eps).to(query.dtype), None


def _state_space_dual(
    hidden_states: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    chunk_size: int,
    D: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
    initial_states: torch.Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
    return_final_states: bool = False,
    **kwargs: Any,
) -> torch.Tensor:
    _refuse_packed("mamba_chunk_scan_combined", kwargs)
    _refuse("mamba_chunk_scan_combined", initial_states=initial_states, return_final_states=return_final_states)
    if dt_bias is not None:
        dt = dt + dt_bias.to(dt.dtype)
    if dt_softplus:
        dt = F.softplus(dt)
    dt = torch.clamp(dt, min=dt_limit[0], max=dt_limit[1])
    wide = hidden_states.float()
    log_decay = A.float() * dt.float()
    output = linear_recurrence_seq(C, B, wide * dt[..., None].float(), log_decay, None, 1.0, None)
    return output if D is None else output + D[..., None] * wide


def _selective_scan(
    hidden_states: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    D: torch.Tensor | None = None,
    z: torch.Tensor | None = None,
    delta_bias: torch.Tensor | None = None,
    delta_softplus: bool = False,
    return_last_state: bool = False,
    use_mambapy: bool = False,
    use_associative_scan: bool = False,
    **kwargs: Any,
) -> torch.Tensor:
    _refuse_packed("selective_scan_fn", kwargs)
    _refuse("selective_scan_fn", return_last_state=return_last_state)
    if delta_bias is not None:
        dt = dt + delta_bias.to(dt.dtype)[..., None]
    if delta_softplus:
        dt = F.softplus(dt)
    rows = (tensor.transpose(1, 2) for tensor in (hidden_states, dt, B, C))
    x, step, b, c = rows
    output = selective_scan_seq(x, step, A, b, c, True).transpose(1, 2)
    if D is not None:
        output = output + hidden_states * D[None, :, None]
    return output if z is None else output * F.silu(z)


def _refuse_packed(name: str, kwargs: Mapping[str, Any]) -> None:
    """Refuse what only the packages' own functions take; transformers' ignore other keywords."""
    _refuse(name, **{key: kwargs.get(key) for key in ("seq_idx", "cu_seqlens")})


def _random(*shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(len(shape) * 1000 + sum(shape))
    return torch.randn(shape, generator=generator)


def _conv_sample(length: int) -> dict[str, Any]:
    return {
        "hidden_states": _random(1, 6, length),
        "weight": _random(6, 4),
        "bias": _random(6),
        "activation": "silu",
    }


def _delta_sample(length: int, *, per_channel: bool = False) -> dict[str, Any]:
    heads, dims = 2, 8
    decay = _random(1, length, heads, dims) if per_channel else _random(1, length, heads)
    return {
        "query": _random(1, length, heads, dims),
        "key": _random(1, length, heads, dims).flip(1),
        "value": _random(1, length, heads, 6),
        "g": -F.softplus(decay),
        "beta": _random(1, length, heads).sigmoid(),
        "use_qk_l2norm_in_kernel": True,
    }


def _dual_sample(length: int) -> dict[str, Any]:
    heads, dims, groups, states = 4, 6, 2, 8
    return {
        "hidden_states": _random(1, length, heads, dims),
        "dt": _random(1, length, heads),
        "A": -_random(heads).exp(),
        "B": _random(1, length, groups, states),
        "C": _random(1, length, groups, states).flip(1),
        "chunk_size": 16,
        "D": _random(heads),
        "dt_bias": _random(heads).flip(0),
        "dt_softplus": True,
        "dt_limit": (0.1, 2.0),
    }


def _scan_sample(length: int) -> dict[str, Any]:
    channels, states = 6, 4
    return {
        "hidden_states": _random(1, channels, length),
        "dt": _random(1, channels, length).flip(1),
        "A": -_random(channels, states).exp(),
        "B": _random(1, states, length),
        "C": _random(1, states, length).flip(1),
        "D": _random(channels),
        "z": _random(1, channels, length).flip(2),
        "delta_bias": _random(channels).flip(0),
        "delta_softplus": True,
    }


_DELTA_RULE = (
    *("query", "key", "value", "g", "beta", "chunk_size"),
    *("initial_state", "output_final_state", "use_qk_l2norm_in_kernel"),
)
COUNTERPARTS: Mapping[str, Counterpart] = {
    "causal_conv1d_fn": Counterpart(("hidden_states", "weight", "bias", "activation"), _causal_conv1d, _conv_sample),
    "chunk_gated_delta_rule": Counterpart(_DELTA_RULE, _delta_rule, _delta_sample),
    "chunk_kda": Counterpart(_DELTA_RULE, _delta_rule, functools.partial(_delta_sample, per_channel=True)),
    "mamba_chunk_scan_combined": Counterpart(
        (
            *("hidden_states", "dt", "A", "B", "C", "chunk_size", "D", "dt_bias"),
            *("initial_states", "dt_softplus", "dt_limit", "return_final_states"),
        ),
        _state_space_dual,
        _dual_sample,
    ),
    "selective_scan_fn": Counterpart(
        (
            *("hidden_states", "dt", "A", "B", "C", "D", "z", "delta_bias", "delta_softplus"),
            *("return_last_state", "use_mambapy", "use_associative_scan"),
        ),
        _selective_scan,
        _scan_sample,
    ),
}
"""By the names that kernel packages know. Their other functions are called in training or with a cache only."""
