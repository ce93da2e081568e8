"""A call of an operator as the limits see it: its arguments by name, whether it is in a graph yet or not."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from ...graph.fx_nodes import is_dynamic, value
from ...graph.npu_target import NpuTarget


@dataclass(frozen=True)
class Call:
    """Arguments of an operator, every one of its schema, defaults included.

    Attributes:
        overload: the operator.
        arguments: name → node, number, text, list or None.
        target: the chip that it is meant for.
    """

    overload: torch._ops.OpOverload
    arguments: Mapping[str, Any]
    target: NpuTarget

    @staticmethod
    def make(overload: torch._ops.OpOverload, target: NpuTarget, *args: Any, **kwargs: Any) -> Call:
        """The call ``overload(*args, **kwargs)``.

        Raises:
            TypeError: an argument that the schema does not have, or one that is missing.
        """
        given = dict(kwargs)
        arguments: dict[str, Any] = {}
        for i, parameter in enumerate(overload._schema.arguments):
            if i < len(args) and not parameter.kwarg_only:
                arguments[parameter.name] = args[i]
            elif parameter.name in given:
                arguments[parameter.name] = given.pop(parameter.name)
            elif parameter.has_default_value():
                arguments[parameter.name] = parameter.default_value
            else:
                raise TypeError(f"{overload} needs an argument {parameter.name!r}")
        if given:
            raise TypeError(f"{overload} has no arguments {', '.join(given)}")
        return Call(overload, arguments, target)

    @staticmethod
    def of(node: fx.Node, target: NpuTarget) -> Call:
        """The call that ``node`` makes."""
        assert isinstance(node.target, torch._ops.OpOverload)
        return Call.make(node.target, target, *node.args, **node.kwargs)

    @property
    def name(self) -> str:
        """Of the operator, without namespace and overload."""
        return self.overload._schema.name.partition("::")[2]

    def __getitem__(self, name: str) -> Any:
        return self.arguments[name]

    def tensor(self, name: str) -> torch.Tensor | None:
        """The fake tensor of an argument; None when it is not given."""
        found = value(self.arguments[name])
        return found if isinstance(found, torch.Tensor) else None

    def shape(self, name: str) -> tuple[int | None, ...]:
        """Sizes of a tensor argument, None for those that vary; () when it is not given."""
        tensor = self.tensor(name)
        if tensor is None:
            return ()
        return tuple(None if is_dynamic(size) else int(size) for size in tensor.shape)

    def dtype(self, name: str) -> torch.dtype | None:
        """The dtype that an argument counts as; None when it is not given."""
        tensor = self.tensor(name)
        return None if tensor is None else self.target.counted(tensor.dtype)

    def tensors(self) -> dict[str, torch.Tensor]:
        """All tensors among the arguments; those of a list are counted on: ``weight[0]``."""
        found: dict[str, torch.Tensor] = {}
        for name, given in self.arguments.items():
            leaves = pytree.tree_leaves(given)
            for i, leaf in enumerate(leaves):
                if isinstance(tensor := value(leaf), torch.Tensor):
                    found[f"{name}[{i}]" if isinstance(given, list | tuple) else name] = tensor
        return found
