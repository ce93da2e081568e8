"""Converts a lowered graph to GE with the real torchair, on a machine without a device.

Torchair's backend is called directly, as the runtime does, not through ``torch.compile``: ``backend(module, values)``
inside a ``TracingContext``, where the values are fake tensors, with symbols for dynamic sizes, and SymInts. Torchair
runs AOTAutograd on the module once more, with no decompositions. That makes in-place operators functional
(``npu_scatter_pa_kv_cache`` → ``npu_scatter_pa_kv_cache_functional`` and a ``copy_`` of the result to the input), the
form that torchair's converters and its removal of copies start from, and leaves everything else as it is. A graph
that holds the functional form and the ``copy_`` already converts to the same.

Integers need symbols of their own, as Dynamo makes them for ``dynamic=True``: AOTAutograd treats a plain 0 or 1 as a
constant and merges two equal integers. Dynamo only adds guards to this; the GE graph is the same.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch._dynamo.source import LocalSource
from torch._guards import TracingContext, detect_fake_mode, tracing
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

from ...compiler.targets.npu.ge.converters import registered_converters
from ...compiler.targets.npu.ge.scheduled import WriteRowsAndSchedule
from ...compiler.targets.npu.in_place import write_rows_in_place
from ...compiler.targets.npu.without_device import is_offline, without_device
from .ge_graph import GeGraph
from .ge_reader import read_graph

_ORIGIN = "pagoda_node"
_EXECUTING = re.compile(r"While executing %(\w+) :.*?target=(\S+?)\]")


class ConversionError(RuntimeError):
    """A node of the graph has no GE form, or its converter rejects it.

    Attributes:
        node: name of the node in the original graph; "" if no single one is at fault.
        operator: its operator.
        reason: message of torchair, or of the operator's meta function.
    """

    def __init__(self, node: str, operator: str, reason: str) -> None:
        what = f"node {node} ({operator})" if node else "the graph"
        super().__init__(f"cannot convert {what} to GE: {reason}")
        self.node, self.operator, self.reason = node, operator, reason


@dataclass(frozen=True)
class Conversion:
    """The result of a conversion by torchair.

    Attributes:
        graph: the GE graph, after torchair's passes.
        run: function of the module's inputs, lists of integers included, that runs the converted operators on the CPU
            and writes to the inputs what the graph writes in place. It shows that the operators' numbers are right,
            not that the GE graph's are.
    """

    graph: GeGraph
    run: Callable[..., Sequence[Any]]


def convert(
    module: fx.GraphModule,
    inputs: Sequence[Any],
    *,
    soc: str = "Ascend910B3",
    dynamic: bool = True,
    own_converters: bool = True,
    fusions: bool = False,
) -> GeGraph:
    """The GE graph of ``module``; arguments and errors as for ``convert_and_keep``."""
    return convert_and_keep(
        module, inputs, soc=soc, dynamic=dynamic, own_converters=own_converters, fusions=fusions
    ).graph


def convert_and_keep(
    module: fx.GraphModule,
    inputs: Sequence[Any],
    *,
    soc: str = "Ascend910B3",
    dynamic: bool = True,
    own_converters: bool = True,
    fusions: bool = False,
) -> Conversion:
    """Convert ``module`` to GE, in a process started with the offline toolchain.

    Args:
        module: a graph of ATen and ``npu::`` operators; not modified.
        inputs: a value for each placeholder: a tensor, an integer, or a list of integers for SymInt[] arguments. A
            real tensor represents its placeholder's fake value; if there is none, sizes marked with
            ``torch._dynamo.mark_dynamic`` become symbols. Fake tensors, of one mode, and SymInts are used as they
            are. Tensors must not be on the meta device.
        soc: the SoC to convert for; operators depend on it.
        dynamic: keep symbolic sizes, and make each list of integers one host input. Otherwise the sizes of ``inputs``
            and the values of the integers become constants, fake tensors must not have symbols, and schedules on the
            nodes are applied.
        own_converters: add our converters for operators that torchair cannot convert.
        fusions: let torchair fuse operators before the conversion (its ``pattern_fusion_pass``). Off: the graph keeps
            the lowered operators.

    Raises:
        ConversionError: a node cannot be converted; the error names it.
        ValueError: the inputs do not match the placeholders, or ``soc`` is unknown.
        RuntimeError: this process cannot import torchair.
    """
    if not is_offline():
        raise RuntimeError("torchair cannot be imported in this process; start it with: pagoda npu python")
    import torch_npu  # noqa: F401  brings torchair
    import torchair

    values, mode = _fake_values(module, inputs, dynamic)
    flat = _flatten(module, values, mode, dynamic)
    config = torchair.CompilerConfig()
    config.debug.run_eagerly = True
    config.post_grad_custom_pre_pass = write_rows_in_place if dynamic else WriteRowsAndSchedule()
    config.experimental_config.pattern_fusion_pass = fusions
    with ExitStack() as stack:
        stack.enter_context(without_device(soc))
        if own_converters:
            stack.enter_context(registered_converters())
        watcher = stack.enter_context(_watching())
        stack.enter_context(tracing(TracingContext(mode)))
        stack.enter_context(torch.no_grad())
        backend = torchair.get_npu_backend(compiler_config=config)
        try:
            run = backend(flat.module, flat.values)
        except Exception as error:
            raise _named(error, watcher) from error
    concrete = watcher.graph
    graph = read_graph(concrete, flat.names, watcher.origins, watcher.defaults)
    return Conversion(graph, lambda *given: run(*flat.flatten(given)))


def _fake_values(module: fx.GraphModule, inputs: Sequence[Any], dynamic: bool) -> tuple[list[Any], FakeTensorMode]:
    """A fake tensor, SymInt, int or list of ints for each placeholder; and the mode of the tensors."""
    placeholders = [n for n in module.graph.nodes if n.op == "placeholder"]
    if len(placeholders) != len(inputs):
        raise ValueError(f"inputs: the graph has {len(placeholders)} placeholders, but got {len(inputs)} values")
    known = [_recorded(node) if dynamic else None for node in placeholders]
    mode = detect_fake_mode([v for v in (*inputs, *known) if isinstance(v, torch.Tensor)])
    if mode is None or mode.shape_env is None:
        mode = FakeTensorMode(shape_env=ShapeEnv())
    values: list[Any] = []
    for node, recorded, given in zip(placeholders, known, inputs, strict=True):
        if isinstance(given, torch.Tensor) and not isinstance(given, FakeTensor):
            fake = recorded if isinstance(recorded, FakeTensor) else _fake(mode, given, node.name, dynamic)
            values.append(fake)
        elif isinstance(given, int) and isinstance(recorded, torch.SymInt):
            values.append(recorded)
        elif isinstance(given, list | tuple):
            if not all(isinstance(item, int | torch.SymInt) for item in given):
                raise ValueError(f"inputs: {node.name} is a list with values other than integers")
            values.append(list(given))
        else:
            values.append(given)
    return values, mode


def _recorded(node: fx.Node) -> Any:
    return node.meta.get("val", node.meta.get("example_value"))


def _fake(mode: FakeTensorMode, tensor: torch.Tensor, name: str, dynamic: bool) -> torch.Tensor:
    marked: set[int] = getattr(tensor, "_dynamo_dynamic_indices", set()) if dynamic else set()
    sizes = [DimDynamic.DUCK if d in marked else DimDynamic.STATIC for d in range(tensor.dim())]
    context: Any = StatelessSymbolicContext(dynamic_sizes=sizes)
    return mode.from_tensor(tensor, source=LocalSource(name), symbolic_context=context)


@dataclass(frozen=True)
class _Flat:
    """A copy of a module whose inputs are tensors and single integers, and the values to trace it with.

    Attributes:
        module: the copy.
        values: one per placeholder of the copy.
        names: the caller's name of each placeholder of the copy: its own name, or (list's name, index in it).
        takes: number of the copy's inputs per input of the original: 1 for a tensor; 0 for integers that are
            constants of the copy.
        lengths: per input of the original that is a list, its length.
    """

    module: fx.GraphModule
    values: list[Any]
    names: list[str | tuple[str, int]]
    takes: list[int]
    lengths: dict[int, int]

    def flatten(self, inputs: Sequence[Any]) -> list[Any]:
        """The copy's inputs for the original's."""
        flat: list[Any] = []
        for i, (value, takes) in enumerate(zip(inputs, self.takes, strict=True)):
            if i not in self.lengths:
                flat.extend([value] * takes)
            elif len(value) != self.lengths[i]:
                raise ValueError(f"inputs: converted for a list of {self.lengths[i]} integers, but got {len(value)}")
            elif takes:
                flat.extend(value)
        return flat


def _flatten(module: fx.GraphModule, values: Sequence[Any], mode: FakeTensorMode, dynamic: bool) -> _Flat:
    """Copy ``module`` with an integer input for each member of its lists; nodes record the node they copy."""
    graph = fx.Graph()
    flat = _Flat(fx.GraphModule(module, graph), [], [], [], {})
    copies: dict[fx.Node, Any] = {}
    remaining = iter(values)

    def integer(name: str, called: str | tuple[str, int], value: int | torch.SymInt) -> fx.Node | int:
        if not dynamic:
            return int(value)
        flat.values.append(_symbol(mode, name, value) if isinstance(value, int) else value)
        flat.names.append(called)
        return graph.placeholder(name)

    for node in module.graph.nodes:
        if node.op != "placeholder":
            if node.target is operator.getitem and isinstance(copies.get(node.args[0]), list):
                copies[node] = copies[node.args[0]][node.args[1]]
                continue
            copies[node] = graph.node_copy(node, copies.__getitem__)
            if node.op == "output" and not isinstance(node.args[0], tuple | list):
                copies[node].args = (copies[node].args,)  # AOTAutograd takes graphs that return tuples
            copies[node].meta["custom"] = {**(node.meta.get("custom") or {}), _ORIGIN: node.name}
            continue
        value = next(remaining)
        before = len(flat.values)
        if isinstance(value, list):
            flat.lengths[len(flat.takes)] = len(value)
            copies[node] = [integer(f"{node.name}_{i}", (node.name, i), member) for i, member in enumerate(value)]
        elif isinstance(value, int | torch.SymInt):
            copies[node] = integer(node.name, node.name, value)
        else:
            copies[node] = graph.node_copy(node)
            flat.values.append(value)
            flat.names.append(node.name)
        flat.takes.append(len(flat.values) - before)
    graph.lint()
    flat.module.graph = graph
    flat.module.recompile()
    return flat


def _symbol(mode: FakeTensorMode, name: str, value: int) -> torch.SymInt:
    """A separate symbol for an integer input, whatever its value."""
    source = LocalSource(name)
    assert mode.shape_env is not None
    symbol = mode.shape_env.create_unspecified_symbol(value, source=source, dynamic_dim=DimDynamic.DYNAMIC)
    made = mode.shape_env.create_symintnode(symbol, hint=value, source=source)
    assert isinstance(made, torch.SymInt)
    return made


class _Watcher:
    """Observes torchair while it converts.

    Attributes:
        graph: its GE graph, once the passes have run.
        origins: name of a GE node → name of the converted node.
        defaults: Ascend IR operator → attributes that torchair omits from its nodes at their default value, and that
            value.
        failed: torchair's node that could not be converted, and the reason.
    """

    def __init__(self) -> None:
        self.graph: Any = None
        self.origins: dict[str, str] = {}
        self.defaults: dict[str, dict[str, Any]] = {}
        self.failed: tuple[fx.Node, str] | None = None


@contextmanager
def _watching() -> Iterator[_Watcher]:
    """Observe conversions within this context."""
    from torchair._ge_concrete_graph.compat_ir import IrDef
    from torchair._ge_concrete_graph.fx2ge_converter import GeConcreteGraph

    watcher = _Watcher()
    parse_node, optimize = GeConcreteGraph.parse_node, GeConcreteGraph.optimize_graph_without_runtime
    optional_attributes = IrDef.get_optional_attr

    def watched_parse(self: Any, target: Any, *args: Any) -> Any:
        node = self._converter_ctx.node
        before = len(self.graph.op)
        try:
            return parse_node(self, target, *args)
        except Exception as error:
            if watcher.failed is None:
                watcher.failed = (node, _reason(target, error))
            raise
        finally:
            for made in list(self.graph.op)[before:]:
                watcher.origins[made.name] = _origin(node)

    def watched_optimize(self: Any, *args: Any, **kwargs: Any) -> Any:
        watcher.graph = self
        return optimize(self, *args, **kwargs)

    def watched_attributes(self: Any) -> dict[str, Any]:
        watcher.defaults[self.op_type] = found = optional_attributes(self)
        return found

    IrDef.get_optional_attr = watched_attributes
    GeConcreteGraph.parse_node = watched_parse
    GeConcreteGraph.optimize_graph_without_runtime = watched_optimize
    try:
        yield watcher
    finally:
        IrDef.get_optional_attr = optional_attributes
        GeConcreteGraph.parse_node = parse_node
        GeConcreteGraph.optimize_graph_without_runtime = optimize


def _origin(node: fx.Node) -> str:
    custom: Mapping[str, Any] = node.meta.get("custom") or {}
    return custom.get(_ORIGIN, "")


def _reason(target: Any, error: Exception) -> str:
    from torchair._ge_concrete_graph.fx2ge_converter import _get_converter

    if isinstance(target, torch._ops.OpOverload) and _get_converter(target) is None:
        return "torchair has no converter for this operator"
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)


def _named(error: Exception, watcher: _Watcher) -> ConversionError:
    if watcher.failed is not None:
        node, reason = watcher.failed
        wrapped = node.args[0] if str(node.target) == "auto_functionalized_v2" else node.target
        return ConversionError(_origin(node) or node.name, str(wrapped), reason)
    text = str(error)
    reason = next((line.strip() for line in text.splitlines() if line.strip()), type(error).__name__)
    if found := _EXECUTING.search(text):
        return ConversionError(found[1], found[2], reason)
    return ConversionError("", "", reason)
