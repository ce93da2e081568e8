"""What a draft model or a head needs besides the model, by ``speculative_config``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from ..checkpoint.configs import causal_lm_class, load_config
from ..checkpoint.loading import without_quantization
from ..checkpoint.mtp_head import head_skeleton
from ..compiler.costs.requirements import requirements
from ..compiler.options import CompileOptions
from ..draft_program import with_hidden_rows
from ..runtime.cache.cache_specs import AnySpec, bytes_per_block, token_specs
from ..runtime.program import CacheSpec
from ..runtime.speculation.config import read_speculative_config


@dataclass(frozen=True)
class DraftNeeds:
    """The needs of what drafts for a model.

    Attributes:
        kind: "draft model" or "head".
        model: class of the model, or of the head's layer.
        parameters: without those that a head shares with the model.
        weight_bytes: of them.
        caches: what it stores of each token.
    """

    kind: str
    model: str
    parameters: int
    weight_bytes: int
    caches: tuple[AnySpec, ...]

    @property
    def token_bytes(self) -> int:
        """Bytes of its cache for each token."""
        return bytes_per_block(self.caches, 1)

    def to_dict(self) -> dict[str, Any]:
        """Plain values, sizes in bytes."""
        named = {"kind": self.kind, "model": self.model, "parameters": self.parameters}
        return {**named, "weight_bytes": self.weight_bytes, "token_bytes": self.token_bytes}

    def __str__(self) -> str:
        return (
            f"{self.kind.capitalize()} ({self.model}): {self.parameters:,} parameters, {self.weight_bytes:,} bytes; "
            f"KV per token: {self.token_bytes:,} bytes."
        )


def draft_needs(
    given: Mapping[str, Any] | None,
    model: str,
    dtype: torch.dtype | None,
    options: CompileOptions,
    caches: Sequence[AnySpec] | None = None,
) -> DraftNeeds | None:
    """Find out what drafts and what it needs; None where that is no model. Only configurations are read.

    Args:
        given: ``speculative_config``.
        model: checkpoint folder or hub id of the model.
        dtype: of the weights; None for what the configuration says.
        options: how the model would be compiled.
        caches: the model's, as in ``Program.caches``, where they are known.

    Raises:
        ValueError: it cannot draft for this model.
    """
    if given is None:
        return None
    config = read_speculative_config(given)
    with_hidden_rows(given, model, options)  # refuses what no head runs on
    if config.method == "draft_model":
        kind, own = _kind_and_config(config.model)
        alone = replace(options, tensor_parallel_size=1, pipeline_parallel_size=1, expert_parallel_size=None)
        needs = requirements(kind, without_quantization(own), dtype, alone)
        return DraftNeeds("draft model", needs.model, needs.parameters, needs.weight_bytes, tuple(needs.caches))
    if config.method != "mtp":
        return None
    kind, own = _kind_and_config(model)
    kept = dtype or getattr(own.get_text_config(decoder=True), "dtype", None) or torch.bfloat16
    own = without_quantization(own)
    head = head_skeleton(kind, own, kept)
    if caches is None:
        caches = requirements(kind, own, dtype, options).caches
    parameters = sum(weight.numel() for weight in head.mtp.layers.parameters())
    return DraftNeeds(
        "head",
        type(head.mtp.layers[0].mtp_block).__name__,
        parameters,
        parameters * kept.itemsize,
        _head_caches(caches, head.config.hidden_size, kept),
    )


def _head_caches(caches: Sequence[AnySpec], size: int, dtype: torch.dtype) -> tuple[AnySpec, ...]:
    """A hidden row, and a layer like the model's of the widest attention."""
    own = min(token_specs(caches), key=lambda spec: spec.sliding_window is not None)
    return CacheSpec(1, size, 0, dtype, sliding_window=own.sliding_window), own


def _kind_and_config(model: str) -> tuple[Any, Any]:
    _, config = load_config(model, trust_remote_code=False)
    kind = causal_lm_class(config)
    if kind is None:
        raise ValueError(f"model={model!r} is no causal LM of transformers; use one")
    return kind, config
