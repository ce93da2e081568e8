"""Compares each call of a lowered graph on a device with the operator's semantics on the CPU.

The graph runs on the CPU, node by node, and each call is kept with its inputs and results. The device then gets the
same inputs, so that the error of one operator does not affect the next.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from ...compiler.targets.npu.weights.weights import cast_to_nz
from ...passes.graph.fx_nodes import value
from ...passes.graph.provenance import scopes

LIMITS = {torch.float16: 2**-10, torch.bfloat16: 2**-7, torch.float32: 2**-13, torch.float64: 2**-26}
"""Tolerated difference of a number, relative to itself plus the root mean square of its row: two roundings in half
precision, another order of summation in other dtypes."""
_ROUNDED = (torch.int8, torch.uint8)
"""Operators whose entries may be off by one integer; other integers must be equal."""
_CHOICES = ("topk", "npu_moe_gating_top_k_softmax", "npu_moe_gating_top_k_softmax_v2")
"""Operators that select the largest entries of rows; of equal entries they may select either."""
_REPEATS = 3


@dataclass(frozen=True)
class OperatorCall:
    """A call of an operator with its inputs and correct results, all on the CPU.

    Attributes:
        target: the operator.
        args, kwargs: arguments; weights are shared with the graph, all else is copied.
        expected: result index → its correct value, for the results that are used.
        written: argument → its correct value after the call.
        step: kind of step, as text.
        module: module of the model that the call belongs to; "" if unknown.
        which: "first" or "last" of its kind in the graph.
        turned: weight arguments to convert to FRACTAL_NZ.
    """

    target: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    expected: dict[int, Tensor]
    written: dict[str, Tensor]
    step: str
    module: str = ""
    which: str = "first"
    turned: tuple[Tensor, ...] = ()

    @property
    def operator(self) -> str:
        """Its name, such as "npu_linear"."""
        return str(self.target).removesuffix(".default").removeprefix("npu.")

    @property
    def shapes(self) -> str:
        """Shapes and dtypes of its tensors."""
        leaves = pytree.tree_leaves((self.args, self.kwargs))
        return ", ".join(_shape(leaf) for leaf in leaves if isinstance(leaf, Tensor))

    @property
    def name(self) -> str:
        """The call as text, unique among the kept ones."""
        nz = ", FRACTAL_NZ" if self.turned else ""
        return f"{self.operator}({self.shapes}{nz}), {self.step}, {self.which}"


@dataclass
class Difference:
    """The differences of a device's results.

    Attributes:
        largest: the largest difference; infinite if something is not a number.
        of_limit: the same in multiples of the tolerance; more than 1 is wrong.
        beyond: share of the entries outside the tolerance.
        where: result and index of that entry, as text; "" if nothing differs.
        found, expected: the entry.
        reason: why the result is wrong; "" if it is right.
    """

    largest: float = 0.0
    of_limit: float = 0.0
    beyond: float = 0.0
    where: str = ""
    found: float = 0.0
    expected: float = 0.0
    reason: str = ""


@dataclass
class Collected:
    """The calls of a graph, in its order.

    Attributes:
        first, last: signature → the first call with it, and the last one.
        counts: signature → number of calls.
    """

    first: dict[Any, OperatorCall] = field(default_factory=dict)
    last: dict[Any, OperatorCall] = field(default_factory=dict)
    counts: dict[Any, int] = field(default_factory=dict)

    def calls(self) -> Iterator[tuple[OperatorCall, int]]:
        """Each kept call with the number of calls that it represents."""
        for signature, call in self.first.items():
            yield call, self.counts[signature]
            if (last := self.last.get(signature)) is not None:
                yield last, self.counts[signature]


class Collector(fx.Interpreter):
    """Runs a module on the CPU and keeps its calls.

    Args:
        module: module of a lowered graph.
        into: receives calls; a call with a known signature is counted only.
        weights: tensors that need no copy.
        step: kind of step, as text.
    """

    def __init__(self, module: fx.GraphModule, into: Collected, weights: Sequence[Tensor], step: str) -> None:
        super().__init__(module)
        self._into, self._step = into, step
        self._weights = {id(weight) for weight in weights}

    def run_node(self, n: fx.Node) -> Any:
        """Run a node, and keep its call if it is an operator that computes something."""
        if n.op != "call_function" or not _computes(n):
            return super().run_node(n)
        args, kwargs = self.fetch_args_kwargs_from_env(n)
        signature = (self._step, str(n.target), *map(_described, _leaves(n, args, kwargs)))
        given_args, given_kwargs = pytree.tree_map_only(Tensor, self._kept, (tuple(args), dict(kwargs)))
        yielded = n.target(*args, **kwargs)  # type: ignore[operator]
        results = yielded if isinstance(yielded, tuple | list) else (yielded,)
        call = OperatorCall(
            target=n.target,
            args=given_args,
            kwargs=given_kwargs,
            expected={i: on_device(results[i], "cpu") for i in _read(n, results) if isinstance(results[i], Tensor)},
            written={name: on_device(tensor, "cpu") for name, tensor in _written(n.target, args, kwargs)},
            step=self._step,
            module=innermost_module(n),
        )
        into = self._into
        into.counts[signature] = into.counts.get(signature, 0) + 1
        if signature not in into.first:
            into.first[signature] = call
        else:
            into.last[signature] = replace(call, which="last")
        return yielded

    def _kept(self, tensor: Tensor) -> Tensor:
        return tensor if id(tensor) in self._weights else on_device(tensor, "cpu")


def on_device(tensor: Tensor, device: torch.device | str) -> Tensor:
    """A copy with the same strides on a device."""
    narrow = tensor.detach()
    for dim, (size, stride) in enumerate(zip(tensor.shape, tensor.stride(), strict=True)):
        if size > 1 and stride == 0:
            narrow = narrow.narrow(dim, 0, 1)
    made = torch.empty_strided(narrow.shape, narrow.stride(), dtype=tensor.dtype, device=device)
    return made.copy_(narrow).expand(tensor.shape)


def run_call(
    call: OperatorCall,
    device: torch.device,
    run: Callable[[Callable[[], Any]], Any],
    function: Callable[..., Any] | None = None,
) -> tuple[Difference, float]:
    """Call an operator on a device and compare.

    Args:
        call: the call.
        device: where tensors go.
        run: calls a function on the device and returns when it has finished.
        function: called in place of the operator, with the same arguments.

    Returns:
        the differences, and the minimum seconds of a few runs of the call, launch included.
    """

    def moved(leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            turned = any(leaf is weight for weight in call.turned)
            copied = on_device(leaf, device)
            return cast_to_nz(copied) if turned else copied
        return device if isinstance(leaf, torch.device) else leaf

    function = function or call.target
    with torch.inference_mode():
        args, kwargs = pytree.tree_map(moved, (call.args, call.kwargs))
        yielded = run(lambda: function(*args, **kwargs))
        results = yielded if isinstance(yielded, tuple | list) else (yielded,)
        difference = Difference()
        for i, expected in call.expected.items():
            name = f"result {i}" if len(results) > 1 else "result"
            found = _chosen(call, i, results[i].cpu(), expected)
            _worse(difference, name, found, expected, sums_in_float16(call))
        for name, tensor in _written(call.target, args, kwargs):
            _worse(difference, name, tensor.cpu(), call.written[name])
        seconds = []
        for _ in range(_REPEATS):
            began = time.perf_counter()
            run(lambda: function(*args, **kwargs))
            seconds.append(time.perf_counter() - began)
    return difference, min(seconds)


def sums_in_float16(call: OperatorCall) -> int:
    """Products that the operator adds in float16 for each number of a float16 result; 0 where it adds none so.

    npu_grouped_matmul of int8 by 4 bits does (op-plugin, test_npu_grouped_matmul.py, golden of the A8W4 tests): one
    for each group of inputs that share a scale, ``[E, groups, N]``.
    """
    if not str(call.target).startswith("npu.npu_grouped_matmul.") or call.args[1][0].dtype is not torch.int32:
        return 0
    is_half = call.args[0][0].dtype is torch.int8 and any(t.dtype is torch.float16 for t in call.expected.values())
    return int(call.kwargs["scale"][0].shape[1]) if is_half else 0


def difference_of(found: Tensor, expected: Tensor, sums: int = 0) -> Difference:
    """Compare ``found`` with the correct value.

    Args:
        found, expected: results of floats or integers.
        sums: rounded numbers that were added for each float, whose errors add up as a random walk.
    """
    if found.shape != expected.shape or found.dtype != expected.dtype:
        reason = f"the result is {_shape(found)}, expected {_shape(expected)}"
        return Difference(math.inf, math.inf, 1.0, reason=reason)
    if not found.numel():
        return Difference()
    exact = not (expected.is_floating_point() or expected.dtype in _ROUNDED)
    a, b = found.double(), expected.double()
    apart = (a - b).abs()
    # What the CPU's kernels leave as NaN is undefined.
    apart = torch.where((a == b) | b.isnan(), 0.0, apart).nan_to_num(nan=math.inf, posinf=math.inf)
    if exact:
        allowed = torch.full_like(b, 0.5)  # none
    elif expected.dtype in _ROUNDED:
        allowed = torch.ones_like(b)
    else:
        finite = b.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)
        rows = finite.square().mean(-1, keepdim=True).sqrt() if b.dim() else finite.abs()
        allowed = LIMITS.get(expected.dtype, LIMITS[torch.bfloat16]) * (finite.abs() + rows) + 1e-30
        allowed *= 2 * math.sqrt(sums) if sums else 1
    ratio = apart / allowed
    at = int(ratio.argmax())
    worst = float(ratio.flatten()[at])
    index = [int(i) for i in torch.unravel_index(torch.tensor(at), ratio.shape)]
    made = Difference(
        largest=float(apart.max()),
        of_limit=worst,
        beyond=float((ratio > 1).double().mean()),
        where=str(index) if worst else "",
        found=float(a.flatten()[at]),
        expected=float(b.flatten()[at]),
    )
    if worst > 1:
        many = f"{100 * made.beyond:.3g} % of the entries"
        by = "is not a number" if math.isinf(made.largest) else f"differs by {made.largest:.3g}"
        made.reason = f"{by} at {index} ({made.found:.5g}, expected {made.expected:.5g}), {many} exceed the limit"
    return made


def _worse(so_far: Difference, name: str, found: Tensor, expected: Tensor, sums: int = 0) -> None:
    """Merge a difference that exceeds earlier ones."""
    other = difference_of(found, expected, sums)
    so_far.largest = max(so_far.largest, other.largest)
    if other.of_limit > so_far.of_limit:
        reason = f"{name} {other.reason}" if other.reason else ""
        vars(so_far).update({**vars(other), "largest": so_far.largest, "where": f"{name} {other.where}"})
        so_far.reason = reason


def _chosen(call: OperatorCall, result: int, found: Tensor, expected: Tensor) -> Tensor:
    """Selected indices, with the correct ones in place of others with equal entries."""
    if found.is_floating_point() or found.shape != expected.shape:
        return found
    if str(call.target).startswith("npu.npu_lightning_indexer"):
        return _chosen_keys(call, found, expected)
    if not _is_choice(call.target):
        return found
    rows: Tensor = call.args[0]
    if int(found.min()) < 0 or int(found.max()) >= rows.shape[-1]:
        return found
    if bool((found.long().sort(-1).values.diff(dim=-1) == 0).any()):
        return found  # one entry twice
    alike = rows.gather(-1, found.long()) == rows.gather(-1, expected.long())
    return torch.where(alike, expected, found)


def _chosen_keys(call: OperatorCall, found: Tensor, expected: Tensor) -> Tensor:
    """Positions of selected keys, with the correct ones in place of others whose scores are equal within rounding."""
    ends, table, key = call.kwargs["actual_seq_lengths_query"], call.kwargs["block_table"].long(), call.args[1]
    places, size = expected.shape[-1], key.shape[1]
    if int(found.min()) < -1 or int(found.max()) >= table.shape[1] * size:
        return found
    sequences = torch.searchsorted(ends, torch.arange(len(found)), right=True).clamp(max=len(table) - 1)

    def scores(chosen: Tensor) -> Tensor:
        at = chosen.reshape(-1, places).long().clamp(min=0)
        keys = key[table[sequences[:, None], at // size], at % size, 0].float()
        heads = torch.relu(torch.einsum("thd,tkd->thk", call.args[0].float(), keys))
        each = (heads * call.args[2].float()[:, :, None]).sum(1).view_as(chosen)
        return each.masked_fill(chosen < 0, -torch.inf).sort(-1, descending=True).values

    a, b = scores(found), scores(expected)
    finite = b.where(b.isfinite(), 0.0)
    near = (a - b).abs() <= LIMITS[torch.float32] * (finite.abs() + finite.abs().amax(-1, keepdim=True))
    close = (near & b.isfinite()) | (a == b)  # where there is no key to choose, none is chosen
    twice = ((found.sort(-1).values.diff(dim=-1) == 0) & (found.sort(-1).values[..., 1:] >= 0)).any(-1, keepdim=True)
    return torch.where(close.all(-1, keepdim=True) & ~twice, expected, found)


def _is_choice(target: Any) -> bool:
    return str(target).split(".")[1] in _CHOICES


def _computes(node: fx.Node) -> bool:
    """True for an operator that returns or writes tensors of its own, rather than views."""
    if not isinstance(node.target, torch._ops.OpOverload):
        return False
    schema = node.target._schema
    writes = any(argument.is_write for argument in schema.arguments)
    views = any(each.alias_info is not None for each in schema.returns) and not writes
    yields = any(isinstance(leaf, Tensor) for leaf in pytree.tree_leaves(value(node)))
    return writes or (yields and not views)


def _read(node: fx.Node, results: Sequence[Any]) -> list[int]:
    """Indices of the results that are used; an operator may leave others undefined."""
    if not isinstance(value(node), tuple | list):
        return [0] if node.users and len(results) == 1 else []
    return sorted({int(user.args[1]) for user in node.users if user.op == "call_function"})  # type: ignore[arg-type]


def _written(target: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[tuple[str, Tensor]]:
    """The tensors that a call writes to, by argument name."""
    parameters = target._schema.arguments
    given = {**dict(zip((parameter.name for parameter in parameters), args, strict=False)), **kwargs}
    for parameter in parameters:
        if parameter.is_write and isinstance(given.get(parameter.name), Tensor):
            yield parameter.name, given[parameter.name]


def _leaves(node: fx.Node, args: Sequence[Any], kwargs: dict[str, Any]) -> list[Any]:
    """The signature of a call. Excludes lists of sequence lengths, which differ from step to step."""
    lists = str(node.target).startswith("npu.")

    def leaf(given: Any) -> Any:
        return ("list", len(given)) if lists and isinstance(given, list) and given and _numbers(given) else given

    shown = [leaf(given) for given in (*args, *kwargs.values())]
    return pytree.tree_leaves(shown)


def _numbers(given: list[Any]) -> bool:
    return all(isinstance(each, int) for each in given)


def _described(leaf: Any) -> Any:
    return (leaf.dtype, tuple(leaf.shape), leaf.stride()) if isinstance(leaf, Tensor) else repr(leaf)


def _shape(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')}[{', '.join(map(str, tensor.shape))}]"


def innermost_module(node: fx.Node) -> str:
    """Path of the innermost module, if the capture recorded one."""
    found = scopes(node)
    return found[-1].path if found else ""
