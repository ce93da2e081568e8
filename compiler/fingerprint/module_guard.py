"""Notice when a live module is no longer what its program was compiled from, other than in its weights.

A program does what the module did when it was traced. An adapter that is switched off or rescaled, a hook, another
``forward``, an attribute or a setting of the config that has changed would be ignored without a word.
"""

from __future__ import annotations

import functools
import sys
import types
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import nn
from torch._C._dynamo.guards import dict_version
from torch.nn.modules import module as _of_modules

from .describer import cached_names
from .framework import is_framework

_HOOKS = ("_forward_hooks", "_forward_pre_hooks")
_DICTS = ("_modules", *_HOOKS)
_OF_WEIGHTS = ("_parameters", "_buffers")
"""Looked at by ``WeightGuard``."""
_NOT_READ = frozenset(
    "generation_config generate _compiled_call _compiled_call_impl _cache _state_dict_hooks "
    "_non_persistent_buffers_set _backward_hooks _backward_pre_hooks _is_full_backward_hook "
    "_state_dict_pre_hooks _load_state_dict_pre_hooks "
    "_load_state_dict_post_hooks warnings_issued".split()
)
"""Attributes of modules that no forward call reads, or that generating by transformers sets."""
_LITERALS = frozenset((bool, int, float, complex, str, bytes, type(None)))
_HEAP_TYPE = 1 << 9
_REMEDY = "compile it again"


class ModuleGuard:
    """Remembers what a module's forward reads of its objects.

    Every dict among them is known by its version, a number that the interpreter moves with each write, so that
    looking again costs one pass in C. A dict that was written to is compared in full before anything is refused.

    Args:
        model: the module that was compiled.
    """

    def __init__(self, model: nn.Module) -> None:
        self._name = type(model).__name__
        self._dicts: list[dict[Any, Any]] = []
        self._places: list[str] = []
        self._copies: list[dict[Any, Any]] = []
        self._empty: list[tuple[str, dict[Any, Any]]] = []
        self._lists: list[Any] = []
        self._list_copies: list[Any] = []
        self._list_places: list[str] = []
        self._fields: list[tuple[str, Any, str, Any]] = []  # place, object, attribute, value
        self._tensors: list[tuple[str, torch.Tensor, tuple[int, int]]] = []
        self._arrays: list[tuple[str, np.ndarray[Any, Any], bytes]] = []
        self._seen: dict[int, Any] = {}
        self._classes: dict[type, dict[str, Any]] = {}
        self._named: list[tuple[str, dict[str, Any], dict[str, Any]]] = []  # file, its globals, those that are read
        self._seen.update((id(module), module) for module in model.modules())
        for name, module in model.named_modules():
            self._watch_module(name, module)
        for key in ("_global_forward_hooks", "_global_forward_pre_hooks"):
            self._watch_dict(f"torch's {key}", getattr(_of_modules, key), inside=False)
        self._watch_classes(model)
        self._bare = [items for _, items in self._empty]
        self._versions = list(map(dict_version, self._dicts))

    def check(self, *, fully: bool = False) -> None:
        """Compare with what the module is now.

        Args:
            fully: look at its classes and at the globals that their code names, too.

        Raises:
            RuntimeError: an attribute, a hook, a submodule, a method or a setting was changed, added or removed.
        """
        if any(self._bare):
            place = next(place for place, items in self._empty if items)
            raise self._changed(place, "was added to")
        versions = list(map(dict_version, self._dicts))
        if versions != self._versions:
            for i, (before, now) in enumerate(zip(self._versions, versions, strict=True)):
                if before != now:
                    self._compare(self._places[i], self._copies[i], self._dicts[i])
            self._versions = versions
        if not _equal(self._lists, self._list_copies):
            pairs = zip(self._list_places, self._lists, self._list_copies, strict=True)
            raise self._changed(next(place for place, now, before in pairs if not _equal(now, before)))
        for place, item, key, value in self._fields:
            if not _same(_field(item, key), value):
                raise self._changed(f"{place}.{key}")
        for place, tensor, state in self._tensors:
            if _state(tensor) != state:
                raise self._changed(place)
        for place, array, content in self._arrays:
            if array.tobytes() != content:
                raise self._changed(place)
        if fully:
            self._check_code()

    def _check_code(self) -> None:
        for cls, before in self._classes.items():
            if not _equal(vars(cls), before):
                self._compare(cls.__name__, before, dict(vars(cls)), is_class=True)
        for file, space, before in self._named:
            for key, value in before.items():
                if not _same(space.get(key), value):
                    raise self._changed(f"{file}.{key}")

    def _compare(
        self, place: str, before: Mapping[Any, Any], now: Mapping[Any, Any], *, is_class: bool = False
    ) -> None:
        for key in {**before, **now}:
            special = is_class and str(key)[:2] == "__" and key not in ("__call__", "__getattr__", "__getattribute__")
            if special or key in _NOT_READ:
                continue
            if key not in before or key not in now or not _same(now[key], before[key]):
                raise self._changed(f"{place}.{key}".lstrip("."))

    def _changed(self, place: str, what: str = "was changed") -> RuntimeError:
        return RuntimeError(
            f"{place!r} of {self._name} {what} after the model was compiled (an adapter switched, scaled or "
            f"merged, a hook, an attribute, a submodule, train()); {_REMEDY}"
        )

    def _watch_module(self, name: str, module: nn.Module) -> None:
        self._watch_dict(name, vars(module), inside=False)
        for key, item in vars(module).items():
            place = f"{name}.{key}".lstrip(".")
            if key in _DICTS:
                self._watch_dict(place, item, inside=key in _HOOKS)
            elif key not in _NOT_READ and key not in _OF_WEIGHTS and not key.endswith("_hooks"):
                self._watch(place, item)

    def _watch_dict(self, place: str, items: dict[Any, Any], *, inside: bool = True) -> None:
        if (not items and type(items) is not dict) or (not items and place.endswith(_DICTS)):
            self._empty.append((place, items))
        else:
            self._dicts.append(items)
            self._places.append(place)
            self._copies.append(dict(items))
        if inside:
            for key, item in items.items():
                self._watch(f"{place}[{key!r}]", item)

    def _watch(self, place: str, item: Any) -> None:
        """Remember what can be written to inside a value."""
        if type(item) in _LITERALS or id(item) in self._seen or isinstance(item, (type, types.ModuleType)):
            return
        self._seen[id(item)] = item
        if isinstance(item, dict):
            self._watch_dict(place, item)
        elif isinstance(item, (list, tuple, set, frozenset)):
            if isinstance(item, (list, set)):
                self._lists.append(item)
                self._list_copies.append(item.copy())
                self._list_places.append(place)
            for i, inner in enumerate(item):
                self._watch(f"{place}[{i}]", inner)
        elif isinstance(item, torch.Tensor):
            self._tensors.append((place, item, _state(item)))
        elif isinstance(item, np.ndarray):
            if not item.dtype.hasobject:
                self._arrays.append((place, item, item.tobytes()))
        elif isinstance(item, types.MethodType):
            self._watch(place, item.__func__)
            self._watch(place, item.__self__)
        elif isinstance(item, types.FunctionType):
            for key in ("__code__", "__defaults__", "__kwdefaults__"):
                self._fields.append((place, item, key, getattr(item, key)))
            for cell in item.__closure__ or ():
                content = _field(cell, "cell_contents")
                self._fields.append((place, cell, "cell_contents", content))
                self._watch(place, content)
        elif isinstance(item, functools.partial):
            self._watch(place, item.func)
            self._watch(place, (*item.args, item.keywords))
        elif type(item).__flags__ & _HEAP_TYPE:
            self._watch_object(place, item)

    def _watch_object(self, place: str, item: Any) -> None:
        for cls in type(item).__mro__:
            slots = vars(cls).get("__slots__", ())
            for key in (slots,) if isinstance(slots, str) else tuple(slots):
                if key not in ("__dict__", "__weakref__"):
                    self._fields.append((place, item, key, _field(item, key)))
                    self._watch(f"{place}.{key}", _field(item, key))
        if isinstance(getattr(item, "__dict__", None), dict):
            self._dicts.append(vars(item))
            self._places.append(place)
            self._copies.append(dict(vars(item)))
            for key, inner in vars(item).items():
                self._watch(f"{place}.{key}", inner)

    def _watch_classes(self, model: nn.Module) -> None:
        names: dict[str, set[str]] = {}
        for cls in dict.fromkeys(base for module in model.modules() for base in type(module).__mro__[:-1]):
            self._classes[cls] = dict(vars(cls))
            if is_framework(cls.__module__):
                continue
            read = names.setdefault(cls.__module__, set())
            for key, item in vars(cls).items():
                function = getattr(item, "__wrapped__", item)
                if isinstance(function, types.FunctionType):
                    read.update(cached_names(function.__code__))
                elif isinstance(item, (dict, list)):
                    self._watch(f"{cls.__name__}.{key}", item)
        for file, read in names.items():
            space = vars(sys.modules[file]) if file in sys.modules else {}
            found = {key: space[key] for key in read if key in space}
            self._named.append((file, space, found))
            for key, item in found.items():
                if isinstance(item, (dict, list)):
                    self._watch(f"{file}.{key}", item)


def _same(now: Any, before: Any) -> bool:
    if now is before:
        return True
    return type(now) is type(before) and type(now) in _LITERALS and bool(now == before)


def _equal(now: Any, before: Any) -> bool:
    try:
        return bool(now == before)
    except Exception:  # elements that cannot be compared, and are no longer the same objects
        return False


def _field(item: Any, key: str) -> Any:
    try:
        return getattr(item, key, None)
    except ValueError:  # an empty cell
        return None


def _state(tensor: torch.Tensor) -> tuple[int, int]:
    return tensor.data_ptr(), 0 if tensor.is_inference() else tensor._version
