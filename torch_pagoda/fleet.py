"""A fleet under Ray's own command: ``serve run torch_pagoda.fleet:app model=MODEL replicas=4``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .cli.fleet import application_of

if TYPE_CHECKING:
    from ray.serve import Application


def app(arguments: dict[str, Any]) -> Application:
    """The application of Ray Serve for these options of ``pagoda fleet``, with their names in Python.

    Raises:
        ValueError: an argument is missing, unknown or invalid.
    """
    return application_of(arguments)
