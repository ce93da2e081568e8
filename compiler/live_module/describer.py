"""Digests of values of all kinds and of modules, equal in every process for equal values.

Code counts as it is in memory. What it reads in addition to its arguments is not followed: see ``identity``.
"""

from __future__ import annotations

import builtins
import enum
import functools
import hashlib
import importlib
import inspect
import logging
import operator
import os
import re
import sys
import types
import weakref
from collections import deque, namedtuple
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import nn

from ...runtime.ops.linear.stored_weight import StoredWeight
from ..report import first_line
from ..weights.tensor_contents import module_tensors, tensor_digest
from .code_reads import UNTOLD
from .forward_reads import MAKERS
from .framework import is_framework

_HEAP_TYPE = 1 << 9
"""Flag of classes that are made at run time, those written in Python among them."""
_LITERALS = (bool, int, float, complex, str, bytes, range)
_EXACT_LITERALS = frozenset((*_LITERALS, type(None), type(Ellipsis)))
_TYPE_HINTS = (types.UnionType, types.GenericAlias, inspect.Signature)
_TORCH_VALUES = (torch.dtype, torch.device, torch.layout, torch.memory_format)
_OPERATORS = (torch._ops.OpOverload, torch._ops.OpOverloadPacket)
_CODE = (types.FunctionType, property, classmethod, staticmethod, functools.cached_property, functools.partialmethod)
_FIELDS = (types.MemberDescriptorType, types.GetSetDescriptorType, type(vars(namedtuple("_", "x"))["x"]))
_MADE = ("_abc_impl", "_backward_cls")
"""Members that Python and torch put into classes."""
_KEPT_APART = frozenset(
    (
        *(name for name in vars(nn.Module()) if "_hooks" in name),
        *("_parameters", "_buffers", "_modules", "generation_config", "generate"),
    )
)
"""Attributes of modules that are described or looked at elsewhere, or that no forward call reads."""
_UNTOLD_ITEMS = {
    id(vars(module)[name]): name for module in (builtins, importlib, os) for name in UNTOLD & vars(module).keys()
}


class CannotIdentify(Exception):
    """The module contains something that cannot be described. The message names it."""


@contextmanager
def looking() -> Iterator[None]:
    """Raise ``CannotIdentify`` if inspecting an object fails: objects can run code of their own when inspected."""
    try:
        yield
    except CannotIdentify:
        raise
    except Exception as error:
        raise CannotIdentify(f"looking at it fails: {type(error).__name__}: {first_line(error)}") from error


def describe(item: Any) -> str:
    """A digest of any value.

    Raises:
        CannotIdentify: something in it cannot be described.
    """
    with looking():
        describer = Describer()
        describer.add(item)
        return describer.digest()


def describe_module(module: nn.Module, more: Any, ignores: Callable[[str], bool]) -> str:
    """A digest of a module and those below it, whatever its tensors hold. Classes count by their names.

    Args:
        module: on the CPU, or on the meta device.
        more: what counts besides.
        ignores: whether an attribute of this name does not count.

    Raises:
        CannotIdentify: something in it cannot be described.
    """
    with looking():
        describer = Describer()
        describer.add(more)
        describer.add_module(module, ignores)
        return describer.digest()


class Describer:
    """Feeds a digest with values of all kinds, so that different ones make different digests.

    Args:
        runs: whether code may run a method of this name. Of classes that are not the framework's these count, and all
            data. None: classes count by their names.
    """

    def __init__(self, runs: Callable[[str], bool] | None = None) -> None:
        self._runs = runs
        self._said: list[str] = []
        self._seen: dict[int, int] = {}
        self._kept: list[Any] = []  # while an object is known by its id, it must live
        self._modules: dict[int, str] = {}
        self.classes: dict[type, None] = {}
        """All that were met, with their bases."""

    def digest(self) -> str:
        return hashlib.sha256("".join(self._said).encode()).hexdigest()

    def add_module(self, model: nn.Module, ignores: Callable[[str], bool] = lambda name: False) -> None:
        """A module with all those below it, without its hooks and what is in its tensors.

        Args:
            model: it.
            ignores: whether an attribute of this name does not count.
        """
        self._modules = {id(module): name for name, module in model.named_modules()}
        for name, module in model.named_modules():
            self.say("module", name)
            self.say("of", f"{type(module).__module__}.{type(module).__qualname__}")
            self._add_class(type(module))
            for key, item in vars(module).items():
                if key in _KEPT_APART or ignores(key):
                    continue
                if type(item) in _EXACT_LITERALS:
                    self.say(f"attribute {key}", repr(item))
                else:
                    self.say("attribute", key)
                    self.add(item)
        self._add_tensors(module_tensors(model))

    def add(self, item: Any) -> None:
        """Any value.

        Raises:
            CannotIdentify: nothing is known about its kind.
        """
        if type(item) in _EXACT_LITERALS:
            self.say(type(item).__name__, repr(item))
        elif isinstance(item, _TORCH_VALUES):
            self.say("torch", str(item))
        elif isinstance(item, re.Pattern):  # of the same text one object or several, as Python's cache has it
            self.say("pattern", repr((item.pattern, item.flags)))
        elif id(item) in self._modules:
            self.say("module", self._modules[id(item)])
        elif id(item) in self._seen:
            self.say("seen", str(self._seen[id(item)]))
        else:
            self._seen[id(item)] = len(self._seen)
            self._kept.append(item)
            self._add_compound(item)

    def say(self, kind: str, text: str) -> None:
        self._said.append(f"{kind}\0{len(text)}\0{text}\0")

    def _add_compound(self, item: Any) -> None:
        if id(item) in _UNTOLD_ITEMS:
            raise CannotIdentify(f"code has {_UNTOLD_ITEMS[id(item)]!r} by another name")
        if isinstance(item, enum.Enum):
            self.say("enum", f"{type(item).__module__}.{type(item).__qualname__}.{item.name}")
            self.add(item.value)
            self._add_class(type(item))
        elif isinstance(item, np.generic):
            self.say(type(item).__name__, repr(item))
        elif isinstance(item, _LITERALS):
            base = next(cls for cls in _LITERALS if isinstance(item, cls))
            self.say("kind of", base.__repr__(item))
            self._add_object(item)
        elif isinstance(item, (list, tuple, deque)):
            self.say(type(item).__qualname__, str(len(item)))
            self._add_all(item)
            self._add_own_state(item)
        elif isinstance(item, Mapping):
            self._add_mapping(item)
        elif isinstance(item, (set, frozenset)):
            self.say(type(item).__qualname__, str(len(item)))
            self._add_all(sorted(item, key=repr))
        elif isinstance(item, torch.Tensor):
            self._add_tensor(item)
        elif type(item) is np.ndarray and not item.dtype.hasobject:
            self.say("array", f"{item.dtype.str} {item.shape} {hashlib.sha256(item.tobytes()).hexdigest()}")
        elif isinstance(item, functools.partial):
            self.say("partial", "")
            self._add_all((item.func, item.args, item.keywords))
        elif isinstance(item, types.MethodType):
            self.say("method", "")
            self._add_all((item.__func__, item.__self__))
        elif isinstance(item, types.FunctionType):
            self._add_function(item)
        elif isinstance(item, types.ModuleType):
            self.say("python module", item.__name__)
        elif isinstance(item, type):
            self.say("class", f"{item.__module__}.{item.__qualname__}")
            self._add_class(item)
            self._add_makers(item)
        elif isinstance(item, weakref.ReferenceType):
            self.add(item())
        elif isinstance(item, (property, classmethod, staticmethod, functools.cached_property)):
            self.say(type(item).__name__, "")
            self._add_all(_inside(item))
        elif isinstance(item, torch.jit.ScriptFunction):
            self.say("script", str(item.graph))
        elif type(item).__module__ == "functools" and hasattr(item, "__wrapped__"):
            self.say(type(item).__qualname__, "")
            self.add(item.__wrapped__)
        elif callable(item) and hasattr(item, "__qualname__") and not hasattr(item, "__dict__"):
            self.say("built in", f"{getattr(item, '__module__', '')}.{item.__qualname__}")
        elif isinstance(item, _OPERATORS):
            self.say("operator", str(item))
        elif isinstance(item, _TYPE_HINTS) or type(item).__module__ in ("typing", "typing_extensions"):
            self.say("type hint", str(item))
        elif type(item) is object:
            self.say("sentinel", "")
        elif isinstance(item, logging.Logger):
            self.say("logger", item.name)
        else:
            self._add_object(item)

    def _add_tensors(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Describe how they lie in memory and share it; of orders of stored weights only which weights share one."""
        places: dict[int, int] = {}
        orders: dict[bytes, int] = {}
        for name, tensor in tensors.items():
            without_values = tensor.is_meta and self._runs is None
            if (tensor.device.type != "cpu" and not without_values) or tensor.layout is not torch.strided:
                raise CannotIdentify(f"{name} is a {tensor.layout} tensor on {tensor.device}")
            layout: tuple[Any, ...]
            if isinstance(tensor, StoredWeight):
                form, dtype, transposed, order, input_scale = tensor.stored_as
                shared = orders.setdefault(order, len(orders))
                layout = (str(form), dtype, tuple(tensor.shape), transposed, shared, input_scale)
            elif type(tensor) in (torch.Tensor, nn.Parameter, nn.Buffer):
                place = places.setdefault(tensor.untyped_storage().data_ptr(), len(places))
                sizes = (tuple(tensor.shape), tensor.stride(), tensor.storage_offset())
                layout = (tensor.dtype, *sizes, tensor.requires_grad, tensor.is_inference(), place)
            else:
                raise CannotIdentify(f"{name} is a {type(tensor).__name__}")
            self.say(type(tensor).__name__, repr((name, *layout)))

    def _add_tensor(self, tensor: torch.Tensor) -> None:
        if tensor.device.type != "cpu" or tensor.layout is not torch.strided:
            raise CannotIdentify(f"an attribute is a {tensor.layout} tensor on {tensor.device}")
        self.say("tensor", f"{tensor.dtype} {tuple(tensor.shape)} {tensor.stride()} {tensor_digest(tensor)}")

    def _add_object(self, item: Any) -> None:
        kind = f"{type(item).__module__}.{type(item).__qualname__}"
        if not type(item).__flags__ & _HEAP_TYPE:
            raise CannotIdentify(f"nothing is known about a {kind}")
        self.say("object", kind)
        self._add_class(type(item))
        slots = [name for cls in type(item).__mro__ for name in _slots(cls) if hasattr(item, name)]
        self._add_mapping({**{name: getattr(item, name) for name in slots}, **getattr(item, "__dict__", {})})

    def _add_mapping(self, item: Mapping[Any, Any]) -> None:
        self.say(type(item).__qualname__, str(len(item)))
        for key, inner in item.items():
            self.add(key)
            self.add(inner)
        self._add_own_state(item)

    def _add_own_state(self, item: Any) -> None:
        """The class and the attributes of a container of a kind of its own."""
        if not is_framework(type(item).__module__):
            self._add_object(item)

    def _add_all(self, items: Iterable[Any]) -> None:
        for item in items:
            self.add(item)

    def _add_function(self, function: types.FunctionType) -> None:
        home = str(function.__globals__.get("__name__"))
        self.say(f"function of {home}", f"{function.__module__}.{function.__qualname__}")
        self.say("code", code_digest(function.__code__))
        self._add_all((function.__defaults__, function.__kwdefaults__, {} if is_framework(home) else vars(function)))
        for cell in function.__closure__ or ():
            try:
                content = cell.cell_contents
            except ValueError:
                self.say("empty cell", "")
            else:
                self.add(content)

    def _add_class(self, cls: type) -> None:
        """A class and its bases, which must be what their names stand for."""
        for base in cls.__mro__[:-1]:
            if base in self.classes:
                continue
            self.classes[base] = None
            self.say("base", f"{base.__module__}.{base.__qualname__}")
            if not _is_found_by_its_name(base):
                raise CannotIdentify(f"{base.__qualname__} is a class that was made at run time")
            if self._runs is not None and not is_framework(base.__module__):
                for key, item in vars(base).items():
                    if self._runs(key) if isinstance(item, _CODE) else _is_data(key, item):
                        self.say("member", key)
                        self.add(item)

    def _add_makers(self, cls: type) -> None:
        """Add the methods that run when code calls a class."""
        for base in cls.__mro__ if self._runs is not None else ():
            if not is_framework(base.__module__):
                for key in sorted(MAKERS & vars(base).keys()):
                    self.say("maker", key)
                    self.add(vars(base)[key])


def _is_data(key: str, item: Any) -> bool:
    return key[:2] != "__" and key not in _MADE and not isinstance(item, _FIELDS)


def code_digest(code: types.CodeType) -> str:
    """A digest of what code does."""
    digest = hashlib.sha256(code.co_code)
    digest.update("\0".join((*code.co_names, *code.co_varnames, "", *code.co_freevars, *code.co_cellvars)).encode())
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            said = code_digest(constant)
        else:
            said = repr(sorted(map(repr, constant)) if isinstance(constant, frozenset) else constant)
        digest.update(f"{said}\0".encode())
    return digest.hexdigest()


def _slots(cls: type) -> tuple[str, ...]:
    slots = vars(cls).get("__slots__", ())
    names = (slots,) if isinstance(slots, str) else tuple(slots)
    return tuple(name for name in names if name not in ("__dict__", "__weakref__"))


def _is_found_by_its_name(cls: type) -> bool:
    try:
        return operator.attrgetter(cls.__qualname__)(sys.modules[cls.__module__]) is cls
    except (KeyError, AttributeError):
        return not cls.__flags__ & _HEAP_TYPE  # builtin ones, of which some have no name


def _inside(item: Any) -> tuple[Any, ...]:
    if isinstance(item, property):
        return item.fget, item.fset
    return (item.func,) if isinstance(item, functools.cached_property) else (item.__func__,)
