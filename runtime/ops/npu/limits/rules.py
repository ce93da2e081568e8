"""What limits of operators are made of: a table of dtypes and ranks, and rules for all else."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import torch

from ....npu_target import Product
from .call import Call

Rule = Callable[[Call], str]
"""Says why a call is not legal; "" when it is, as far as the rule goes."""

A2, A3, A5, INFERENCE = Product.A2, Product.A3, Product.A5, Product.INFERENCE
BF16 = frozenset({torch.bfloat16})
HALF = BF16 | {torch.float16}
FLOAT = HALF | {torch.float32}
INDEX = frozenset({torch.int32, torch.int64})
INT8 = frozenset({torch.int8})
INT32 = frozenset({torch.int32})
INT64 = frozenset({torch.int64})


@dataclass(frozen=True)
class Limits:
    """The limits of one operator, which lowering and the reference kernel refuse by.

    Attributes:
        products: chips that run it; none where lowering does not emit it.
        dtypes: argument → dtypes; arguments that are not named take any. Of fp16 and bf16, or bf16 alone, the
            reference kernel takes fp32 and fp64, too.
        alike: groups of arguments that have one dtype.
        mixes: the operator takes other mixtures of dtypes than lowering gives it, which rules of the reference name.
        ranks: argument → numbers of dims.
        forms: the same for lowering, where it makes fewer forms than there are.
        rules: what cannot be said that way.
    """

    products: frozenset[Product]
    dtypes: Mapping[str, frozenset[torch.dtype]] = field(default_factory=dict)
    alike: Sequence[Sequence[str]] = ()
    mixes: bool = False
    ranks: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    forms: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    rules: Sequence[Rule] = ()


def lowered(rule: Rule) -> Rule:
    """``rule`` for calls that lowering makes: of a chip or a graph, or of what its forms of a call do not need."""
    return lambda call: "" if call.is_reference else rule(call)


def in_reference(rule: Rule) -> Rule:
    """``rule`` for reference kernels, where another says the same to lowering."""
    return lambda call: rule(call) if call.is_reference else ""


def on_inference_chip(rule: Rule) -> Rule:
    """``rule`` on the inference chip alone."""
    return lambda call: rule(call) if call.target.product is INFERENCE else ""


def below(argument: str, dim: int, bound: int) -> Rule:
    """Dim ``dim`` of a tensor is below ``bound``."""

    def check(call: Call) -> str:
        size = _size(call, argument, dim)
        return f"dim {dim} of {argument} is {size}; it must be below {bound}" if size and size >= bound else ""

    return check


def sizes(argument: str, dim: int, allowed: Sequence[int]) -> Rule:
    """Dim ``dim`` of a tensor is one of a few sizes."""

    def check(call: Call) -> str:
        size = _size(call, argument, dim)
        if size is None or size in allowed:
            return ""
        return f"dim {dim} of {argument} is {size}; it must be {' or '.join(map(str, allowed))}"

    return check


def _size(call: Call, argument: str, dim: int) -> int | None:
    shape = call.shape(argument)
    return shape[dim] if -len(shape) <= dim < len(shape) else None


def given(argument: str, *allowed: Any) -> Rule:
    """An argument that is no tensor has one of a few values."""

    def check(call: Call) -> str:
        found = call[argument]
        return "" if found in allowed else f"{argument} is {found!r}; it must be {' or '.join(map(repr, allowed))}"

    return check


def needed(*arguments: str) -> Rule:
    """Arguments that the schema lets out, and the operator does not."""

    def check(call: Call) -> str:
        missing = [name for name in arguments if not call.is_given(name)]
        return f"{missing[0]} is None; it is needed" if missing else ""

    return check


def stored_as(argument: str, *dtypes: torch.dtype) -> Rule:
    """A tensor has one of these dtypes, whatever float32 counts as elsewhere."""

    def check(call: Call) -> str:
        tensor = call.tensor(argument)
        if tensor is None or tensor.dtype in dtypes:
            return ""
        return f"{argument} is {tensor.dtype}; it must be {' or '.join(map(str, dtypes)).replace('torch.', '')}"

    return check


def alike(*arguments: str) -> Rule:
    """Arguments have one dtype."""

    def check(call: Call) -> str:
        dtypes = {name: call.dtype(name) for name in arguments if call.tensor(name) is not None}
        if len(set(dtypes.values())) < 2:
            return ""
        return "dtypes differ: " + ", ".join(f"{name} {dtype}" for name, dtype in dtypes.items())

    return check


def dense(*arguments: str) -> Rule:
    """Tensors without gaps, which the kernel reads by their sizes alone. In GE graphs every tensor is."""

    def check(call: Call) -> str:
        if call.target.graph_mode == "ge":
            return ""
        for name, tensor in call.tensors().items():
            if name.partition("[")[0] in arguments and not tensor.is_contiguous():
                return f"{call.own(name)} is not contiguous"
        return ""

    return lowered(check)


def captured_only(call: Call) -> str:
    """An operator that torchair does not convert, and that is called as it is where graphs are captured."""
    return "torchair has no GE converter for it" if call.target.graph_mode == "ge" else ""


def shaped(shapes: str) -> Rule:
    """Shapes that fit each other, such as ``"x [T, H], expert_idx [T, K]"``.

    A letter is of one size wherever it stands. ``T*K`` is a product and ``L+R`` a sum of such, ``*B`` any number of
    dims, and ``S?`` is S or 1. Tensors that are not given fit, and so do sizes that vary.
    """
    wanted = {name: dims.split(", ") for name, dims in re.findall(r"([\w[\]]+) \[(.*?)\]", shapes)}

    def check(call: Call) -> str:
        found = {name: call.shape(name) for name in wanted if call.tensor(name) is not None}
        bound: dict[str, Any] = {}
        if all(_fits(shape, wanted[name], bound) for name, shape in found.items()):
            return ""
        needs = ", ".join(f"{name} [{', '.join(wanted[name])}]" for name in found)
        return f"{', '.join(f'{name} {shape}' for name, shape in found.items())} do not fit {needs}"

    return check


def _fits(shape: tuple[int | None, ...], dims: Sequence[str], bound: dict[str, Any]) -> bool:
    """Tell whether a shape has these dims, and bind those that are new."""
    counts = [len(bound.get(dim.rstrip("?"), ())) if dim[0] == "*" else 1 for dim in dims]
    new = [i for i, dim in enumerate(dims) if dim[0] == "*" and dim.rstrip("?") not in bound]
    if new:
        counts[new[0]] = len(shape) - sum(counts)
    if sum(counts) != len(shape) or min(counts, default=0) < 0:
        return False
    sizes = iter(shape)
    for dim, count in zip(dims, counts, strict=True):
        name, found = dim.rstrip("?"), tuple(islice(sizes, count))
        known = _known(name, bound)
        if known is None:
            bound[name] = found
        elif not all(
            None in (a, b) or a == b or (a == 1 and dim[-1] == "?") for a, b in zip(found, known, strict=True)
        ):
            return False
    return True


def _known(dim: str, bound: Mapping[str, Any]) -> tuple[int | None, ...] | None:
    """Sizes of dims as far as they are bound; None where they are not."""
    if dim in bound or dim[0] == "*":
        return bound.get(dim)
    terms: list[list[Any]] = [
        [(int(x),) if x.isdigit() else bound.get(x) for x in term.split("*")] for term in dim.split("+")
    ]
    if any(x is None for term in terms for x in term):
        return None
    if any(x[0] is None for term in terms for x in term):
        return (None,)
    return (sum(math.prod(x[0] for x in term) for term in terms),)
