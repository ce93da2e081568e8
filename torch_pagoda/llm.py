"""The offline engine: a model, its compiled program and its paged KV cache, with vLLM's API."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn, Self, Unpack

from .block_fingerprint import block_fingerprint
from .chat import Message, chat_prompts
from .compiled_model import compiled_model
from .compiler import CompileReport
from .default_params import default_params
from .device import free_memory, resolve_device
from .draft_program import draft_program, with_hidden_rows
from .options import LLMOptions, signature_with_options, split_options
from .runtime.engine.engine import Engine
from .runtime.garbage_collection import collection_paused
from .runtime.phases import import_seconds, logged, phase, timed
from .runtime.processors import limit_threads
from .runtime.program import Program
from .runtime.requests.outputs import RequestOutput
from .runtime.requests.sampling_params import SamplingParams

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

_LET_GO = ("_core", "engine", "limits", "program", "_weights")
"""Attributes that an engine loses when it is shut down."""


class LLM(Engine):
    """Serves one causal LM: prompts in, tokens out, batched token by token.

    Thread-safe: calls alternate step by step, and their prompts share the batch. A call waits for the running step,
    not for other calls. A forked process cannot use it (RuntimeError); create it there, or start the process with
    multiprocessing's ``"spawn"``.

    Args:
        model: a checkpoint folder, hub id or GGUF file, or a live transformers module in eval mode. A live module
            keeps its weights; one loaded here belongs to the engine.
        tokenizer: a tokenizer, or a folder or hub id of one; by default the checkpoint's. Without one, prompts are
            token ids.
        options: the keyword arguments of the signature. ``dtype``, ``device``, ``generation_config``,
            ``trust_remote_code`` and ``gguf_file`` control loading, see
            :class:`~torch_pagoda.load_options.LoadOptions`;
            ``block_size`` to ``max_queue`` size the KV cache and schedule the steps, see
            :class:`~torch_pagoda.runtime.engine.engine_options.EngineOptions`; the others and ``kv_cache_dtype`` are
            the compiler's, see :class:`~torch_pagoda.compiler.CompileOptions`. ``pack_weights`` defaults to true for
            a model loaded here, and packed or quantized weights replace its own; a live module keeps its own as well.

    Attributes:
        program: the compiled model.
        engine: the engine that runs it: this object.
        compile_report: what the compiler did, pass by pass.
        tokenizer: the tokenizer in use, or None.
        recommended_params: sampling parameters of the generation config, by their names in ``SamplingParams``.

    Raises:
        TypeError, ValueError: an unsupported argument, in one line with the remedy.
    """

    tokenizer: PreTrainedTokenizerBase | None

    @collection_paused()
    @logged()
    def __init__(
        self,
        model: str | os.PathLike[str] | PreTrainedModel,
        tokenizer: str | os.PathLike[str] | PreTrainedTokenizerBase | None = None,
        **options: Unpack[LLMOptions],
    ) -> None:
        known_modules = frozenset(sys.modules)
        loading, serving, compiling = split_options(options, owns_weights=isinstance(model, str | os.PathLike))
        device = resolve_device(loading.device)
        limit_threads()
        seconds = {"imports": import_seconds()}
        with timed(seconds), phase("load"):
            config = serving.speculative_config
            compiling = with_hidden_rows(config, model, compiling)
            fingerprint = None if serving.kv_store is None else block_fingerprint(model, loading, compiling)
            compiled = compiled_model(model, tokenizer, loading, compiling, device, known_modules)
            drafts = draft_program(config, model, compiled, loading, compiling, device, known_modules)
        compiled.program.report.seconds = seconds
        self._weights, self._module = compiled.weights, compiled.guard
        self.program: Program = compiled.program
        self.compile_report: CompileReport = compiled.program.report
        self.recommended_params = compiled.recommended_params
        with timed(seconds), phase("cache"):
            super().__init__(
                compiled.program,
                compiled.tokenizer,
                eos_token_ids=compiled.eos_token_ids,
                default_params=default_params(compiled.recommended_params),
                free_memory=free_memory(device),
                before_step=self._check_unchanged,
                draft_program=drafts,
                fingerprint=fingerprint,
                **vars(serving),
            )
        self.engine: Engine = self

    __signature__ = signature_with_options(__init__)

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
            chat_template: replaces the tokenizer's.
            add_generation_prompt: end the prompt where the answer begins.
            continue_final_message: continue the last message; with ``add_generation_prompt=False``.
            tools: functions that the model may call, as JSON schemas.
            chat_template_kwargs: additional variables of the template.
            terms: ``priority``, ``client``, ``deadline``, ``cache_salt``, ``on_progress``, as for :meth:`generate`.

        Raises:
            ValueError: there is no tokenizer or chat template, or it rejects a conversation, before any runs.
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

    def get_tokenizer(self) -> PreTrainedTokenizerBase:
        """The tokenizer in use.

        Raises:
            ValueError: the model has none.
        """
        if self.tokenizer is None:
            raise ValueError("the model has no tokenizer; pass tokenizer= to LLM")
        return self.tokenizer

    def check_weights(self) -> None:
        """Check the module against the compiled one; every call and every step does.

        If weights were written to in place, the engine uses them as they are now: it drops prefix-cache entries of
        the former ones, and recomputes running requests from their tokens, generated ones included.

        Raises:
            RuntimeError: a weight was replaced, moved, or written to after it was packed; or a live module changed
            otherwise: an adapter, a hook, an attribute, a setting of its config, a submodule, a method, train().
                Create a new ``LLM``; :func:`~torch_pagoda.compile`, called again, does.
        """
        self.in_turn(partial(self._check_unchanged, fully=True))

    def _check_usable(self) -> None:
        self.check_weights()

    def _check_unchanged(self, *, fully: bool = False) -> None:
        self._weights.check()
        if self._module is not None:
            self._module.check(fully=fully)
        if self._weights.written_since_last_time():
            self.compute_again()

    def shutdown(self) -> list[RequestOutput]:
        """Free the KV cache and the program, and the weights of a model that was loaded here.

        Cancels unfinished requests. Any later use of the engine raises ``RuntimeError``; leaving ``with LLM(...) as
        llm:`` does this, too.

        Returns:
            The last outputs of the requests of :meth:`submit`.
        """
        if "_core" not in self.__dict__:
            return []
        outputs = super().shutdown()
        for name in _LET_GO:
            del self.__dict__[name]
        gc.collect()  # programs and engines hold on to themselves
        return outputs

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.shutdown()

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> NoReturn:
            if name in _LET_GO:
                raise RuntimeError(f"{self!r} is closed; create a new one")
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def __repr__(self) -> str:
        if "_core" not in self.__dict__:
            return f"LLM({self.compile_report.model}, shut down)"
        return f"LLM({self.compile_report.model} on {self.program.device}, {self.max_model_len} tokens)"
