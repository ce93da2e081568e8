"""Proof that the layers that were not compiled themselves read their own weights: in the graph, and packed.

Where a few decoder layers stand for all that are like them, the logits of these few are compared with the model's.
The other layers are copies of them, operator by operator (``LayerRepeat.check_unrolled``). ``check_order`` reads off
the graph which weights each copy reads, and ``PackedProducts`` compares what was packed with the module's tensors.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import torch

from ...passes import TracedGraph
from ...passes.graph.fx_nodes import cache_index
from ...passes.graph.notes import PackedWeight
from ...runtime.ops.linear.packed_linear import packed_linear_cpu
from ...runtime.ops.linear.quantized_linear import quantized_linear_cpu
from ...runtime.ops.linear.stored_weight import StoredWeight, as_dense
from ...runtime.phases import phase
from ..capture.layer_repeat import CannotRepeat, LayerRepeat
from ..link.linker import LinkedProgram
from ..link.packed_rows import matrices
from ..weights.tensor_contents import module_tensors

_INPUTS = 4
"""Rows that are multiplied."""
_OUTPUTS = 8
"""Of the first and of the last outputs of each tensor, which are compared."""
_LEAST_ALIKE = 0.5
"""Cosine of two products. Rounding to 4 bits leaves 0.9 of it; with another matrix it is 0, up to 0.15."""


def check_order(repeat: LayerRepeat, traced: TracedGraph) -> None:
    """Check that the graph of all layers reads the weights and the cache of each layer in its turn.

    Args:
        repeat: the layers.
        traced: their graph, in front of the passes that select the format of weights or behind them.

    Raises:
        CannotRepeat: a copy reads others than the layer that was compiled would in its place.
    """
    layer = re.compile(rf"{re.escape(repeat.path)}\.(\d+)\.(.*)")
    owners: dict[int, set[tuple[int, str]]] = defaultdict(set)
    for name, tensor in module_tensors(repeat.model).items():
        if (match := layer.fullmatch(name)) is not None:
            owners[id(tensor)].add((int(match[1]), match[2]))
            if isinstance(tensor, StoredWeight) and tensor.order is not None:
                owners[id(tensor.order)].add((int(match[1]), f"{match[2]}.order"))
    wholes = traced.constants | {name: part.whole for name, part in traced.notes.parts.items()}
    caches, read, periods = [], defaultdict[str, list[int]](list), defaultdict[int, list[tuple[int, str]]](list)
    first, made_of = repeat.kept - repeat.period, _made_of(traced)
    for node in _inputs_in_order(traced):
        if (index := cache_index(node)) is not None:
            caches += [] if index in caches else [index]
        for name in _sources(node.name, made_of):
            found = owners.get(id(wholes.get(name)), ())
            if len(found) != 1:  # not of a layer, or of several that share it
                continue
            ((at, inner),) = found
            read[inner].append(at)
            if at >= first:
                periods[(at - first) // repeat.period].append(((at - first) % repeat.period, inner))
    for inner, order in read.items():
        if order != sorted(order):
            raise CannotRepeat(f"{repeat.path} read {inner} in the order {order}")
    if caches != list(range(len(traced.caches))):
        raise CannotRepeat(f"caches are read in the order {caches}")
    for count in range((repeat.total - first) // repeat.period):
        if periods[count] != periods[0]:
            at = first + count * repeat.period
            raise CannotRepeat(f"{repeat.path}.{at} does not read its weights in the order of {repeat.path}.{first}")


def _inputs_in_order(traced: TracedGraph) -> Iterator[torch.fx.Node]:
    """The inputs of a graph in the order in which calls read them first."""
    seen = set()
    for call in traced.graph.nodes:
        for node in call.all_input_nodes:
            if node.op == "placeholder" and node not in seen:
                seen.add(node)
                yield node


def _made_of(traced: TracedGraph) -> dict[str, tuple[str, ...]]:
    """Input → those that it is made of, by a pass or when the graph is linked."""
    notes = traced.notes
    folded = {name: notes.made_of[id(t)][1] for name, t in traced.constants.items() if id(t) in notes.made_of}
    packed = {noted.name: noted.sources for noted in notes.packed}
    made = folded | packed | notes.merged
    return {name: sources for name, sources in made.items() if sources and sources != (name,)}


def _sources(name: str, made_of: Mapping[str, tuple[str, ...]]) -> Iterator[str]:
    """The inputs that an input is made of in the end; itself where it is not."""
    if name not in made_of:
        yield name
    for source in made_of.get(name, ()):
        yield from _sources(source, made_of)


@dataclass(frozen=True)
class PackedProducts:
    """Products with the tensors that weights are packed from, taken before these are freed.

    Attributes:
        expected: of each packed input, by its place in a stack (None: it is a matrix), the products with some rows
            of each tensor that it is made of.
    """

    expected: Mapping[str, dict[int | None, list[_Rows]]]

    @classmethod
    @phase("verify")
    def of(cls, traced: TracedGraph) -> PackedProducts:
        """The products with all weights of a graph that are to be packed."""
        found: dict[str, dict[int | None, list[_Rows]]] = {}
        for noted in traced.notes.packed:
            # One that is not merged may be the transposed parameter.
            names = noted.sources if len(noted.sources) > 1 else [noted.name]
            sources = [traced.constants[name] for name in names]
            if sources[0].dim() == 3:
                stacks = [matrices(source, noted) for source in sources]
                ends: tuple[int | None, ...] = (0, len(stacks[0]) - 1)
                found[noted.name] = {at: [_Rows.of(stack[at or 0], noted) for stack in stacks] for at in ends}
            else:
                found[noted.name] = {None: [_Rows.of(source, noted) for source in sources]}
        return cls(found)

    @phase("verify")
    def fault(self, program: LinkedProgram) -> str:
        """What a program whose weights are packed holds in place of another; "" where each is in its place."""
        for noted, packed in program.packed_weights():
            for at, parts in self.expected[noted.name].items():
                outputs = sum(part.outputs for part in parts)
                product = _product(packed if at is None else packed[at], outputs, parts[0].inputs, noted)
                for part, own in zip(parts, product.split([part.outputs for part in parts], -1), strict=True):
                    if not part.is_alike(own):
                        return f"the packed weight {noted.name!r} is not {', '.join(noted.sources)}"
        return ""


@dataclass(frozen=True)
class _Rows:
    """The products with the first and the last rows of a matrix.

    Attributes:
        inputs: ``[_INPUTS, in]``, in the matrix' dtype.
        outputs: number of its rows.
        product: ``[_INPUTS, rows]``, float32.
    """

    inputs: torch.Tensor
    outputs: int
    product: torch.Tensor

    @classmethod
    def of(cls, matrix: torch.Tensor, noted: PackedWeight) -> _Rows:
        if isinstance(matrix, StoredWeight) and noted.quantization is not None:
            # The kernel orders the inputs, not the columns.
            matrix = matrix.replaced(form=replace(matrix.form, ordered=False), order=None, dtype=torch.float32)
        generator = torch.Generator().manual_seed(0)
        x = torch.randn(_INPUTS, matrix.shape[1], generator=generator).to(matrix.dtype)
        ends = [as_dense(matrix.detach()[at]).float() for at in _at_ends(len(matrix))]
        return cls(x, len(matrix), x.float() @ torch.cat(ends).T)

    def is_alike(self, product: torch.Tensor) -> bool:
        found = torch.cat([product[:, at] for at in _at_ends(self.outputs)], -1).float().flatten()
        expected = self.product.flatten()
        if not expected.isfinite().all():
            return True  # the program's logits will not be finite, either
        norms = found.norm() * expected.norm()
        return bool(found @ expected >= _LEAST_ALIKE * norms) and bool(expected.norm()) == bool(found.norm())


def _at_ends(outputs: int) -> tuple[slice, slice]:
    return slice(0, _OUTPUTS), slice(max(_OUTPUTS, outputs - _OUTPUTS), outputs)


def _product(packed: torch.Tensor, outputs: int, x: torch.Tensor, noted: PackedWeight) -> torch.Tensor:
    if noted.quantization is None:
        return packed_linear_cpu(x, packed, None)
    return quantized_linear_cpu(x, packed, None, outputs, *noted.quantization.arguments())
