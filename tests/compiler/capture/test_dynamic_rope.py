"""Rotary tables that depend on the length: the plain one up to where sequences end, and kinds that are named."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from torch_pagoda.checkpoint.loading import load_model
from torch_pagoda.compiler.capture.dynamic_rope import plain_rope, rope_types
from torch_pagoda.compiler.capture.trace import capture
from torch_pagoda.passes import UnsupportedModel

from tiny_models import LLAMA_VARIANTS, build_tiny_model

VARIANT = LLAMA_VARIANTS["llama/rope-dynamic"]
LIMIT = 32


def test_dynamic_scaling_is_traced_as_the_plain_table_even_after_a_long_sequence():
    model = build_tiny_model(VARIANT.model_type, **VARIANT.overrides)
    rope = model.model.rotary_emb
    ids = torch.arange(3, 3 + LIMIT)[None]
    expected = model(ids, use_cache=False).logits
    plain = rope.inv_freq.clone()
    model(torch.arange(3, 70)[None], use_cache=False)
    assert not torch.equal(rope.inv_freq, plain) and rope.max_seq_len_cached > LIMIT
    traced = capture(model).traced
    assert rope.rope_type == "dynamic" and traced.max_positions == LIMIT
    assert torch.equal(rope.inv_freq, plain) and rope.max_seq_len_cached == LIMIT
    with plain_rope(model):
        assert torch.equal(model(ids, use_cache=False).logits, expected)


def test_types_of_layers_are_told_apart():
    module = torch.nn.Module()
    module.rope_type, module.original_max_seq_len = {"full": "dynamic", "sliding": "default"}, LIMIT
    module.full_max_seq_len_cached = 2 * LIMIT
    module.register_buffer("full_inv_freq", torch.ones(2))
    module.register_buffer("full_original_inv_freq", torch.zeros(2))
    with plain_rope(module):
        assert module.rope_type == {"full": "default", "sliding": "default"}
        assert module.full_inv_freq.sum() == 0 and module.full_max_seq_len_cached == LIMIT
    assert module.rope_type["full"] == "dynamic"


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({}, []),
        ({"rope_parameters": {"rope_type": "default"}}, []),
        ({"rope_scaling": {"type": "dynamic"}}, ["dynamic"]),
        ({"rope_parameters": {"a": {"rope_type": "yarn"}, "b": {"rope_type": "default"}}}, ["yarn"]),
    ],
)
def test_kinds_of_a_config(config, expected):
    assert rope_types(SimpleNamespace(**config)) == expected


def test_a_table_that_cannot_be_traced_is_named():
    model = build_tiny_model("llama", rope_parameters={"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4})
    rope = type(model.model.rotary_emb)

    class OwnRope(rope):
        def forward(self, x, position_ids):
            return super().forward(x, position_ids * 2 if position_ids.max() > 100 else position_ids)

    model.model.rotary_emb.__class__ = OwnRope
    with pytest.raises(UnsupportedModel, match="rope_type is 'linear': if its table depends on the sequence length"):
        capture(model)


def test_a_kind_that_transformers_does_not_know_is_named(tmp_path: Path):
    build_tiny_model("llama").save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    del config["rope_parameters"]
    (tmp_path / "config.json").write_text(json.dumps(config | {"rope_scaling": {"type": "su", "factor": 2.0}}))
    with pytest.raises(
        ValueError, match=r"rope_type is 'su', but transformers only knows 'default', .*correct rope_scaling"
    ):
        load_model(tmp_path, "float32", False, torch.device("cpu"))
