"""The offline engine: a model, its compiled program and its paged KV cache behind vLLM's names."""

from __future__ import annotations

import gc
import inspect
import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn, Self

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from .chat import Message, chat_prompts
from .checkpoint import (
    causal_lm_class,
    check_module,
    check_tokenizer,
    checkpoint_files,
    load_config,
    load_model,
    load_tokenizer,
    resolve_dtype,
)
from .compiler import (
    CompileOptions,
    CompileReport,
    ModuleGuard,
    NotFinite,
    UnsupportedModel,
    WeightGuard,
    compile_program,
)
from .compiler.calibrate.recorded_grid import on_recorded_grid
from .compiler.capture.state_layers import check_state
from .compiler.user_passes import Pattern
from .default_params import default_params, params_or, recommended_params
from .device import free_memory, resolve_device
from .known_program import known_program
from .model_facts import facts_of
from .option_checks import LIMITS, check_cache_size, check_limits, check_scheduling, check_swap_space
from .passes.graph.npu_target import DEFAULT_BLOCK_SIZE as NPU_BLOCK_SIZE
from .runtime.autocast import without_autocast
from .runtime.cache.kv_cache import bytes_per_block, default_num_blocks, parse_memory
from .runtime.engine.engine import Engine
from .runtime.profiling.profile import Profile
from .runtime.program import Program
from .runtime.requests.beam_search_params import BeamSearchParams
from .runtime.requests.outputs import BeamSearchOutput, Progress, RequestOutput, StreamPiece
from .runtime.requests.prompt_forms import Prompt
from .runtime.requests.request_options import RequestOptions, options_for
from .runtime.requests.sampling_params import SamplingParams
from .runtime.requests.validation import as_batch

logger = logging.getLogger(__name__)

DEFAULT_MAX_NUM_SEQS = 64
DEFAULT_MAX_NUM_BATCHED_TOKENS = 2048
DEFAULT_BLOCK_SIZE = 32
"""For a CPU; see ``passes.graph.npu_target`` for NPUs."""

_COMPILE_OPTIONS = (
    "verify",
    "passes",
    "opt_level",
    "patterns",
    "codegen",
    "target",
    "pack_weights",
    "kv_cache_dtype",
    "quantization",
    "batch_invariant",
    "group_size",
)


class LLM:
    """Serves one causal LM: prompts in, tokens out, batched token by token.

    Any number of threads may call it: they take turns, step by step, and their prompts share the batch. A call waits
    for the step that is under way, not for the calls of others. It cannot be used in a process that was forked after
    it was made (RuntimeError); make it there, or start the process with multiprocessing's ``"spawn"``.

    Args:
        model: a checkpoint folder or hub id, or a live transformers module in eval mode. A live module keeps
            its weights; one loaded here belongs to the engine.
        tokenizer: a tokenizer, or where to load one; by default the checkpoint's. Without one, prompts are
            token ids.
        dtype: ``"auto"`` (the checkpoint's, or the live module's), ``"float32"``, ``"bfloat16"`` or
            ``"float16"``.
        device: ``"auto"`` (an NPU if torch_npu reports one, else the CPU), ``"cpu"`` or ``"npu"``.
        block_size: tokens per KV-cache block; by default 32 for a CPU, and 128 for an NPU, which takes multiples
            of 16.
        num_blocks: blocks in the KV cache.
        kv_cache_memory: the same in bytes, or as ``"4GiB"``; not together with ``num_blocks``. By default a
            CPU gets min(max_num_seqs x max_model_len tokens, 4 GiB, half of the free memory), touched lazily; an NPU
            the same without the 4 GiB, and nine tenths of what is free.
        kv_cache_dtype: ``"auto"`` keeps keys and values as they are computed; ``"int8"`` rounds them to a byte each,
            with a scale per token and head: about half the memory of bfloat16, and slightly other logits.
        min_kv_cache_memory: what a CPU's cache shrinks to when there is little to do, in bytes or as ``"512MiB"``. By
            default it keeps all memory that it once needed.
        max_num_seqs: sequences that run at the same time.
        max_num_batched_tokens: tokens per step; longer prompts are cut into chunks.
        max_model_len: tokens of one sequence, prompt included; by default what the model and the cache allow.
        enable_prefix_caching: keep computed blocks for prompts that begin with the same tokens, and for the next turn
            of a chat.
        policy: who comes first: ``"fcfs"``, ``"priority"``, ``"sjf"`` (the shortest job), ``"fair"`` (clients take
            turns) or ``"prefix"`` (the most cached tokens).
        preemption: how a sequence gives up its blocks when they run out: ``"recompute"``, ``"swap"`` (to host memory)
            or ``"auto"``, whatever measures as cheaper.
        swap_space: host memory for swapped sequences, in bytes or as ``"1GiB"``.
        max_queue: most completions that wait; more are refused with ``QueueFull``. By default any number.
        verify: ``"model"`` checks the compiled model against the original, ``"every-pass"`` after each pass
            too, ``"off"`` not at all.
        passes: ``{"skip": [names]}``, or ``{"only": [names]}``, which chooses among the optional passes.
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
        quantization: ``"int8"`` or ``"int4"`` rounds the weights of linear layers to so many bits, and their inputs
            to 8; with ``"int8-weight-only"`` and ``"int4-weight-only"`` inputs keep 16. Logits change
            slightly. Rounded weights take the place of those of a model loaded here; a live module keeps its own
            beside them.
        group_size: inputs of a rounded weight that share a scale, a multiple of 64, or 0 for all of them; by default
            what ``pagoda quantize`` recorded in the config, else 256 for 8 bits and 128 for 4. Rounded inputs have
            the same groups.
        batch_invariant: on a CPU, the logits of a token do not change by a bit with its batch mates, the chunks of
            its prompt, cached prefixes or the number of threads, for one machine and one build of the kernels.
            Slower; a model of which that cannot be said is refused with the operator's name.
        generation_config: where the parameters of requests come from that bring none: ``"auto"``, the generation
            config of the checkpoint (or live module); ``"vllm"``, ``SamplingParams()``; or a folder with such a file.
            Its temperature, top_k, top_p, min_p, repetition_penalty and max_new_tokens are read, and
            ``do_sample=False`` as greedy. What ends a text is the model's own in any case.
        trust_remote_code: run model code that comes with the checkpoint.

    Attributes:
        program: the compiled model.
        engine: the engine that runs it.
        compile_report: what the compiler did, pass by pass.
        tokenizer: the tokenizer in use, or None.
        recommended_params: what the generation config says of sampling, by the names in ``SamplingParams``.

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
        min_kv_cache_memory: int | str | None = None,
        kv_cache_dtype: str = "auto",
        max_num_seqs: int = DEFAULT_MAX_NUM_SEQS,
        max_num_batched_tokens: int = DEFAULT_MAX_NUM_BATCHED_TOKENS,
        max_model_len: int | None = None,
        enable_prefix_caching: bool = True,
        policy: str = "fcfs",
        preemption: str = "auto",
        swap_space: int | str = 0,
        max_queue: int | None = None,
        verify: str = "model",
        passes: dict[str, list[str]] | None = None,
        opt_level: int = 2,
        patterns: Sequence[Pattern] = (),
        codegen: str = "auto",
        target: str = "auto",
        pack_weights: bool | None = None,
        quantization: str | None = None,
        group_size: int | None = None,
        batch_invariant: bool = False,
        generation_config: str | os.PathLike[str] = "auto",
        trust_remote_code: bool = False,
    ) -> None:
        limits = {
            "block_size": block_size,
            "num_blocks": num_blocks,
            "max_num_seqs": max_num_seqs,
            "max_num_batched_tokens": max_num_batched_tokens,
            "max_model_len": max_model_len,
            "max_queue": max_queue,
        }
        check_limits(limits)
        check_scheduling(policy, preemption, enable_prefix_caching)
        swap_bytes = check_swap_space(swap_space)
        memory = check_cache_size(num_blocks, kv_cache_memory)
        least = None if min_kv_cache_memory is None else parse_memory(min_kv_cache_memory, "min_kv_cache_memory")
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
                "kv_cache_dtype": kv_cache_dtype,
                "quantization": quantization,
                "group_size": group_size,
                "batch_invariant": batch_invariant,
            }
        ).for_device(resolved.type)

        module, program, files = None, None, None
        if isinstance(model, str | os.PathLike):
            files = checkpoint_files(model, dtype) if resolved.type == "cpu" else None
            if files is not None and (found := known_program(files, options)) is not None:
                program, module = found
            else:
                _, config = load_config(model, trust_remote_code)
                options = on_recorded_grid(options, config)
                if (model_class := causal_lm_class(config)) is not None:
                    with _refusals_named(model):
                        check_state(model_class, config)
                module = load_model(model, dtype, trust_remote_code, resolved, config)
        else:
            module = check_module(model, dtype, resolved)
            options = on_recorded_grid(options, module.config)
        if tokenizer is None and isinstance(model, str | os.PathLike):
            self.tokenizer = load_tokenizer(model, trust_remote_code, required=False)
        elif isinstance(tokenizer, str | os.PathLike):
            self.tokenizer = load_tokenizer(tokenizer, trust_remote_code, required=True)
        else:
            self.tokenizer = check_tokenizer(tokenizer)
        self.recommended_params = recommended_params(generation_config, module)
        self._default_params = default_params(self.recommended_params)

        if program is None:
            with _refusals_named(model), without_autocast(resolved.type):
                facts = facts_of(module)
                files = None if facts is None else files
                program = compile_program(module, options, owns_weights=loads, files=files, facts=facts)
            self._weights = WeightGuard(module, program.copied_weights, program.merged_weights)
        else:
            self._weights = WeightGuard(torch.nn.Module())
        self._module = None if loads else ModuleGuard(module)
        self.program: Program = program
        self.compile_report: CompileReport = program.report
        if memory is None and num_blocks is None and (free := free_memory(resolved)) is not None:
            longest = max_model_len or program.max_model_len
            num_blocks = default_num_blocks(program.caches, block_size, max_num_seqs, longest, memory=free)
        min_blocks = None
        if least is not None:
            per_block = bytes_per_block(program.caches, block_size)
            most = per_block * num_blocks if memory is None and num_blocks is not None else memory
            if most is not None and least > most:
                raise ValueError(
                    f"min_kv_cache_memory={min_kv_cache_memory!r} is above the {most} bytes of the whole KV cache; "
                    "lower it, or leave it out"
                )
            min_blocks = max(1, least // per_block)
        self.engine = Engine(
            self.program,
            self.tokenizer,
            block_size=block_size,
            num_blocks=num_blocks,
            kv_cache_memory=memory,
            min_num_blocks=min_blocks,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            max_model_len=max_model_len,
            eos_token_ids=eos_token_ids(module, self.tokenizer),
            enable_prefix_caching=enable_prefix_caching,
            policy=policy,
            preemption=preemption,
            swap_space=swap_bytes,
            max_queue=max_queue,
            before_step=self._check_unchanged,
        )

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        priority: int | Sequence[int] = 0,
        client: str | Sequence[str] = "",
        deadline: float | Sequence[float | None] | None = None,
        cache_salt: str | Sequence[str] = "",
        on_progress: Callable[[Progress], None] | None = None,
    ) -> list[RequestOutput]:
        """Run prompts to their end, all in one continuous batch.

        Args:
            prompts: texts, token ids (lists of int, or 1-d tensors), or dicts of these, ``{"prompt": text}`` or
                ``{"prompt_token_ids": ids}``; or a single one.
            sampling_params: for all prompts, or one per prompt; by default :meth:`get_default_sampling_params`, which
                given ones replace as a whole.
            priority: lower comes first under ``policy="priority"``; this and the next three for all prompts, or a
                list with one for each.
            client: whose prompt it is, for ``policy="fair"``.
            deadline: seconds from now at which a prompt ends with ``finish_reason="timeout"``.
            cache_salt: prompts share cached blocks only with those of the same salt.
            on_progress: called after every step.

        Returns:
            One output per prompt, in their order. A request that failed while it ran has
            ``finish_reason="error"``.

        Raises:
            TypeError, ValueError: a bad prompt, named by its index, before any prompt runs.
            QueueFull: more prompts than ``max_queue`` lets wait; none runs.
            RuntimeError: a weight was replaced or moved since the model was compiled (see
                :meth:`check_weights`).
        """
        self.check_weights()
        batch = as_batch(prompts)
        options = options_for(len(batch), priority=priority, client=client, deadline=deadline, cache_salt=cache_salt)
        return self.engine.generate(batch, params_or(self._default_params, sampling_params), on_progress, options)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        **terms: Any,
    ) -> list[RequestOutput]:
        """Answer a conversation, or several in one batch: :meth:`generate` behind the tokenizer's chat template.

        Args:
            messages: ``[{"role": "user", "content": "Hello"}, ...]``, or a list of such.
            sampling_params: as for :meth:`generate`.
            chat_template: in place of the tokenizer's.
            add_generation_prompt: end the prompt where the answer begins.
            continue_final_message: go on with the last message; with ``add_generation_prompt=False``.
            tools: functions that the model may call, as JSON schemas.
            chat_template_kwargs: further variables of the template.
            terms: ``priority``, ``client``, ``deadline``, ``cache_salt``, ``on_progress``, as for :meth:`generate`.

        Raises:
            ValueError: there is no tokenizer or chat template, or it refuses a conversation, before any runs.
            TypeError, QueueFull, RuntimeError: as :meth:`generate`.
        """
        prompts = chat_prompts(
            self.get_tokenizer(),
            messages,
            self.max_model_len,
            chat_template=chat_template,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            tools=tools,
            chat_template_kwargs=chat_template_kwargs,
        )
        return self.generate(prompts, sampling_params, **terms)

    def beam_search(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: BeamSearchParams | Sequence[BeamSearchParams],
        *,
        priority: int | Sequence[int] = 0,
        client: str | Sequence[str] = "",
        deadline: float | Sequence[float | None] | None = None,
        cache_salt: str | Sequence[str] = "",
        on_progress: Callable[[Progress], None] | None = None,
    ) -> list[BeamSearchOutput]:
        """Search for the likeliest continuations of each prompt; all prompts share the steps.

        The beams of a prompt share the blocks of the KV cache as far as they are the same. The results are those of
        HuggingFace's ``generate(num_beams=beam_width, num_return_sequences=beam_width)``.

        Args:
            prompts: texts, token ids (lists of int, or 1-d tensors), or dicts of these, ``{"prompt": text}`` or
                ``{"prompt_token_ids": ids}``; or a single one.
            params: how wide to search, how long, what to prefer; for all prompts, or one per prompt.
            priority, client, deadline, cache_salt: as in :meth:`generate`.
            on_progress: called after every step.

        Returns:
            One output per prompt, in their order, its ``sequences`` best first; ``error`` says why a search ended
            before its time.

        Raises:
            TypeError, ValueError: a bad prompt, named by its index, before any prompt runs.
            QueueFull: more prompts than ``max_queue`` lets wait; none runs.
            RuntimeError: a weight was replaced or moved since the model was compiled.
        """
        self.check_weights()
        batch = as_batch(prompts)
        options = options_for(len(batch), priority=priority, client=client, deadline=deadline, cache_salt=cache_salt)
        return self.engine.beam_search(batch, params, on_progress, options)

    def stream(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        priority: int = 0,
        client: str = "",
        deadline: float | None = None,
        cache_salt: str = "",
    ) -> Iterator[StreamPiece]:
        """Run one prompt, yielding text and tokens as they come; closing the iterator cancels the request.

        Arguments as for :meth:`generate`.

        Raises:
            QueueFull: ``max_queue`` prompts wait already.
        """
        self.check_weights()
        options = RequestOptions(priority, client, deadline, cache_salt)
        return self.engine.stream(
            prompt, self._default_params if sampling_params is None else sampling_params, options
        )

    def submit(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        priority: int = 0,
        client: str = "",
        deadline: float | None = None,
        cache_salt: str = "",
    ) -> str:
        """Queue one prompt for :meth:`step`; returns its request id. Arguments as for :meth:`generate`.

        Raises:
            QueueFull: ``max_queue`` prompts wait already.
        """
        self.check_weights()
        options = RequestOptions(priority, client, deadline, cache_salt)
        params = self._default_params if sampling_params is None else sampling_params
        return self.engine.submit(prompt, params, request_id, options)

    def get_default_sampling_params(self) -> SamplingParams:
        """The parameters of requests that bring none; ``dataclasses.replace`` makes others of them."""
        return self._default_params

    def stats(self) -> dict[str, int | float]:
        """Figures of the queue, the KV cache and the steps since the engine was made.

        Among them ``blocks_total``, ``blocks_used``, ``blocks_cached``, ``blocks_free`` (used + cached + free = total
        at every moment), ``prefix_hit_rate``, ``preemptions``, ``swaps``, ``evictions``, ``queue_length``,
        ``running``.
        """
        return self.engine.stats()

    def profile(self, *, reset: bool = False) -> Profile:
        """Where the time went since the engine was made, or since the last call with ``reset``.

        Prefill and decode apart, tokens per second, percentiles of TTFT, TPOT and ITL, seconds of each phase of a
        step; ``save_trace(path)`` writes the last steps for chrome://tracing or Perfetto.
        """
        return self.engine.profile(reset=reset)

    def reset_prefix_cache(self) -> None:
        """Forget all cached prefixes. Writing to a weight in place does it by itself; writing to ``.data`` goes
        unseen."""
        self.engine.reset_prefix_cache()

    def check_weights(self) -> None:
        """Compare the module with what was compiled; every call and every step does.

        Weights that were written to in place are used as they are now: what the prefix cache holds of the former ones
        is dropped, and requests under way are computed again from their tokens, those that they got so far included.

        Raises:
            RuntimeError: a weight was replaced, moved, or written to after it was packed; or a live module changed
                otherwise: an adapter, a hook, an attribute, a setting of its config, a submodule, a method, train().
                Make a new ``LLM``; :func:`~torch_pagoda.compile`, called again, does.
        """
        self.engine.in_turn(partial(self._check_unchanged, fully=True))

    def _check_unchanged(self, *, fully: bool = False) -> None:
        self._weights.check()
        if self._module is not None:
            self._module.check(fully=fully)
        if self._weights.written_since_last_time():
            self.engine.compute_again()

    def step(self) -> list[RequestOutput]:
        """Run one step of the engine; returns the requests that got on."""
        return self.engine.step()

    def cancel(self, request_id: str) -> bool:
        """End a request early; False when there is none of that id."""
        return self.engine.cancel(request_id)

    def shutdown(self) -> list[RequestOutput]:
        """Free the KV cache and the program, and the weights of a model that was loaded here.

        What has not ended ends as cancelled. Any later use of the engine raises ``RuntimeError``; leaving ``with
        LLM(...) as llm:`` does this, too.

        Returns:
            The last outputs of the requests of :meth:`submit`.
        """
        if "engine" not in self.__dict__:
            return []
        outputs = self.engine.shutdown()
        del self.engine, self.program, self._weights
        gc.collect()  # programs and engines hold on to themselves
        return outputs

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.shutdown()

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> NoReturn:
            if name in ("engine", "program", "_weights"):
                raise RuntimeError(f"{self!r} takes no more calls; make a new one")
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def get_tokenizer(self) -> PreTrainedTokenizerBase:
        """The tokenizer in use.

        Raises:
            ValueError: there is none.
        """
        if self.tokenizer is None:
            raise ValueError("the model has no tokenizer; pass tokenizer= to LLM")
        return self.tokenizer

    def has_unfinished(self) -> bool:
        """Whether :meth:`step` has anything to do."""
        return self.engine.has_unfinished()

    @property
    def max_model_len(self) -> int:
        """Most tokens of one sequence, prompt included."""
        return self.engine.max_model_len

    def __repr__(self) -> str:
        if "engine" not in self.__dict__:
            return f"LLM({self.compile_report.model}, shut down)"
        return f"LLM({self.compile_report.model} on {self.program.device}, {self.engine.max_model_len} tokens)"


@contextmanager
def _refusals_named(model: object) -> Iterator[None]:
    """Has every ``UnsupportedModel`` from within name the model, and say what else would run it, if anything does."""
    try:
        yield
    except UnsupportedModel as error:
        name = f"{os.fspath(model)!r}" if isinstance(model, str | os.PathLike) else type(model).__name__
        refused = f"model={name} cannot be served: {error}"
        if isinstance(error, NotFinite):
            raise NotFinite(refused) from error
        raise UnsupportedModel(
            f'{refused}; use transformers\' own generate, which torch.compile(model, backend="pagoda") can speed up'
        ) from error


def check_options(options: dict[str, Any]) -> None:
    """Check the names, and what can be checked of the values, of options meant for :class:`LLM`.

    Raises:
        ValueError: an unknown option, or a value out of range.
    """
    known = set(inspect.signature(LLM).parameters) - {"model", "tokenizer", "generation_config", "trust_remote_code"}
    for name in options:
        if name not in known:
            raise ValueError(
                f"option {name!r} (given {options[name]!r}) is not known; use one of {', '.join(sorted(known))}"
            )
    check_limits({name: options[name] for name in LIMITS if name in options})
    check_scheduling(
        options.get("policy", "fcfs"), options.get("preemption", "auto"), options.get("enable_prefix_caching", True)
    )
    check_swap_space(options.get("swap_space", 0))
    if options.get("min_kv_cache_memory") is not None:
        parse_memory(options["min_kv_cache_memory"], "min_kv_cache_memory")
    resolve_dtype(options.get("dtype", "auto"))
    resolve_device(options.get("device", "auto"))
    check_cache_size(options.get("num_blocks"), options.get("kv_cache_memory"))
    CompileOptions.from_dict({name: options[name] for name in _COMPILE_OPTIONS if name in options})


def eos_token_ids(module: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None) -> list[int]:
    """Tokens that end a sequence: the generation config's, else the model config's, else the tokenizer's.

    Negative ones, with which some configs say that nothing does, are left out: no token is one.
    """
    for owner in (getattr(module, "generation_config", None), module.config, tokenizer):
        found = getattr(owner, "eos_token_id", None)
        if found is not None:
            return [int(t) for t in (found if isinstance(found, list | tuple) else [found]) if t >= 0]
    return []
