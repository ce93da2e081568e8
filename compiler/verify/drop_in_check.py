"""The comparison of what the drop-in backend makes of a graph with the graph, on the call that it is compiled for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensor

from ...passes.graph.fx_nodes import storage_key, written_arguments
from ..tolerance import HALF, ROUNDINGS, TOLERANCE, judged_share, routes_tokens, row_errors, typical
from .float32_run import Float32Graph


def difference(
    original: fx.GraphModule, rewritten: fx.GraphModule, inputs: Sequence[Any], added: Sequence[Any] = ()
) -> str:
    """The difference of two graphs in what they yield and in what they write into their inputs, in words, or "".

    Half precision is judged twice: both graphs in float32, where every row has to be right; and as it is, within the
    rounding that the original shows against itself in float32. There, where tokens are routed, half of the rows may
    differ more: routers flip on ties. On other devices than a CPU it is judged as it is only, by constants.

    Args:
        original: as Dynamo or AOTAutograd made it.
        rewritten: what passes made of it.
        inputs: of the call; nothing of them is changed. Where one is fake, nothing is compared.
        added: further inputs of the rewritten graph.
    """
    if any(isinstance(x, FakeTensor) for x in inputs):
        return ""
    written = _written_inputs(original) | _written_inputs(rewritten)
    inputs = [x.detach() if isinstance(x, nn.Parameter) and i in written else x for i, x in enumerate(inputs)]
    tensors = [x for x in inputs if isinstance(x, torch.Tensor)]
    routed = routes_tokens(original.graph)
    expected = _run(original, inputs)
    if not any(x.dtype in HALF for x in tensors) or any(x.device.type != "cpu" for x in tensors):
        return _judge(expected, _run(rewritten, inputs, added), None, routed)
    exact = _run(original, inputs, wide=True)
    reason = _judge(exact, _run(rewritten, inputs, added, wide=True), TOLERANCE[torch.float32], False)
    if reason:
        return f"in float32 {reason}"
    rounding = max((typical(_row_errors(a, b), 0.9) for a, b in zip(exact, expected, strict=True)), default=0.0)
    return _judge(expected, _run(rewritten, inputs, added), ROUNDINGS * rounding, routed)


def _run(
    graph: fx.GraphModule, inputs: Sequence[Any], added: Sequence[Any] = (), *, wide: bool = False
) -> list[torch.Tensor]:
    """All floating-point numbers that a graph yields and that its inputs, but for parameters, hold behind it.

    Args:
        graph: it.
        inputs: parameters are given as they are, so that large ones are not copied; none may be written into.
        added: further inputs.
        wide: compute in float32.
    """
    given = [_fresh(x, wide) for x in inputs]
    run = Float32Graph(graph, ()) if wide else graph
    with torch.no_grad():
        yielded = run(*given, *added)
    written = [x for x in given if not isinstance(x, nn.Parameter)]
    return [x for x in (*yielded, *written) if isinstance(x, torch.Tensor) and x.is_floating_point() and x.numel()]


def _written_inputs(graph: fx.GraphModule) -> set[int]:
    """The inputs, by position, that the graph writes into itself or by an alias."""
    keys = {storage_key(written) for node in graph.graph.nodes for written in written_arguments(node)}
    placeholders = [node for node in graph.graph.nodes if node.op == "placeholder"]
    return {i for i, node in enumerate(placeholders) if storage_key(node) in keys - {None}}


def _fresh(x: Any, wide: bool) -> Any:
    """An input whose in-place writes the caller does not see; sizes without new guards."""
    if isinstance(x, torch.SymInt):
        return x.node.hint
    if isinstance(x, torch.Tensor) and not isinstance(x, nn.Parameter):
        fresh = x.detach().clone()
        return fresh.float() if wide and fresh.dtype in HALF else fresh
    return x


def _judge(
    expected: Sequence[torch.Tensor], found: Sequence[torch.Tensor], tolerance: float | None, routed: bool
) -> str:
    for a, b in zip(expected, found, strict=True):
        limit = TOLERANCE.get(a.dtype, 0.3) if tolerance is None else tolerance
        share = 1.0 if not routed else judged_share(a.dtype) if tolerance is None else 0.5
        error = typical(_row_errors(a, b), share)
        if error > limit:
            return f"its outputs differ by {error:.3g} standard deviations (limit {limit:.3g})"
    return ""


def _row_errors(expected: torch.Tensor, found: torch.Tensor) -> list[float]:
    """The largest difference in each row, in standard deviations of the tensor: rows of caches and masks may hold one
    number throughout. Tensors that are the same have none, as a mask of infinities that nobody writes into."""
    a, b = expected.float(), found.float()
    if torch.equal(a, b):
        return [0.0]
    spread = a.std().clamp_min(1e-6) if a.numel() > 1 else a.abs().clamp_min(1e-6)
    width = a.shape[-1] if a.dim() else 1
    errors: list[float] = row_errors(b.reshape(-1, width), a.reshape(-1, width), spread.reshape(())).tolist()
    return errors
