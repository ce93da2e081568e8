"""Facts that one pass leaves for later ones, for linking and for the self-check."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from ...runtime.ops.quantized_weight import Quantization


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


@dataclass
class GraphNotes:
    """Facts about one graph that do not stand in it.

    Attributes:
        merged: graph input → names of the inputs that are its rows; its tensor is among the constants once the graph
            is linked.
        packed: the weights of packed and quantized linears.
        folded: names of the constants that others were computed from, each once.
        of_layers: names of weights of layers that stand for others: what is computed from them is folded once there
            are all layers.
        rope_switch: the longest sequence that still uses the first of two rotary tables; None without such a choice.
        followed_literals: literal → names of the nodes in which it is a window, chunk or number of chosen keys
            that was too large to run.
    """

    merged: dict[str, tuple[str, ...]] = field(default_factory=dict)
    packed: list[PackedWeight] = field(default_factory=list)
    folded: list[str] = field(default_factory=list)
    of_layers: frozenset[str] = frozenset()
    rope_switch: int | None = None
    followed_literals: dict[int, set[str]] = field(default_factory=dict)

    def copy(self) -> GraphNotes:
        """The same facts, for another graph."""
        literals = {literal: set(names) for literal, names in self.followed_literals.items()}
        return replace(
            self,
            merged=dict(self.merged),
            packed=list(self.packed),
            folded=list(self.folded),
            followed_literals=literals,
        )

    def fold(self, sources: Iterable[str]) -> None:
        """Note names of constants that another one was computed from."""
        self.folded = list(dict.fromkeys((*self.folded, *sources)))
