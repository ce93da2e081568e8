"""What users register with transformers and what then decides how a checkpoint is loaded: classes of configs and of
models, classes in the place of a model's parts, conversions of weights.
"""

from __future__ import annotations

import sys
from typing import Any

import transformers

from .fingerprint import describe
from .framework_state import Touched


def check_nothing_registered() -> None:
    """Nothing, where all is as transformers brings it; modules that are not loaded are.

    Raises:
        CannotIdentify: the conversions of weights cannot be told from transformers' own.
        Touched: something was registered, or replaced.
    """
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING, AutoModelForCausalLM

    for mapping in (CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING):
        for registered in mapping._extra_content.values():
            raise Touched(f"{_place(registered)} is registered with transformers' auto classes")
    if AutoModelForCausalLM._model_mapping is not MODEL_FOR_CAUSAL_LM_MAPPING:
        raise Touched("AutoModelForCausalLM has another mapping")
    for package in (transformers, sys.modules["transformers"]):  # which transformers makes anew as it is imported
        if vars(package).get("AutoModelForCausalLM", AutoModelForCausalLM) is not AutoModelForCausalLM:
            raise Touched("transformers.AutoModelForCausalLM is another class")
    patching = sys.modules.get("transformers.monkey_patching")
    for registered in getattr(patching, "_monkey_patch_mapping_cache", {}).values():
        raise Touched(f"{_place(registered)} is registered in the place of a class of transformers'")
    conversions: Any = sys.modules.get("transformers.conversion_mapping")
    known = getattr(conversions, "_checkpoint_conversion_mapping_cache", None)
    if known is not None and describe(known) != describe(conversions._build_checkpoint_conversion_mapping()):
        raise Touched("a conversion of weights is registered with transformers")


def _place(registered: Any) -> str:
    kind = registered if isinstance(registered, type) else type(registered)
    return f"{kind.__module__}.{kind.__qualname__}"
