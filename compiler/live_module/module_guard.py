"""Detects changes of a live module since its compilation, other than in its weights.

A program does what the module did when it was traced. It would silently ignore an adapter switched off or rescaled, a
hook, another ``forward``, or a changed attribute or config setting.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn
from torch._C._dynamo.guards import dict_version
from torch.nn.modules import module as _of_modules
from transformers import PreTrainedConfig

from .forward_reads import ForwardReads
from .framework import is_framework

_HOOKS = ("_forward_hooks", "_forward_pre_hooks")
_DICTS = ("_modules", *_HOOKS)
_OF_WEIGHTS = ("_parameters", "_buffers")
"""Looked at by ``WeightGuard``."""
_WITHOUT_EFFECT = frozenset(
    (
        *("generate", "generation_config", "_compiled_call_impl", "_is_torch_compile", "_previous_max_cache_length"),
        *("hf_device_map", "_is_accelerate_prepared", "_require_grads_hooks", "warnings_issued", "model_tags"),
        # what a call gives out beside logits, and where it keeps keys and values
        *("use_cache", "return_dict", "output_attentions", "_output_attentions", "output_hidden_states"),
        "_output_capturing_hooks_installed",
        # of training
        *("gradient_checkpointing", "_gradient_checkpointing_func"),
    )
)
"""Attributes that code may name and that change no logits; libraries set them on their own."""
_HOOKS_WITHOUT_EFFECT = frozenset(
    (
        *(("transformers", "output_capturing_hook"), ("transformers", "make_inputs_require_grads")),
        ("peft", "make_inputs_require_grad"),
    )
)
"""Package and name of functions that libraries leave behind as hooks."""
_LITERALS = frozenset((bool, int, float, complex, str, bytes, type(None)))
_HEAP_TYPE = 1 << 9
_REMEDY = "recompile it"
_MISSING = object()


@dataclass(frozen=True, eq=False)
class _Dict:
    """A dict as it was.

    Attributes:
        place: where, for messages.
        items: the dict.
        copy: what it held.
        owner: whose attributes it holds; None for a dict of any other kind.
        counts: whether an attribute of a name does; all keys of other dicts do.
    """

    place: str
    items: dict[Any, Any]
    copy: dict[Any, Any]
    owner: Any = None
    counts: Callable[[Any], bool] = lambda key: True


class ModuleGuard:
    """Remembers what a module's forward reads of its objects.

    Attributes count by their names, see ``ForwardReads``; of a config those that the model was made from, too. Every
    dict among them is known by its version, a number that the interpreter moves with each write, so that looking
    again costs one pass in C. A dict that was written to is compared in full before anything is refused.

    Args:
        model: the module that was compiled.
    """

    def __init__(self, model: nn.Module) -> None:
        self._name = type(model).__name__
        self._reads = ForwardReads(model)
        self._modules = list(model.modules())
        self._types = list(map(type, self._modules))
        self._dicts: list[_Dict] = []
        self._empty: list[_Dict] = []
        self._versions: list[int] = []
        self._lists: list[Any] = []
        self._list_copies: list[Any] = []
        self._list_places: list[str] = []
        self._fields: list[tuple[str, Any, str, Any]] = []  # place, object, attribute, value
        self._tensors: list[tuple[str, torch.Tensor, tuple[int, int]]] = []
        self._arrays: list[tuple[str, np.ndarray[Any, Any], bytes]] = []
        self._seen: dict[int, Any] = {}
        self._classes: dict[type, dict[str, Any]] = {}
        self._named: list[tuple[str, dict[str, Any], dict[str, Any]]] = []  # file, its globals, those that are read
        self._seen.update((id(module), module) for module in self._modules)
        for name, module in model.named_modules():
            self._watch_module(name, module)
        for key in ("_global_forward_hooks", "_global_forward_pre_hooks"):
            self._watch_dict(f"torch's {key}", getattr(_of_modules, key), inside=False)
        self._watch_code()
        self._remember_versions()

    def check(self, *, fully: bool = False) -> None:
        """Compare with what the module is now.

        Args:
            fully: look at its classes and at the globals that their code names, too.

        Raises:
            RuntimeError: an attribute, a hook, a submodule, a method or a setting that ``forward`` reads was changed,
                added or removed.
        """
        if list(map(type, self._modules)) != self._types:
            pairs = zip(self._modules, self._types, strict=True)
            raise self._changed(
                next(f"{before.__name__}.__class__" for now, before in pairs if type(now) is not before)
            )
        if any(self._bare):
            for each in [each for each in self._empty if each.items]:
                self._compare(each)
                self._empty.remove(each)
                self._dicts.append(each)  # hooks without effect, which stay
            self._remember_versions()
        versions = list(map(dict_version, self._written_to))
        if versions != self._versions:
            for each, before, now in zip(self._dicts, self._versions, versions, strict=True):
                if before != now:
                    self._compare(each)
            self._versions = versions
        if not _equal(self._lists, self._list_copies):
            triples = zip(self._list_places, self._lists, self._list_copies, strict=True)
            raise self._changed(next(place for place, now, before in triples if not _equal(now, before)))
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

    def _remember_versions(self) -> None:
        self._bare = [each.items for each in self._empty]
        self._written_to = [each.items for each in self._dicts]
        self._versions = list(map(dict_version, self._written_to))

    def _check_code(self) -> None:
        for cls, before in self._classes.items():
            now = vars(cls)
            if not _equal(now, before):
                for key in {**before, **now}:
                    special = key[:2] == "__" and key not in ("__call__", "__getattr__", "__getattribute__")
                    changed = not _same(now.get(key, _MISSING), before.get(key, _MISSING))
                    if changed and not special and self._reads.reads(key) and key not in _WITHOUT_EFFECT:
                        raise self._changed(f"{cls.__name__}.{key}")
        for file, space, before in self._named:
            for key, value in before.items():
                if not _same(space.get(key), value):
                    raise self._changed(f"{file}.{key}")

    def _compare(self, each: _Dict) -> None:
        """Raise if an entry that counts is another."""
        for key in {**each.copy, **each.items}:
            if each.owner is not None and (key in _WITHOUT_EFFECT or not each.counts(key)):
                continue
            before, now = (_found(each.owner, items, key) for items in (each.copy, each.items))
            if not _same(now, before) and not (_has_no_effect(before) and _has_no_effect(now)):
                raise self._changed(f"{each.place}.{key}".lstrip("."))

    def _changed(self, place: str) -> RuntimeError:
        return RuntimeError(
            f"{place!r} of {self._name} was changed after the model was compiled (an adapter switched, scaled or "
            f"merged, a hook, an attribute, a submodule, train()); {_REMEDY}"
        )

    def _watch_module(self, name: str, module: nn.Module) -> None:
        self._watch_attributes(name, module, self._reads.reads)
        for key, item in vars(module).items():
            place = f"{name}.{key}".lstrip(".")
            if key in _DICTS:
                self._watch_dict(place, item, inside=key in _HOOKS)

    def _watch_attributes(self, place: str, owner: Any, counts: Callable[[Any], bool]) -> None:
        """Those of an object that count, and what is inside them."""
        items = vars(owner)
        self._dicts.append(_Dict(place, items, dict(items), owner, counts))
        for key, item in items.items():
            if counts(key) and key not in _WITHOUT_EFFECT and key not in (*_DICTS, *_OF_WEIGHTS):
                self._watch(f"{place}.{key}".lstrip("."), item)

    def _watch_dict(self, place: str, items: dict[Any, Any], *, inside: bool = True) -> None:
        (self._dicts if items else self._empty).append(_Dict(place, items, dict(items)))
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
            is_config = isinstance(item, PreTrainedConfig)
            self._watch_attributes(place, item, self._reads.configures if is_config else self._reads.reads)

    def _watch_code(self) -> None:
        for cls in dict.fromkeys(base for kind in self._types for base in kind.__mro__[:-1]):
            self._classes[cls] = dict(vars(cls))
            if not is_framework(cls.__module__):
                for key, item in vars(cls).items():
                    if self._reads.reads(key) and isinstance(item, (dict, list)):
                        self._watch(f"{cls.__name__}.{key}", item)
        for file, space, found in self._reads.globals():
            self._named.append((file, space, found))
            for key, item in found.items():
                if isinstance(item, (dict, list)) and not is_framework(file):
                    self._watch(f"{file}.{key}", item)


def _found(owner: Any, items: Mapping[Any, Any], key: Any) -> Any:
    """An entry; of attributes what a look for it finds, be it in the object or in its class."""
    if key in items or owner is None:
        item = items.get(key, _MISSING)
        return item.__func__ if isinstance(item, types.MethodType) and item.__self__ is owner else item
    return next((vars(cls)[key] for cls in type(owner).__mro__ if key in vars(cls)), _MISSING)


def _has_no_effect(item: Any) -> bool:
    """Whether a hook, or its absence, leaves the outputs of a module alone."""
    if item is _MISSING:
        return True
    package = str(getattr(item, "__module__", "")).partition(".")[0]
    return (package, getattr(item, "__name__", "")) in _HOOKS_WITHOUT_EFFECT


def _same(now: Any, before: Any) -> bool:
    if now is before:
        return True
    if torch.dtype in (type(now), type(before)):  # saving writes the name in its place
        return str(now).removeprefix("torch.") == str(before).removeprefix("torch.")
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
