"""Handles torch functions that a program has replaced, in Dynamo's graphs.

Dynamo traces through a replacement down to the original function. But a graph calls torch's functions by name, and
some look themselves up by name: at run time the program's replacement would be called again.
"""

from __future__ import annotations

import functools
import sys
import types
from collections.abc import Callable
from typing import Any

import torch
from torch import fx
from torch._dynamo.exc import TensorifyScalarRestartAnalysis
from torch._dynamo.trace_rules import get_torch_obj_rule_map

from ..live_module.framework import is_framework

_FUNCTIONS = (types.FunctionType, types.BuiltinFunctionType)


def trace_exchanged() -> None:
    """Have Dynamo trace the program's functions that it mistakes for torch's.

    Dynamo listed torch's functions while the program's had replaced them.
    """
    rules = get_torch_obj_rule_map()
    for function in [item for item in rules if _is_a_programs(item)]:
        rule = rules.pop(function)
        for name in [name for name, item in vars(torch).items() if item is function]:
            if hasattr(torch._C._VariableFunctions, name):
                rules.setdefault(getattr(torch._C._VariableFunctions, name), rule)


def keep_exchanged(gm: fx.GraphModule) -> None:
    """Have a graph call the original functions that Dynamo recorded, even where the program has replaced them.

    Args:
        gm: Dynamo's graph; it is edited.

    Raises:
        TensorifyScalarRestartAnalysis: the graph calls a function that ``trace_exchanged`` has Dynamo trace now; it
            catches this and begins anew.
    """
    calls = [node for node in gm.graph.nodes if node.op == "call_function" and isinstance(node.target, _FUNCTIONS)]
    rules = get_torch_obj_rule_map()
    if any(node.target in rules and _is_a_programs(node.target) for node in calls):
        trace_exchanged()
        raise TensorifyScalarRestartAnalysis
    exchanged = [node for node in calls if _is_exchanged(node.target)]
    for node in exchanged:
        node.target = _found(node.target)
    if exchanged:
        gm.recompile()


def _is_exchanged(target: Any) -> bool:
    place, name = getattr(target, "__module__", None), getattr(target, "__name__", "")
    if not str(place).startswith("torch"):
        return False
    return vars(sys.modules[place]).get(name, target) is not target if place in sys.modules else False


def _is_a_programs(function: Any) -> bool:
    """Whether a function is written in a file of the program's, whatever it says of itself."""
    home = str(getattr(function, "__globals__", {}).get("__name__", "torch"))
    return not is_framework(home) and home != "typing_extensions"  # which marks torch's as deprecated


@functools.cache
def _found(target: Callable[..., Any]) -> Callable[..., Any]:
    """The function under no name that anything else has."""
    own = _copy(target) if isinstance(target, types.FunctionType) else _calling(target)
    own.__module__, own.__qualname__ = __name__, f"exchanged_{target.__name__}"
    return own


def _copy(function: types.FunctionType) -> types.FunctionType:
    """A function that is itself where its code names it."""
    space = dict(function.__globals__)
    own = types.FunctionType(function.__code__, space, function.__name__, function.__defaults__, function.__closure__)
    own.__kwdefaults__ = function.__kwdefaults__
    space[function.__name__] = own
    return own


def _calling(function: Callable[..., Any]) -> Callable[..., Any]:
    def own(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    own.__name__ = function.__name__
    return own
