"""What ranks tell each other of themselves before they load, and of what they have loaded."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Mapping
from typing import Any

import torch

from ..ops.native import processor
from ..program import Program
from .group import GroupFailed


def facts(threads: int) -> dict[str, Any]:
    """What must be the same on all ranks, lest their numbers differ."""
    try:
        version = importlib.metadata.version("torch-pagoda")
    except importlib.metadata.PackageNotFoundError:
        version = "unknown"
    return {
        "version of torch": torch.__version__,
        "version of torch-pagoda": version,
        "processor": processor(),
        "number of threads": threads,
    }


def digest_of(program: Program) -> dict[str, Any]:
    """What tells one rank's program from another's that is no part of the same model."""
    return {"program": getattr(program, "digest", ""), "vocab_size": program.vocab_size}


def refuse_differences(own: Mapping[str, Any], others: Mapping[int, Mapping[str, Any]]) -> None:
    """Hold what other ranks told against what this one would.

    Raises:
        GroupFailed: a rank told something else.
    """
    for rank, theirs in others.items():
        for name, value in own.items():
            if theirs.get(name) != value:
                raise GroupFailed(rank, f"has another {name} than rank 0: {theirs.get(name)!r}, not {value!r}")
