"""The offline engine: a model, its compiled program and its paged KV cache behind vLLM's names."""

from __future__ import annotations

import gc
import logging
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from numbers import Integral
from typing import TYPE_CHECKING, Any, NoReturn, Self, Unpack

from torch import nn

from .chat import Message, chat_prompts
from .checkpoint.gguf.source import gguf_in
from .checkpoint.loading import (
    causal_lm_class,
    check_module,
    check_tokenizer,
    checkpoint_files,
    load_config,
    load_model,
    load_tokenizer,
)
from .compiler import (
    CompileReport,
    ModuleGuard,
    NotFinite,
    UnsupportedModel,
    WeightGuard,
    compile_program,
    program_of_checkpoint,
)
from .compiler.calibrate.recorded_grid import on_recorded_grid
from .compiler.capture.state_layers import check_state
from .default_params import default_params, params_or, recommended_params
from .device import free_memory, resolve_device
from .options import LLMOptions, signature_with_options, split_options
from .runtime.autocast import without_autocast
from .runtime.engine.engine import Engine
from .runtime.garbage_collection import collection_paused
from .runtime.phases import logged
from .runtime.processors import limit_threads
from .runtime.profiling.profile import Profile
from .runtime.program import Program
from .runtime.requests.beam_search_params import BeamSearchParams
from .runtime.requests.outputs import BeamSearchOutput, Progress, RequestOutput, StreamPiece
from .runtime.requests.prompt_forms import Prompt
from .runtime.requests.request_options import RequestOptions, options_for
from .runtime.requests.sampling_params import SamplingParams
from .runtime.requests.validation import as_batch

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

logger = logging.getLogger(__name__)


class LLM:
    """Serves one causal LM: prompts in, tokens out, batched token by token.

    Any number of threads may call it: they take turns, step by step, and their prompts share the batch. A call waits
    for the step that is under way, not for the calls of others. It cannot be used in a process that was forked after
    it was made (RuntimeError); make it there, or start the process with multiprocessing's ``"spawn"``.

    Args:
        model: a checkpoint folder, hub id or GGUF file, or a live transformers module in eval mode. A live module
            keeps its weights; one loaded here belongs to the engine.
        tokenizer: a tokenizer, or where to load one; by default the checkpoint's. Without one, prompts are
            token ids.
        options: the keywords of the signature. ``dtype``, ``device``, ``generation_config``, ``trust_remote_code``
            and ``gguf_file`` say how a model is loaded, see :class:`~torch_pagoda.options.LoadOptions`;
            ``block_size`` to ``max_queue`` size the KV cache and steps and schedule them, see
            :class:`~torch_pagoda.runtime.engine.engine_options.EngineOptions`; the others and ``kv_cache_dtype`` are
            the compiler's, see :class:`~torch_pagoda.compiler.CompileOptions`. ``pack_weights`` is by default true
            for a model loaded here, and packed or rounded weights take the place of its own; a live module keeps its
            own beside them.

    Attributes:
        program: the compiled model.
        engine: the engine that runs it.
        compile_report: what the compiler did, pass by pass.
        tokenizer: the tokenizer in use, or None.
        recommended_params: what the generation config says of sampling, by the names in ``SamplingParams``.

    Raises:
        TypeError, ValueError: an argument that cannot be served, in one line that says what to do.
    """

    @collection_paused()
    @logged()
    def __init__(
        self,
        model: str | os.PathLike[str] | PreTrainedModel,
        tokenizer: str | os.PathLike[str] | PreTrainedTokenizerBase | None = None,
        **options: Unpack[LLMOptions],
    ) -> None:
        loaded = frozenset(sys.modules)
        loads = isinstance(model, str | os.PathLike)
        loading, serving, compiling = split_options(options, owns_weights=loads)
        device = resolve_device(loading.device)
        limit_threads()
        if loading.gguf_file is not None:
            if not isinstance(model, str | os.PathLike):
                raise ValueError(f"gguf_file={loading.gguf_file!r} names a file; pass the folder that it lies in")
            model = gguf_in(model, loading.gguf_file)

        module, program, files = None, None, None
        if isinstance(model, str | os.PathLike):
            files = checkpoint_files(model, loading.dtype) if device.type == "cpu" else None
            with without_autocast(device.type):
                found = None if files is None else program_of_checkpoint(files, compiling)
            if found is not None:
                program, module = found
            else:
                _, config = load_config(model, loading.trust_remote_code)
                compiling = on_recorded_grid(compiling, config)
                if (model_class := causal_lm_class(config)) is not None:
                    with _refusals_named(model):
                        check_state(model_class, config)
                module = load_model(model, loading.dtype, loading.trust_remote_code, device, config)
        else:
            module = check_module(model, loading.dtype, device)
            compiling = on_recorded_grid(compiling, module.config)
        if tokenizer is None and isinstance(model, str | os.PathLike):
            self.tokenizer = load_tokenizer(model, loading.trust_remote_code, required=False)
        elif isinstance(tokenizer, str | os.PathLike):
            self.tokenizer = load_tokenizer(tokenizer, loading.trust_remote_code, required=True)
        else:
            self.tokenizer = check_tokenizer(tokenizer)
        self.recommended_params = recommended_params(loading.generation_config, module)
        self._default_params = default_params(self.recommended_params)

        if program is None:
            with _refusals_named(model), without_autocast(device.type):
                program = compile_program(module, compiling, owns_weights=loads, files=files, loaded=loaded)
            self._weights = WeightGuard(module, program.copied_weights, program.merged_weights)
        else:  # nobody but the program holds the tensors
            self._weights = WeightGuard(nn.Module())
        self._module = None if loads else ModuleGuard(module)
        self.program: Program = program
        self.compile_report: CompileReport = program.report
        self.engine = Engine(
            self.program,
            self.tokenizer,
            eos_token_ids=eos_token_ids(module, self.tokenizer),
            free_memory=free_memory(device),
            before_step=self._check_unchanged,
            **vars(serving),
        )

    __signature__ = signature_with_options(__init__)

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
            TypeError, ValueError: the prompt or a parameter is refused, at once and not with the first piece; and
                ``best_of`` above ``n``, where the best are known at the end only.
            QueueFull: ``max_queue`` prompts wait already.
            RuntimeError: a weight was replaced or moved since the model was compiled.
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
            TypeError, ValueError: the prompt or a parameter is refused, or ``request_id`` is in use or no plain text;
                other requests are not affected.
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
        ``running``; of models with state also ``state_slots_total``, ``_used``, ``_cached``, ``_free``.
        """
        return self.engine.stats()

    def profile(self, *, reset: bool = False) -> Profile:
        """Times of the engine's steps and requests since it was made, or since the last call with ``reset``.

        Prefill and decode apart, tokens per second, percentiles of TTFT, TPOT and ITL, seconds of each phase of a
        step; ``save_trace(path)`` writes the last steps for chrome://tracing or Perfetto.
        """
        return self.engine.profile(reset=reset)

    def reset_prefix_cache(self) -> None:
        """Forget all cached prefixes. Writing to a weight in place does it by itself; writing to ``.data`` goes
        unseen."""
        self.engine.reset_prefix_cache()

    def defragment(self) -> int:
        """Move used and cached blocks of the KV cache to its front, with the next step; returns how many move.

        Free blocks lie together then, so that a request of negative ``priority``, which is given neighbouring blocks
        where it can be, finds them without moving others. No output changes, and nothing has to be defragmented to be
        served: any free block will do. Nothing moves while sequences are being swapped.
        """
        return self.engine.defragment()

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
        """Run one step of the engine; returns the requests that got a token or ended, with everything up to now."""
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
        """True if :meth:`step` has anything to do."""
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


def eos_token_ids(module: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None) -> list[int]:
    """Tokens that end a sequence: the generation config's, else the model config's, and the tokenizer's, as in vLLM.

    Negative ones, with which some configs say that nothing does, are left out: no token is one.

    Raises:
        ValueError: one is no integer.
    """
    configs = (getattr(module, "generation_config", None), module.config)
    configured = next((config for config in configs if getattr(config, "eos_token_id", None) is not None), None)
    ends: set[int] = set()
    for owner in (configured, tokenizer):
        found = getattr(owner, "eos_token_id", None)
        if found is not None:
            for token in found if isinstance(found, list | tuple) else [found]:
                if isinstance(token, bool) or not isinstance(token, Integral):
                    raise ValueError(
                        f"eos_token_id={found!r} of {type(owner).__name__} holds {token!r}; use token ids, such as 2"
                    )
                ends.add(int(token))
    return sorted(token for token in ends if token >= 0)
