"""Layers of transformers' models use their index only to address what they cache; code that does more is seen."""

from __future__ import annotations

from functools import wraps

import pytest
from layer_index_uses import uses_of_place
from torch import nn

from torch_pagoda.compiler.capture.layer_kinds import find_decoder_layers

from tiny_models import build_tiny_model, causal_lm_types


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer_idx = 3
        self.windows = [1, 2]
        self.inner = Inner()

    def looks_up(self, layer_idx):
        return self.windows[layer_idx]

    def called_otherwise(self, number):
        return number > 2

    @property
    def is_late(self):
        return self.layer_idx > 2

    def not_called(self):
        return self.layer_idx > 2


class Inner(nn.Module):
    def forward(self, x, layer_idx):
        return x if x is None or layer_idx is None else x.update(layer_idx)


class Deciding(nn.Module):
    def forward(self, x, layer_idx):
        return x if layer_idx else -x


def decorated(function):
    @wraps(function)
    def run(*args):
        return function(*args)

    return run


def enclosed(function):
    return lambda *args: function(*args)


def helper(x, module):
    return x[: module.layer_idx + 1]


def layer(forward, **attributes):
    made = type("Made", (Layer,), {"forward": forward})()
    for name, item in attributes.items():
        setattr(made, name, item)
    return made


def compares(self, x):
    return x if self.layer_idx > 2 else -x


def compares_behind_a_length(self, x):
    return -x if x.shape[1] > 4096 and self.layer_idx > 2 else x


def computes(self, x):
    return x if self.layer_idx % 2 else -x


def keeps(self, x):
    where = self.layer_idx
    return x if where else -x


def is_true(self, x):
    return x if self.layer_idx else -x


def chooses_its_own(self, x):
    return x * self.windows[self.layer_idx]


def chooses_its_own_by_another_name(self, x):
    windows = x if self.training else self.windows
    return windows[self.layer_idx]


def chooses_by_a_text(self, x):
    return x[f"layer {self.layer_idx}"]


def calls_a_method(self, x):
    return self.looks_up(self.layer_idx)


def calls_a_method_with_a_number(self, x):
    return self.called_otherwise(self.layer_idx)


def calls_with_a_keyword(self, x):
    return x.roll(shifts=self.layer_idx)


def calls_a_function(self, x):
    return range(self.layer_idx)


def calls_a_function_of_the_file(self, x):
    return helper(x, self)


def calls_a_module(self, x):
    return self.inner(x, self.layer_idx)


def asks_a_property(self, x):
    return x if self.is_late else -x


class Margin:
    def decides(self, x):
        x = (
            x
            or """
no indentation here
"""
        )
        return x if self.layer_idx > 2 else -x


def inside(self, x):
    return [y for y in x if (lambda: self.layer_idx > y)()]


def updates(self, x, cache):
    if cache is not None:
        other = cache.cross if cache.is_updated.get(self.layer_idx) else cache.own
        x, _ = other.update(x, x, self.layer_idx)
        cache.is_updated[self.layer_idx] = True
        x += other.layers[self.layer_idx].keys
        x = self.inner(x, self.layer_idx)
        x = other.update(x, layer_idx=self.layer_idx)
    if self.layer_idx is None:
        raise ValueError(f"layer {self.layer_idx} has no place")
    return x


@pytest.mark.parametrize(
    "forward",
    [
        compares,
        compares_behind_a_length,
        computes,
        keeps,
        is_true,
        chooses_its_own,
        chooses_its_own_by_another_name,
        chooses_by_a_text,
        calls_a_method,
        calls_a_method_with_a_number,
        calls_with_a_keyword,
        calls_a_function,
        calls_a_function_of_the_file,
        asks_a_property,
        inside,
        decorated(compares),
        enclosed(compares),
    ],
)
def test_decisions_are_seen(forward):
    assert uses_of_place([layer(forward)])


def test_decision_is_seen_where_it_is():
    assert uses_of_place([layer(compares)]) == ["compares: self.layer_idx > 2"]
    assert uses_of_place([layer(calls_a_method)]) == ["Layer.looks_up: self.windows[layer_idx]"]
    assert uses_of_place([layer(calls_a_function_of_the_file)]) == ["helper: module.layer_idx + 1"]
    assert uses_of_place([layer(calls_a_module, inner=Deciding())]) == ["Deciding.forward: x if layer_idx else -x"]


def test_forward_of_a_single_layer_is_read():
    made = layer(updates)
    made.forward = compares.__get__(layer(compares))
    assert uses_of_place([layer(updates), made]) == ["compares: self.layer_idx > 2"]


def test_code_without_a_source_is_not_trusted():
    exec(compile("def forward(self, x): return x if self.layer_idx else -x", "<nowhere>", "exec"), named := {})
    assert uses_of_place([layer(named["forward"])]) == ["forward: no source"]


def test_caches_are_found_by_a_place():
    assert uses_of_place([layer(updates)]) == []
    assert uses_of_place([layer(calls_a_module)]) == []


DECIDE = {
    "hrm_text": "HrmTextAttention.forward: self.layer_idx + cycle_offset",  # of its cache: layers are run in cycles
    "moshi": "MoshiLinear.forward: self.linear(x, layer_idx)",  # of a codebook, in the decoder of audio
    "reformer": "ReformerAttention.forward: len(past_buckets_states.states_cache) <= self.layer_id",  # refused
    "rwkv": "RwkvBlock.forward: self.layer_id == 0",  # refused
    "zamba2": "Zamba2MLP.forward: self.gate_up_proj_adapter_list[layer_idx]",  # of layers that are not copies
}
"""Architecture → a use that is more, and why the copies of its layers are right."""


NOT_BUILT = {"gemma3n", "gemma4_assistant"}  # the one needs pillow, the other has no configuration so small


@pytest.mark.parametrize("kind", sorted(set(causal_lm_types()) - NOT_BUILT))
def test_real_layers_only_address_what_they_cache(kind):
    uses = uses_of_place(find_decoder_layers(build_tiny_model(kind))[1])
    assert DECIDE[kind] in uses if kind in DECIDE else uses == []


def test_code_that_cannot_be_followed_is_not_trusted():
    class Broken(Layer):
        @property
        def kernel(self):
            raise NotImplementedError

        def forward(self, x):
            return self.kernel(x, self.layer_idx)

    assert uses_of_place([Broken()]) == ["NotImplementedError: code that cannot be read"]


def test_texts_may_begin_at_the_margin():
    assert uses_of_place([layer(Margin.decides)]) == ["Margin.decides: self.layer_idx > 2"]
