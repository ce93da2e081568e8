"""torch-pagoda: a ``torch.compile`` backend that serves unmodified HuggingFace causal LMs, paged and batched.

Three ways in: ``torch.compile(model, backend="pagoda")`` for any forward call, :func:`compile` for the
model's own ``generate``, and an engine with vLLM's names: :class:`LLM`, or :class:`AsyncLLM` for asyncio.
"""

from __future__ import annotations

import ast
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

try:
    __version__ = version("torch-pagoda")
except PackageNotFoundError:  # the sources lie on sys.path without being installed
    __version__ = "0+unknown"

# The stub beside this file lists the public names, for type checkers and for here. They are imported on first use, so
# that `pagoda --help` and the compile backend, which torch loads by entry point, do not pay for transformers and the
# engine.
_HOME = {
    alias.name: f".{node.module}"
    for node in ast.parse(Path(__file__).with_suffix(".pyi").read_text(encoding="utf-8")).body
    if isinstance(node, ast.ImportFrom) and node.level
    for alias in node.names
}

__all__ = ["__version__", *_HOME]


def __getattr__(name: str) -> Any:
    home = _HOME.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from .runtime.garbage_collection import collection_paused
    from .runtime.phases import importing

    with collection_paused(), importing():
        value = getattr(import_module(home, __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(set(globals()) | set(__all__))
