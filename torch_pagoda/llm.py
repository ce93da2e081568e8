"""The offline engine: a model, its compiled program and its paged KV cache behind vLLM's names."""

from __future__ import annotations

import inspect
import logging
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from .checkpoint import check_module, check_tokenizer, load_model, load_tokenizer, resolve_dtype
from .compiler import CompileOptions, CompileReport, UnsupportedModel, WeightGuard, build_program
from .compiler.user_passes import Pattern
from .device import free_memory, resolve_device
from .passes.lower.npu.target import DEFAULT_BLOCK_SIZE as NPU_BLOCK_SIZE
from .runtime.engine import Engine
from .runtime.kv_cache import default_num_blocks, num_blocks_in, parse_memory
from .runtime.outputs import Progress, RequestOutput, StreamPiece
from .runtime.program import Program
from .runtime.sampling_params import SamplingParams
from .runtime.validation import Prompt

logger = logging.getLogger(__name__)

DEFAULT_MAX_NUM_SEQS = 64
DEFAULT_MAX_NUM_BATCHED_TOKENS = 2048
DEFAULT_BLOCK_SIZE = 16
"""For a CPU; see ``passes.lower.npu.target`` for NPUs."""

_LIMITS = ("block_size", "num_blocks", "max_num_seqs", "max_num_batched_tokens", "max_model_len")
_MAY_BE_NONE = ("block_size", "num_blocks", "max_model_len")
_COMPILE_OPTIONS = ("verify", "passes", "opt_level", "patterns", "codegen", "target", "pack_weights")


class LLM:
    """Serves one causal LM: prompts in, tokens out, batched token by token.

    Args:
        model: a checkpoint folder or hub id, or a live transformers module in eval mode. A live module keeps
            its weights; one loaded here belongs to the engine.
        tokenizer: a tokenizer, or where to load one; by default the checkpoint's. Without one, prompts are
            token ids.
        dtype: ``"auto"`` (the checkpoint's, or the live module's), ``"float32"``, ``"bfloat16"`` or
            ``"float16"``.
        device: ``"auto"`` (an NPU if torch_npu reports one, else the CPU), ``"cpu"`` or ``"npu"``.
        block_size: tokens per KV-cache block; by default 16 for a CPU, and 128 for an NPU, which takes multiples
            of 16.
        num_blocks: blocks in the KV cache.
        kv_cache_memory: the same in bytes, or as ``"4GiB"``; not together with ``num_blocks``. By default a
            CPU gets min(max_num_seqs x max_model_len tokens, 4 GiB, half of the free memory), touched lazily; an NPU
            the same without the 4 GiB, and nine tenths of what is free.
        max_num_seqs: sequences that run at the same time.
        max_num_batched_tokens: tokens per step; longer prompts are cut into chunks.
        max_model_len: tokens of one sequence, prompt included; by default what the model and the cache allow.
        verify: ``"model"`` checks the compiled model against the original, ``"every-pass"`` after each pass
            too, ``"off"`` not at all.
        passes: ``{"skip": [names]}`` or ``{"only": [names]}``.
        opt_level: 0 swaps attention only; 1 adds rewrites that change no bit; 2 the fusions; 3 all passes.
        patterns: rewrites of your own, see :class:`~torch_pagoda.Pattern`.
        codegen: ``"none"`` runs the rewritten graph as it is. For a CPU also ``"inductor"``; ``"auto"`` is either.
            On an NPU also ``"ge"`` (compiled by the graph engine), which ``"auto"`` is, and ``"aclgraph"`` (captured
            at planned sizes and replayed).
        target: what to lower for, ``"cpu"`` or ``"npu"``; ``"auto"`` is the device's. ``"npu"`` on a CPU simulates
            the NPU's operators, slowly.
        pack_weights: keep matrices in the layout of the device's matrix kernels. By default for a model
            loaded here, in place of its weights; a live module keeps its own beside them, so there it costs
            their size in memory and has to be asked for.
        trust_remote_code: run model code that comes with the checkpoint.

    Attributes:
        program: the compiled model.
        engine: the engine that runs it.
        compile_report: what the compiler did, pass by pass.
        tokenizer: the tokenizer in use, or None.

    Raises:
        TypeError, ValueError: an argument that cannot be served, in one line that says what to do.
    """

    def __init__(
        self,
        model: str | os.PathLike[str] | PreTrainedModel,
        tokenizer: str | os.PathLike[str] | PreTrainedTokenizerBase | None = None,
        *,
        dtype: str | torch.dtype = "auto",
        device: str | torch.device = "auto",
        block_size: int | None = None,
        num_blocks: int | None = None,
        kv_cache_memory: int | str | None = None,
        max_num_seqs: int = DEFAULT_MAX_NUM_SEQS,
        max_num_batched_tokens: int = DEFAULT_MAX_NUM_BATCHED_TOKENS,
        max_model_len: int | None = None,
        verify: str = "model",
        passes: dict[str, list[str]] | None = None,
        opt_level: int = 2,
        patterns: Sequence[Pattern] = (),
        codegen: str = "auto",
        target: str = "auto",
        pack_weights: bool | None = None,
        trust_remote_code: bool = False,
    ) -> None:
        limits = {
            "block_size": block_size,
            "num_blocks": num_blocks,
            "max_num_seqs": max_num_seqs,
            "max_num_batched_tokens": max_num_batched_tokens,
            "max_model_len": max_model_len,
        }
        check_limits(limits)
        memory = check_cache_size(num_blocks, kv_cache_memory)
        resolved = resolve_device(device)
        loads = isinstance(model, str | os.PathLike)
        for_npu = target == "npu" or (target == "auto" and resolved.type == "npu")
        if block_size is None:
            block_size = NPU_BLOCK_SIZE if for_npu else DEFAULT_BLOCK_SIZE
        options = CompileOptions.from_dict(
            {
                **({"block_size": block_size} if for_npu else {}),
                "verify": verify,
                "passes": passes,
                "opt_level": opt_level,
                "patterns": tuple(patterns),
                "codegen": codegen,
                "target": target,
                "pack_weights": loads if pack_weights is None else pack_weights,
            }
        ).for_device(resolved.type)

        if isinstance(model, str | os.PathLike):
            module = load_model(model, dtype, trust_remote_code, resolved)
        else:
            module = check_module(model, dtype, resolved)
        if tokenizer is None and isinstance(model, str | os.PathLike):
            self.tokenizer = load_tokenizer(model, trust_remote_code, required=False)
        elif isinstance(tokenizer, str | os.PathLike):
            self.tokenizer = load_tokenizer(tokenizer, trust_remote_code, required=True)
        else:
            self.tokenizer = check_tokenizer(tokenizer)

        try:
            program = build_program(module, options, owns_weights=loads)
        except UnsupportedModel as error:
            name = f"{os.fspath(model)!r}" if isinstance(model, str | os.PathLike) else type(model).__name__
            raise UnsupportedModel(
                f"model={name} cannot be served: {error}; use transformers' own generate, which "
                'torch.compile(model, backend="pagoda") can speed up'
            ) from error
        self._weights = WeightGuard(module, program.copied_weights, program.merged_weights)
        self.program: Program = program
        self.compile_report: CompileReport = program.report
        if memory is not None:
            num_blocks = num_blocks_in(memory, program.caches, block_size)
        elif num_blocks is None and (free := free_memory(resolved)) is not None:
            longest = max_model_len or program.max_model_len
            num_blocks = default_num_blocks(program.caches, block_size, max_num_seqs, longest, memory=free)
        self.engine = Engine(
            self.program,
            self.tokenizer,
            block_size=block_size,
            num_blocks=num_blocks,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            max_model_len=max_model_len,
            eos_token_ids=eos_token_ids(module, self.tokenizer),
        )

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        on_progress: Callable[[Progress], None] | None = None,
    ) -> list[RequestOutput]:
        """Run prompts to their end, all in one continuous batch.

        Args:
            prompts: texts, or token ids (lists of int, or 1-d tensors); or a single one.
            sampling_params: for all prompts, or one per prompt.
            on_progress: called after every step.

        Returns:
            One output per prompt, in their order. A request that failed while it ran has
            ``finish_reason="error"``.

        Raises:
            TypeError, ValueError: a bad prompt, named by its index, before any prompt runs.
            RuntimeError: a weight was replaced or moved since the model was compiled (see
                :meth:`check_weights`).
        """
        self.check_weights()
        return self.engine.generate(prompts, sampling_params, on_step=on_progress)

    def stream(self, prompt: Prompt, sampling_params: SamplingParams | None = None) -> Iterator[StreamPiece]:
        """Run one prompt, yielding text and tokens as they come; closing the iterator cancels the request."""
        self.check_weights()
        return self.engine.stream(prompt, sampling_params)

    def submit(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None, request_id: str | None = None
    ) -> str:
        """Queue one prompt for :meth:`step`; returns its request id."""
        self.check_weights()
        return self.engine.submit(prompt, sampling_params, request_id)

    def check_weights(self) -> None:
        """Compare the module's weights with those that were compiled.

        Raises:
            RuntimeError: one was replaced, moved, or written to after it was packed.
        """
        self._weights.check()

    def step(self) -> list[RequestOutput]:
        """Run one step of the engine; returns the requests that got on."""
        return self.engine.step()

    def cancel(self, request_id: str) -> bool:
        """End a request early; False when there is none of that id."""
        return self.engine.cancel(request_id)

    def has_unfinished(self) -> bool:
        """Whether :meth:`step` has anything to do."""
        return self.engine.has_unfinished()

    def __repr__(self) -> str:
        return f"LLM({self.compile_report.model} on {self.program.device}, {self.engine.max_model_len} tokens)"


def check_options(options: dict[str, Any]) -> None:
    """Check the names, and what can be checked of the values, of options meant for :class:`LLM`.

    Raises:
        ValueError: an unknown option, or a value out of range.
    """
    known = set(inspect.signature(LLM).parameters) - {"model", "tokenizer", "trust_remote_code"}
    for name in options:
        if name not in known:
            raise ValueError(
                f"option {name!r} (given {options[name]!r}) is not known; use one of {', '.join(sorted(known))}"
            )
    check_limits({name: options[name] for name in _LIMITS if name in options})
    resolve_dtype(options.get("dtype", "auto"))
    resolve_device(options.get("device", "auto"))
    check_cache_size(options.get("num_blocks"), options.get("kv_cache_memory"))
    CompileOptions.from_dict({name: options[name] for name in _COMPILE_OPTIONS if name in options})


def check_limits(limits: dict[str, Any]) -> None:
    """Refuse limits that are not whole numbers of at least 1; some may be None, for unset."""
    for name, value in limits.items():
        if value is None and name in _MAY_BE_NONE:
            continue
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(f"{name}={value!r} is not a whole number of at least 1; use one, or leave it out")


def check_cache_size(num_blocks: int | None, kv_cache_memory: int | str | None) -> int | None:
    """Bytes of ``kv_cache_memory``, or None; refuses both sizes together."""
    if num_blocks is not None and kv_cache_memory is not None:
        raise ValueError(
            f"num_blocks={num_blocks} and kv_cache_memory={kv_cache_memory!r} both size the KV cache; "
            "give one of them"
        )
    return None if kv_cache_memory is None else parse_memory(kv_cache_memory)


def eos_token_ids(module: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None) -> list[int]:
    """Tokens that end a sequence: the generation config's, else the model config's, else the tokenizer's."""
    for owner in (getattr(module, "generation_config", None), module.config, tokenizer):
        found = getattr(owner, "eos_token_id", None)
        if found is not None:
            return [int(token) for token in (found if isinstance(found, list | tuple) else [found])]
    return []
