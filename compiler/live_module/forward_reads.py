"""What a model's ``forward`` can read: names of attributes, and entries of Python modules.

Code is followed by name: from ``forward`` and what Python calls implicitly, to the functions and classes that it
names and to the methods of that name in every class found, also in transformers' files. That is a superset of what a
call reads. If code computes the names that it reads, every name counts; in transformers' models, which concatenate
names (``f"{layer_type}_inv_freq"``), those with a matching part.
"""

from __future__ import annotations

import functools
import importlib.util
import sys
import types
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn

from .code_reads import computes_names, imports_in, names_in
from .framework import is_framework

_NOT_RUN = frozenset(
    "__init__ __post_init__ __new__ __init_subclass__ __repr__ extra_repr _init_weights from_pretrained "
    "save_pretrained prepare_inputs_for_generation __getstate__ __setstate__ __reduce__ __reduce_ex__ "
    "__deepcopy__ __copy__ __del__".split()
)
"""Methods that a forward call of a finished object does not run unless its code names them."""
MAKERS = frozenset(("__init__", "__post_init__", "__new__"))
"""Methods that run when code calls a class."""
_CALLED = frozenset(
    "__call__ __getattr__ __getattribute__ __getitem__ __iter__ __len__ __contains__ __bool__ __enter__".split()
)
"""Methods of the framework's classes that Python calls by itself."""
_ALWAYS = frozenset(
    "forward __call__ _call_impl _wrapped_call_impl __getattr__ __getattribute__ _modules _forward_hooks "
    "_forward_pre_hooks _forward_hooks_with_kwargs _forward_pre_hooks_with_kwargs".split()
)
"""What calling a module reads."""
_TOKENS = frozenset(("pad_token_id", "bos_token_id", "eos_token_id"))
"""Entries of a config that models are made from and that say nothing of their logits."""
_ASIDE = frozenset(("loss_function", "warn_if_padding_and_no_attention_mask"))
"""Functions that say nothing of the logits."""
_CALLED_ALIKE = (torch.Tensor, dict, list, str)
"""Kinds whose methods code calls; the framework's of such a name, ``to`` or ``update``, are not part of a forward."""
_SCALARS = frozenset((bool, int, float, complex, str, bytes, type(None)))
_CONTAINERS = frozenset((dict, OrderedDict, list, tuple, set, frozenset))
_FUNCTIONS = (types.FunctionType, types.BuiltinFunctionType, type)

Space = dict[str, Any]


class ForwardReads:
    """What ``forward`` of a model, of the modules in it, and of what these hold can read.

    Args:
        model: a module.
    """

    def __init__(self, model: nn.Module) -> None:
        self._names = set(_ALWAYS)
        self._all_names = False
        self._parts: set[str] = set()
        self._seen: dict[int, Any] = {}
        self._members: list[tuple[str, Any]] = []  # of classes and objects: followed once the name is read
        self._files: list[types.ModuleType] = []  # not the framework's, which code gets hold of
        self._aliases: list[dict[str, str]] = []  # names of configs in place of others
        self._globals: dict[int, tuple[str, Space, set[str]]] = {}
        for module in model.modules():
            self._add_attributes(vars(module))
            self._add_class(type(module))
        self._add_attention(getattr(model, "config", None))
        self._close()
        kinds = {
            cls for module in model.modules() for cls in type(module).__mro__ if not is_framework(cls.__module__)
        }
        makers = [vars(cls).get("__init__") for cls in kinds]
        found = [names_in(maker.__code__) for maker in makers if isinstance(maker, types.FunctionType)]
        self._of_config = frozenset().union(*found) - _TOKENS

    def reads(self, name: str) -> bool:
        """Whether an attribute of this name is read."""
        return (
            self._all_names or name in self._names or bool(self._parts and any(part in name for part in self._parts))
        )

    def runs(self, name: str) -> bool:
        """True if a method of this name of a class that is not the framework's may be run."""
        return name not in _NOT_RUN if name[:2] == "__" else self.reads(name)

    def configures(self, name: str) -> bool:
        """Whether an entry of a config of this name is read, or was when the model was made."""
        return self.reads(name) or name in self._of_config

    def globals(self) -> Iterator[tuple[str, Space, dict[str, Any]]]:
        """The name of each Python module that is read, its entries, and those of them that are read."""
        for place, space, names in self._globals.values():
            yield place, space, {name: space[name] for name in sorted(names) if name in space}

    def functions(self) -> Iterator[types.FunctionType]:
        """The functions that may be run, but for those of the framework that look at no attribute of a model."""
        yield from (item for item in self._seen.values() if isinstance(item, types.FunctionType))

    def _add_attention(self, config: Any) -> None:
        """The function that transformers calls under the config's name."""
        implementation = getattr(config, "_attn_implementation", None)
        if isinstance(implementation, str):
            from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

            self._add(ALL_ATTENTION_FUNCTIONS.get(implementation, None))

    def _close(self) -> None:
        """Look at what the names found so far stand for, until none is new."""
        before = -1
        while before != (now := len(self._names) + len(self._seen)):
            before = now
            waiting, self._members = self._members, []
            for name, item in waiting:
                if self._all_names or name in self._names:
                    self._add(item)
                else:
                    self._members.append((name, item))
            for module in list(self._files):
                self._read(vars(module), frozenset(self._names))
            for aliases in self._aliases:
                self._names.update(other for name, other in aliases.items() if name in self._names)

    def _add_all(self, items: Iterable[Any]) -> None:
        for item in items:
            self._add(item)

    def _add(self, item: Any) -> None:
        """A value that code can get hold of."""
        if type(item) in _SCALARS or isinstance(item, (torch.Tensor, nn.Module)):
            return
        if isinstance(item, type):
            self._add_class(item)
            self._add_makers(item)
            return
        if id(item) in self._seen:
            return
        self._seen[id(item)] = item
        self._add_all(_parts(item))
        if isinstance(item, types.FunctionType):
            self._add_function(item)
        elif isinstance(item, types.ModuleType):
            if _is_a_users(item.__name__):
                self._files.append(item)
        elif _is_followed(type(item).__module__):
            self._add_class(type(item))
            if isinstance(getattr(item, "__dict__", None), dict):
                self._add_attributes(vars(item))

    def _add_attributes(self, items: Space) -> None:
        for name, item in items.items():
            if type(item) not in _SCALARS and (type(item) not in _CONTAINERS or item):
                self._members.append((name, item))

    def _add_makers(self, cls: type) -> None:
        """Follow the methods that run when code calls a class."""
        for base in cls.__mro__ if not issubclass(cls, nn.Module) else ():
            if _is_a_users(base.__module__):
                self._add_all([vars(base)[name] for name in MAKERS & vars(base).keys()])

    def _add_class(self, cls: type) -> None:
        for base in cls.__mro__[:-1]:
            if id(base) in self._seen or base is nn.Module or not _is_followed(base.__module__):
                continue
            self._seen[id(base)] = base
            framework, installed = is_framework(base.__module__), base.__module__.startswith("transformers.")
            for name, item in vars(base).items():
                if name == "attribute_map" and isinstance(item, dict):
                    self._aliases.append(item)
                if name[:2] == "__" and name[-2:] == "__":
                    if name in _CALLED if installed else name not in _NOT_RUN:
                        self._add(item)
                elif not (framework and any(hasattr(kind, name) for kind in _CALLED_ALIKE)):
                    self._members.append((name, item))

    def _add_function(self, function: types.FunctionType) -> None:
        code, space = function.__code__, function.__globals__
        place = str(space.get("__name__"))
        if not _is_followed(place):
            return
        names = names_in(code) - _ASIDE
        if not is_framework(place) and computes_names(code):
            if place.startswith("transformers."):
                self._parts.update(name for name in names if name[:1] == "_" or name[-1:] == "_")
            else:
                self._all_names = True
        self._names |= names
        self._read(space, names)
        for name in imports_in(code):
            module = sys.modules.get(importlib.util.resolve_name(name, space.get("__package__") or ""))
            if module is not None:
                self._read(vars(module), names)

    def _read(self, space: Space, names: frozenset[str]) -> None:
        """Entries of a Python module that code names, and those of other such modules among them."""
        place, known = str(space.get("__name__")), names & space.keys()
        new = known - self._globals.setdefault(id(space), (place, space, set()))[2]
        self._globals[id(space)][2].update(new)
        for name in new:
            if not (is_framework(place) and name[:1] == "_" and isinstance(space[name], dict)):
                self._add(space[name])  # what the framework keeps is about all models that are loaded
        for item in [space[name] for name in known]:
            if isinstance(item, types.ModuleType) and item.__name__.partition(".")[0] not in sys.stdlib_module_names:
                self._read_inside(item, names)

    def _read_inside(self, module: types.ModuleType, names: frozenset[str]) -> None:
        """Functions and classes of a Python module, where what has them is a name in the code."""
        space = vars(module)
        found = [name for name in names & space.keys() if isinstance(space[name], _FUNCTIONS)]
        self._read(space, frozenset(found))
        for item in [space[name] for name in names & space.keys()]:
            if isinstance(item, types.ModuleType) and item.__name__.startswith(f"{module.__name__}."):
                self._read_inside(item, names)


def _is_followed(name: str) -> bool:
    """True if functions of a Python module may look at an attribute of a model: of torch's those of modules do."""
    if name.startswith("transformers."):
        return not name.startswith("transformers.models.auto.")  # which model a config stands for
    return name.startswith("torch.nn.modules.") or not is_framework(name)


def _is_a_users(name: str) -> bool:
    return not is_framework(name) and not name.startswith("transformers.")


def _parts(item: Any) -> Iterator[Any]:
    """Values that code gets hold of with a value."""
    if isinstance(item, types.MethodType):
        yield from (item.__func__, item.__self__)
    elif isinstance(item, property):
        yield from (item.fget, item.fset)
    elif isinstance(item, (classmethod, staticmethod)):
        yield item.__func__
    elif isinstance(item, (functools.partial, functools.partialmethod)):
        yield from (item.func, *item.args, *item.keywords.values())
    elif isinstance(item, functools.cached_property):
        yield item.func
    elif isinstance(item, dict):
        yield from list(item.values())
    elif isinstance(item, (list, tuple, set, frozenset)):
        yield from list(item)
    elif isinstance(item, types.FunctionType):
        yield from (*(item.__defaults__ or ()), *(item.__kwdefaults__ or {}).values())
        yield getattr(item, "__wrapped__", None)
        for cell in item.__closure__ or ():
            try:
                yield cell.cell_contents
            except ValueError:  # an empty cell
                continue
