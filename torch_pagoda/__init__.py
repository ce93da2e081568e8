"""torch-pagoda: a ``torch.compile`` backend that serves unmodified HuggingFace causal LMs, paged and batched.

Three ways in: ``torch.compile(model, backend="pagoda")`` for any forward call, :func:`compile` for the
model's own ``generate``, and an engine with vLLM's names: :class:`LLM`, or :class:`AsyncLLM` for asyncio.
"""

from __future__ import annotations

from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .async_llm import AsyncLLM
    from .compiler.explain import Explanation, explain
    from .compiler.user_passes import Pattern, register_pass, unregister_pass
    from .generation import compile, restore
    from .llm import LLM
    from .passes import PassRecord, Rejection, TracedGraph
    from .runtime.batching import QueueFull
    from .runtime.requests.beam_search_params import BeamSearchParams
    from .runtime.requests.outputs import BeamSearchOutput, BeamSearchSequence, CompletionOutput, RequestOutput
    from .runtime.requests.sampling_params import SamplingParams

try:
    __version__ = version("torch-pagoda")
except PackageNotFoundError:  # the sources lie on sys.path without being installed
    __version__ = "0+unknown"

# Where each public name lives. They are imported on first use, so that `pagoda --help` and the compile
# backend, which torch loads by entry point, do not pay for transformers and the engine.
_HOME = {
    "LLM": ".llm",
    "AsyncLLM": ".async_llm",
    "SamplingParams": ".runtime.requests.sampling_params",
    "QueueFull": ".runtime.batching",
    "BeamSearchParams": ".runtime.requests.beam_search_params",
    "BeamSearchOutput": ".runtime.requests.outputs",
    "BeamSearchSequence": ".runtime.requests.outputs",
    "RequestOutput": ".runtime.requests.outputs",
    "CompletionOutput": ".runtime.requests.outputs",
    "compile": ".generation",
    "restore": ".generation",
    "Explanation": ".compiler.explain",
    "PassRecord": ".passes",
    "Pattern": ".compiler.user_passes",
    "Rejection": ".passes",
    "TracedGraph": ".passes",
    "explain": ".compiler.explain",
    "register_pass": ".compiler.user_passes",
    "unregister_pass": ".compiler.user_passes",
}

__all__ = [
    "LLM",
    "AsyncLLM",
    "BeamSearchOutput",
    "BeamSearchParams",
    "BeamSearchSequence",
    "CompletionOutput",
    "Explanation",
    "PassRecord",
    "Pattern",
    "QueueFull",
    "Rejection",
    "RequestOutput",
    "SamplingParams",
    "TracedGraph",
    "__version__",
    "compile",
    "explain",
    "register_pass",
    "restore",
    "unregister_pass",
]


def __getattr__(name: str) -> Any:
    home = _HOME.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(home, __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(set(globals()) | set(__all__))
