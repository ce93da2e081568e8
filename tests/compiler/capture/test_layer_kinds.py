"""Decoder layers and the kinds of them: one account for repeated layers, skeletons and calibration."""

from __future__ import annotations

import pytest
from torch import nn

from torch_pagoda.compiler.capture.layer_kinds import find_decoder_layers, layer_kinds

from tiny_models import build_tiny_model


def like(kinds):
    """For each layer the first one of its kind."""
    return [kinds.index(kind) for kind in kinds]


@pytest.fixture
def windowed():
    return build_tiny_model(
        "gemma3_text", num_hidden_layers=4, layer_types=["sliding_attention", "full_attention"] * 2
    )


def test_layers_are_alike_whatever_their_place_and_their_weights(windowed):
    path, layers = find_decoder_layers(windowed)
    assert path == "model.layers" and len(layers) == 4
    assert like(layer_kinds(windowed, layers)) == [0, 1, 0, 1]
    layers[2].self_attn.scaling *= 2
    assert like(layer_kinds(windowed, layers)) == [0, 1, 2, 1]


def test_kinds_need_no_values(windowed):
    _, layers = find_decoder_layers(windowed.to("meta"))
    assert like(layer_kinds(windowed, layers, any_depth=True)) == [0, 1, 0, 1]


def test_layers_of_models_of_other_depths_can_be_alike():
    """The configuration that each layer holds says how many there are, as do lists of it that a layer keeps."""
    few, many = (build_tiny_model("llama", num_hidden_layers=n) for n in (2, 3))
    for model in (few, many):
        model.config.of_layers = list(range(len(model.model.layers)))
        for layer in model.model.layers:
            layer.of_layers = model.config.of_layers
    kinds = [layer_kinds(model, find_decoder_layers(model)[1], any_depth=True) for model in (few, many)]
    assert len({kind for found in kinds for kind in found}) == 1
    assert layer_kinds(few, few.model.layers)[0] != layer_kinds(many, many.model.layers)[0]


def test_the_list_that_the_configuration_counts_is_taken(windowed):
    """Not a longer one beside it, nor one inside of a layer; without a configuration the longest."""
    windowed.extra = nn.ModuleList(nn.Linear(1, 1) for _ in range(9))
    windowed.model.layers[0].experts = nn.ModuleList(nn.Linear(1, 1) for _ in range(4))
    assert find_decoder_layers(windowed)[0] == "model.layers"
    assert find_decoder_layers(nn.ModuleDict({"a": nn.ModuleList([nn.Identity()]), "b": windowed.extra}))[0] == "b"
    path, layers = find_decoder_layers(nn.Linear(1, 1))
    assert path == "" and len(layers) == 0
