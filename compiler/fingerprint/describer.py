"""A digest of modules and of all else that their ``forward`` reads.

Modules are described by their attributes, hooks, tensors' places and classes. Of a class that is not the framework's
all data counts, and of its methods those whose name any code names that was described before: what ``forward`` can
reach. Code is described with the globals, imports and environment variables that it names, through all files that are
not the framework's; the bytes of these files count, too. Of the framework's code only what was patched counts.
"""

from __future__ import annotations

import enum
import functools
import hashlib
import importlib.util
import inspect
import logging
import os
import re
import sys
import types
import weakref
from collections import deque, namedtuple
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.modules import module as _of_modules

from ...runtime.ops.linear.stored_weight import StoredWeight
from .code_reads import Reads, Untold, cached_reads
from .framework import is_framework, is_own, patches
from .tensor_contents import module_tensors, update_whole

_MOST_OBJECTS = 200_000
_HEAP_TYPE = 1 << 9
"""Flag of classes that are made at run time, those written in Python among them."""
_HOOKS = frozenset(name for name in vars(nn.Module()) if name.endswith("_hooks"))
_LITERALS = (bool, int, float, complex, str, bytes, range)
_EXACT_LITERALS = frozenset(_LITERALS)
_TYPE_HINTS = (types.UnionType, types.GenericAlias, inspect.Signature)
_TORCH_VALUES = (torch.dtype, torch.device, torch.layout, torch.memory_format)
_C_FUNCTIONS = (types.BuiltinFunctionType, types.MethodDescriptorType, types.WrapperDescriptorType)
_CODE = (types.FunctionType, property, classmethod, staticmethod, functools.cached_property, functools.partialmethod)
_FIELDS = (types.MemberDescriptorType, types.GetSetDescriptorType, type(vars(namedtuple("_", "x"))["x"]))
_FOLLOWED = ("transformers.", "torch.nn.")
"""Parts of the framework whose code is followed to find patches behind it."""
_KEPT_APART = frozenset(("_parameters", "_buffers", "_modules", "generation_config", "generate"))
"""Attributes of modules that are described elsewhere, or that no forward call reads."""
NOT_RUN = frozenset(
    "__init__ __post_init__ __new__ __init_subclass__ __repr__ extra_repr _init_weights from_pretrained "
    "save_pretrained prepare_inputs_for_generation __getstate__ __setstate__ __reduce__ __reduce_ex__ "
    "__deepcopy__ __copy__ __del__".split()
)
"""Methods that a forward call of a finished object does not run unless its code names them."""
_INSTALLED = re.compile(r"[\\/](site|dist)-packages[\\/]")
_AUTO_CLASSES = "transformers.models.auto.auto_factory"
_MAKERS = frozenset(("__init__", "__post_init__", "__new__"))


class CannotIdentify(Exception):
    """The module holds something whose content cannot be told. The message says what."""


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


def changed_variable(known: Mapping[str, str | None]) -> str | None:
    """The first environment variable that has another value than a ``Describer`` found; None if there is none."""
    return next((name for name, value in known.items() if os.environ.get(name) != value), None)


@functools.lru_cache(maxsize=1024)
def _file_digest(path: str, size: int, modified: int) -> bytes:
    with open(path, "rb") as file:
        return hashlib.sha256(file.read()).digest()


class Describer:
    """Feeds a digest with values of all kinds, so that different ones make different digests.

    Args:
        ignores: whether an attribute of a module of this name does not count.
        follows: whether code is followed to what it reads; else classes and functions that are one object are alike,
            which is right within a process.
    """

    def __init__(self, ignores: Callable[[str], bool] = lambda name: False, *, follows: bool = True) -> None:
        self._ignores = ignores
        self._follows = follows
        self._digest = hashlib.sha256()
        self._seen: dict[int, int] = {}
        self._kept: list[Any] = []  # while an object is known by its id, it must live
        self._modules: dict[int, str] = {}
        self._classes: set[type] = set()
        self._said: set[tuple[int, str]] = set()  # (dict of a namespace by id, name in it)
        self._names: set[str] = {"forward"}
        self._members: list[tuple[str, str, Any]] = []  # class, name, method: described once the name is read
        self._files: dict[str, types.ModuleType] = {}  # not the framework's, read as objects or for their bytes
        self.sources: dict[str, str] = {}
        self.variables: dict[str, str | None] = {}

    def digest(self) -> str:
        self._follow_names()
        return self._digest.hexdigest()

    def add_module(self, model: nn.Module) -> None:
        """A module with all those below it."""
        self._modules = {id(module): name for name, module in model.named_modules()}
        for name, module in model.named_modules():
            self._say("module", name)
            self._say("of", f"{type(module).__module__}.{type(module).__qualname__}")
            self._add_class(type(module))
            for key, item in vars(module).items():
                if key in _HOOKS:
                    if item:
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
        orders: dict[bytes, int] = {}
        for name, tensor in tensors.items():
            without_values = tensor.is_meta and not self._follows
            if (tensor.device.type != "cpu" and not without_values) or tensor.layout is not torch.strided:
                raise CannotIdentify(f"{name} is a {tensor.layout} tensor on {tensor.device}")
            if isinstance(tensor, StoredWeight):
                self._add_stored(name, tensor, orders)
                continue
            if type(tensor) not in (torch.Tensor, nn.Parameter, nn.Buffer):
                raise CannotIdentify(f"{name} is a {type(tensor).__name__}")
            place = places.setdefault(tensor.untyped_storage().data_ptr(), len(places))
            layout = (tuple(tensor.shape), tensor.stride(), tensor.storage_offset(), tensor.requires_grad)
            self._say(type(tensor).__name__, repr((name, tensor.dtype, layout, tensor.is_inference(), place)))

    def _add_stored(self, name: str, weight: StoredWeight, orders: dict[bytes, int]) -> None:
        """A weight as a quantized checkpoint stores it; of orders only which weights share one."""
        form, dtype, transposed, order, input_scale = weight.stored_as
        shared = orders.setdefault(order, len(orders))
        said = (name, str(form), dtype, tuple(weight.shape), transposed, shared)
        self._say("StoredWeight", repr(said if input_scale is None else (*said, tuple(input_scale))))

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
        if item is None or item is Ellipsis or type(item) in _EXACT_LITERALS:
            self._say(type(item).__name__, repr(item))
        elif isinstance(item, _TORCH_VALUES):
            self._say("torch", str(item))
        elif isinstance(item, re.Pattern):  # of the same text one object or several, as Python's cache has it
            self._say("pattern", repr((item.pattern, item.flags)))
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
        if isinstance(item, enum.Enum):
            self._say("enum", f"{type(item).__module__}.{type(item).__qualname__}.{item.name}")
            self.add(item.value)
            self._add_class(type(item))
        elif isinstance(item, np.generic):
            self._say(type(item).__name__, repr(item))
        elif isinstance(item, _LITERALS):
            base = next(cls for cls in _LITERALS if isinstance(item, cls))
            self._say("kind of", base.__repr__(item))
            self._add_object(item)
        elif isinstance(item, (list, tuple, deque)):
            self._say(type(item).__qualname__, str(len(item)))
            self._add_all(item)
            self._add_own_state(item)
        elif isinstance(item, Mapping):
            self._add_mapping(item)
        elif isinstance(item, (set, frozenset)):
            self._say(type(item).__qualname__, str(len(item)))
            self._add_all(sorted(item, key=repr))
        elif isinstance(item, torch.Tensor):
            if item.device.type != "cpu" or item.layout is not torch.strided:
                raise CannotIdentify(f"an attribute is a {item.layout} tensor on {item.device}")
            self._say("tensor", f"{item.dtype} {tuple(item.shape)} {item.stride()}")
            update_whole(self._digest, item)
        elif type(item) is np.ndarray and not item.dtype.hasobject:
            self._say("array", f"{item.dtype.str} {item.shape}")
            self._digest.update(item.tobytes())
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
            if not is_framework(item.__name__):
                self._add_file(item.__name__)
        elif isinstance(item, type):
            self._say("class", f"{item.__module__}.{item.__qualname__}")
            self._add_class(item)
            self._add_makers(item)
        elif isinstance(item, weakref.ReferenceType):
            self.add(item())
        elif isinstance(item, (property, classmethod, staticmethod, functools.cached_property)):
            self._say(type(item).__name__, "")
            self._add_all(_inside(item))
        elif isinstance(item, torch.jit.ScriptFunction):
            self._say("script", str(item.graph))
        elif type(item).__module__ == "functools" and hasattr(item, "__wrapped__"):
            self._say(type(item).__qualname__, "")
            self.add(item.__wrapped__)
        elif callable(item) and hasattr(item, "__qualname__") and not hasattr(item, "__dict__"):
            self._say("built in", f"{getattr(item, '__module__', '')}.{item.__qualname__}")
        elif isinstance(item, (torch._ops.OpOverload, torch._ops.OpOverloadPacket)):
            self._say("operator", str(item))
        elif isinstance(item, _TYPE_HINTS) or type(item).__module__ in ("typing", "typing_extensions"):
            self._say("type hint", str(item))
        elif type(item) is object:
            self._say("sentinel", "")
        elif isinstance(item, logging.Logger):
            self._say("logger", item.name)
        elif _state(item) is not None:
            self._add_object(item)
        else:
            raise CannotIdentify(f"nothing is known about a {type(item).__module__}.{type(item).__qualname__}")

    def _add_object(self, item: Any) -> None:
        self._say("object", f"{type(item).__module__}.{type(item).__qualname__}")
        self._add_class(type(item))
        self._add_mapping(_state(item) or {})

    def _add_mapping(self, item: Mapping[Any, Any]) -> None:
        if type(item).__module__ == _AUTO_CLASSES:
            # Its items are the classes of all models, each imported when it is read: the version tells them. What was
            # registered besides is at hand.
            self._say(type(item).__qualname__, "")
            self.add(getattr(item, "_extra_content", None))
            return
        self._say(type(item).__qualname__, str(len(item)))
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

    # Code

    def _add_function(self, function: types.FunctionType) -> None:
        self._say("function", f"{function.__module__}.{function.__qualname__}")
        own = is_own(function)
        if not self._follows:
            self._say("globals", str(id(function.__globals__)))
        if not own or not self._follows:
            self._add_code(function.__code__)
        self._add_all((function.__defaults__, function.__kwdefaults__))
        for cell in function.__closure__ or ():
            try:
                content = cell.cell_contents
            except ValueError:
                self._say("empty cell", "")
            else:
                self.add(content)
        if not self._follows:
            return
        if not own:
            if function.__dict__:
                self.add(function.__dict__)
            self._add_file(str(function.__module__))
            self._add_reads(function)
        elif str(function.__module__).startswith(_FOLLOWED):
            self._add_patches_behind(function)

    def _add_code(self, code: types.CodeType) -> None:
        self._say("code", " ".join((*code.co_names, *code.co_varnames, *code.co_freevars, *code.co_cellvars)))
        self._digest.update(code.co_code)
        for constant in code.co_consts:
            if isinstance(constant, types.CodeType):
                self._add_code(constant)
            else:
                self.add(constant)

    def _add_reads(self, function: types.FunctionType) -> None:
        """What code that is not the framework's reads of the world."""
        try:
            reads = cached_reads(function.__code__)
        except Untold as error:
            raise CannotIdentify(f"{error}, in {function.__module__}") from None
        space = function.__globals__
        self._names.update(reads.names)
        for name in reads.names:
            if name not in space or not self._is_new(space, name):
                continue
            item = space[name]
            if item is os.environ or item is os.getenv:
                if name not in ("environ", "getenv"):
                    raise CannotIdentify(f"{function.__module__} reads the environment as {name!r}")
                continue
            self._say("global", f"{space.get('__name__')}.{name}")
            self.add(item)
        for name in reads.names:
            if isinstance(space.get(name), types.ModuleType):
                self._add_of_framework(space[name], reads.names)
        self._add_imports(function, reads)
        held = [space.get(name) for name in reads.variable_globals]
        for variable in (*reads.variables, *held):
            if not isinstance(variable, str):
                raise CannotIdentify(f"{function.__qualname__} reads an environment variable of an unknown name")
            self.variables[variable] = os.environ.get(variable)
            self._say("environment", f"{variable}={self.variables[variable]!r}")

    def _add_imports(self, function: types.FunctionType, reads: Reads) -> None:
        package = function.__globals__.get("__package__") or ""
        for entry in reads.imports:
            name = importlib.util.resolve_name("." * entry.level + entry.name, package) if entry.level else entry.name
            module = sys.modules.get(name)
            if module is None and not is_framework(name):
                if importlib.util.find_spec(name.partition(".")[0]) is not None:
                    raise CannotIdentify(f"{function.__qualname__} imports {name} when it runs; it is not loaded yet")
                self._say("not installed", name)
            elif module is not None:
                self.add(module)
                self._add_of_framework(module, entry.items)
                for item in entry.items:
                    if not is_framework(name) and hasattr(module, item) and self._is_new(vars(module), item):
                        self._say("imported", f"{name}.{item}")
                        self.add(getattr(module, item))

    def _add_patches_behind(self, function: types.FunctionType) -> None:
        """The functions that a function of the framework names, with its numbers."""
        self._add_file(str(function.__module__))
        space = function.__globals__
        names = cached_names(function.__code__)
        for name in names:
            if name in space:
                item = space[name]
                if isinstance(item, types.ModuleType):
                    self._add_of_framework(item, names)
                elif self._is_new(space, name):
                    self._add_found(f"{space.get('__name__')}.{name}", item)

    def _add_of_framework(self, module: types.ModuleType, names: Iterable[str]) -> None:
        """What code with these names finds in a Python module of the framework."""
        if not is_framework(module.__name__):
            return
        space = vars(module)
        for name in names:
            if name in space:
                item = space[name]
                if isinstance(item, types.ModuleType):
                    if item.__name__.startswith(f"{module.__name__}."):
                        self._add_of_framework(item, names)
                elif self._is_new(space, name):
                    self._add_found(f"{module.__name__}.{name}", item)

    def _add_found(self, place: str, item: Any) -> None:
        """A value that the framework holds, in so far as it may have been patched."""
        if isinstance(item, type):
            self._say(place, f"{item.__module__}.{item.__qualname__}")
            self._add_class(item)
        elif isinstance(item, _C_FUNCTIONS):
            self._say(place, item.__qualname__)
        elif isinstance(item, types.FunctionType) or type(item) in (bool, int, float):
            self._say("found", place)
            self.add(item)
        elif isinstance(item, dict):
            for key, value in item.items():
                if isinstance(value, types.FunctionType):
                    self._say("found", f"{place}[{key!r}]")
                    self.add(value)
        elif not is_framework(type(item).__module__):
            self._say("found", place)
            self.add(item)

    def _is_new(self, space: Mapping[str, Any], name: str) -> bool:
        entry = (id(space), name)
        if entry in self._said:
            return False
        self._said.add(entry)
        return True

    # Classes and files

    def _add_class(self, cls: type) -> None:
        """A class and its bases, with the files that they come from."""
        for base in inspect.getmro(cls):
            if base is object or base in self._classes:
                continue
            self._classes.add(base)
            self._say("base", f"{base.__module__}.{base.__qualname__}")
            if not self._follows:
                self._say("one object", str(id(base)))
            elif is_framework(str(base.__module__)):
                self._add_class_of_framework(base)
            else:
                self._add_class_of_model(base)

    def _add_class_of_framework(self, cls: type) -> None:
        if not cls.__flags__ & _HEAP_TYPE or not cls.__module__.startswith(("torch", "transformers")):
            return
        self._add_file(cls.__module__)
        for place, item in patches(cls):
            if place in NOT_RUN:  # the tracer puts its own __init__ into nn.Module
                continue
            self._say("patch", f"{cls.__qualname__}.{place}")
            self.add(item)
        for key, item in vars(cls).items():
            if key[:2] == "__":
                continue
            if type(item) in _EXACT_LITERALS:
                self._say("of the class", f"{key}={item!r}")
            elif key == "forward" and isinstance(item, types.FunctionType):
                self.add(item)

    def _add_class_of_model(self, cls: type) -> None:
        name = f"{cls.__module__}.{cls.__qualname__}"
        self._add_file(cls.__module__)
        inherited = {key for base in cls.__mro__[1:] if is_framework(base.__module__) for key in vars(base)}
        for key, item in vars(cls).items():
            special = key[:2] == "__" and key[-2:] == "__"
            if isinstance(item, _CODE):
                run = special or isinstance(item, property) or key in inherited
                if run and key not in NOT_RUN:
                    self._say("member", key)
                    self.add(item)
                else:
                    self._members.append((name, key, item))
            elif special or key == "_abc_impl":
                self._members.append((name, key, item))
            elif not isinstance(item, _FIELDS):
                self._say("of the class", key)
                self.add(item)

    def _add_makers(self, cls: type) -> None:
        """What runs when code calls a class."""
        for base in cls.__mro__ if self._follows else ():
            if not is_framework(base.__module__):
                for key in sorted(_MAKERS & vars(base).keys()):
                    self._say("maker", key)
                    self.add(vars(base)[key])

    def _add_file(self, name: str) -> None:
        """The bytes of a file, and of those that it takes something from unless they are the framework's."""
        module = sys.modules.get(name)
        if module is None or name in self._files or not self._follows:
            return
        self._files[name] = module
        path = getattr(module, "__file__", None)
        if path is not None:
            try:
                stat = os.stat(path)
                content = _file_digest(path, stat.st_size, stat.st_mtime_ns)
            except OSError as error:
                raise CannotIdentify(f"the source of {name} cannot be read: {error}") from None
            self._say("file", name)
            self.sources[name] = content.hex()
            self._digest.update(content)
        if not is_framework(name):
            for item in list(vars(module).values()):
                if isinstance(item, types.ModuleType):
                    other: Any = item.__name__
                elif isinstance(item, (types.FunctionType, type)):
                    other = item.__module__
                else:
                    continue
                if isinstance(other, str) and _belongs_to(name, other, str(path)):
                    self._add_file(other)

    def _follow_names(self) -> None:
        """Describe what the names that code reads stand for: methods of classes, and attributes of Python modules."""
        before = -1
        while before != len(self._said) + len(self._seen) + len(self._names):
            before = len(self._said) + len(self._seen) + len(self._names)
            waiting, self._members = self._members, []
            for cls, key, item in waiting:
                if key in self._names and key not in ("__doc__", "__dict__", "__module__"):
                    self._say("member", f"{cls}.{key}")
                    self.add(item)
                else:
                    self._members.append((cls, key, item))
            for name, module in list(self._files.items()):
                if id(module) not in self._seen or is_framework(name):
                    continue
                space = vars(module)
                for key in sorted(self._names & space.keys()):
                    if self._is_new(space, key):
                        self._say("global", f"{name}.{key}")
                        self.add(space[key])

    def _say(self, kind: str, text: str) -> None:
        self._digest.update(f"{kind}\0{len(text)}\0{text}\0".encode())


@functools.lru_cache(maxsize=4096)
def cached_names(code: types.CodeType) -> tuple[str, ...]:
    """Globals and attributes that code of the framework names, and the functions inside it."""
    inner = [name for part in code.co_consts if isinstance(part, types.CodeType) for name in cached_names(part)]
    return tuple(dict.fromkeys((*code.co_names, *inner)))


def _inside(item: Any) -> tuple[Any, ...]:
    if isinstance(item, property):
        return item.fget, item.fset
    return (item.func,) if isinstance(item, functools.cached_property) else (item.__func__,)


def _belongs_to(name: str, other: str, path: str) -> bool:
    """Whether the file of ``other`` belongs to the program that module ``name``, at ``path``, is part of: what is
    installed does not take other packages along, only what its code names of them."""
    if is_framework(other):
        return False
    return other.partition(".")[0] == name.partition(".")[0] or not _INSTALLED.search(path)
