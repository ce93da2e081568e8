"""Records the kernel calls of a step, and replays them without Python for steps of the same sizes.

Decoding a token takes hundreds of kernel calls. In a small model, Python between them costs as much as the kernels. A
recorded step owns the tensors that its calls read and write: a step's inputs are copied in, a loop in C makes the
calls, and the few nodes that are not our kernels (the embedding, the angles of rotary embeddings) are evaluated as
before, into the same memory.
"""

from __future__ import annotations

import logging
import operator
import threading
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from ....runtime.ops import OPERATORS
from ....runtime.ops.collectives import all_gather, all_reduce, group_changes
from ....runtime.ops.native import NotedCall, load_kernels, noting_calls
from ....runtime.ops.replay import Replay
from .kernels import GraphCalls
from .result_memory import ResultMemory, ResultWatch

log = logging.getLogger(__name__)

MOST_TOKENS = 64
"""Of a step that is recorded. In longer ones kernels take all the time, and hardly two have the same size."""

MOST_STEPS = 128
"""Records that are kept; the one that was not used for the longest time goes first."""

NO_BLOCK = -1
"""What a block table's wider record holds beyond it: kernels refuse a sequence that reaches so far."""

_LEAST_WIDTH = 16  # of a block table
_BY_VALUE = {torch.ops.pagoda.moe.default, torch.ops.pagoda.moe_gating.default}
_BY_SHAPE = {operator.cpu for overload, operator in OPERATORS.items() if overload not in _BY_VALUE}
"""Functions whose arguments' shapes, and not values, say which kernels they call with what."""
_COLLECTIVES = {OPERATORS[overload].cpu for overload in (all_reduce, all_gather)}
_NUMBERS = (int, float, bool, str, tuple, list, torch.SymInt, torch.dtype, torch.device)


class RecordedSteps:
    """Runs a graph; small steps whose sizes came before, from their records.

    Args:
        calls: the graph.
        varying: which of its inputs are tensors that every step brings; the first one is ``[1, T]``.
        tables: those of them that are block tables ``[S, W]``, whose entries past a sequence's length are ignored.
    """

    def __init__(self, calls: GraphCalls, varying: Sequence[int], tables: Sequence[int]) -> None:
        self._calls = calls
        self._varying = tuple(varying)
        self._tables = frozenset(tables)
        self._steps: OrderedDict[Any, _Step | None] = OrderedDict()  # None: seen once
        self._memory = ResultMemory()
        self._lock = threading.Lock()
        self._possible = load_kernels() is not None
        self._collective = any(node.target in _COLLECTIVES for node in calls.module.graph.nodes)

    def __call__(self, args: Sequence[Any]) -> Sequence[Any]:
        """The graph's outputs for its inputs, in order; they hold until the next call.

        Raises:
            RuntimeError: a kernel refused its arguments in the middle of a step that several ranks run. One of them
                alone can't run it again: the others have gone on.
        """
        tokens = args[self._varying[0]].shape[1]
        if tokens > MOST_TOKENS or not self._possible or not self._lock.acquire(blocking=False):
            return self._calls(*args)
        try:
            outputs = self._recorded(args)
        finally:
            self._lock.release()
        return self._calls(*args) if outputs is None else outputs

    def clear(self) -> None:
        """Forget all records, and what they hold: inputs of the graph were replaced by others."""
        with self._lock:
            self._steps.clear()
            self._memory = ResultMemory()

    def _recorded(self, args: Sequence[Any]) -> Sequence[Any] | None:
        sizes = [self._size(i, args[i]) for i in self._varying]
        key = (torch.get_num_threads(), torch.is_inference_mode_enabled(), group_changes(), *sizes)
        if key not in self._steps:
            self._steps[key] = None
            if len(self._steps) > MOST_STEPS:
                self._steps.popitem(last=False)
            return None
        self._steps.move_to_end(key)
        step = self._steps[key]
        if step is not None and step.fits(args):
            outputs = step.replay(args)
            if outputs is None and self._collective:
                raise RuntimeError(
                    "a kernel refused its arguments in a step that several ranks run together, so it isn't run again"
                )
            return outputs
        step = _Step(self._calls.module, args, dict(zip(self._varying, sizes, strict=True)), self._memory)
        if step.refusal:
            log.info("not recording steps: %s", step.refusal)
            self._possible = False
            self._steps.clear()
        else:
            self._steps[key] = step
        return step.outputs

    def _size(self, index: int, tensor: torch.Tensor) -> tuple[int, ...]:
        """Of the input that stands for this one in a record."""
        if index not in self._tables:
            return tuple(tensor.shape)
        sequences, width = tensor.shape
        return sequences, max(_LEAST_WIDTH, 1 << (width - 1).bit_length())


class _Step:
    """A step that was recorded while it ran.

    Args:
        module: the graph.
        args: its inputs, in order.
        varying: index of each input that a step brings → the size that it has in the record.
        memory: for intermediate results, shared with other records.

    Attributes:
        outputs: of the graph.
        refusal: why it cannot be replayed; "" if it can.
    """

    def __init__(
        self,
        module: fx.GraphModule,
        args: Sequence[Any],
        varying: Mapping[int, tuple[int, ...]],
        memory: ResultMemory,
    ) -> None:
        self._constants = [(i, x, _address(x)) for i, x in enumerate(args) if i not in varying]
        self._inputs = [(i, args[i].new_empty(size)) for i, size in varying.items()]
        self._copy(args)
        given = list(args)
        for i, tensor in self._inputs:
            given[i] = tensor
        recorder = _Recorder(module, memory)
        self.outputs = recorder.run(given)
        self.refusal = recorder.refusal
        self._parts = recorder.parts

    def fits(self, args: Sequence[Any]) -> bool:
        """True if all that steps do not bring is still the same, and where it was."""
        for i, recorded, address in self._constants:
            if args[i] is not recorded or (address and recorded.data_ptr() != address):
                return False
        return True

    def replay(self, args: Sequence[Any]) -> Sequence[Any] | None:
        """The outputs for other inputs of the same sizes; None where a kernel refuses them, which its operator knows
        how to tell."""
        self._copy(args)
        for run in self._parts:
            if not run():
                return None
        return self.outputs

    def _copy(self, args: Sequence[Any]) -> None:
        for i, tensor in self._inputs:
            given = args[i]
            if given.shape != tensor.shape:
                tensor.fill_(NO_BLOCK)
                tensor = tensor[:, : given.shape[1]]
            tensor.copy_(given)


class _Recorder:
    """Evaluates a graph and notes what it takes to do so again.

    Attributes:
        parts: of that, in order; each returns whether it could be done.
        refusal: why it is not enough; "" if it is.
    """

    def __init__(self, module: fx.GraphModule, memory: ResultMemory) -> None:
        self._module = module
        self._memory = memory
        self.parts: list[Callable[[], bool]] = []
        self.refusal = ""
        self._calls: list[NotedCall] = []
        self._holders: Counter[int] = Counter()  # address of memory → values in use that lie there

    def run(self, args: Sequence[Any]) -> Sequence[Any]:
        """The outputs."""
        self._memory.take_back_all()
        inputs, dying = iter(args), _dying(self._module.graph)
        values: dict[fx.Node, Any] = {}
        for node in self._module.graph.nodes:
            if node.op == "placeholder":
                values[node] = next(inputs)
            elif node.op == "output":
                self._flush()
                outputs: Sequence[Any] = fx.node.map_arg(node.args[0], values.__getitem__)
                return outputs
            else:
                given = fx.node.map_arg((node.args, node.kwargs), values.__getitem__)
                values[node] = self._evaluate(node, *given)
                self._hold(values[node])
            for dead in dying.get(node, ()):
                self._let_go(values.pop(dead))
        raise ValueError("the graph has no output")

    def _evaluate(self, node: fx.Node, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        if node.op == "get_attr":
            return fx.graph_module._get_attr(self._module, str(node.target))
        function: Callable[..., Any]
        if node.op == "call_method":
            function = getattr(torch.Tensor, str(node.target))
        elif node.op == "call_module":
            function = self._module.get_submodule(str(node.target))
        else:
            assert callable(node.target)
            function = node.target
        if function in _BY_SHAPE:
            with noting_calls() as calls, ResultWatch(self._memory) as watch:
                found = function(*args, **kwargs)
            for address in watch.taken:
                self._holders.setdefault(address, 0)
            # A collective without a kernel of ours is no less of one.
            if not watch.computes and (calls or function not in _COLLECTIVES):
                self._calls += calls
                return found
        else:
            found = function(*args, **kwargs)
        self._note_node(node, function, args, kwargs, found)
        return found

    def _note_node(
        self, node: fx.Node, function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], found: Any
    ) -> None:
        """Note a node that Python evaluates again, unless it is but a view."""
        read = list(_tensors((args, kwargs)))
        results = list(_tensors(found))
        if not results:
            if read and not _is_size(node):
                self.refusal = f"{node.name} converts a tensor to a number"
            elif not isinstance(found, _NUMBERS):
                self.refusal = f"{node.name} has side effects"
            return
        owned = {tensor.untyped_storage().data_ptr() for tensor in read if not tensor.is_mkldnn}
        fresh = [i for i, tensor in enumerate(results) if tensor.untyped_storage().data_ptr() not in owned]
        if not fresh and _writes_nothing(function):
            return
        self._flush()

        def run() -> bool:
            again = list(_tensors(function(*args, **kwargs)))
            for i in fresh:
                if again[i].shape != results[i].shape:
                    raise RuntimeError(
                        f"{node.name} has shape {tuple(again[i].shape)}, not {tuple(results[i].shape)} as in a step "
                        "of the same size before; please report the model"
                    )
                results[i].copy_(again[i])
            return True

        self.parts.append(run)

    def _flush(self) -> None:
        if self._calls:
            self.parts.append(Replay(self._calls).run)
            self._calls = []

    def _hold(self, value: Any) -> None:
        for tensor in _tensors(value):
            if not tensor.is_mkldnn and (address := tensor.untyped_storage().data_ptr()) in self._memory:
                self._holders[address] += 1
        for address in [address for address, count in self._holders.items() if not count]:
            del self._holders[address]
            self._memory.give(address)

    def _let_go(self, value: Any) -> None:
        for tensor in _tensors(value):
            if not tensor.is_mkldnn and (address := tensor.untyped_storage().data_ptr()) in self._holders:
                self._holders[address] -= 1
                if not self._holders[address]:
                    del self._holders[address]
                    self._memory.give(address)


def _dying(graph: fx.Graph) -> dict[fx.Node, list[fx.Node]]:
    """Node → those whose values nothing reads after it."""
    last: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        last.setdefault(node, node)
        for source in node.all_input_nodes:
            last[source] = node
    dying: dict[fx.Node, list[fx.Node]] = {}
    for node, reader in last.items():
        dying.setdefault(reader, []).append(node)
    return dying


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    """Those in nested sequences and mappings."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for entry in value:
            yield from _tensors(entry)
    elif isinstance(value, Mapping):
        for entry in value.values():
            yield from _tensors(entry)


def _address(value: Any) -> int:
    """The address of a tensor's elements; 0 for what has no such place."""
    return value.data_ptr() if isinstance(value, torch.Tensor) and not value.is_mkldnn else 0


def _writes_nothing(function: Callable[..., Any]) -> bool:
    """True if a function is known to leave its arguments as they are."""
    if isinstance(function, torch._ops.OpOverload):
        return not function._schema.is_mutable
    return function is operator.getitem


def _is_size(node: fx.Node) -> bool:
    """True if it asks for a tensor's size or layout."""
    name = str(node.target) if node.op == "call_method" else getattr(node.target, "__name__", "")
    return name.split(".")[0] in ("size", "sym_size", "shape", "dim", "numel", "sym_numel", "stride", "sym_stride")
