"""The functions that transformers offers to kernel packages, traced as operators that a graph can keep state for.

transformers names its convolutions and recurrences as ``causal_conv1d``, ``fla`` and ``mamba_ssm`` do, and lets these
packages, or its own loops over chunks, stand behind the names (``use_kernel_func_from_hub_with_fallback``). A loop is
unrolled for the number of tokens that a graph is traced with, so the loops are not traced: while a model is captured,
its modules see operators of ours under these names. Before that, each function of theirs is compared with the
operator, on random numbers: nothing is said about a function that was changed.
"""

from __future__ import annotations

import functools
import inspect
import sys
import threading
import types
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from ...passes import UnsupportedModel
from ...runtime.ops.causal_conv1d import causal_conv1d_seq
from ...runtime.ops.linear_recurrence import linear_recurrence_seq
from ...runtime.ops.selective_scan import selective_scan_seq

_LENGTHS = (7, 65)
"""Tokens of the comparison: within a chunk of 64, and beyond."""
_TOLERANCE = 1e-3
"""Of the comparison in float32, beside the standard deviation of what the function yields."""
_L2NORM_EPS = 1e-6
_lock = threading.RLock()


@dataclass(frozen=True)
class KernelFunction:
    """A function that models call under a name that kernel packages know.

    Attributes:
        parameters: names of transformers' own function's parameters, in order, without ``**kwargs``.
        traced: what is traced in its place; None: it is called in training or with a cache only.
        sample: its arguments for a sequence of so many tokens.
    """

    parameters: tuple[str, ...]
    traced: Callable[..., Any] | None = None
    sample: Callable[[int], dict[str, Any]] | None = None


def kernel_functions(model: nn.Module) -> dict[tuple[str, str], tuple[str, Callable[..., Any]]]:
    """The kernel functions that the modules of a model can call.

    Args:
        model: its modules' Python modules are looked through.

    Returns:
        Python module and name in it → name that kernel packages know, and transformers' own function.
    """
    places = sorted({type(module).__module__ for module in model.modules()})
    return {(place, key): found for place in places for key, found in _functions_of(place).items()}


def has_kernel_functions(model_class: type) -> bool:
    """True if the Python module of a class has functions of convolutions or recurrences that can be traced."""
    names = [name for name, _ in _functions_of(model_class.__module__).values()]
    return any(KERNEL_FUNCTIONS[name].traced is not None for name in names if name in KERNEL_FUNCTIONS)


def _functions_of(place: str) -> dict[str, tuple[str, Callable[..., Any]]]:
    """The kernel functions among the globals of a Python module."""
    found = {}
    for key, function in list(vars(sys.modules[place]).items()):
        if not isinstance(function, types.FunctionType):
            continue
        name, own = _offered(function)
        if not name and key in _UNDECORATED:
            name, own = key, function
        if name:
            found[key] = name, own
    return found


@contextmanager
def operators_in_place_of_kernels(model: nn.Module) -> Iterator[None]:
    """Let the modules of a model see operators under the names of kernel functions.

    Raises:
        UnsupportedModel: a function has other parameters than are known here, or yields other numbers than the
            operator.
    """
    with _lock:
        found = kernel_functions(model)
        placed = {place: _replacement(name, own) for place, (name, own) in found.items()}
        before: list[tuple[dict[str, Any], str, Any]] = []
        try:
            for (module, key), replacement in placed.items():
                namespace = vars(sys.modules[module])
                before.append((namespace, key, namespace[key]))
                namespace[key] = replacement
            yield
        finally:
            for namespace, key, function in before:
                namespace[key] = function


def _offered(function: types.FunctionType) -> tuple[str, Any]:
    """The name under which transformers offers a function to kernel packages, and its own function behind the name.

    The decorator's closure has both; ("", None) for any other function.
    """
    seen: set[int] = set()
    pending: list[Any] = [function]
    while pending:
        current = pending.pop()
        if not isinstance(current, types.FunctionType) or id(current) in seen:
            continue
        seen.add(id(current))
        cells = zip(current.__code__.co_freevars, current.__closure__ or (), strict=True)
        held = {name: cell.cell_contents for name, cell in cells if _is_set(cell)}
        if isinstance(held.get("func_name"), str) and isinstance(held.get("torch_function"), types.FunctionType):
            return held["func_name"], held["torch_function"]
        pending += held.values()
    return "", None


def _is_set(cell: types.CellType) -> bool:
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:
        return False
    return True


def _replacement(name: str, own: Callable[..., Any]) -> Callable[..., Any]:
    known = KERNEL_FUNCTIONS.get(name)
    if known is None:
        return _never_called(name)
    if known.traced is None or known.sample is None:
        return _never_called(name)
    named = [p for p in inspect.signature(own).parameters.values() if p.kind is not p.VAR_KEYWORD]
    if tuple(p.name for p in named) != known.parameters:
        raise UnsupportedModel(
            f"transformers' {name} in {own.__module__} takes ({', '.join(p.name for p in named)}), not "
            f"({', '.join(known.parameters)}); use a version of transformers that was tested"
        )
    _compare(name, own)
    return known.traced


def _never_called(name: str) -> Callable[..., Any]:
    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError(f"{name} has no counterpart in a graph without a cache")

    return refuse


@functools.lru_cache(maxsize=256)
def _compare(name: str, own: Callable[..., Any]) -> None:
    """Compare transformers' own function with what is traced in its place.

    Raises:
        UnsupportedModel: they differ.
    """
    known = KERNEL_FUNCTIONS[name]
    assert known.traced is not None and known.sample is not None
    for length in _LENGTHS:
        arguments = known.sample(length)
        with torch.no_grad():
            expected, got = _first(own(**arguments)), _first(known.traced(**arguments))
        error = float((got.double() - expected.double()).abs().max() / expected.double().std())
        if got.shape != expected.shape or got.dtype is not expected.dtype or not error <= _TOLERANCE:
            raise UnsupportedModel(
                f"transformers' {name} in {own.__module__} does not compute what its name says: at {length} tokens "
                f"it differs by {error:.3g} standard deviations; use a version of transformers that was tested"
            )


def _first(result: Any) -> torch.Tensor:
    tensor: torch.Tensor = result[0] if isinstance(result, tuple) else result
    return tensor


def _refuse(name: str, **given: Any) -> None:
    for argument, value in given.items():
        if value is not None and value is not False:
            raise NotImplementedError(f"{name} with {argument} has no counterpart in a flat step")


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
KERNEL_FUNCTIONS: Mapping[str, KernelFunction] = {
    "causal_conv1d_fn": KernelFunction(
        ("hidden_states", "weight", "bias", "activation"), _causal_conv1d, _conv_sample
    ),
    "chunk_gated_delta_rule": KernelFunction(_DELTA_RULE, _delta_rule, _delta_sample),
    "chunk_kda": KernelFunction(_DELTA_RULE, _delta_rule, functools.partial(_delta_sample, per_channel=True)),
    "mamba_chunk_scan_combined": KernelFunction(
        (
            *("hidden_states", "dt", "A", "B", "C", "chunk_size", "D", "dt_bias"),
            *("initial_states", "dt_softplus", "dt_limit", "return_final_states"),
        ),
        _state_space_dual,
        _dual_sample,
    ),
    "selective_scan_fn": KernelFunction(
        (
            *("hidden_states", "dt", "A", "B", "C", "D", "z", "delta_bias", "delta_softplus"),
            *("return_last_state", "use_mambapy", "use_associative_scan"),
        ),
        _selective_scan,
        _scan_sample,
    ),
    "causal_conv1d_update": KernelFunction(()),
    "fused_recurrent_gated_delta_rule": KernelFunction(()),
    "fused_recurrent_kda": KernelFunction(()),
    "mamba_inner_fn": KernelFunction(()),
    "mamba_split_conv1d_scan_combined": KernelFunction(()),
    "selective_state_update": KernelFunction(()),
}
"""By the names that kernel packages know."""
_UNDECORATED = frozenset(name for name, known in KERNEL_FUNCTIONS.items() if known.traced is not None)
"""Names that are taken without transformers' decorator too, as lfm3's own copy has one."""
