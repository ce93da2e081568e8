"""Digests of Python modules of the framework as they are in this process: what was put into one changes its digest.

A program can be taken from the store without importing the model's class, if what the class would have found is what
it found when the program was compiled. The files are compared by their bytes; modules that are loaded could have been
changed since by code (functions replaced or registered, classes patched, numbers set), or their files by an editor.
Caches, counters and loggers do not count.
"""

from __future__ import annotations

import functools
import hashlib
import sys
import types
from collections.abc import Container, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from torch.nn.modules import module as _of_modules

from .framework import functions_of, is_own, patches

_MODELS = "transformers.models."
_AUTO = "transformers.models.auto."
_CHOOSING = frozenset(f"{_AUTO}{name}" for name in ("auto_factory", "configuration_auto", "modeling_auto"))
"""Modules that say which class loads a checkpoint. Those beside them, for images and the like, change in loading."""
_PACKAGES = ("transformers.", "huggingface_hub.", "torch.nn.")
_SINGLE = ("torch", "torch.functional", "torch._tensor", "torch._C._nn", "torch.nn")
_NUMBERS = (bool, int, float)
_REPLACED_BY_DYNAMO = tuple(f"torch.nn.modules.module.Module.{name}" for name in ("__init__", "__setstate__"))
_C_CALLABLES = (types.BuiltinFunctionType, types.MethodDescriptorType, types.WrapperDescriptorType)
_NOT_TRACED = torch._disable_dynamo(lambda: None).__code__  # type: ignore[no-untyped-call]
"""Of what importing Dynamo puts around some of torch's functions; a start from the store does not import it."""
_HOOKS = (
    _of_modules._global_forward_pre_hooks,
    _of_modules._global_forward_hooks,
    _of_modules._global_parameter_registration_hooks,
    _of_modules._global_module_registration_hooks,
    _of_modules._global_buffer_registration_hooks,
)


class Touched(Exception):
    """Something that is not the framework's stands in a module of it. The message says where."""


def framework_states() -> dict[str, str]:
    """The digest of each loaded module that models are made of, or run by; without those of the models themselves.

    Raises:
        Touched: one of them holds something that is not the framework's.
    """
    return {name: module_state(module) for name, module in _loaded()}


def changed_module(states: Mapping[str, str]) -> str | None:
    """The first loaded module that is not as it was, by what ``framework_states`` said then; None if there is none.

    A module that was not loaded then had no part in the model.

    Raises:
        Touched: as ``framework_states``.
    """
    return next((name for name, module in _loaded() if states.get(name) not in (None, module_state(module))), None)


def loaded_of_models(names: Iterable[str], loaded: Container[str]) -> str | None:
    """The first of these Python modules that holds models and was loaded, so that its contents may have been changed;
    None if there is none."""
    models = (name for name in names if name.startswith(_MODELS) and not name.startswith(_AUTO))
    return next((name for name in models if name in loaded), None)


def _loaded() -> Iterator[tuple[str, types.ModuleType]]:
    if any(_HOOKS):
        raise Touched("hooks are registered for all modules")
    for name, module in list(sys.modules.items()):
        wanted = name in _SINGLE or name.startswith(_PACKAGES)
        counts = name in _CHOOSING or not name.startswith(_MODELS)
        if wanted and counts and type(module).__name__ != "_LazyModule":
            yield name, module


def module_state(module: types.ModuleType) -> str:
    """The digest of one module."""
    digest = hashlib.sha256()
    for name, item in sorted(vars(module).items()):
        if name[:2] == "__":
            continue
        said = _said(f"{module.__name__}.{name}", item, module.__name__)
        if said:
            digest.update(f"{name}\0{said}\0".encode())
    return digest.hexdigest()


def _said(place: str, item: Any, home: str) -> str:
    """What counts of a value; "" for nothing."""
    if isinstance(item, types.FunctionType):
        return _function(place, item, home)
    if isinstance(item, type):
        return _class(item) if item.__module__ == home else f"{item.__module__}.{item.__qualname__}"
    if isinstance(item, _C_CALLABLES):
        return item.__qualname__
    if type(item) in _NUMBERS:
        return repr(item)
    # What is private is a cache; what has other keys than names was not made to be registered in.
    if isinstance(item, dict) and not place.rpartition(".")[2].startswith("_"):
        return _registered(place, item)
    return ""


def _class(cls: type) -> str:
    place = f"{cls.__module__}.{cls.__qualname__}"
    said = [place]
    for name, item in patches(cls):
        if f"{place}.{name}" not in _REPLACED_BY_DYNAMO:
            said.append(f"{name}: {item if isinstance(item, str) else type(item).__qualname__}")
    for name, item in vars(cls).items():
        if f"{place}.{name}" in _REPLACED_BY_DYNAMO:
            continue
        said += [
            _function(f"{place}.{name}", function, cls.__module__)
            for function in functions_of(item)
            if not _is_made_when_run(function, cls)
        ]
        if name[:2] == "__":
            continue
        if type(item) in _NUMBERS:
            said.append(f"{name}={item!r}")
        elif isinstance(item, dict):
            said.append(f"{name}={_registered(f'{place}.{name}', item)}")
    return "\0".join(said)


def _is_made_when_run(function: types.FunctionType, cls: type) -> bool:
    """Whether the framework put a function of its own into a class of another module: transformers does, loading."""
    return "<locals>" in function.__qualname__ and function.__module__ != cls.__module__ and is_own(function)


def _registered(place: str, items: dict[Any, Any]) -> str:
    """Functions, classes and numbers that a dict holds under names, whatever methods of its own it has."""
    found = []
    for key, item in dict.items(items):
        parts = item if isinstance(item, tuple) else (item,)
        if isinstance(key, str):
            found += [
                f"{key}:{said}"
                for part in parts
                if (said := repr(part) if type(part) is str else _said(f"{place}[{key!r}]", part, ""))
            ]
    return ",".join(sorted(found))


def _function(place: str, function: types.FunctionType, home: str) -> str:
    """Where a function is from, and its code unless another module of the framework has it.

    Raises:
        Touched: it is written in a file that was not installed.
    """
    while function.__code__ is _NOT_TRACED:
        function = function.__wrapped__  # type: ignore[attr-defined]
    code = function.__code__
    defaults = (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values())
    numbers = [default for default in defaults if type(default) in _NUMBERS]
    said = f"{function.__module__}.{function.__qualname__}:{code.co_firstlineno} {numbers}"
    if code.co_filename[:1] == "<":
        return said
    if is_own(function):
        return f"{said}:{_code_digest(code)}" if function.__module__ == home else said
    if not code.co_filename.startswith(_installed()):
        raise Touched(f"{place} is {function.__module__}.{function.__qualname__}")
    return f"{said}:{_code_digest(code)}"


def _code_digest(code: types.CodeType) -> str:
    digest = hashlib.sha256(code.co_code)
    digest.update("\0".join((*code.co_names, *code.co_varnames)).encode())
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            said = _code_digest(constant)
        else:
            said = repr(sorted(map(repr, constant)) if isinstance(constant, frozenset) else constant)
        digest.update(f"{said}\0".encode())
    return digest.hexdigest()


@functools.cache
def _installed() -> str:
    """The folder that transformers is installed in."""
    return f"{Path(transformers.__file__).parents[1]}/"
