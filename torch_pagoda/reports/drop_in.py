"""Graph breaks and recompiles of a model under ``torch.compile``."""

from __future__ import annotations

import copy
import itertools
import logging
import types
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn
from torch._dynamo.utils import counters

log = logging.getLogger(__name__)

_calls = itertools.count()
_PER_TOKEN = ("input_ids", "attention_mask", "position_ids", "token_type_ids")


@dataclass(frozen=True)
class DropIn:
    """Dynamo's graphs and graph breaks for a model.

    Attributes:
        observed: counted on example inputs; else inferred from the capture as one graph, which has no breaks.
        graphs: graphs that the first call compiled.
        graph_breaks: points at which Dynamo fell back to Python.
        reasons: one line per break.
        recompiles: graphs compiled after the first call, on the same inputs and on longer ones.
    """

    observed: bool
    graphs: int
    graph_breaks: int
    reasons: tuple[str, ...]
    recompiles: int


CAPTURED_WHOLE = DropIn(observed=False, graphs=1, graph_breaks=0, reasons=(), recompiles=0)


def observe(model: nn.Module, example: Mapping[str, Any] | Sequence[Any] | torch.Tensor) -> DropIn:
    """Call ``model`` under ``torch.compile`` and count: on the example twice, then one and two tokens longer.

    The graphs run eagerly, without any backend.

    Args:
        model: in eval mode.
        example: keyword arguments, positional arguments, or the one positional argument.

    Raises:
        TypeError: the example has another type.
        ValueError: the model fails on the example.
    """
    arguments, keywords = _as_call(example)
    compiled: list[fx.GraphModule] = []

    def backend(gm: fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        compiled.append(gm)
        return gm.forward

    def call(*args: Any, **kwargs: Any) -> Any:
        return model(*args, **kwargs)

    # Dynamo counts recompiles per code object, and remembers by name which of its sizes vary: a new one each time.
    code = call.__code__.replace(co_name=f"call_{next(_calls)}")
    fresh = types.FunctionType(code, call.__globals__, "call", None, call.__closure__)
    run = torch.compile(fresh, backend=backend)
    before = Counter(counters["graph_break"])
    try:
        with torch.no_grad():
            given, named = _inputs(arguments, keywords, extra=0)
            run(*given, **named)
    except Exception as error:
        raise ValueError(f"{type(model).__name__} fails on the example: {error}") from error
    breaks = Counter(counters["graph_break"]) - before
    first = len(compiled)
    for extra in (0, 1, 2):
        given, named = _inputs(arguments, keywords, extra)
        try:
            with torch.no_grad():
                run(*given, **named)
        except Exception as error:  # a static cache that is full, for instance
            log.info("skipped the call with %d more tokens: %s", extra, error)
            break
    reasons = tuple(" ".join(str(reason).split())[:200] for reason in breaks)
    return DropIn(True, first, sum(breaks.values()), reasons, len(compiled) - first)


def _as_call(example: Any) -> tuple[list[Any], dict[str, Any]]:
    if isinstance(example, Mapping):
        return [], dict(example)
    if isinstance(example, torch.Tensor):
        return [example], {}
    if isinstance(example, list | tuple):
        return list(example), {}
    raise TypeError(f"example is a {type(example).__name__}; pass a dict of inputs, a tuple, or a tensor")


def _inputs(arguments: Sequence[Any], keywords: Mapping[str, Any], extra: int) -> tuple[list[Any], dict[str, Any]]:
    """A copy of the inputs with ``extra`` more tokens; its tensors share no memory."""
    given = [_longer(a, extra, isinstance(a, torch.Tensor) and not a.is_floating_point()) for a in arguments]
    named = {k: _longer(v, extra, k in _PER_TOKEN, positions=k == "position_ids") for k, v in keywords.items()}
    return given, named


def _longer(argument: Any, extra: int, per_token: bool, positions: bool = False) -> Any:
    """A copy with ``extra`` more columns, if the argument has one column per token."""
    if not per_token or not isinstance(argument, torch.Tensor) or argument.dim() != 2:
        return copy.deepcopy(argument)
    column = argument[:, -1:]
    added = [column + i + 1 if positions else column for i in range(extra)]
    return torch.cat([argument, *added], dim=1)
