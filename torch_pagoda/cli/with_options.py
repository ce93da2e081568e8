"""Commands with options from dataclass fields: one definition of types, defaults and help texts."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import MISSING, Field, fields
from functools import update_wrapper
from pathlib import Path
from typing import Annotated, Any

import typer

from .errors import one_line_errors

Model = Annotated[str, typer.Argument(help="Checkpoint folder, or hub id.", metavar="MODEL")]

_KINDS: dict[str, Any] = {
    **{"bool": bool, "int": int, "float": float, "Path": Path},
    **{"list[str]": list[str], "list[int]": list[int], "tuple[str, ...]": list[str]},
}
"""Types of fields, as they are written, and what the command line reads; a text for all others."""


def with_options(
    own: type, panels: Sequence[tuple[str, str]], *groups: Sequence[type]
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorate a command to add options that its signature does not list.

    The command is called with its own arguments, an instance of ``own``, and one dictionary of options per group.
    JSON objects are decoded. A flag that is on by default gets an opposite, ``--no-…``; ``--help`` shows the one that
    changes the default.

    Args:
        own: the option class of this command; has ``debug``.
        panels: titles of ``--help``, each with the names of its options; "" is the panel of the rest.
        groups: option classes that share a dictionary. The first class that has an option describes it.
    """
    classes = [(own,), *groups]
    known = {
        field.name: (field, place)
        for place in reversed(range(len(classes)))
        for kind in reversed(classes[place])
        for field in fields(kind)
    }
    offered = [(*known[name], panel) for panel, names in panels for name in names.split()]

    def decorate(command: Callable[..., Any]) -> Callable[..., Any]:
        parameters = inspect.signature(command, eval_str=True).parameters
        arguments = list(parameters.values())[: -len(classes)]

        def run(**given: Any) -> Any:
            values: list[dict[str, Any]] = [{} for _ in classes]
            with one_line_errors(given["debug"]):
                for field, place, _ in offered:
                    values[place][field.name] = _value(field, given)
            return command(*(given[argument.name] for argument in arguments), own(**values[0]), *values[1:])

        update_wrapper(run, command)
        run.__annotations__ = {}
        options = [parameter for field, _, panel in offered for parameter in _parameters(field, panel)]
        run.__signature__ = inspect.Signature([*arguments, *options])  # type: ignore[attr-defined]
        return run

    return decorate


def json_object(flag: str, text: str) -> dict[str, Any]:
    """Parse an option to a dictionary.

    Raises:
        ValueError: it is not a JSON object.
    """
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{flag} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise ValueError(f"{flag} is not a JSON object; use {{...}}")
    return value


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _kind(field: Field[Any]) -> Any:
    return _KINDS.get(str(field.type).removesuffix(" | None"), str)


def _has_opposite(field: Field[Any]) -> bool:
    return _kind(field) is bool and field.default is not False and "flags" not in field.metadata


def _is_json(field: Field[Any]) -> bool:
    return str(field.type).startswith("Mapping")


def _parameters(field: Field[Any], panel: str) -> Iterator[inspect.Parameter]:
    """Arguments for typer's option of a field."""
    shown = {"rich_help_panel": panel or None, **({"metavar": "JSON"} if _is_json(field) else {}), **field.metadata}
    if _has_opposite(field):
        for name, is_default in ((f"no_{field.name}", not field.default), (field.name, field.default)):
            yield _parameter(name, bool, False, {"hidden": True} if is_default else shown)
        return
    kind, default = _kind(field), None if field.default in (MISSING, None, ()) else field.default
    if default is None:
        kind |= None
    elif kind is str:
        default = str(default)
    yield _parameter(field.name, kind, default, shown)


def _parameter(name: str, kind: Any, default: Any, shown: Mapping[str, Any]) -> inspect.Parameter:
    info = typer.Option(*shown.get("flags", (_flag(name),)), **{key: shown[key] for key in shown if key != "flags"})
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[kind, info])


def _value(field: Field[Any], given: dict[str, Any]) -> Any:
    """The value of an option from typer's value.

    Raises:
        ValueError: a flag and its opposite, or text that is not a JSON object.
    """
    value = given[field.name]
    if _has_opposite(field):
        opposite = given[f"no_{field.name}"]
        if value and opposite:
            flags = f"{_flag(field.name)} and {_flag(f'no_{field.name}')}"
            raise ValueError(f"{flags} are mutually exclusive; give one")
        return True if value else False if opposite else field.default
    if _is_json(field) and value is not None:
        return json_object(_flag(field.name), value)
    if isinstance(field.default, tuple):
        return tuple(value or ())
    return None if value == [] else value
