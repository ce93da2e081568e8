"""Which code is the installed framework's own, and what stands in its place.

Torch, transformers, numpy, the standard library and this package are known by their versions, so their code is not
described. Models of transformers are: they are what is compiled.
"""

from __future__ import annotations

import functools
import sys
import sysconfig
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy
import torch
import transformers

_MODELS = "transformers.models."
_PACKAGES = frozenset({"torch", "transformers", "numpy", "torch_pagoda", "torch_npu"})
_STANDARD = frozenset(sys.stdlib_module_names) - {"__main__"}
_C_CALLABLES = (types.BuiltinFunctionType, types.MethodDescriptorType, types.WrapperDescriptorType)


def is_framework(name: str) -> bool:
    """Whether the versions identify a Python module of this name."""
    top = name.partition(".")[0]
    return (top in _PACKAGES or top in _STANDARD) and not name.startswith(_MODELS)


def is_own(function: types.FunctionType) -> bool:
    """Whether a function is written in a file of the framework."""
    return _is_framework_file(function.__code__.co_filename)


def patches(cls: type) -> Iterator[tuple[str, Any]]:
    """What was put into a class of the framework: name and value; also functions under another's name."""
    for key, item in vars(cls).items():
        for function in functions_of(item):
            if not _is_all_own(function):
                yield key, item
            elif function.__name__ != key:
                yield key, f"{function.__module__}.{function.__qualname__}"
        if isinstance(item, _C_CALLABLES) and item.__name__ != key:
            yield key, item.__name__
        elif not isinstance(item, type) and not is_framework(type(item).__module__):
            yield key, item


def functions_of(item: Any) -> tuple[types.FunctionType, ...]:
    """The Python functions that a member of a class consists of."""
    if isinstance(item, types.FunctionType):
        return (item,)
    if isinstance(item, property):
        inner: tuple[Any, ...] = (item.fget, item.fset)
    elif isinstance(item, (staticmethod, classmethod)):
        inner = (item.__func__,)
    elif isinstance(item, (functools.cached_property, functools.partialmethod, functools.partial)):
        inner = (item.func,)
    else:
        return ()
    return tuple(function for function in inner if isinstance(function, types.FunctionType))


def _is_all_own(function: types.FunctionType) -> bool:
    """Whether a function and those that it wraps are written in the framework's files, or made by dataclasses."""
    path = function.__code__.co_filename
    if not _is_framework_file(path) and path[:1] != "<":
        return False
    for cell in function.__closure__ or ():
        try:
            content = cell.cell_contents
        except ValueError:
            continue
        if isinstance(content, types.FunctionType) and content is not function and not _is_all_own(content):
            return False
    return True


@functools.cache
def _is_framework_file(path: str) -> bool:
    models = f"{Path(transformers.__file__).parent / 'models'}/"
    return path.startswith(_roots()) and not path.startswith(models)


@functools.cache
def _roots() -> tuple[str, ...]:
    folders = [Path(package.__file__ or "").parent for package in (torch, transformers, numpy)]
    house = Path(__file__).resolve().parents[2]
    folders += [house / name for name in ("torch_pagoda", "compiler", "passes", "runtime")]
    standard = Path(sysconfig.get_path("stdlib"))
    inside = [entry for entry in standard.iterdir() if entry.name != "site-packages"]
    files = [str(entry) for entry in inside if not entry.is_dir()]
    return (*(f"{folder}/" for folder in folders), *(f"{d}/" for d in inside if d.is_dir()), *files, "<frozen ")
