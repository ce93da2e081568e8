"""Fields of option classes, with the help text that a command line shows for them."""

from __future__ import annotations

from dataclasses import field
from typing import Any, TypeVar

T = TypeVar("T")


def option(default: T, help: str, **shown: Any) -> T:
    """A dataclass field that is an option of a command, too.

    Modules that declare options import no torch, so that ``--help`` answers at once.

    Args:
        default: the value when the option is left out; each instance gets a copy of a dictionary.
        help: the text behind the option in ``--help``.
        shown: further keywords of the command line's option, such as ``metavar``.
    """
    metadata = {"help": help, **shown}
    if isinstance(default, dict):
        return field(default_factory=default.copy, metadata=metadata)  # type: ignore[return-value]
    return field(default=default, metadata=metadata)
