"""Code that decides by a layer's place, and code that only finds what the layer caches."""

from __future__ import annotations

from functools import wraps

import pytest
import torch
from torch import nn

from torch_pagoda.compiler.capture.layer_kinds import find_decoder_layers
from torch_pagoda.compiler.capture.layer_place import PlaceUsed, uses_of_place, without_places

from tiny_models import build_tiny_model


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


@pytest.mark.parametrize("kind", ["llama", "gpt2", "bart", "deepseek_v3", "qwen3_5_text", "mamba2", "minimax"])
def test_real_layers_only_find_what_they_cache(kind):
    assert uses_of_place(find_decoder_layers(build_tiny_model(kind))[1]) == []


def test_real_layers_that_decide_are_seen():
    uses = uses_of_place(find_decoder_layers(build_tiny_model("zamba2"))[1])
    assert "Zamba2MLP.forward: self.gate_up_proj_adapter_list[layer_idx]" in uses


USES = {
    "compares": lambda place: place > 2,
    "is equal": lambda place: place == 3,
    "is true": bool,
    "counts": range,
    "computes": lambda place: 1 + place,
    "divides": lambda place: divmod(place, 2),
    "indexes": lambda place: [0, 1, 2, 3][place],
    "is a key": lambda place: {}.get(place),
    "is in": lambda place: place in (1, 2),
    "is text": lambda place: f"{place}",
    "is written": str,
    "indexes a tensor": lambda place: torch.zeros(4).select(0, place),
}


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("given", [False, True], ids=["own", "argument"])
def test_places_cannot_be_looked_at(use, given):
    made = layer(lambda self, x, layer_idx=7, *, idx=None: USES[use](layer_idx if given else self.layer_idx) and x)
    made.inner.idx = 5
    with pytest.raises((PlaceUsed, TypeError)), without_places([made]):
        made(1, layer_idx=3)
    assert (made.layer_idx, made.inner.idx, vars(made).get("forward")) == (3, 5, None)


def test_places_among_other_arguments_cannot_be_looked_at():
    made = layer(lambda self, x, **kwargs: x if kwargs["layer_idx"] > 2 else -x)
    with pytest.raises(PlaceUsed, match="calls __gt__ of it"), without_places([made]):
        made(1, layer_idx=3)


def test_places_can_be_handed_on():
    made = layer(
        lambda self, x, layer_idx=None: x if self.inner(None, self.layer_idx) is None and layer_idx is None else -x
    )
    with without_places([made]):
        assert made(2) == 2
        assert made(2, 3) == -2
    own = made.forward = lambda x: x
    with without_places([made]):
        assert made(2) == 2
    assert vars(made)["forward"] is own


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
