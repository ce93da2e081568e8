"""The identity of what is compiled, as one digest: another model, option, version or source is another program.

The module is described as it is in memory, not as its checkpoint says: classes, attributes, how its tensors lie there
and share it, and what is in them: buffers and small parameters in full, since passes read them; large
parameters by samples, since only the verdict of the self-check depends on their values. Parameters that a program
computed constants from are compared in full when it is loaded.

Of code counts what ``ForwardReads`` finds, as it is in memory, with the globals that it names; and the bytes of the
files that classes and this code lie in, with all that they import within their packages. Code that reads what it does
not say (environment variables, files), classes that were made at run time and modules with hooks have no identity:
such models are compiled anew.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import os
import platform
import re
import sys
import types
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn
from torch.nn.modules import module as _of_modules
from torch.overrides import _get_current_function_mode_stack
from torch.utils._device import DeviceContext
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from ...runtime.ops.native import processor
from ..live_module.code_reads import imports_in, untold_in
from ..live_module.describer import CannotIdentify, Describer, looking
from ..live_module.forward_reads import ForwardReads
from ..live_module.framework import is_framework
from ..options import CompileOptions, selected_passes
from .framework_state import class_state, entries_state

_ROOT = Path(__file__).resolve().parents[1]
_OURS = (_ROOT, _ROOT.parent / "passes", _ROOT.parent / "runtime")
_FOLLOWED = ("torch", "transformers")
_OF_TORCH = (torch, nn.functional, torch._C._nn)
"""Their functions call each other, mostly under one name."""
_CALLED = frozenset(("get_input_embeddings",))
"""Methods of models that the compiler calls."""
_INSTALLED = re.compile(r"[\\/](site|dist)-packages[\\/]")
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


@dataclass(frozen=True)
class Identity:
    """Everything that compiling a model depends on.

    Attributes:
        digest: of all of it.
        sources: Python modules whose files count, and the SHA-256 of each.
    """

    digest: str
    sources: dict[str, str]


def identity(model: nn.Module, options: CompileOptions, contents: str) -> Identity:
    """Everything that compiling ``model`` with ``options`` depends on.

    Args:
        model: a module on the CPU.
        options: how it is compiled.
        contents: what its tensors hold, as ``contents_digest`` says it.

    Raises:
        CannotIdentify: something that the program may depend on cannot be described.
    """
    with looking():
        reads = ForwardReads(model)
        describer = Describer(reads.runs)
        _add_settings(describer, options)
        describer.add(contents)
        sources = add_model(describer, model, reads)
        return Identity(describer.digest(), sources)


def add_model(describer: Describer, model: nn.Module, reads: ForwardReads) -> dict[str, str]:
    """Describe a module and its code; see ``Identity`` for what is returned.

    Args:
        describer: of what ``reads`` says that runs.
        model: a module.
        reads: what it reads.

    Raises:
        CannotIdentify: it has hooks, or something in it cannot be described.
    """
    _check_hooks(model)
    _check_functions(reads.functions())
    describer.add_module(model)
    _add_entries(describer, model, reads)
    places = [str(function.__globals__.get("__name__")) for function in reads.functions()]
    sources = dict(_files([*(cls.__module__ for cls in describer.classes), *places]))
    describer.add(sorted(sources.items()))
    return sources


def settings_digest(options: CompileOptions, more: Any) -> str:
    """A digest of all that compiling depends on besides the model: options, versions, the state of this thread.

    Args:
        options: how a model is compiled.
        more: what counts besides, made of literals and containers.

    Raises:
        CannotIdentify: something of it cannot be described.
    """
    with looking():
        describer = Describer()
        _add_settings(describer, options)
        describer.add(more)
        return describer.digest()


def _add_settings(describer: Describer, options: CompileOptions) -> None:
    describer.add((*environment(), torch.get_default_dtype(), *modes()))
    describer.add(options)
    describer.add([selected_passes(options, stage) for stage in ("dynamo", "aten", "weights")])


@functools.cache
def environment() -> tuple[str, ...]:
    """Versions, the processor, and a digest of our own sources."""
    digest = hashlib.sha256()
    for root in _OURS:
        for path in sorted(p for p in root.rglob("*") if p.suffix in (".py", ".cpp", ".h")):
            digest.update(f"{path.relative_to(root.parent)}\0".encode())
            digest.update(path.read_bytes())
    versions = (sys.version, torch.__version__, transformers.__version__)
    return (*versions, platform.machine(), processor(), digest.hexdigest())


def modes() -> tuple[Any, ...]:
    """Settings that change the meaning of torch's functions in this thread.

    Raises:
        CannotIdentify: a mode whose effect is not known, or a kernel of torch's operators that was registered here.
    """
    found: list[Any] = [torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")]
    for mode in (*_get_current_function_mode_stack(), *_get_current_dispatch_mode_stack()):
        if type(mode) is not DeviceContext:
            raise CannotIdentify(f"the mode {type(mode).__name__} is active")
        found.append(mode.device)
    if own := sorted(
        name for name in torch.library._impls if name.startswith("aten/") and name.endswith(("CPU", "AutogradCPU"))
    ):
        raise CannotIdentify(f"a kernel of {own[0]} was registered in this process")
    return tuple(found)


def _check_hooks(model: nn.Module) -> None:
    if _of_modules._global_forward_pre_hooks or _of_modules._global_forward_hooks:
        raise CannotIdentify("hooks are registered for all modules")
    for name, module in model.named_modules():
        if "forward" in vars(module) or any(vars(module).get(hooks) for hooks in _HOOKS):
            raise CannotIdentify(f"{name or type(module).__name__} has hooks, or a forward of its own")


def _check_functions(functions: Iterable[types.FunctionType]) -> None:
    """Refuse code that reads what it does not say, unless it is the framework's."""
    for function in functions:
        place = str(function.__globals__.get("__name__"))
        if is_framework(place):
            continue
        if name := untold_in(function.__code__):
            raise CannotIdentify(f"{function.__qualname__} in {place} names {name!r}")
        for imported in imports_in(function.__code__):
            name = importlib.util.resolve_name(imported, function.__globals__.get("__package__") or "")
            waits = not is_framework(name) and name not in sys.modules
            if waits and importlib.util.find_spec(name.partition(".")[0]) is not None:
                raise CannotIdentify(f"{function.__qualname__} imports {name} when it runs; it is not loaded yet")


def _add_entries(describer: Describer, model: nn.Module, reads: ForwardReads) -> None:
    """Describe the entries that code finds in Python modules, and the framework's classes as they are."""
    for place, _, found in sorted(reads.globals(), key=lambda each: each[0]):
        if is_framework(place):
            classes = {name: item for name, item in found.items() if isinstance(item, type)}
            describer.add(classes)
            describer.say(place, entries_state({name: found[name] for name in found.keys() - classes.keys()}))
        else:
            describer.say("file", place)
            describer.add(found)
    for module in _OF_TORCH:
        named = {
            name: item for name, item in vars(module).items() if not isinstance(item, type) and reads.reads(name)
        }
        describer.say(module.__name__, entries_state(named))
    describer.add(_registered_attention(getattr(model, "config", None)))
    for cls in (torch.Tensor, *describer.classes):
        if is_framework(cls.__module__) and cls.__module__.partition(".")[0] in _FOLLOWED:
            describer.say("class", class_state(cls, lambda name: reads.runs(name) or name in _CALLED))


def _registered_attention(config: Any) -> list[Any]:
    """The functions that transformers calls under the config's name: users register their own."""
    implementation = getattr(config, "_attn_implementation", None)
    if not isinstance(implementation, str):
        return []
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    return [known.get(implementation, None) for known in (ALL_ATTENTION_FUNCTIONS, ALL_MASK_ATTENTION_FUNCTIONS)]


def _files(names: Iterable[str]) -> Iterator[tuple[str, str]]:
    """Python modules behind their names, and those that they take something from unless they are the framework's: the
    name of each, and the SHA-256 of its file where it has one."""
    waiting, known = list(names), set()
    while waiting:
        name = waiting.pop()
        module = sys.modules.get(name)
        if module is None or name in known:
            continue
        known.add(name)
        path = str(getattr(module, "__file__", None) or "")
        counts = not is_framework(name) or (name.partition(".")[0] in _FOLLOWED and path.endswith(".py"))
        if path and counts:
            try:
                stat = os.stat(path)
                yield name, _file_digest(path, stat.st_size, stat.st_mtime_ns)
            except OSError as error:
                raise CannotIdentify(f"the source of {name} cannot be read: {error}") from None
        if not is_framework(name):
            for item in list(vars(module).values()):
                if isinstance(item, (types.ModuleType, types.FunctionType, type)):
                    other = str(item.__name__ if isinstance(item, types.ModuleType) else item.__module__)
                    waiting += [other] if _belongs_to(name, other, path) else []


@functools.lru_cache(maxsize=1024)
def _file_digest(path: str, size: int, modified: int) -> str:
    return hashlib.sha256(Path(path).read_bytes()).hexdigest()


def _belongs_to(name: str, other: str, path: str) -> bool:
    """True if the file of ``other`` belongs to the program that module ``name``, at ``path``, is part of: what is
    installed does not take other packages along, only what its code names of them."""
    return not is_framework(other) and (
        other.partition(".")[0] == name.partition(".")[0] or not _INSTALLED.search(path)
    )
