"""Dataclasses and named tuples as plain data, and back with every type checked: what is read from a file is not what
it says it is.
"""

from __future__ import annotations

import types
import typing
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import torch

_SCALARS = (bool, int, float, str, type(None))


def to_plain(item: Any) -> Any:
    """Literals, containers and tensors; a dataclass or a named tuple is a dict of its fields, a device its name."""
    if not isinstance(item, type) and (names := _field_names(item)) is not None:
        return {name: to_plain(getattr(item, name)) for name in names}
    if isinstance(item, Mapping):
        return {key: to_plain(inner) for key, inner in item.items()}
    if isinstance(item, (list, tuple)):
        return type(item)(map(to_plain, item))
    if isinstance(item, frozenset):
        return sorted(item)
    return str(item) if isinstance(item, torch.device) else item


def from_plain(kind: Any, plain: Any, name: str) -> Any:
    """What ``to_plain`` was given.

    Args:
        kind: its type, as an annotation says it.
        plain: the data.
        name: what the data is called in messages.

    Raises:
        ValueError: the data is not of that type.
    """
    if kind is Any:
        return plain
    if kind is float and type(plain) is int:
        return float(plain)
    if kind in _SCALARS:
        if type(plain) is not kind:
            raise _refusal(name, plain, kind)
        return plain
    if kind is torch.device:
        if plain != "cpu":
            raise ValueError(f"{name} is {plain!r}; programs are kept for the CPU")
        return torch.device("cpu")
    if kind is torch.Tensor:
        if type(plain) is not torch.Tensor or plain.device.type != "cpu" or plain.layout is not torch.strided:
            raise _refusal(name, plain, kind)
        return plain
    if (names := _field_names(kind)) is not None:
        return _record(kind, names, plain, name)
    origin, arguments = typing.get_origin(kind) or kind, typing.get_args(kind)
    if origin in (types.UnionType, typing.Union):
        return _one_of(arguments, plain, name)
    if origin in (Mapping, dict):
        if type(plain) is not dict:
            raise _refusal(name, plain, kind)
        key, inner = arguments
        return {
            from_plain(key, k, f"a key of {name}"): from_plain(inner, v, f"{name}[{k!r}]") for k, v in plain.items()
        }
    if origin in (tuple, list, frozenset):
        if type(plain) not in (tuple, list):
            raise _refusal(name, plain, kind)
        if origin is tuple and Ellipsis not in arguments:
            if len(plain) != len(arguments):
                raise _refusal(name, plain, kind)
            inner_kinds = arguments
        else:
            inner_kinds = (arguments[0],) * len(plain)
        pairs = enumerate(zip(inner_kinds, plain, strict=True))
        return origin(from_plain(inner, x, f"{name}[{i}]") for i, (inner, x) in pairs)
    if not isinstance(plain, kind):
        raise _refusal(name, plain, kind)
    return plain


def _field_names(kind: Any) -> frozenset[str] | None:
    """Of a dataclass or a named tuple, or one of them; None for all else."""
    if is_dataclass(kind):
        return frozenset(field.name for field in fields(kind))
    named = kind if isinstance(kind, type) else type(kind)
    return frozenset(named._fields) if issubclass(named, tuple) and hasattr(named, "_fields") else None


def _record(kind: Any, names: frozenset[str], plain: Any, name: str) -> Any:
    hints = typing.get_type_hints(kind)
    if type(plain) is not dict or plain.keys() != names:
        raise ValueError(f"{name} is {_short(plain)}, no {kind.__name__} of {', '.join(sorted(names))}")
    return kind(**{key: from_plain(hints[key], plain[key], f"{name}.{key}") for key in plain})


def _one_of(kinds: tuple[Any, ...], plain: Any, name: str) -> Any:

    def likeness(kind: Any) -> int:
        names = _field_names(kind)
        if names is not None and type(plain) is dict:
            return len(plain.keys() & names)
        return 0 if kind is not type(None) else -1

    for kind in sorted(kinds, key=likeness):  # what refuses last says why
        try:
            return from_plain(kind, plain, name)
        except ValueError as error:
            refusal = error
    raise refusal


def _refusal(name: str, plain: Any, kind: Any) -> ValueError:
    return ValueError(f"{name} is {_short(plain)}, no {getattr(kind, '__name__', kind)}")


def _short(plain: Any) -> str:
    return f"{plain!r:.60}" if isinstance(plain, (bool, int, float, str)) else f"a {type(plain).__name__}"
