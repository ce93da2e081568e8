"""Trace a causal LM once, as one flat step of T tokens without a cache."""

from __future__ import annotations

import logging
import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import sympy
import torch
from torch import fx, nn
from torch._guards import TracingContext
from torch._subclasses.fake_tensor import FakeTensor

from ...passes.graph.fx_nodes import callee, shape, value
from ...passes.graph.traced import TracedGraph, UnsupportedModel
from ...runtime.phases import phase
from ...runtime.step_metadata import PREVIOUS_HIDDEN
from ..report import first_line
from .dynamic_rope import plain_rope, rope_types
from .exchanged_functions import keep_exchanged, trace_exchanged
from .kernel_functions import operators_in_place_of_kernels
from .model_facts import configs, max_positions, takes_hidden, takes_positions
from .plain_buffers import plain_buffers
from .recurrent_modules import operators_in_place_of_loops
from .stored_parameters import placeholders_for_stored

if TYPE_CHECKING:
    from .layer_repeat import LayerRepeat

SHORTEST_TRACE = 40
_LONGEST_ASKED = 1 << 20
_FACTORS = (2, 3, 5, 16, 101, 1024)
_LOGGING = {getattr(logging.Logger, level) for level in ("debug", "info", "warning", "error")}


@dataclass
class Captured:
    """A traced model.

    Attributes:
        traced: the graph, with parameters as inputs.
        context: the tracing context that code generation has to run in.
        repeat: how the decoder layers that were traced stand for the others; None: all were traced.
    """

    traced: TracedGraph
    context: TracingContext
    repeat: LayerRepeat | None = None


class _Stop(Exception):
    """Raised instead of running the traced graph: capturing must not execute the model."""


@phase("capture")
def capture(model: nn.Module) -> Captured:
    """Trace ``model(input_ids[1, T], position_ids[1, T], use_cache=False).logits`` with T dynamic; of a model that
    takes hidden rows (``takes_hidden``), with ``previous_hidden[1, T, hidden_size]``.

    T stands above every window of the model while tracing, so that no branch for short inputs is taken; the graph
    is then driven directly and never meets Dynamo's guards.

    Raises:
        UnsupportedModel: Dynamo cannot trace it into one graph, or it yields no logits per token.
    """
    caught: dict[str, Any] = {}

    def backend(gm: fx.GraphModule, example_inputs: list[Any]) -> Callable[..., Any]:
        keep_exchanged(gm)
        caught.update(gm=gm, inputs=list(example_inputs), context=TracingContext.get())

        def stop(*args: Any) -> Any:
            raise _Stop

        return stop

    has_positions = takes_positions(model)
    tokens = trace_length(model)
    device = next(model.parameters()).device
    input_ids, positions = first_tokens(tokens, device)
    torch._dynamo.mark_dynamic(input_ids, 1)
    torch._dynamo.mark_dynamic(positions, 1)
    rows = _first_rows(model, tokens, device)
    if rows is not None:
        torch._dynamo.mark_dynamic(rows, 1)
    step = _step_function(model, has_positions)
    trace_exchanged()
    try:
        with (
            operators_in_place_of_kernels(model),
            operators_in_place_of_loops(model),
            plain_buffers(model),
            plain_rope(model),
            torch._dynamo.config.patch(specialize_float=True, ignore_logging_functions=_LOGGING),
            torch.no_grad(),
            placeholders_for_stored(model) as standing,
        ):
            torch.compile(step, backend=backend, fullgraph=True, dynamic=True)(input_ids, positions, rows)
    except _Stop:
        pass
    except UnsupportedModel:
        raise
    except Exception as error:
        raise UnsupportedModel(
            f"{type(model).__name__} cannot be traced into one graph: {first_line(error)}{_of_rope(model)}"
        ) from error
    if "gm" not in caught:
        raise UnsupportedModel(f"{type(model).__name__} has no operators to trace")
    inputs = [standing.get(id(given), given) for given in caught["inputs"]]
    traced = _traced_graph(model, caught["gm"], inputs, input_ids, positions, rows)

    def run(length: int) -> None:
        step(*first_tokens(length, device), _first_rows(model, length, device))

    _check_guards(model, traced, tokens, run)
    # Dynamo hands backends a context with a fresh fake mode; the recorded values belong to the one it traced with.
    caught["context"].fake_mode = traced.fake_mode
    return Captured(traced, caught["context"])


def _of_rope(model: nn.Module) -> str:
    """What to try where a rotary table may be why a model cannot be traced."""
    kinds = list(dict.fromkeys(kind for config in configs(model) for kind in rope_types(config)))
    if not kinds:
        return ""
    stated = ", ".join(map(repr, kinds))
    return (
        f" (its config's rope_type is {stated}: if its table depends on the sequence length, remove rope_scaling "
        "from config.json for sequences of the original length)"
    )


def trace_length(model: nn.Module) -> int:
    """Number of tokens to trace at: above every window and chunk, and below the positions that the model has: a table
    has as many rows, and a slice of all of them would be taken for the table."""
    longest = SHORTEST_TRACE
    limit = max_positions(model)
    for config in configs(model):
        for name in ("sliding_window", "attention_chunk_size", "window_size", "local_attention"):
            size = getattr(config, name, None)
            if isinstance(size, int) and not isinstance(size, bool):
                longest = max(longest, 2 * size + 9)
    return max(4, min(longest, limit - 1)) if limit else longest


def _step_function(model: nn.Module, has_positions: bool) -> Callable[..., torch.Tensor]:
    def step(input_ids: torch.Tensor, position_ids: torch.Tensor, rows: torch.Tensor | None) -> torch.Tensor:
        torch._check(input_ids.shape[1] == position_ids.shape[1])  # one symbol for both
        if rows is not None:
            torch._check(input_ids.shape[1] == rows.shape[1])
            output = model(input_ids=input_ids, position_ids=position_ids, previous_hidden=rows)
        elif has_positions:
            output = model(input_ids=input_ids, position_ids=position_ids, use_cache=False, return_dict=True)
        else:
            output = model(input_ids=input_ids, use_cache=False, return_dict=True)
        # The clone marks which of the graph's outputs the logits are.
        return output.logits.clone()

    # Dynamo counts recompiles per code object; every capture gets its own.
    return types.FunctionType(step.__code__.replace(), step.__globals__, "step", None, step.__closure__)


def _traced_graph(
    model: nn.Module,
    gm: fx.GraphModule,
    inputs: list[Any],
    input_ids: torch.Tensor,
    positions: torch.Tensor,
    rows: torch.Tensor | None,
) -> TracedGraph:
    fake_mode = next(value(n).fake_mode for n in gm.graph.nodes if isinstance(value(n), FakeTensor))
    traced = TracedGraph(gm, fake_mode, {}, max_positions=max_positions(model))
    for node, given in zip(traced.placeholders, inputs, strict=True):
        if given is input_ids:
            traced.input_ids = node.name
        elif given is positions:
            traced.position_ids = node.name
        elif given is rows and rows is not None:
            traced.take_step_input(node, PREVIOUS_HIDDEN)
        elif isinstance(given, torch.Tensor):
            traced.constants[node.name] = given
    if not traced.input_ids:
        raise UnsupportedModel(f"{type(model).__name__} does not read input_ids")
    logits = [n for n in traced.output.args[0] if callee(n) == "clone"]  # type: ignore[union-attr]
    if len(logits) != 1 or len(shape(logits[0])) != 3:
        shapes = [tuple(shape(n)) for n in logits]
        raise UnsupportedModel(
            f"{type(model).__name__} returns logits of shapes {shapes} instead of one [1, T, vocab]"
        )
    clone = logits[0]
    traced.output.args = ((clone.args[0],),)
    return traced


def first_tokens(length: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids and positions ``[1, length]`` of a sequence."""
    ids = torch.ones(1, length, dtype=torch.int64, device=device)
    return ids, torch.arange(length, device=device)[None]


def _first_rows(model: nn.Module, length: int, device: torch.device) -> torch.Tensor | None:
    """Hidden rows ``[1, length, hidden_size]`` of a sequence; None for a model that takes none."""
    if not takes_hidden(model):
        return None
    (config, *_) = configs(model)
    dtype = next(p.dtype for p in model.parameters() if p.is_floating_point())
    return torch.ones(1, length, config.hidden_size, dtype=dtype, device=device)


def _check_guards(model: nn.Module, traced: TracedGraph, tokens: int, run: Callable[[int], object]) -> None:
    """Refuse a graph that holds for some numbers of tokens only, such as a loop over chunks that was unrolled for as
    many as were traced.

    Looked at are lengths above the traced one within the model's positions: what holds below is another branch, which
    a program that is driven directly never takes. Where the model itself fails at such a length, as at the end of a
    table of positions that no config tells, the guard only says so.

    Args:
        model: it.
        traced: its graph.
        tokens: number of tokens that it was traced with.
        run: runs the model on so many tokens.

    Raises:
        UnsupportedModel: a guard of the tracer is false at one of them.
    """
    shapes = traced.fake_mode.shape_env
    if shapes is None:
        return
    limit = traced.max_positions or _LONGEST_ASKED
    longer = {tokens + 1, limit - 1, *(factor * tokens + extra for factor in _FACTORS for extra in (0, 1))}
    for guard in shapes.guards:
        if guard.expr.free_symbols != {traced.token_symbol}:
            continue
        for length in sorted(n for n in longer if tokens < n < limit):
            if guard.expr.subs({traced.token_symbol: length}) == sympy.false and _succeeds(run, length):
                raise UnsupportedModel(
                    f"{type(model).__name__} takes another path at {length} tokens than at the traced {tokens} "
                    f"({guard.expr} is false there); one graph cannot represent both"
                )


def _succeeds(run: Callable[[int], object], length: int) -> bool:
    try:
        with torch.no_grad():
            run(length)
    except Exception:
        return False
    return True
