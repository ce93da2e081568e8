"""Memory requirements of a model from its configuration alone: weights, caches, and an estimate of activations."""

from __future__ import annotations

import copy
import logging
from collections import Counter
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from ...passes import TracedGraph
from ...runtime.program import CacheSpec, StateSpec
from ..capture.trace import capture
from ..options import CompileOptions
from ..pipeline import References, of_one_rank, rewrite
from ..report import CompileReport
from .layer_caches import all_caches
from .live_memory import peak_live_bytes
from .rank_shares import RankShares, rank_shares
from .skeleton import build_skeleton
from .stage_shares import StageShares, stage_shares
from .traffic import Step

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Requirements:
    """The needs of serving a model, before any of it is loaded.

    Attributes:
        model: class of the model.
        parameters: how many numbers its weights are; tied ones count once.
        weight_bytes: of parameters and buffers, on each rank where there are several.
        weight_dtype: of most of them, ``float16``.
        caches: what each cached layer of the whole model stores, likewise.
        max_model_len: positions that it supports, or None when it does not say.
        graph: the rewritten graph of a few layers, for ``activation_bytes``.
        stages: what the stages of a pipeline hold; None without them.
        shares: each rank's part; None for one rank.
    """

    model: str
    parameters: int
    weight_bytes: int
    weight_dtype: str
    caches: tuple[CacheSpec | StateSpec, ...]
    max_model_len: int | None
    graph: TracedGraph
    stages: StageShares | None = None
    shares: RankShares | None = None

    def activation_bytes(
        self, max_num_batched_tokens: int, max_num_seqs: int, max_model_len: int | None = None
    ) -> int:
        """Estimate the memory that the largest step takes in addition to weights and caches; see ``peak_live_bytes``.

        Layers run one after the other, so that a few show the peak of all.

        Args:
            max_num_batched_tokens: tokens of the step.
            max_num_seqs: sequences that can ask for logits.
            max_model_len: tokens that a sequence can have; by default no more than the step.
        """
        rows = min(max_num_seqs, max_num_batched_tokens)
        context = max(max_num_batched_tokens, max_model_len or 0)
        return peak_live_bytes(self.graph, Step(max_num_batched_tokens, context, rows))


def requirements(
    kind: Any, config: Any, dtype: torch.dtype | None = None, options: CompileOptions | None = None
) -> Requirements:
    """Find out what a transformers model needs. No memory is taken for its weights, and nothing is run.

    Args:
        kind: class of the model.
        config: its configuration, which is not changed.
        dtype: of its weights; None for what the configuration says, or bf16.
        options: how it would be compiled; the target and the passes count.

    Raises:
        UnsupportedModel: it cannot be served.
    """
    options = CompileOptions() if options is None else options
    dtype = dtype or getattr(config, "dtype", None) or torch.bfloat16
    skeleton = build_skeleton(kind, config, dtype)
    options = replace(options, verify="off", codegen="none").for_device("cpu")
    report = CompileReport(type(skeleton.model).__name__)
    whole = replace(options, pipeline_parallel_size=1)  # the skeleton may have fewer layers than there are stages
    found = rewrite(capture(skeleton.model), whole, References(None), report)
    traced = found.traced
    parameters, weight_bytes, kept = _weights(_whole(kind, config, dtype, skeleton.model))
    shares = None
    if found.unsharded is not None:
        sharded, records = of_one_rank(found.unsharded, options)
        shares = rank_shares(found.unsharded, sharded, records, skeleton.representatives, traced)
        weight_bytes += shares.rank_weight_bytes - shares.weight_bytes
    stages = None
    if options.pipeline_parallel_size > 1:
        stages = stage_shares(traced, skeleton.representatives, options.pipeline_parallel_size)
    return Requirements(
        model=type(skeleton.model).__name__,
        parameters=parameters,
        weight_bytes=weight_bytes,
        weight_dtype=str(kept).removeprefix("torch."),
        caches=all_caches(traced, skeleton.representatives),
        max_model_len=traced.max_positions,
        graph=traced,
        stages=stages,
        shares=shares,
    )


def _whole(kind: Any, config: Any, dtype: torch.dtype, skeleton: nn.Module) -> nn.Module:
    """The whole model without memory; the skeleton where that cannot be built, which then has all layers."""
    try:
        with torch.device("meta"):
            model: nn.Module = kind._from_config(copy.deepcopy(config), dtype=dtype)
    except Exception as error:  # a model that computes with its buffers while it is built
        logger.info("could not build on the meta device: %s", error)
        return skeleton
    model.tie_weights()  # type: ignore[operator]
    return model


def _weights(model: nn.Module) -> tuple[int, int, torch.dtype]:
    """Number of parameters, bytes of parameters and buffers, and the dtype that most of the parameters have."""
    parameters = {id(p): p for p in model.parameters()}.values()
    buffers = {id(b): b for b in model.buffers()}.values()
    by_dtype: Counter[torch.dtype] = Counter()
    for p in parameters:
        by_dtype[p.dtype] += p.numel()
    size = sum(t.numel() * t.element_size() for t in (*parameters, *buffers))
    return by_dtype.total(), size, by_dtype.most_common(1)[0][0]
