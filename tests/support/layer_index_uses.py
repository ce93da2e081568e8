"""Where the code of layers does more with a layer's index than address what the layer caches.

Only a few layers of transformers' models are compiled, and copied for the others. Code that decides by a layer's
index, such as "the upper half of the layers looks back over 4096 tokens", may do so where no compared sequence
shows it. So the code is read: an index may be compared with None, choose an entry of what the layer is handed, and
be an argument of a method of that.
"""

from __future__ import annotations

import ast
import inspect
import os
import types
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from typing import Any

import torch
from torch import nn

from torch_pagoda.compiler.capture.layer_kinds import PLACE

_TORCH = torch.__path__[0] + os.sep
_OF_EVERY_OBJECT = {"__doc__", "__getattribute__", "__new__"}


def uses_of_place(layers: Iterable[nn.Module]) -> list[str]:
    """The uses of a layer's place by which layers may differ.

    Args:
        layers: with the modules below them.

    Returns:
        each as "function: expression"; a function whose source cannot be read as "function: no source", and code
        that cannot be followed by an error.
    """
    reader = _Reader([module for layer in layers for module in layer.modules()])
    try:
        reader.read_named("forward")
    except Exception as error:  # of attributes that are computed, or code too deep to follow
        return [f"{type(error).__name__}: code that cannot be read"]
    return list(reader.found)


class _Reader:
    """Reads functions, and those that they name.

    Args:
        modules: whose methods are read where code names them.

    Attributes:
        found: the uses, in the order in which they were met.
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self.found: dict[str, None] = {}
        self._methods: dict[str, list[tuple[Any, nn.Module]]] = {}
        self._named: set[str] = set()
        self._read: set[types.CodeType] = set()
        classes = set[type]()
        for module in modules:
            bases = () if type(module) in classes else type(module).__mro__
            classes.add(type(module))
            for owner in (module, *bases):
                for name, item in vars(owner).items():
                    if callable(item) or isinstance(item, property | staticmethod | classmethod):
                        self._methods.setdefault(name, []).append((item, module))

    def read_named(self, name: str) -> None:
        """Read the methods of this name, of whatever module."""
        if name not in self._named:
            self._named.add(name)
            for item, module in self._methods.get(name, ()):
                self.read(item, module)

    def read(self, item: Any, module: nn.Module) -> None:
        """Read a function, what it decorates or encloses, and what it names: methods, and functions of its file."""
        item = item.fget if isinstance(item, property) else item
        item = getattr(item, "__func__", item)
        if not isinstance(item, types.FunctionType) or item.__code__ in self._read:
            return
        code = item.__code__
        self._read.add(code)
        if not code.co_filename.startswith(_TORCH):
            self.found |= dict.fromkeys(f"{item.__qualname__}: {use}" for use in _uses(code, module))
            for name in _names(code):
                self.read_named(name)
                called = item.__globals__.get(name)
                if inspect.isfunction(called) and called.__code__.co_filename == code.co_filename:
                    self.read(called, module)
        for inner in (getattr(item, "__wrapped__", None), *_enclosed(item)):
            self.read(inner, module)


def _enclosed(function: types.FunctionType) -> Iterator[Any]:
    for cell in function.__closure__ or ():
        with suppress(ValueError):  # not set yet
            yield cell.cell_contents


def _uses(code: types.CodeType, module: nn.Module) -> Iterator[str]:
    """The uses of a place in a function, as expressions."""
    if not any(map(PLACE.fullmatch, _names(code))):
        return
    try:
        source = inspect.getsource(code)
        tree = ast.parse(f"if True:\n{source}" if source[0].isspace() else source)
    except (OSError, SyntaxError):
        yield "no source"
        return
    parents = {child: parent for parent in ast.walk(tree) for child in ast.iter_child_nodes(parent)}
    handed = _Handed(tree)
    for node in ast.walk(tree):
        if handed.is_place(node) and not _finds_what_is_cached(node, parents, handed, module):
            yield ast.unparse(parents[node])


def _names(code: types.CodeType) -> Iterator[str]:
    """The names of attributes and variables in a function and in those inside of it."""
    yield from (*code.co_names, *code.co_varnames)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names(constant)


class _Handed:
    """What a function is handed, told from what belongs to its owner, the first of its parameters.

    Attributes:
        owner: its name.
    """

    def __init__(self, tree: ast.AST) -> None:
        nodes = list(ast.walk(tree))
        self._parameters = [node.arg for node in nodes if isinstance(node, ast.arg)]
        self.owner = self._parameters[0] if self._parameters else ""
        self._own = {self.owner}
        variables = set(self._parameters)
        for node in nodes:
            if isinstance(node, ast.Assign):
                names = {name for target in node.targets for name in _stored(target)}
                variables |= names
                if any(_root(source) in self._own for source in _sources(node.value)):
                    self._own |= names
        self._names = variables - self._own

    def is_place(self, node: ast.AST) -> bool:
        """True if it reads an attribute or a parameter that is a place by its name."""
        if not isinstance(getattr(node, "ctx", None), ast.Load):
            return False
        if isinstance(node, ast.Attribute):
            return PLACE.fullmatch(node.attr) is not None
        return isinstance(node, ast.Name) and node.id in self._parameters and PLACE.fullmatch(node.id) is not None

    def holds(self, node: ast.AST) -> bool:
        """True if it is part of what is handed."""
        return _root(node) in self._names


def _stored(target: ast.expr) -> list[str]:
    """The variables that an assignment to this sets; those of which it sets a part are left out."""
    return [n.id for n in ast.walk(target) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)]


def _sources(node: ast.expr) -> list[ast.expr]:
    """What an expression may be: both sides of a choice."""
    match node:
        case ast.IfExp(body=body, orelse=orelse):
            return [*_sources(body), *_sources(orelse)]
        case ast.BoolOp(values=values) | ast.Tuple(elts=values):
            return [source for value in values for source in _sources(value)]
    return [node]


def _root(node: ast.AST) -> str:
    """The name that an expression begins with; "" where it begins with none."""
    while isinstance(node, ast.Attribute | ast.Subscript | ast.Call):
        node = node.func if isinstance(node, ast.Call) else node.value
    return node.id if isinstance(node, ast.Name) else ""


def _finds_what_is_cached(
    place: ast.AST, parents: Mapping[ast.AST, ast.AST], handed: _Handed, module: nn.Module
) -> bool:
    """True for a use that makes no difference between layers."""
    parent = parents[place]
    match parent:
        case ast.Compare(ops=[ast.Is() | ast.IsNot()], comparators=[ast.Constant(value=None)]):
            return True
        case ast.keyword(arg=str(name)):
            return PLACE.fullmatch(name) is not None
        case ast.Subscript(value=value):
            return handed.holds(value)
        case ast.Call(func=called) if called is place:
            return True  # a method of this name, as lists have one
        case ast.Call(func=ast.Attribute(value=ast.Name(id=handed.owner), attr=name), args=arguments):
            return _calls_it_place(getattr(module, name, None), arguments.index(place))
        case ast.Call(func=ast.Attribute(value=value)):
            return handed.holds(value)
    return any(isinstance(above, ast.Raise) for above in _above(parent, parents))


def _above(node: ast.AST, parents: Mapping[ast.AST, ast.AST]) -> Iterator[ast.AST]:
    while node in parents:
        yield node
        node = parents[node]


def _calls_it_place(called: Any, position: int) -> bool:
    """True if a method, or a module, whose code is read as well, calls the argument at this position a place."""
    try:
        parameters = list(inspect.signature(called.forward if isinstance(called, nn.Module) else called).parameters)
    except (TypeError, ValueError):
        return False
    return position < len(parameters) and PLACE.fullmatch(parameters[position]) is not None
