"""Keyword arguments of the public API, divided among loader, engine and compiler."""

from __future__ import annotations

import difflib
import inspect
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, fields
from typing import Any, TypedDict, get_type_hints

import torch

from .compiler import CompileOptions
from .compiler.user_passes import Pattern
from .device import resolve_device
from .load_options import LoadOptions
from .runtime.engine.engine_options import EngineOptions


class ModelOptions(TypedDict, total=False):
    """Keyword arguments of :func:`~torch_pagoda.compile`, described in ``LoadOptions``, ``EngineOptions`` and
    ``CompileOptions``.

    For type checkers and editors; it also defines which fields of the three are public.
    """

    dtype: str | torch.dtype
    device: str | torch.device
    block_size: int | None
    num_blocks: int | None
    kv_cache_memory: int | str | None
    min_kv_cache_memory: int | str | None
    kv_cache_dtype: str
    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int | None
    enable_prefix_caching: bool
    policy: str
    preemption: str
    swap_space: int | str
    max_queue: int | None
    async_scheduling: bool | None
    npu_warmup: str
    speculative_config: Mapping[str, Any] | None
    draft_forced_tokens: bool
    kv_store: str | None
    kv_store_size: int | str | None
    kv_store_key_file: str | None
    kv_store_wait: float | None
    kv_store_write: str
    verify: str
    passes: Mapping[str, Sequence[str]] | None
    opt_level: int
    patterns: Sequence[Pattern]
    codegen: str
    static_decode: bool
    target: str
    pack_weights: bool | None
    quantization: str | None
    group_size: int | None
    input_bits: int | None
    batch_invariant: bool
    npu_options: Mapping[str, Any] | None
    schedule: Mapping[str, bool] | None


class LLMOptions(ModelOptions, total=False):
    """Keyword arguments of :class:`~torch_pagoda.LLM`: these, and those for loading a checkpoint."""

    generation_config: str | os.PathLike[str]
    tensor_parallel_size: int
    pipeline_parallel_size: int
    expert_parallel_size: int | None
    enable_expert_parallel: bool | None
    distributed_executor_backend: str
    trust_remote_code: bool
    worker_restarts: int | None
    step_timeout: float
    gguf_file: str | None


class UnknownOption(TypeError, ValueError):
    """An unknown option: a TypeError, as Python raises it, and a ValueError."""


_PARTS = (LoadOptions, EngineOptions, CompileOptions)


def split_options(
    options: Mapping[str, Any], *, owns_weights: bool, known: type = LLMOptions
) -> tuple[LoadOptions, EngineOptions, CompileOptions]:
    """Divide keyword arguments among loader, engine and compiler, without loading anything.

    Args:
        options: by name.
        owns_weights: default of ``pack_weights``: whether packed weights replace the model's own.
        known: the ``TypedDict`` of the allowed names.

    Raises:
        UnknownOption: an unknown name.
        ValueError: an invalid value, or a conflict of options.
    """
    names = list(known.__annotations__)
    for name in options:
        if name not in names:
            close = difflib.get_close_matches(name, names, n=1)
            remedy = f"did you mean {close[0]!r}?" if close else f"use one of {', '.join(sorted(names))}"
            raise UnknownOption(f"option {name!r} (given {options[name]!r}) is not known; {remedy}")
    load, engine, compiler = ({f.name: options[f.name] for f in fields(part) if f.name in options} for part in _PARTS)
    loading, serving = LoadOptions(**load), EngineOptions(**engine)
    device = resolve_device(loading.device).type
    target = compiler.get("target", "auto")
    for_npu = target == "npu" or (target == "auto" and device == "npu")
    if not for_npu or compiler.get("block_size") is None:
        compiler.pop("block_size", None)
    if compiler.get("pack_weights") is None:
        compiler["pack_weights"] = owns_weights
    return loading, serving, CompileOptions.from_dict(compiler).for_device(device)


def signature_with_options(init: Callable[..., None]) -> inspect.Signature:
    """The signature of ``init``, without ``self``, with every keyword of ``LLMOptions`` instead of ``**options``.

    For ``__signature__`` of a class, which help() and notebooks show.
    """
    _, *own = inspect.signature(init).parameters.values()
    defaults = {
        f.name: None if f.default is MISSING else f.default for part in reversed(_PARTS) for f in fields(part)
    }
    defaults["pack_weights"] = None
    keywords = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=defaults[name], annotation=kind)
        for name, kind in get_type_hints(LLMOptions).items()
    ]
    return inspect.Signature([*own[:-1], *keywords])
