"""Digests of the framework's Python modules as they are in this process: what was put into one changes its digest.

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
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from torch.nn.modules import module as _of_modules

from ..live_module.describer import CannotIdentify, code_digest, describe
from ..live_module.framework import is_framework, is_of_a_model

_CHOOSING = frozenset(
    f"transformers.models.auto.{x}" for x in ("auto_factory", "configuration_auto", "modeling_auto")
)
"""Modules that say which class loads a checkpoint. Those beside them, for images and the like, change in loading."""
_PACKAGES = ("transformers.", "huggingface_hub.", "torch.nn.")
_SINGLE = ("torch", "torch.functional", "torch._tensor", "torch._C._nn", "torch.nn")
_NUMBERS = (bool, int, float)
_REPLACED_BY_DYNAMO = ("__init__", "__setstate__")
"""Of ``nn.Module``."""
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


def framework_states() -> dict[str, str]:
    """The digest of each loaded module that models are made of, or run by; without those of the models themselves.

    Raises:
        CannotIdentify: one of them holds something that is not the framework's.
    """
    return {name: module_state(module) for name, module in _loaded()}


def changed_module(states: Mapping[str, str]) -> str | None:
    """The first loaded module that is not as it was, by what ``framework_states`` said then; None if there is none.

    A module that was not loaded then had no part in the model.

    Raises:
        CannotIdentify: as ``framework_states``.
    """
    return next((name for name, module in _loaded() if states.get(name) not in (None, module_state(module))), None)


def loaded_of_models(names: Iterable[str], loaded: Container[str]) -> str | None:
    """The first of these Python modules that holds models and was loaded, so that its contents may have been changed;
    None if there is none."""
    return next((name for name in names if is_of_a_model(name) and name in loaded), None)


def check_nothing_registered() -> None:
    """Check that nothing registered with transformers changes how it loads a checkpoint.

    The check covers classes of configs and models, classes that replace parts of models, and conversions of weights.
    Modules that are not loaded have changed nothing.

    Raises:
        CannotIdentify: something was registered, or replaced.
    """
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING, AutoModelForCausalLM

    for mapping in (CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING):
        for registered in mapping._extra_content.values():
            raise CannotIdentify(f"{_kind(registered)} is registered with transformers' auto classes")
    if AutoModelForCausalLM._model_mapping is not MODEL_FOR_CAUSAL_LM_MAPPING:
        raise CannotIdentify("AutoModelForCausalLM has another mapping")
    for package in (transformers, sys.modules["transformers"]):  # which transformers makes anew as it is imported
        if vars(package).get("AutoModelForCausalLM", AutoModelForCausalLM) is not AutoModelForCausalLM:
            raise CannotIdentify("transformers.AutoModelForCausalLM is another class")
    patching = sys.modules.get("transformers.monkey_patching")
    for registered in getattr(patching, "_monkey_patch_mapping_cache", {}).values():
        raise CannotIdentify(f"{_kind(registered)} is registered in the place of a class of transformers'")
    conversions: Any = sys.modules.get("transformers.conversion_mapping")
    known = getattr(conversions, "_checkpoint_conversion_mapping_cache", None)
    if known is not None and describe(known) != describe(conversions._build_checkpoint_conversion_mapping()):
        raise CannotIdentify("a conversion of weights is registered with transformers")


def _kind(registered: Any) -> str:
    kind = registered if isinstance(registered, type) else type(registered)
    return f"{kind.__module__}.{kind.__qualname__}"


def _loaded() -> Iterator[tuple[str, types.ModuleType]]:
    if any(_HOOKS):
        raise CannotIdentify("hooks are registered for all modules")
    for name, module in list(sys.modules.items()):
        wanted = name in _SINGLE or name.startswith(_PACKAGES)
        counts = name in _CHOOSING or not name.startswith("transformers.models.")
        if wanted and counts and type(module).__name__ != "_LazyModule":
            yield name, module


def module_state(module: types.ModuleType) -> str:
    """The digest of one module.

    Raises:
        CannotIdentify: it holds a function that was not installed.
    """
    return hashlib.sha256(entries_state(vars(module), module.__name__).encode()).hexdigest()


def entries_state(entries: Mapping[str, Any], home: str = "") -> str:
    """Text of all that counts of entries of a Python module.

    Args:
        entries: by name; a dict of a private name is a cache.
        home: a module's name: of the code of others the name alone counts; "" for none, the code of functions always
            and that of classes never does.

    Raises:
        CannotIdentify: one of them is a function that was not installed.
    """
    said = []
    for name, item in sorted(entries.items()):
        counts = name[:2] != "__" and not (name[:1] == "_" and isinstance(item, dict))
        if counts and (state := _state(item, home)):
            said.append(f"{name}={state}")
    return "\0".join(said)


def _state(item: Any, home: str = "") -> str:
    """Text of all that counts of a value; "" for nothing."""
    if isinstance(item, types.FunctionType):
        return _function(item, home)
    if isinstance(item, type):
        return class_state(item) if item.__module__ == home else f"{item.__module__}.{item.__qualname__}"
    if isinstance(item, _C_CALLABLES):
        return item.__qualname__
    if type(item) in _NUMBERS:
        return repr(item)
    return _registered(item) if isinstance(item, dict) else ""


def class_state(cls: type, counts: Callable[[str], bool] = lambda name: True) -> str:
    """Text of all that counts of a class: its code, numbers and dicts.

    Args:
        cls: it.
        counts: whether a method of this name does.

    Raises:
        CannotIdentify: it has a function that was not installed.
    """
    place = f"{cls.__module__}.{cls.__qualname__}"
    said = [place]
    for name, item in vars(cls).items():
        parts = _inside(item)
        if name in _REPLACED_BY_DYNAMO and cls is torch.nn.Module:
            continue
        if isinstance(parts[0], types.FunctionType) and (_is_made_when_run(parts[0], cls) or not counts(name)):
            continue
        special = name[:2] == "__"
        said += [f"{name}={state}" for x in parts if (callable(x) or not special) and (state := _state(x))]
    return "\0".join(said)


def _inside(item: Any) -> tuple[Any, ...]:
    """The values that a member of a class consists of."""
    if isinstance(item, property):
        return item.fget, item.fset
    if isinstance(item, (staticmethod, classmethod)):
        return (item.__func__,)
    if isinstance(item, (functools.cached_property, functools.partialmethod, functools.partial)):
        return (item.func,)
    return (item,)


def _is_made_when_run(function: types.FunctionType, cls: type) -> bool:
    """True if the framework put a function of its own into a class of another module: transformers does, loading."""
    return "<locals>" in function.__qualname__ and function.__module__ != cls.__module__ and _is_own(function)


def _registered(items: dict[Any, Any]) -> str:
    """Functions, classes and numbers that a dict holds under names, whatever methods of its own it has: what has
    other keys was not made to be registered in."""
    found = []
    for key, item in dict.items(items):
        for part in (item if isinstance(item, tuple) else (item,)) if isinstance(key, str) else ():
            said = part if type(part) is str else _state(part)
            found.append(f"{key}:{said}")
    return ",".join(sorted(found))


def _function(function: types.FunctionType, home: str) -> str:
    """Where a function is from, its code and its numbers.

    Raises:
        CannotIdentify: it is written in a file that was not installed.
    """
    while function.__code__ is _NOT_TRACED:
        function = function.__wrapped__  # type: ignore[attr-defined]
    code, place = function.__code__, f"{function.__module__}.{function.__qualname__}"
    if not _is_own(function) and not code.co_filename.startswith(("<", _installed())):
        raise CannotIdentify(f"{place} stands in a module of the framework")
    defaults = (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values())
    numbers = [default for default in defaults if type(default) in _NUMBERS]
    return f"{place}:{numbers}:{code_digest(code) if home in ('', function.__module__) else ''}"


def _is_own(function: types.FunctionType) -> bool:
    return is_framework(str(function.__globals__.get("__name__")))


@functools.cache
def _installed() -> str:
    """The folder that transformers is installed in."""
    return f"{Path(transformers.__file__).parents[1]}/"
