"""What is registered with transformers, by its own functions and without them."""

from __future__ import annotations

import re
import sys

import pytest
import transformers
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, conversion_mapping, monkey_patching
from transformers.core_model_loading import WeightRenaming
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_MASKED_LM_MAPPING

from torch_pagoda.compiler.live_module.describer import CannotIdentify, describe
from torch_pagoda.compiler.warm_start import framework_state
from torch_pagoda.compiler.warm_start.framework_state import check_nothing_registered


class OwnConfig(transformers.PreTrainedConfig):
    model_type = "llama"


class OwnModel(nn.Module):
    config_class = transformers.LlamaConfig


@pytest.fixture(autouse=True)
def unregister(monkeypatch):
    """Lets a test register what it likes, with itself alone."""
    for mapping in (CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING):
        monkeypatch.setattr(mapping, "_extra_content", {})
    monkeypatch.setattr(monkey_patching, "_monkey_patch_mapping_cache", {})
    monkeypatch.setattr(conversion_mapping, "_checkpoint_conversion_mapping_cache", None)
    monkeypatch.setattr(conversion_mapping, "USER_REGISTERED_MAPPINGS", set())


def conversion(name, **options):
    renaming = WeightRenaming(["up_proj"], ["gate_proj"])
    conversion_mapping.register_checkpoint_conversion_mapping(name, [renaming], **options)


def in_another_order():
    """A conversion of transformers' own, changed where it lies."""
    conversion_mapping.get_checkpoint_conversion_mapping("mixtral")
    conversion_mapping._checkpoint_conversion_mapping_cache["mixtral"].reverse()


REGISTERED = {
    "a config": (lambda m: AutoConfig.register("llama", OwnConfig, exist_ok=True), "OwnConfig is registered"),
    "a model": (
        lambda m: AutoModelForCausalLM.register(transformers.LlamaConfig, OwnModel, exist_ok=True),
        "OwnModel is registered with",
    ),
    "a model's part": (
        lambda m: monkey_patching.register_patch_mapping({"LlamaMLP": OwnModel}),
        "OwnModel is registered in the place",
    ),
    "a conversion": (lambda m: conversion("OwnModel"), "conversion of weights"),
    "a conversion in the place of another": (
        lambda m: conversion("mixtral", overwrite=True),
        "conversion of weights",
    ),
    "a conversion that was changed": (lambda m: in_another_order(), "conversion of weights"),
    "another mapping": (
        lambda m: m.setattr(AutoModelForCausalLM, "_model_mapping", MODEL_FOR_MASKED_LM_MAPPING),
        "another mapping",
    ),
    "another loader": (
        lambda m: m.setattr(sys.modules["transformers"], "AutoModelForCausalLM", OwnModel),
        "is another class",
    ),
    "another loader in the package as it was first imported": (
        lambda m: m.setattr(framework_state.transformers, "AutoModelForCausalLM", OwnModel),
        "is another class",
    ),
}


@pytest.mark.parametrize(("register", "words"), REGISTERED.values(), ids=REGISTERED)
def test_what_is_registered_is_refused(monkeypatch, register, words):
    register(monkeypatch)
    with pytest.raises(CannotIdentify, match=words):
        check_nothing_registered()


def test_what_transformers_brings_is_not():
    check_nothing_registered()
    assert conversion_mapping.get_checkpoint_conversion_mapping("mixtral") is not None
    check_nothing_registered()


def test_which_patterns_python_keeps_does_not_count():
    """A conversion holds patterns of equal text, which are one object as long as Python's cache has it."""
    conversion_mapping.get_checkpoint_conversion_mapping("mixtral")
    first = re.compile("of a test")
    alike = describe([first, re.compile("of a test")])
    re.purge()
    assert describe([first, re.compile("of a test")]) == alike != describe([first, re.compile("of another")])
    check_nothing_registered()
