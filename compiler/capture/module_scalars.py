"""Make constants of the numbers that ``torch.compile(dynamic=True)`` turns into graph inputs."""

from __future__ import annotations

from torch import fx
from torch._dynamo.exc import TensorifyScalarRestartAnalysis
from torch._dynamo.symbolic_convert import TensorifyState

from ...passes.graph.fx_nodes import value


def recover_module_scalars(gm: fx.GraphModule) -> None:
    """Have Dynamo trace anew if floats that modules own came as graph inputs; they are constants then.

    With ``dynamic=True`` every Python float is a graph input, an RMSNorm's eps and an attention's scale too, and no
    pass could tell what they are. A module's attribute hardly ever changes, and Dynamo guards the constant: if it
    does change, the graph is compiled again. Floats that the caller passes, such as a temperature, stay inputs.

    This is how PyTorch itself specializes the floats that it cannot turn into tensors, only earlier: otherwise
    AOTAutograd asks for the same restart after the passes have run.

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
