"""What a compiled program depends on, as one digest: another model, option, version or source is another program.

The module is described as it is in memory, not as its checkpoint says: classes with the code of their methods and of
the functions and numbers around them (monkeypatches count), plain attributes, hooks, how tensors lie in memory and
share it, and what is in them: buffers and small parameters in full, since passes read them; large parameters by
samples, since only the verdict of the self-check depends on their values. Parameters that a program computed
constants from are compared in full when it is loaded.
"""

from __future__ import annotations

import enum
import functools
import hashlib
import inspect
import logging
import platform
import re
import sys
import types
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from torch import nn
from torch.nn.modules import module as _of_modules

from ...runtime.ops.native import processor
from ..options import CompileOptions
from ..pipeline import selected_passes

WHOLE_BYTES = 1 << 16
"""Parameters up to this size are read in full."""
_SAMPLES = 8
_SAMPLE_BYTES = 512
_MOST_OBJECTS = 200_000
_ROOT = Path(__file__).resolve().parents[1]
_OURS = (_ROOT, _ROOT.parent / "passes", _ROOT.parent / "runtime")
_FRAMEWORK = ("torch.", "transformers.modeling_utils", "transformers.generation")
_HEAP_TYPE = 1 << 9
"""Flag of classes that are made at run time, those written in Python among them."""
_HOOKS = frozenset(name for name in vars(nn.Module()) if name.endswith("_hooks"))
_LITERALS = (bool, int, float, complex, str, bytes, range, np.generic)
_TYPE_HINTS = (types.UnionType, types.GenericAlias, inspect.Signature)
_KEPT_APART = frozenset(("_parameters", "_buffers", "_modules", "generation_config"))
"""Attributes of modules that are described elsewhere, or that no forward call reads."""


class CannotIdentify(Exception):
    """The module holds something whose content cannot be told. The message says what."""


def fingerprint(model: nn.Module, options: CompileOptions, contents: str) -> str:
    """A digest of everything that compiling ``model`` with ``options`` depends on.

    Args:
        model: a module on the CPU.
        options: how it is compiled.
        contents: what its tensors hold, as ``contents_digest`` says it.

    Raises:
        CannotIdentify: something that the program may depend on cannot be described.
    """
    describer = _Describer()
    describer.add((*environment(), torch.get_default_dtype()))
    describer.add(options)
    describer.add([selected_passes(options, stage) for stage in ("dynamo", "aten", "weights")])
    describer.add(contents)
    describer.add_module(model)
    return describer.digest()


def describe_module(module: nn.Module, more: Any, ignores: Callable[[str], bool]) -> str:
    """A digest of what a module is, whatever its tensors hold.

    Args:
        module: it, with all those below it.
        more: what counts besides.
        ignores: whether an attribute of this name does not count.

    Raises:
        CannotIdentify: something in it cannot be described.
    """
    describer = _Describer(ignores)
    describer.add(more)
    describer.add_module(module)
    return describer.digest()


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


def tensor_digest(tensor: torch.Tensor) -> str:
    """A digest of all elements of a tensor."""
    digest = hashlib.sha256()
    _update_whole(digest, tensor)
    return digest.hexdigest()


def contents_digest(model: nn.Module) -> str:
    """A digest of what the module's tensors hold, wherever in memory they are: samples of large parameters, all of
    the others."""
    digest = hashlib.sha256()
    known: set[int] = set()
    for name, tensor in module_tensors(model).items():
        if id(tensor) in known or tensor.device.type != "cpu" or tensor.layout is not torch.strided:
            continue
        known.add(id(tensor))
        digest.update(f"{name}\0{tensor.dtype}\0{tuple(tensor.shape)}\0".encode())
        small = tensor.numel() * tensor.element_size() <= WHOLE_BYTES
        if small or not isinstance(tensor, nn.Parameter) or not tensor.is_contiguous():
            _update_whole(digest, tensor)
        else:
            _update_samples(digest, tensor)
    return digest.hexdigest()


def module_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """Parameters and buffers by qualified name; shared ones under each of their names."""
    named: dict[str, torch.Tensor] = dict(model.named_parameters(remove_duplicate=False))
    named.update(model.named_buffers(remove_duplicate=False))
    return named


def _update_whole(digest: Any, tensor: torch.Tensor) -> None:
    digest.update(memoryview(tensor.detach().contiguous().view(-1).view(torch.uint8).numpy()))


def _update_samples(digest: Any, tensor: torch.Tensor) -> None:
    flat = tensor.detach().view(-1).view(torch.uint8)
    step = (flat.numel() - _SAMPLE_BYTES) // (_SAMPLES - 1)
    for i in range(_SAMPLES):
        digest.update(memoryview(flat[i * step : i * step + _SAMPLE_BYTES].numpy()))


def _state(item: Any) -> dict[str, Any] | None:
    """The attributes of an object of a Python class; None for others, whose content is out of reach."""
    if not type(item).__flags__ & _HEAP_TYPE:
        return None
    slots = [name for cls in type(item).__mro__ for name in _slots(cls) if hasattr(item, name)]
    return {**{name: getattr(item, name) for name in slots}, **getattr(item, "__dict__", {})}


def _slots(cls: type) -> tuple[str, ...]:
    slots = vars(cls).get("__slots__", ())
    names = (slots,) if isinstance(slots, str) else tuple(slots)
    return tuple(name for name in names if name not in ("__dict__", "__weakref__"))


class _Describer:
    """Feeds a digest with values of all kinds, so that different ones make different digests."""

    def __init__(self, ignores: Callable[[str], bool] = lambda name: False) -> None:
        self._ignores = ignores
        self._digest = hashlib.sha256()
        self._seen: dict[int, int] = {}
        self._kept: list[Any] = []  # while an object is known by its id, it must live
        self._modules: dict[int, str] = {}

    def digest(self) -> str:
        return self._digest.hexdigest()

    def add_module(self, model: nn.Module) -> None:
        """A module with all those below it."""
        self._modules = {id(module): name for name, module in model.named_modules()}
        for name, module in model.named_modules():
            self._say("module", name)
            self._add_class(type(module))
            for key, item in vars(module).items():
                if key in _HOOKS:
                    self._say("hooks", key)
                    self.add(list(item.values()))  # the keys count all hooks of the process
                elif key not in _KEPT_APART and not self._ignores(key):
                    self._say("attribute", key)
                    self.add(item)
        for hooks in (_of_modules._global_forward_pre_hooks, _of_modules._global_forward_hooks):
            self.add(list(hooks.values()))
        self._add_tensors(module_tensors(model))
        self._add_attention(getattr(model, "config", None))

    def _add_tensors(self, tensors: Mapping[str, torch.Tensor]) -> None:
        places: dict[int, int] = {}
        for name, tensor in tensors.items():
            if tensor.device.type != "cpu" or tensor.layout is not torch.strided:
                raise CannotIdentify(f"{name} is a {tensor.layout} tensor on {tensor.device}")
            if type(tensor) not in (torch.Tensor, nn.Parameter, nn.Buffer):
                raise CannotIdentify(f"{name} is a {type(tensor).__name__}")
            place = places.setdefault(tensor.untyped_storage().data_ptr(), len(places))
            layout = (tuple(tensor.shape), tensor.stride(), tensor.storage_offset(), tensor.requires_grad)
            self.add((name, type(tensor).__name__, tensor.dtype, layout, tensor.is_inference(), place))

    def _add_attention(self, config: Any) -> None:
        """The functions that transformers calls under the config's name: users register their own."""
        implementation = getattr(config, "_attn_implementation", None)
        if not isinstance(implementation, str):
            return
        from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
        from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

        for functions in (ALL_ATTENTION_FUNCTIONS, ALL_MASK_ATTENTION_FUNCTIONS):
            self.add(functions.get(implementation, None))

    def add(self, item: Any) -> None:
        """Any value.

        Raises:
            CannotIdentify: nothing is known about its kind.
        """
        if item is None or item is Ellipsis or isinstance(item, _LITERALS):
            self._say(type(item).__name__, repr(item))
        elif isinstance(item, (torch.dtype, torch.device, torch.layout, torch.memory_format)):
            self._say("torch", str(item))
        elif isinstance(item, enum.Enum):
            self._say(type(item).__qualname__, item.name)
        elif id(item) in self._modules:
            self._say("module", self._modules[id(item)])
        elif id(item) in self._seen:
            self._say("seen", str(self._seen[id(item)]))
        else:
            self._seen[id(item)] = len(self._seen)
            self._kept.append(item)
            if len(self._seen) > _MOST_OBJECTS:
                raise CannotIdentify(f"the module holds more than {_MOST_OBJECTS} objects")
            self._add_compound(item)

    def _add_compound(self, item: Any) -> None:
        if isinstance(item, (list, tuple, deque)):
            self._say(type(item).__qualname__, str(len(item)))
            self._add_all(item)
        elif isinstance(item, Mapping):
            self._say(type(item).__qualname__, str(len(item)))
            for key, inner in item.items():
                self.add(key)
                self.add(inner)
        elif isinstance(item, (set, frozenset)):
            self._say(type(item).__qualname__, str(len(item)))
            self._add_all(sorted(item, key=repr))
        elif isinstance(item, torch.Tensor):
            if item.device.type != "cpu" or item.layout is not torch.strided:
                raise CannotIdentify(f"an attribute is a {item.layout} tensor on {item.device}")
            self._say("tensor", f"{item.dtype} {tuple(item.shape)} {item.stride()}")
            _update_whole(self._digest, item)
        elif isinstance(item, functools.partial):
            self._say("partial", "")
            self._add_all((item.func, item.args, item.keywords))
        elif isinstance(item, types.MethodType):
            self._say("method", "")
            self._add_all((item.__func__, item.__self__))
        elif isinstance(item, types.FunctionType):
            self._add_function(item)
        elif isinstance(item, types.ModuleType):
            self._say("python module", item.__name__)
        elif isinstance(item, type):
            self._say("class", f"{item.__module__}.{item.__qualname__}")
        elif isinstance(item, weakref.ReferenceType):
            self.add(item())
        elif isinstance(item, (property, classmethod, staticmethod)):
            self._say(type(item).__name__, "")
            inner = (item.fget, item.fset) if isinstance(item, property) else (item.__func__,)
            self._add_all(inner)
        elif callable(item) and hasattr(item, "__qualname__") and not hasattr(item, "__dict__"):
            self._say("built in", f"{getattr(item, '__module__', '')}.{item.__qualname__}")
        elif isinstance(item, (torch._ops.OpOverload, torch._ops.OpOverloadPacket)):
            self._say("operator", str(item))
        elif isinstance(item, _TYPE_HINTS) or type(item).__module__ == "typing":
            self._say("type hint", str(item))
        elif type(item) is object:
            self._say("sentinel", "")
        elif isinstance(item, logging.Logger):
            self._say("logger", item.name)
        elif isinstance(item, re.Pattern):
            self._add_all((item.pattern, item.flags))
        elif (state := _state(item)) is not None:
            self._say("object", f"{type(item).__module__}.{type(item).__qualname__}")
            self._add_class(type(item))
            self.add(state)
        else:
            raise CannotIdentify(f"nothing is known about a {type(item).__module__}.{type(item).__qualname__}")

    def _add_all(self, items: Iterable[Any]) -> None:
        for item in items:
            self.add(item)

    def _add_function(self, function: types.FunctionType) -> None:
        self._say("function", f"{function.__module__}.{function.__qualname__}")
        self._add_code(function.__code__)
        self._add_all((function.__defaults__, function.__kwdefaults__))
        for cell in function.__closure__ or ():
            try:
                content = cell.cell_contents
            except ValueError:
                self._say("empty cell", "")
            else:
                self.add(content)

    def _add_code(self, code: types.CodeType) -> None:
        self._say("code", " ".join((*code.co_names, *code.co_varnames, *code.co_freevars, *code.co_cellvars)))
        self._digest.update(code.co_code)
        for constant in code.co_consts:
            if isinstance(constant, types.CodeType):
                self._add_code(constant)
            else:
                self.add(constant)

    def _add_class(self, cls: type) -> None:
        """A class with its methods, and the functions and numbers of the files that it and its bases come from."""
        for base in inspect.getmro(cls):
            name = f"{base.__module__}."
            if base is object or name.startswith(_FRAMEWORK) or id(base) in self._seen:
                continue
            self._seen[id(base)] = len(self._seen)
            self._say("class", name + base.__qualname__)
            for key, item in vars(base).items():
                if isinstance(item, (types.FunctionType, property, classmethod, staticmethod)):
                    self._say("member", key)
                    self.add(item)
            file = sys.modules.get(base.__module__)
            if file is not None and id(file) not in self._seen:
                self._seen[id(file)] = len(self._seen)
                numbers = _LITERALS if issubclass(base, nn.Module) else ()  # other files hold ids of the process
                for key, item in vars(file).items():
                    if isinstance(item, types.FunctionType) or (isinstance(item, numbers) and key[:2] != "__"):
                        self._say("of the file", key)
                        self.add(item)

    def _say(self, kind: str, text: str) -> None:
        self._digest.update(f"{kind}\0{len(text)}\0{text}\0".encode())
