"""Facts that one pass records for later ones, for linking and for the self-check."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

import torch

from ...runtime.ops.linear.quantized_weight import Quantization
from ...runtime.parallel.stage_values import StageValue
from .cut import Cut


@dataclass(frozen=True)
class PackedWeight:
    """A graph input that packed or quantized linears read.

    Attributes:
        name: of the input.
        sources: names of the inputs that hold the same elements in the module's own tensors.
        quantization: how its elements are rounded; None: they are not.
        stored: they are rounded already: the checkpoint stores them so.
        transposed: of experts ``[E, in, out]``, whose matrices are packed one by one; those that are stored know
            themselves.
    """

    name: str
    sources: tuple[str, ...]
    quantization: Quantization | None = None
    stored: bool = False
    transposed: bool = False


@dataclass(frozen=True)
class QuantizedInputs:
    """Graph inputs of a quantized product for Ascend, which linking makes of one weight.

    Attributes:
        source: the input that holds the weight, ``[out, in]``, or ``[in, out]`` where it is ``turned``; of experts
            ``[E, in, out]``.
        numbers: input for the integers ``[in, out]``, of experts ``[E, in, out]``: int8, or 4 bits, eight in an
            int32.
        scales: input for the scales, ``[out]`` or ``[groups, out]``, of experts ``[E, out]`` or ``[E, groups, out]``.
            For 4-bit weights with 8-bit inputs they always have a dim of groups, even for one group. Static scales of
            inputs are multiplied in.
        offsets: input for what is added to the numbers before they are scaled; "" for none.
        quantization: how the weight is rounded, or what stored codes are.
        scale_dtype: of scales and offsets; int64 stands for the bits of float32.
        turned: see ``source``.
        stored: a quantized checkpoint stores the weight so.
        sums: input for 8 times the sum of the weights of each output, float32 ``[out]``, of experts ``[E, out]``;
            "" for none.
        whole_bias: input for what is added to the sums of integers, int32 ``[out]``: ``bias`` in steps of the
            scales, less the offset of the inputs times the sum of each output's numbers; "" for none.
        bias: the input that holds the layer's own bias, of which ``whole_bias`` is made; "" for none.
    """

    source: str
    numbers: str
    scales: str
    offsets: str
    quantization: Quantization
    scale_dtype: torch.dtype
    turned: bool = False
    stored: bool = False
    sums: str = ""
    whole_bias: str = ""
    bias: str = ""

    @property
    def made(self) -> tuple[str, ...]:
        """The inputs that linking makes."""
        return tuple(filter(None, (self.numbers, self.scales, self.offsets, self.sums, self.whole_bias)))


def fewest_bits(weights: Iterable[PackedWeight | QuantizedInputs]) -> int | None:
    """The fewest bits that weights are rounded to, or, of those that a checkpoint stores so, their inputs; None where
    none is."""
    rounded = ((weight.quantization, weight.stored) for weight in weights)
    bits = (
        8 if stored else scheme.bits
        for scheme, stored in rounded
        if scheme is not None and (not stored or scheme.input_bits == 8)
    )
    return min(bits, default=None)


@dataclass(frozen=True)
class Boundary:
    """Where a stage of a pipeline begins.

    Attributes:
        first: name of its first node.
        values: what it receives of the stage before.
    """

    first: str
    values: tuple[StageValue, ...]


@dataclass(frozen=True)
class Part:
    """Where a graph input's tensor comes from that is the part of one rank.

    Attributes:
        whole: what all ranks hold together.
        cut: who holds which part.
    """

    whole: torch.Tensor
    cut: Cut

    def turned(self) -> Part:
        """The part of a matrix, transposed."""
        assert self.cut.further is None
        return Part(self.whole.detach().transpose(0, 1), Cut(1 - self.cut.dim, self.cut.indices))


@dataclass
class GraphNotes:
    """Facts about one graph that do not stand in it.

    Attributes:
        merged: graph input → names of the inputs that are its rows; its tensor is among the constants once the graph
            is linked.
        packed: the weights of packed and quantized linears.
        quantized: likewise of a graph for an NPU.
        widened: graph input → the one that holds the same elements in fewer bits; in float32 once it is linked.
        folded: names of the constants that others were computed from, or numbers read off (scales, tables of masks),
            each once.
        made_of: id of a folded constant → itself, and the inputs that it was computed from.
        of_layers: names of weights from which nothing is folded, so that all layers stay alike: of layers that stand
            for others, until there are all; then of those that are not loaded in one of them.
        rope_switch: the longest sequence that still uses the first of two rotary tables; None without such a choice.
        parts: graph input → the tensor that it receives a part of, in a graph for one of several ranks.
        boundaries: where the stages of a pipeline begin, but for the first; see ``graph.stages``.
        followed_literals: literal → names of the nodes in which it is a window, chunk or number of chosen keys
            that was too large to run.
    """

    merged: dict[str, tuple[str, ...]] = field(default_factory=dict)
    packed: list[PackedWeight] = field(default_factory=list)
    quantized: list[QuantizedInputs] = field(default_factory=list)
    widened: dict[str, str] = field(default_factory=dict)
    folded: list[str] = field(default_factory=list)
    made_of: dict[int, tuple[torch.Tensor, tuple[str, ...]]] = field(default_factory=dict)
    of_layers: frozenset[str] = frozenset()
    rope_switch: int | None = None
    parts: dict[str, Part] = field(default_factory=dict)
    boundaries: tuple[Boundary, ...] = ()
    followed_literals: dict[int, set[str]] = field(default_factory=dict)

    @property
    def made_when_linked(self) -> frozenset[str]:
        """Names of graph inputs whose tensors are not there before the graph is linked."""
        quantized = (name for inputs in self.quantized for name in inputs.made)
        return frozenset((*self.merged, *quantized, *self.widened))

    def copy(self) -> GraphNotes:
        """The same facts, for another graph."""
        literals = {literal: set(names) for literal, names in self.followed_literals.items()}
        return replace(
            self,
            merged=dict(self.merged),
            packed=list(self.packed),
            quantized=list(self.quantized),
            widened=dict(self.widened),
            folded=list(self.folded),
            made_of=dict(self.made_of),
            parts=dict(self.parts),
            followed_literals=literals,
        )

    def fold(self, sources: Iterable[str]) -> None:
        """Note names of constants that another one, or a number in the graph, was computed from."""
        self.folded = list(dict.fromkeys((*self.folded, *sources)))
