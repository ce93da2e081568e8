from __future__ import annotations

from typing import Any

import pytest
from transformers import LlamaForCausalLM

from torch_pagoda.compiler.verify.cache_restart import restart_length
from torch_pagoda.passes import UnsupportedModel

from tiny_models import build_tiny_model


def model_that_restarts_at(*lengths: int) -> LlamaForCausalLM:
    class Restarts(LlamaForCausalLM):
        def prepare_inputs_for_generation(self, input_ids: Any, past_key_values: Any = None, **kwargs: Any) -> Any:
            return {"past_key_values": None if input_ids.shape[1] in lengths else past_key_values}

    return Restarts(build_tiny_model("llama").config)


def test_a_cache_of_the_newer_name() -> None:
    class Renamed(LlamaForCausalLM):
        def prepare_inputs_for_generation(self, input_ids: Any, cache: Any = None, **kwargs: Any) -> Any:
            return {"cache": None if input_ids.shape[1] == 17 else cache}

    assert restart_length(Renamed(build_tiny_model("llama").config), 16) == 16


def test_models_that_keep_their_keys() -> None:
    assert restart_length(build_tiny_model("llama"), 16) is None
    assert restart_length(model_that_restarts_at(), 16) is None
    assert restart_length(model_that_restarts_at(30), 16) is None


def test_a_restart_at_the_switch() -> None:
    assert restart_length(model_that_restarts_at(17), 16) == 16


@pytest.mark.parametrize("lengths", [(16,), (18,), (17, 18)])
def test_other_restarts_are_refused(lengths: tuple[int, ...]) -> None:
    with pytest.raises(UnsupportedModel, match="drops its cache at " + ", ".join(map(str, lengths))):
        restart_length(model_that_restarts_at(*lengths), 16)


def test_a_method_that_fails_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_that_restarts_at()
    monkeypatch.setattr(model, "prepare_inputs_for_generation", lambda *args, **kwargs: 1 // 0)
    with pytest.raises(UnsupportedModel, match="cannot be asked"):
        restart_length(model, 16)
