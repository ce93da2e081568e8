"""The program of the draft model, or of the model's head, that ``speculative_config`` names."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

import torch

from .checkpoint.mtp_head import load_mtp_head
from .compiled_model import CompiledModel, compiled_model
from .compiler import CompileOptions
from .options import LoadOptions
from .runtime.cache.cache_specs import has_state
from .runtime.program import Program
from .runtime.shown import shown
from .runtime.speculation.config import drafts_with_head, read_speculative_config

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from .compiler.link.linker import LinkedProgram


def with_hidden_rows(given: Mapping[str, Any] | None, model: object, compiling: CompileOptions) -> CompileOptions:
    """Return the options by which the model itself is compiled: a head reads its hidden rows.

    Args:
        given: ``speculative_config``.
        model: as for ``LLM``.
        compiling: the options for the model without a head.

    Raises:
        ValueError: there can be no head.
    """
    if not drafts_with_head(given):
        return compiling
    refused, others = "speculative_config: method 'mtp'", "method 'suffix' or 'draft_model'"
    if not isinstance(model, str | os.PathLike):
        raise ValueError(
            f"{refused} reads the head from the checkpoint; pass its folder or hub id instead of a module"
        )
    if compiling.world_size > 1:
        raise ValueError(f"{refused} runs in one process, not in {compiling.world_size}; use one, or {others}")
    if compiling.target != "cpu":
        raise ValueError(f"{refused} does not run on Ascend NPUs yet; use {others}")
    return replace(compiling, taps_hidden=True)


def draft_program(
    given: Mapping[str, Any] | None,
    model: object,
    target: CompiledModel,
    loading: LoadOptions,
    compiling: CompileOptions,
    device: torch.device,
    known_modules: frozenset[str],
) -> Program | None:
    """Load and compile the draft model as the model itself is, but in this process alone, or the model's head; None
    without one.

    Args:
        given: ``speculative_config``.
        model: as for ``LLM``.
        target: the model, compiled.
        loading, compiling, device, known_modules: see ``compiled_model``.

    Raises:
        ValueError: it cannot be served, keeps state, or has another vocabulary.
    """
    config = None if given is None else read_speculative_config(given)
    if config is None or config.method not in ("mtp", "draft_model"):
        return None
    if config.method == "mtp":
        # Imported here: it brings the tracer, which a process that finds its program in the store never needs.
        from .compiler.head_program import build_head

        head = load_mtp_head(cast(str, model), loading.dtype, loading.trust_remote_code, config.model or None)
        return build_head(head, cast("LinkedProgram", target.program), head.shared, compiling)
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
