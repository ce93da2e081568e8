"""Operators that only move data: every element of their results is an element of an operand.

Names are those that ``callee`` gives. Passes take these sets and say what they take besides.
"""

from __future__ import annotations

# On the ATen graph, where an overload other than the default is part of the name.
RESHAPES = frozenset({"view", "_unsafe_view", "reshape"})
"""Other sizes, the elements in the same order."""
UNIT_DIMS = frozenset({"unsqueeze", "squeeze", "squeeze.dim", "squeeze.dims"})
"""Dims of size one, inserted or taken out."""
TRANSPOSES = frozenset({"transpose.int", "permute"})
CUTS = frozenset({"slice.Tensor", "select.int", "split.Tensor", "split_with_sizes", "unbind.int", "getitem"})
"""Parts; ``getitem`` is one of several results, and no movement where what yields them is none."""
JOINS = frozenset({"cat", "stack"})
COPIES = frozenset({"clone", "alias", "detach"})
"""The same elements in the same sizes."""
MOVES = RESHAPES | UNIT_DIMS | TRANSPOSES | CUTS | JOINS | COPIES | {"expand"}
"""All of these, and what repeats along a dim."""

# On Dynamo's graph, functions and methods alike.
REARRANGING_CALLS = frozenset(
    "view reshape flatten unflatten unsqueeze squeeze transpose permute movedim swapaxes swapdims t mT adjoint "
    "expand broadcast_to repeat repeat_interleave".split()
)
"""Other sizes or another order, perhaps repeated."""
CAST_CALLS = frozenset("to type type_as float half bfloat16".split())
"""The same elements in the same sizes, rounded where the dtype is a narrower one."""
