"""Reads the config and the tokenizer of a checkpoint, before any weight is read."""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path
from typing import Any

from transformers import AutoConfig, AutoTokenizer, PreTrainedConfig, PreTrainedTokenizerBase

from .gguf.checkpoint import open_gguf
from .gguf.container import is_gguf
from .gguf.tokenizer import tokenizer_of
from .quantized import quantization_method
from .source import check_source, first_line, one_line

logger = logging.getLogger(__name__)


def load_config(source: str | os.PathLike[str], trust_remote_code: bool) -> tuple[str, Any]:
    """Return the folder or hub id as a string, and its config, checked by :func:`check_config`.

    Raises:
        ValueError: as for ``load_model``, for errors that show without the weights.
    """
    name = check_source(source)
    if is_gguf(name):
        return name, one_line(f"model={name!r}: could not read its config", lambda: open_gguf(name).config())
    config = one_line(
        f"model={name!r}: could not read its config",
        lambda: AutoConfig.from_pretrained(name, trust_remote_code=trust_remote_code),
    )
    check_config(config, name, trust_remote_code)
    return name, config


def causal_lm_class(config: Any) -> type | None:
    """Return transformers' class for a config's causal LM; None if the checkpoint's own code provides it."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    has_own = "AutoModelForCausalLM" in (getattr(config, "auto_map", None) or {})
    found = None if has_own else MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    return found if isinstance(found, type) else None


def load_tokenizer(
    source: str | os.PathLike[str], trust_remote_code: bool, required: bool
) -> PreTrainedTokenizerBase | None:
    """Return the tokenizer of a folder, hub id or GGUF file; None if there is none and it is not ``required``."""
    name = check_source(source, argument="tokenizer")

    def load() -> PreTrainedTokenizerBase:
        if is_gguf(name):
            return tokenizer_of(open_gguf(name), trust_remote_code)
        return AutoTokenizer.from_pretrained(
            name, config=_config_without_class(name), trust_remote_code=trust_remote_code
        )

    if required:
        return one_line(f"tokenizer={name!r}: could not load it", load)
    try:
        return load()
    except Exception as error:
        # Most checkpoints without a tokenizer simply have no such file; a tokenizer that fails to load deserves a
        # warning.
        is_there = any(Path(name).glob("tokenizer*")) or not Path(name).is_dir()
        level = logging.WARNING if is_there else logging.INFO
        logger.log(level, "no tokenizer from %s (%s): prompts must be token ids", name, first_line(error))
        return None


def _config_without_class(folder: str) -> PreTrainedConfig | None:
    """Return the config of a folder whose tokenizer names its own class, as an object of the base class; else None.

    The values in it determine the tokenizer's class. Its own class is not needed for that, and importing it takes a
    second, because it imports the model's activations.
    """
    try:
        stated = json.loads((Path(folder) / "tokenizer_config.json").read_text(encoding="utf-8"))
        if isinstance(stated.get("tokenizer_class"), str) and "auto_map" not in stated:
            values, _ = PreTrainedConfig.get_config_dict(folder, local_files_only=True)
            config = PreTrainedConfig.from_dict({**values, "_name_or_path": folder})
            assert isinstance(config, PreTrainedConfig)
            return config
    except Exception as error:
        logger.debug("the config of %s is read with its class: %s", folder, first_line(error))
    return None


def check_tokenizer(tokenizer: PreTrainedTokenizerBase | None) -> PreTrainedTokenizerBase | None:
    """Return a tokenizer object, or None, unchanged.

    Raises:
        TypeError: it is neither.
    """
    if tokenizer is None or (callable(tokenizer) and hasattr(tokenizer, "decode")):
        return tokenizer
    kind = type(tokenizer).__name__
    raise TypeError(f"tokenizer is a {kind}; pass a transformers tokenizer, a folder or a hub id")


def check_config(config: Any, name: str, trust_remote_code: bool) -> None:
    """Check by its config alone that a model is a supported causal LM, before any weight is read."""
    if getattr(config, "is_encoder_decoder", False):
        raise ValueError(
            f"model={name!r} is an encoder-decoder ({config.model_type}), not a causal LM; pass a decoder-only model"
        )
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    has_remote_code = "AutoModelForCausalLM" in (getattr(config, "auto_map", None) or {})
    if config.model_type not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES and not (has_remote_code and trust_remote_code):
        remedy = (
            "pass trust_remote_code=True to run the checkpoint's own code"
            if has_remote_code
            else "pass a checkpoint that AutoModelForCausalLM loads"
        )
        raise ValueError(f"model={name!r} has model_type {config.model_type!r}, which is not a causal LM; {remedy}")
    quantization_method(config, name)
