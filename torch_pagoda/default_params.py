"""Default sampling parameters: the recommendations of the checkpoint's generation config, as in vLLM."""

from __future__ import annotations

import logging
import os
from typing import TYPE_CHECKING, Any

from transformers import GenerationConfig

from .checkpoint.source import first_line
from .runtime.requests.sampling_params import SamplingParams

if TYPE_CHECKING:
    from transformers import PreTrainedModel

logger = logging.getLogger(__name__)

_NAMES = {
    "temperature": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "max_new_tokens": "max_tokens",
}
"""transformers' name → our name, for the values that vLLM reads from a generation config."""

_OFF = 'correct the file, or pass generation_config="vllm"'


def recommended_params(source: str | os.PathLike[str], module: PreTrainedModel) -> dict[str, Any]:
    """Sampling parameters of a generation config, by their names in ``SamplingParams``.

    An explicit ``do_sample=False`` means greedy decoding, as in transformers; if ``do_sample`` is absent, as in most
    configs, the temperature is the config's or vLLM's 1.0. (vLLM does not read ``do_sample`` at all.)

    Args:
        source: ``"auto"``: the module's own, from its checkpoint; ``"vllm"``: none; or a hub id or a folder with a
            ``generation_config.json``.
        module: the model.

    Raises:
        TypeError: ``source`` is neither a string nor a path.
        ValueError: the file is missing, or a value in it is out of range.
    """
    if not isinstance(source, str | os.PathLike):
        raise TypeError(f'generation_config={source!r} is a {type(source).__name__}; use "auto", "vllm" or a folder')
    name = os.fspath(source)
    if name == "vllm":
        return {}
    config = getattr(module, "generation_config", None) if name == "auto" else _read(name)
    found = {ours: value for theirs, ours in _NAMES.items() if (value := getattr(config, theirs, None)) is not None}
    if getattr(config, "do_sample", None) is False:
        found["temperature"] = 0.0
    try:
        if SamplingParams(**found).max_tokens == 0:
            raise ValueError("max_tokens=0 generates nothing")
    except ValueError as error:
        renamed = str(error).replace("max_tokens", "max_new_tokens")
        raise ValueError(f"generation_config={name!r} has invalid sampling parameters: {renamed}; {_OFF}") from error
    neutral = SamplingParams()
    return {name: value for name, value in found.items() if value != getattr(neutral, name)}


def default_params(recommended: dict[str, Any]) -> SamplingParams:
    """The parameters of requests without any; logs them if they differ from ``SamplingParams()``."""
    if recommended:
        logger.info(
            "default sampling parameters from the model's generation_config: %s; a request's parameters replace "
            'all of them, and LLM(generation_config="vllm") ignores them',
            ", ".join(f"{name}={value!r}" for name, value in recommended.items()),
        )
    return SamplingParams(**recommended)


def _read(name: str) -> GenerationConfig:
    try:
        return GenerationConfig.from_pretrained(os.path.expanduser(name))
    except Exception as error:
        raise ValueError(
            f"generation_config={name!r}: could not be read: {first_line(error)}; pass a folder with a "
            'generation_config.json, "auto" or "vllm"'
        ) from error
