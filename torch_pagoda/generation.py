"""The model's own ``generate`` on the paged engine: :func:`compile` and :func:`restore`.

transformers does everything except decoding: ``GenerationMixin.generate`` merges the generation configs, validates,
infers masks, expands rows and builds the processors and stopping criteria, then calls a decoding method. Ours is
passed in through its ``custom_generate`` argument. Calls that the engine does not support run transformers' own
decoding, with one warning per reason.
"""

from __future__ import annotations

import inspect
import logging
import sys
import threading
import warnings
from collections.abc import Callable
from typing import Any, TypeVar, Unpack, cast

import torch
from transformers import GenerationMixin, PreTrainedModel
from transformers.generation.configuration_utils import GenerationConfig, GenerationMode
from transformers.generation.stopping_criteria import StoppingCriteriaList, StopStringCriteria
from transformers.generation.utils import GenerateDecoderOnlyOutput

from .checkpoint.loading import check_dtype, is_causal_lm
from .decoding import Unsupported, decode_rows, plan_decoding
from .llm import LLM
from .options import ModelOptions, split_options

logger = logging.getLogger(__name__)

Model = TypeVar("Model")


def compile(model: Model, **options: Unpack[ModelOptions]) -> Model:
    """Run ``model.generate`` on the paged engine: the same tokens in float32, within rounding in half precision.

    In bfloat16 and float16, logits are as close to float32's as transformers' own, so of two nearly tied candidates
    the other one may be chosen. ``quantization="int8"`` changes the model: its weights and inputs are rounded, their
    products summed exactly.

    Returns the same object. The first call that needs the engine builds it. A repeated call with the same options, or
    with none, changes nothing; other options, or weights replaced or moved since (``generate`` then raises), build
    the engine anew. :func:`restore` undoes it.

    Args:
        model: a transformers causal LM. It keeps its weights.
        **options: the engine's and the compiler's options, as in :class:`~torch_pagoda.LLM`.

    Raises:
        TypeError: not a transformers model.
        ValueError: not a causal LM, quantized, an unknown option, or an invalid value.
    """
    if not isinstance(model, PreTrainedModel):
        raise TypeError(f"model is a {type(model).__name__}; pass a transformers causal LM")
    if not is_causal_lm(model):
        raise ValueError(
            f"model is a {type(model).__name__}, which is not a causal LM; load it with AutoModelForCausalLM"
        )
    if getattr(model, "hf_quantizer", None) is not None:
        raise ValueError(f"model is a quantized {type(model).__name__}, which is not supported; load it unquantized")
    split_options(options, owns_weights=False, known=ModelOptions)
    check_dtype(model, options.get("dtype", "auto"))
    current = paged_generation(model)
    if current is None:
        PagedGeneration(model, dict(options), original=model.__dict__.get("generate")).install()
    elif (options and options != current.options) or current.is_stale:
        PagedGeneration(model, dict(options) or current.options, original=current.original).install()
    return cast(Model, model)


def restore(model: Model) -> Model:
    """Restore the ``generate`` that ``model`` had before :func:`compile`, and drop the engine."""
    current = paged_generation(model)
    if current is not None:
        current.uninstall()
    return model


def paged_generation(model: object) -> PagedGeneration | None:
    """The :class:`PagedGeneration` behind ``model.generate``, or None if the model is not compiled."""
    owner = getattr(getattr(model, "__dict__", {}).get("generate"), "__self__", None)
    return owner if isinstance(owner, PagedGeneration) else None


class PagedGeneration:
    """The engine behind a compiled model's ``generate``.

    Attributes:
        model: the module.
        options: the options of :func:`compile`.
        original: the instance's own ``generate`` before; None if it was its class's.
    """

    def __init__(
        self, model: PreTrainedModel, options: dict[str, Any], original: Callable[..., Any] | None = None
    ) -> None:
        self.model: Any = model  # what transformers mixes into models has no types of its own
        self.options = dict(options)
        self.original = original
        self._llm: LLM | None = None
        self._warned: set[str] = set()
        self._lock = threading.RLock()

    def __getstate__(self) -> dict[str, Any]:
        # A copied or pickled model builds its own engine, on its own weights.
        return {"model": self.model, "options": self.options, "original": self.original}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(**state)  # type: ignore[misc]

    def install(self) -> None:
        """Set this object's ``generate`` on the model instance."""
        self.model.__dict__["generate"] = self.generate

    def uninstall(self) -> None:
        """Restore the original ``generate``."""
        self._llm = None
        if self.original is None:
            self.model.__dict__.pop("generate", None)
        else:
            self.model.__dict__["generate"] = self.original

    @property
    def llm(self) -> LLM:
        """The engine, built on first use."""
        with self._lock:
            if self._llm is None:
                # Compiling draws random numbers; a call that samples must not depend on whether it was the
                # first.
                with torch.random.fork_rng(devices=[]):
                    self._llm = LLM(self.model, generation_config="vllm", **self.options)
            return self._llm

    @property
    def is_stale(self) -> bool:
        """Whether an engine was built and the model's weights have changed since."""
        if self._llm is None:
            return False
        try:
            self._llm.check_weights()
        except RuntimeError:
            return True
        return False

    def generate(self, *args: Any, **kwargs: Any) -> GenerateDecoderOnlyOutput | torch.LongTensor:
        """``GenerationMixin.generate``, decoding on the paged engine. Same arguments, same result.

        ``use_cache`` and ``prefill_chunk_size`` have no effect: keys and values are always in the paged cache, and
        the engine chunks prompts by its own token budget. ``past_key_values`` of a returned dict is None.

        Raises:
            ValueError: an ``attention_mask`` with holes or right padding; and errors of transformers.
            RuntimeError: a row failed; or a weight was replaced or moved since the engine was built.
        """
        signature = inspect.signature(type(self.model).generate)
        call = signature.bind(self.model, *args, **kwargs).arguments
        call.pop("self", None)
        extra = dict(call.pop("kwargs", {}))
        reason = self._call_reason(call, extra)
        if reason is None:
            reason, extra = self._config_reason(call, extra)
        if reason is not None:
            self._warn(reason)
            return self._transformers_generate(*args, **kwargs)
        return self._paged_generate(call, extra)

    def _transformers_generate(self, *args: Any, **kwargs: Any) -> Any:
        if self.original is not None:
            return self.original(*args, **kwargs)
        return type(self.model).generate(self.model, *args, **kwargs)

    def _paged_generate(self, call: dict[str, Any], extra: dict[str, Any]) -> Any:
        streamer = call.get("streamer")
        mask_given = extra.get("attention_mask") is not None

        def decode(
            model: Any,
            input_ids: torch.LongTensor,
            logits_processor: Any,
            stopping_criteria: StoppingCriteriaList,
            generation_config: GenerationConfig,
            synced_gpus: bool = False,
            **model_kwargs: Any,
        ) -> GenerateDecoderOnlyOutput | torch.LongTensor:
            try:
                plan = plan_decoding(
                    input_ids,
                    logits_processor,
                    stopping_criteria,
                    generation_config,
                    model_kwargs,
                    mask_given,
                )
                plan.check_fits(self.llm.max_model_len)
            except Unsupported as error:
                self._warn(str(error))
                return type(model)._sample(
                    model,
                    input_ids,
                    logits_processor=logits_processor,
                    stopping_criteria=stopping_criteria,
                    generation_config=generation_config,
                    synced_gpus=synced_gpus,
                    streamer=streamer,
                    **model_kwargs,
                )
            with self._lock:
                self.llm.check_weights()
                sequences = decode_rows(self.llm, plan, streamer)
            if generation_config.return_dict_in_generate:
                return GenerateDecoderOnlyOutput(sequences=sequences)
            return sequences

        return GenerationMixin.generate(self.model, **{**call, "custom_generate": decode}, **extra)

    def _call_reason(self, call: dict[str, Any], extra: dict[str, Any]) -> str | None:
        """The reason why the arguments alone require transformers' decoding, or None."""
        if self.model.training:
            return (
                "the module is in train() mode, but the engine is for inference: call model.eval(), "
                "and use torch.inference_mode()"
            )
        if self.original is not None or type(self.model).generate is not GenerationMixin.generate:
            return f"{type(self.model).__name__} overrides generate"
        for name in (
            "logits_processor",
            "prefix_allowed_tokens_fn",
            "synced_gpus",
            "assistant_model",
            "negative_prompt_ids",
            "negative_prompt_attention_mask",
            "custom_generate",
        ):
            value = call.get(name)
            if value is not None and not (isinstance(value, list | bool) and not value):
                return f"the engine does not support {name}"
        for name in ("inputs_embeds", "past_key_values", "cache"):
            if extra.get(name) is not None:
                return f"the engine does not support {name}"
        return None

    def _config_reason(self, call: dict[str, Any], extra: dict[str, Any]) -> tuple[str | None, dict[str, Any]]:
        """The reason why the merged config requires transformers' decoding, or None; and the kwargs to use.

        Processors are not checked here: :func:`plan_decoding` gets the list that transformers builds.
        """
        given = {k: v for k, v in extra.items() if k not in ("tokenizer", "assistant_tokenizer", "trust_remote_code")}
        config, _ = self.model._prepare_generation_config(call.get("generation_config"), **given)
        mode = config.get_generation_mode(None)
        if mode not in (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE):
            return f"the engine does not support {mode.value.replace('_', ' ')}", extra
        if config.token_healing:
            return "the engine does not support token_healing", extra
        if config.cache_implementation not in (None, "dynamic"):
            return f"cache_implementation={config.cache_implementation!r} selects a transformers cache", extra
        if config.return_dict_in_generate:
            for name in ("output_scores", "output_logits", "output_attentions", "output_hidden_states"):
                if getattr(config, name, None):
                    return f"the engine does not return {name.removeprefix('output_')} ({name}=True)", extra
        tokenizer = extra.get("tokenizer")
        if config.stop_strings is not None and tokenizer is not None:
            # `generate` hands the tokenizer on to its own decoding methods only, so the criterion is made
            # here.
            criterion = StopStringCriteria(stop_strings=config.stop_strings, tokenizer=tokenizer)
            call["stopping_criteria"] = StoppingCriteriaList([*(call.get("stopping_criteria") or []), criterion])
            extra = {**extra, "stop_strings": None}
        return None, extra

    def _warn(self, reason: str) -> None:
        if reason not in self._warned:
            self._warned.add(reason)
            message = f"model.generate falls back to transformers' decoding, not paged: {reason}"
            warnings.warn(message, UserWarning, stacklevel=_level_of_caller())


def _level_of_caller() -> int:
    """``stacklevel`` that makes a warning point at the first frame outside pagoda, transformers and torch."""
    level, frame = 1, sys._getframe(1)
    inside = (__name__, "transformers", "torch")
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith(inside):
        level, frame = level + 1, frame.f_back
    return level
