"""The program of the draft model that ``speculative_config`` names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from .compiled_model import CompiledModel, compiled_model
from .compiler import CompileOptions
from .options import LoadOptions
from .runtime.cache.cache_specs import has_state
from .runtime.program import Program
from .runtime.shown import shown
from .runtime.speculation.config import read_speculative_config

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def draft_program(
    given: Mapping[str, Any] | None,
    target: CompiledModel,
    loading: LoadOptions,
    compiling: CompileOptions,
    device: torch.device,
    known_modules: frozenset[str],
) -> Program | None:
    """Load and compile the draft model as the model itself is, but in this process alone; None without one.

    Args:
        given: ``speculative_config``.
        target: the model.
        loading, compiling, device, known_modules: see ``compiled_model``.

    Raises:
        ValueError: it cannot be served, keeps state, or has another vocabulary.
    """
    config = None if given is None else read_speculative_config(given)
    if config is None or not config.model:
        return None
    loading = replace(loading, gguf_file=None, generation_config="vllm", distributed_executor_backend="mp")
    compiling = replace(
        compiling,
        tensor_parallel_size=1,
        pipeline_parallel_size=1,
        expert_parallel_size=None,
        enable_expert_parallel=None,
        patterns=(),
    )
    draft = compiled_model(config.model, None, loading, compiling, device, known_modules)
    if has_state(draft.program.caches):
        raise ValueError(
            f"speculative_config: model={config.model!r} keeps a state for each sequence, which does not forget "
            "rejected drafts; use a model with attention only"
        )
    if (difference := _difference(target, draft)) is not None:
        raise ValueError(
            f"speculative_config: model={config.model!r} has another vocabulary: {difference}; use a draft model "
            "with the model's own tokenizer"
        )
    return draft.program


def _difference(target: CompiledModel, draft: CompiledModel) -> str | None:
    """The first difference of two vocabularies, added tokens included. Without tokenizers their sizes count."""
    if target.tokenizer is None or draft.tokenizer is None:
        size, others = target.program.vocab_size, draft.program.vocab_size
        return None if size == others else f"{others} ids instead of {size}, and no tokenizer to compare"
    own, other = _tokens(target.tokenizer), _tokens(draft.tokenizer)
    for token_id in sorted(own.keys() | other.keys()):
        if own.get(token_id) != other.get(token_id):
            return f"id {token_id} is {shown(other.get(token_id))} instead of {shown(own.get(token_id))}"
    return None


def _tokens(tokenizer: PreTrainedTokenizerBase) -> dict[int, str]:
    return {token_id: token for token, token_id in tokenizer.get_vocab().items()}
