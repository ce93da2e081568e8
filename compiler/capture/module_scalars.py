"""Makes constants of numbers that ``torch.compile(dynamic=True)`` turns into graph inputs."""

from __future__ import annotations

from torch import fx
from torch._dynamo.exc import TensorifyScalarRestartAnalysis
from torch._dynamo.symbolic_convert import TensorifyState

from ...passes.graph.fx_nodes import value


def recover_module_scalars(gm: fx.GraphModule) -> None:
    """Have Dynamo retrace if floats of modules are graph inputs; then they become constants.

    With ``dynamic=True`` every Python float is a graph input, including an RMSNorm's eps and an attention's scale,
    which passes need to know. A module's attribute hardly ever changes, and Dynamo guards the constant: a change
    recompiles the graph. Floats that the caller passes, such as a temperature, stay inputs.

    PyTorch itself specializes floats that it cannot turn into tensors in this way, only later: AOTAutograd would
    request the restart after the passes have run.

    Args:
        gm: Dynamo's graph.

    Raises:
        TensorifyScalarRestartAnalysis: there are such inputs; Dynamo catches it.
    """
    found = [symbol for node in gm.graph.find_nodes(op="placeholder") if (symbol := _module_scalar(node))]
    fresh = [symbol for symbol in found if not TensorifyState.should_specialize(symbol)]
    if fresh:
        for symbol in fresh:
            TensorifyState.specialize(symbol)
        raise TensorifyScalarRestartAnalysis


def _module_scalar(node: fx.Node) -> str:
    """The symbol of a float that an ``nn.Module`` owns, or ""."""
    item = getattr(value(node), "item_memo", None)
    source = getattr(node.meta.get("grapharg"), "source", None)
    if item is None or source is None:
        return ""
    guard_source = source.guard_source
    owned = guard_source.is_specialized_nn_module() or guard_source.is_unspecialized_nn_module()
    # The symbol, not what it may have been replaced by: Dynamo looks it up by its name.
    return getattr(item.node._expr, "name", "") if owned else ""
