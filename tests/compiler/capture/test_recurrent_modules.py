"""Modules that spell a recurrence out: compared, replaced while tracing, restored."""

from __future__ import annotations

import dataclasses
import importlib
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn
from transformers import MiniMaxConfig, MiniMaxForCausalLM
from transformers.models.minimax.modeling_minimax import MiniMaxLightningAttention

from torch_pagoda.compiler.capture import recurrent_modules as subject
from torch_pagoda.compiler.capture.recurrent_modules import (
    check_recurrent_modules,
    has_recurrent_modules,
    operators_in_place_of_loops,
)
from torch_pagoda.passes import UnsupportedModel

MODELS = Path(transformers.__file__).parent / "models"
LAYERS = 12


def attention(layer: int = 0, dtype: torch.dtype = torch.float32, cls: type[nn.Module] | None = None) -> Any:
    """One of twelve layers with eight heads of 128, and blocks of 256 tokens."""
    config = MiniMaxConfig(hidden_size=64, num_attention_heads=8, head_dim=128, num_hidden_layers=LAYERS)
    assert config.block_size == 256
    return (cls or MiniMaxLightningAttention)(config, layer).to(dtype)


def test_every_such_module_of_transformers_is_right() -> None:
    """Fails where a new version of transformers has another module of that name."""
    found = 0
    for path in sorted(MODELS.glob("*/modeling_*.py")):
        if re.search(r"^class \w*LightningAttention\(", path.read_text(encoding="utf-8"), re.MULTILINE):
            importlib.import_module(f"transformers.models.{path.parent.name}.{path.stem}")
            found += 1
    assert found == 1  # another needs a module to be made of it here
    assert has_recurrent_modules(MiniMaxForCausalLM)
    assert not has_recurrent_modules(transformers.LlamaForCausalLM)
    assert not has_recurrent_modules(transformers.MiniMaxM2ForCausalLM)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("layer", [0, LAYERS // 2, LAYERS - 1])
def test_its_own_forward_is_what_is_traced(layer: int, dtype: torch.dtype) -> None:
    module = attention(layer, dtype)
    before = {name: buffer.clone() for name, buffer in module.named_buffers()}
    check_recurrent_modules(module)
    assert all(torch.equal(before[name], buffer) for name, buffer in module.named_buffers())


def test_lengths_beyond_two_blocks_are_compared() -> None:
    assert subject._lightning_lengths(attention()) == (7, 65, 300, 513)


def scaled(name: str, factor: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Any], None]:
    """A change of one buffer by what is made of the slopes."""

    def change(module: Any) -> None:
        buffer = getattr(module, name)
        buffer.copy_(buffer * factor(module.slope_rate))

    return change


WRONG: dict[str, Callable[[Any], None]] = {
    "slopes of other heads": lambda m: m.slope_rate.copy_(m.slope_rate.flip(0)),
    "slopes of another layer": lambda m: m.slope_rate.copy_(attention(4).slope_rate),
    "slopes a little too large": scaled("slope_rate", lambda s: torch.full_like(s, 1.01)),
    "queries decayed one token less": scaled("query_decay", torch.exp),
    "keys decayed one token more": scaled("key_decay", lambda s: torch.exp(-s)),
    "no token sees itself": lambda m: m.diagonal_decay.copy_(m.diagonal_decay.tril(-1)),
    "tokens see the next": lambda m: m.diagonal_decay.copy_(m.diagonal_decay.roll(1, -1)),
    "decay of another power": lambda m: m.diagonal_decay.copy_(m.diagonal_decay**2),
    "NaN": lambda m: m.diagonal_decay.fill_(torch.nan),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_buffers_that_say_something_else_are_refused(wrong: str) -> None:
    module = attention(2)
    with torch.no_grad():
        WRONG[wrong](module)
    with pytest.raises(
        UnsupportedModel, match=r"MiniMaxLightningAttention\) does not compute what its class says: at"
    ):
        check_recurrent_modules(module)


class StateKept(MiniMaxLightningAttention):  # type: ignore[misc]
    """The state is not decayed from block to block."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        slopes, self.slope_rate = self.slope_rate, torch.zeros_like(self.slope_rate)
        try:
            return super().forward(*args, **kwargs)
        finally:
            self.slope_rate = slopes


class OneBlock(MiniMaxLightningAttention):  # type: ignore[misc]
    """Tokens do not see the block before."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self.query_decay = torch.zeros_like(self.query_decay)
        return super().forward(*args, **kwargs)


class BeyondTwoBlocks(MiniMaxLightningAttention):  # type: ignore[misc]
    """The last token is wrong where there is a third block."""

    def forward(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        out, state = super().forward(hidden_states, *args, **kwargs)
        if hidden_states.shape[1] > 512:
            out[:, -1] *= 1.01
        return out, state


@pytest.mark.parametrize(("cls", "at"), [(StateKept, 513), (OneBlock, 300), (BeyondTwoBlocks, 513)])
def test_mistakes_beyond_a_block_are_refused(cls: type[nn.Module], at: int, monkeypatch: pytest.MonkeyPatch) -> None:
    own = MiniMaxLightningAttention.forward
    named = type("WrongLightningAttention", (cls,), {})
    # Of the same parameters: what is meant is the comparison of numbers.
    monkeypatch.setattr(subject, "_check_form", lambda known, module: None)
    with pytest.raises(UnsupportedModel, match=f"says: at {at} tokens it differs by"):
        check_recurrent_modules(attention(2, cls=named))
    assert MiniMaxLightningAttention.forward is own


def test_other_parameters_and_attributes_are_refused() -> None:
    class OtherLightningAttention(nn.Module):
        def forward(self, hidden_states: torch.Tensor, rate: float) -> torch.Tensor:
            return hidden_states * rate

    with pytest.raises(UnsupportedModel, match=r"takes \(hidden_states, rate\), not \(hidden_states, position_emb"):
        check_recurrent_modules(OtherLightningAttention())
    module = attention()
    del module.slope_rate
    with pytest.raises(UnsupportedModel, match=r"MiniMaxLightningAttention.*has no slope_rate"):
        check_recurrent_modules(module)


def test_what_is_run_meanwhile_and_afterwards() -> None:
    module, own = attention(), MiniMaxLightningAttention.forward
    hidden = torch.randn(1, 20, 64)
    with torch.no_grad():
        expected, _ = module(hidden, None, None)
        with operators_in_place_of_loops(module):
            assert MiniMaxLightningAttention.forward is subject._lightning_attention
            assert torch.allclose(module(hidden)[0], expected, atol=1e-5)
            with pytest.raises(NotImplementedError, match="with attention_mask is not supported"):
                module(hidden, attention_mask=torch.ones(1, 20))
    assert MiniMaxLightningAttention.forward is own
    with pytest.raises(KeyError), operators_in_place_of_loops(module):
        raise KeyError("of the model")
    assert MiniMaxLightningAttention.forward is own


def test_a_class_that_takes_over_the_forward_of_another() -> None:
    derived = type("DerivedLightningAttention", (MiniMaxLightningAttention,), {})
    with operators_in_place_of_loops(attention(cls=derived)):
        assert derived.__dict__["forward"] is subject._lightning_attention
        assert MiniMaxLightningAttention.forward is not subject._lightning_attention
    assert "forward" not in derived.__dict__
    assert derived.forward is MiniMaxLightningAttention.forward  # type: ignore[attr-defined]


def test_a_wrong_counterpart_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is traced is held against the module, whichever of the two is wrong."""
    known = subject._BY_ENDING["LightningAttention"]

    def shifted(self: Any, hidden_states: torch.Tensor, **kwargs: Any) -> Any:
        slopes, self.slope_rate = self.slope_rate, -self.slope_rate
        out = known.traced(self, hidden_states)
        self.slope_rate = slopes
        return out

    wrong = dataclasses.replace(known, traced=shifted)
    monkeypatch.setattr(subject, "_BY_ENDING", {"LightningAttention": wrong})
    with pytest.raises(UnsupportedModel, match="at 7 tokens it differs"):
        check_recurrent_modules(attention(2))


def test_modules_without_numbers_are_not_run() -> None:
    with torch.device("meta"):
        check_recurrent_modules(attention())
