"""Traces functions of kernel packages in transformers as operators with state.

transformers names its convolutions and recurrences as ``causal_conv1d``, ``fla`` and ``mamba_ssm`` do, and implements
them with these packages or its own loops over chunks (``use_kernel_func_from_hub_with_fallback``). A loop would be
unrolled for the traced number of tokens, so it is not traced: during capture, the model's modules see our
counterparts under these names. First, each of transformers' functions is compared with its counterpart on random
numbers; a modified one is rejected.
"""

from __future__ import annotations

import functools
import inspect
import sys
import threading
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from ...passes import UnsupportedModel
from ..report import first_line
from .kernel_counterparts import COUNTERPARTS, Counterpart

_LENGTHS = (7, 65)
"""Tokens of the comparison: within a chunk of 64, and beyond."""
_TOLERANCE = 1e-3
"""Of the comparison in float32, beside the standard deviation of what the function yields."""
_lock = threading.RLock()


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
    return any(name in COUNTERPARTS for name, _ in _functions_of(model_class.__module__).values())


def _functions_of(place: str) -> dict[str, tuple[str, Callable[..., Any]]]:
    """The kernel functions among the globals of a Python module."""
    found: dict[str, tuple[str, Callable[..., Any]]] = {}
    module = sys.modules.get(place)  # a class may say that it comes from elsewhere
    for key, function in list(vars(module).items()) if module is not None else ():
        if not isinstance(function, types.FunctionType):
            continue
        name, own = _offered(function)
        if not name and key in COUNTERPARTS:  # lfm3's own copy has no decorator
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
    known = COUNTERPARTS.get(name)
    if known is None:
        return _never_called(name)
    named = [p for p in inspect.signature(own).parameters.values() if p.kind is not p.VAR_KEYWORD]
    if tuple(p.name for p in named) != known.parameters:
        raise UnsupportedModel(
            f"transformers' {name} in {own.__module__} takes ({', '.join(p.name for p in named)}), not "
            f"({', '.join(known.parameters)}); use a tested version of transformers"
        )
    if reason := _difference(known, own):
        raise UnsupportedModel(
            f"transformers' {name} in {own.__module__} does not compute what its name says: {reason}; use a "
            "tested version of transformers"
        )
    return known.traced


def _never_called(name: str) -> Callable[..., Any]:
    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError(f"{name} is not supported in a graph without a cache")

    return refuse


@functools.lru_cache(maxsize=256)
def _difference(known: Counterpart, own: Callable[..., Any]) -> str:
    """The way in which transformers' own function differs from what is traced in its place; "" if it does not."""
    for length in _LENGTHS:
        arguments = known.sample(length)
        try:
            with torch.no_grad():
                expected = _first(own(**arguments))
        except Exception as error:
            return f"it fails at {length} tokens: {first_line(error)}"
        got = _first(known.traced(**arguments))
        if got.shape != expected.shape or got.dtype is not expected.dtype:
            return (
                f"at {length} tokens it returns {tuple(expected.shape)} {expected.dtype}, "
                f"not {tuple(got.shape)} {got.dtype}"
            )
        distance = float((got.double() - expected.double()).abs().max() / expected.double().std())
        if not distance <= _TOLERANCE:
            return f"at {length} tokens it differs by {distance:.3g} standard deviations"
    return ""


def _first(result: Any) -> torch.Tensor:
    tensor: torch.Tensor = result[0] if isinstance(result, tuple) else result
    return tensor
