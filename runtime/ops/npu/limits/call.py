"""A call of an operator as its limits see it: the arguments by name, of a graph or of a reference kernel."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch.utils import _pytree as pytree

from ....npu_target import NpuTarget
from ..schemas import COMMON_NAMES

REFERENCE = NpuTarget(graph_mode="aclgraph")
COMPARED = frozenset({torch.float32, torch.float64})
"""Dtypes that reference kernels compute in to compare, beside those of 16 bits."""


@dataclass(frozen=True)
class Call:
    """Arguments of an operator, every one of its schema, defaults included.

    Attributes:
        name: of the operator, without namespace and overload.
        arguments: name → tensor, number, text, list or None; names are those that versions of the operator share.
        target: the chip that it is meant for.
        is_reference: it is made by a reference kernel, which runs on no chip, and compares in fp32 and fp64.
    """

    name: str
    arguments: Mapping[str, Any]
    target: NpuTarget = REFERENCE
    is_reference: bool = False

    @classmethod
    def make(cls, overload: torch._ops.OpOverload, target: NpuTarget, *args: Any, **kwargs: Any) -> Self:
        """The call ``overload(*args, **kwargs)``.

        Raises:
            TypeError: an argument that the schema does not have, or one that is missing.
        """
        given = dict(kwargs)
        name = overload._schema.name.partition("::")[2]
        common = COMMON_NAMES.get(name, {})
        arguments: dict[str, Any] = {}
        for i, parameter in enumerate(overload._schema.arguments):
            known = common.get(parameter.name, parameter.name)
            if i < len(args) and not parameter.kwarg_only:
                arguments[known] = args[i]
            elif parameter.name in given:
                arguments[known] = given.pop(parameter.name)
            elif parameter.has_default_value():
                arguments[known] = parameter.default_value
            else:
                raise TypeError(f"{overload} needs an argument {parameter.name!r}")
        if given:
            raise TypeError(f"{overload} has no arguments {', '.join(given)}")
        return cls(name, arguments, target)

    def __getitem__(self, name: str) -> Any:
        return self.arguments[name]

    def own(self, name: str) -> str:
        """What the operator's schema calls an argument."""
        spelled = {common: own for own, common in COMMON_NAMES.get(self.name, {}).items()}
        return spelled.get(name, name)

    def is_given(self, *names: str) -> bool:
        """Tell whether one of the arguments is there and not None."""
        return any(self.arguments.get(name) is not None for name in names)

    def value(self, given: Any) -> Any:
        """What stands for an argument; a graph's nodes stand for tensors."""
        return given

    def tensor(self, name: str) -> torch.Tensor | None:
        """The tensor of an argument, or the first of a list, ``weight[0]``; None when it is not given."""
        given = self.arguments.get(name.removesuffix("[0]"))
        if name.endswith("[0]"):
            given = given[0] if given else None
        found = self.value(given)
        return found if isinstance(found, torch.Tensor) else None

    def shape(self, name: str) -> tuple[int | None, ...]:
        """Sizes of a tensor argument, None for those that vary; () when it is not given."""
        tensor = self.tensor(name)
        return () if tensor is None else tuple(map(_size, tensor.shape))

    def dtype(self, name: str) -> torch.dtype | None:
        """The dtype that an argument counts as; None when it is not given."""
        tensor = self.tensor(name)
        return None if tensor is None else self.target.counted(tensor.dtype)

    def is_half(self, dtype: torch.dtype | None) -> bool:
        """Tell whether numbers of 16 bits are meant, which a reference kernel compares in others, too."""
        if dtype is None:
            return False
        halves = (torch.float16, torch.bfloat16, *(COMPARED if self.is_reference else ()))
        return self.target.counted(dtype) in halves

    def tensors(self) -> dict[str, torch.Tensor]:
        """All tensors among the arguments; those of a list are counted on: ``weight[0]``."""
        found: dict[str, torch.Tensor] = {}
        for name, given in self.arguments.items():
            for i, leaf in enumerate(pytree.tree_leaves(given)):
                if isinstance(tensor := self.value(leaf), torch.Tensor):
                    found[f"{name}[{i}]" if isinstance(given, list | tuple) else name] = tensor
        return found


def _size(size: Any) -> int | None:
    return None if isinstance(size, torch.SymInt) and not size.node.expr.is_number else int(size)
