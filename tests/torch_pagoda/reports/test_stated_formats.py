"""What a config states of the formats of its weights is what they are."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from quantized_checkpoints import FORMATS, quantize_folder
from stored_matrices import gptq
from transformers import AutoConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from torch_pagoda.checkpoint.loading import load_model
from torch_pagoda.checkpoint.quantized import quantization_method
from torch_pagoda.reports.stated_formats import stated_model
from torch_pagoda.reports.stored_formats import Formats, stored_formats

from tiny_models import build_tiny_model

CASES = [
    *((name, "llama") for name, form in FORMATS.items() if not form.description and not form.of_experts),
    *((name, "qwen3_moe") for name in ("gptq-4-order", "autoround-gptq", "ct-w4a16", "ct-nvfp4", "fp8-blocks")),
    ("mxfp4-experts", "gpt_oss"),
]


def checkpoint(folder: Path, name: str, kind: str, **settings: Any) -> None:
    """A quantized checkpoint, the settings of its method changed."""
    build_tiny_model(kind, dtype=torch.bfloat16, num_hidden_layers=2).save_pretrained(folder)
    quantize_folder(folder, name)
    if settings:
        config = json.loads((folder / "config.json").read_text())
        config["quantization_config"] |= settings
        (folder / "config.json").write_text(json.dumps(config))


def stated(folder: Path) -> Formats:
    config = AutoConfig.from_pretrained(folder)
    method = quantization_method(config, str(folder))
    assert method is not None
    model = stated_model(MODEL_FOR_CAUSAL_LM_MAPPING[type(config)], config, method, str(folder), None)
    assert all(parameter.is_meta for parameter in model.parameters())
    return stored_formats(model)


def comparable(formats: Formats) -> dict[str, Any]:
    """Without the dtype of scales and which weights share an order, which configs do not state, and without the
    numbers of inputs' scales."""
    return {
        name: (re.sub("/(f32|f16|bf16)", "", form), transposed, given is None, order < 0)
        for name, (form, transposed, given, order) in formats.items()
    }


@pytest.mark.parametrize(("name", "kind"), CASES)
def test_formats_are_those_of_the_weights(name: str, kind: str, tmp_path: Path) -> None:
    checkpoint(tmp_path, name, kind)
    model = load_model(str(tmp_path), "auto", False, torch.device("cpu"))
    found = stored_formats(model)
    assert found and comparable(stated(tmp_path)) == comparable(found)


def test_symmetric_codes_of_2_bits_have_zeros(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    form = FORMATS["gptq-2"]
    symmetric = replace(form, store=lambda w: gptq(w, 2, 32, "gptq"), config={**form.config, "sym": True})
    monkeypatch.setitem(FORMATS, "gptq-2", symmetric)
    test_formats_are_those_of_the_weights("gptq-2", "llama", tmp_path)


UP = "model.layers.1.mlp.up_proj"
LEFT_OUT = {
    "ct-w4a16": {"ignore": ["lm_head", UP]},
    "ct-w8a8": {"ignore": ["lm_head", r"re:.*layers\.1\.mlp\.up_proj"]},
    "gptq-4-g32": {"dynamic": {r"+:model\.layers\.0": {"bits": 8}, r"-:model\.layers\.1\.mlp\.up": {}}},
    "autoround-gptq": {"extra_config": {UP: {"bits": 16}}},
    "awq": {"modules_to_not_convert": ["model.layers.*1.mlp.up"]},
    "fp8-blocks": {"modules_to_not_convert": ["layers.1.mlp.up_proj"]},
}


@pytest.mark.parametrize("name", LEFT_OUT)
def test_modules_that_a_config_leaves_out_are_floats(name: str, tmp_path: Path) -> None:
    checkpoint(tmp_path, name, "llama", **LEFT_OUT[name])
    found = stated(tmp_path)
    assert len(found) == 2 * 7 - 1 and f"{UP}.weight" not in found
    bits = {form.split("/")[0] for key, (form, *_) in found.items() if ".layers.0." in key}
    assert bits == {"int8" if name in ("gptq-4-g32", "ct-w8a8") else "e4m3" if name == "fp8-blocks" else "int4"}


@pytest.mark.parametrize("groups", [{}, {"group_0": {"targets": ["Linear"], "weights": None}}, {"group_0": 7}])
def test_a_config_that_quantizes_nothing_is_refused(groups: Any, tmp_path: Path) -> None:
    checkpoint(tmp_path, "ct-w4a16", "llama", config_groups=groups)
    with pytest.raises(ValueError, match="LlamaForCausalLM has no weight that its config quantizes"):
        stated(tmp_path)


def test_what_a_config_does_not_state_is_refused(tmp_path: Path) -> None:
    checkpoint(tmp_path, "slim-w8a16", "llama")
    with pytest.raises(ValueError, match=r"\(msModelSlim\), and only its weights tell their formats; download them"):
        stated(tmp_path)


def test_a_broken_pattern_is_refused(tmp_path: Path) -> None:
    checkpoint(tmp_path, "gptq-4-g32", "llama", dynamic={"(": {}})
    with pytest.raises(ValueError, match=r"invalid pattern '\(' in dynamic"):
        stated(tmp_path)
