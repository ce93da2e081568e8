"""Names of the installed framework's code: torch, transformers, numpy, the standard library and this package.

The framework is identified by its versions. transformers' models are not part of it: they are compiled.
"""

from __future__ import annotations

import functools
import sys

_PACKAGES = frozenset({"torch", "transformers", "numpy", "torch_pagoda", "torch_npu", "packaging"})
"""The last one compares versions for transformers."""
_STANDARD = frozenset(sys.stdlib_module_names) - {"__main__"}
_MODELS = "transformers.models."
_AUTO = "transformers.models.auto."
"""Modules that map configs to classes of models."""


@functools.lru_cache(maxsize=4096)
def is_framework(name: str) -> bool:
    """True if the versions identify a Python module of this name."""
    return name.partition(".")[0] in _PACKAGES | _STANDARD and not is_of_a_model(name)


def is_of_a_model(name: str) -> bool:
    """True if a Python module of this name holds one of transformers' models."""
    return name.startswith(_MODELS) and not name.startswith(_AUTO)
