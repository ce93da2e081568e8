"""The list of passes: what each entry and its docstring promise."""

from __future__ import annotations

import functools
import sys

import pytest
import torch
from aten_graphs import aten_of_module

from torch_pagoda.passes import PASSES
from torch_pagoda.passes.graph.npu_target import NpuTarget


def docstring(entry):
    return sys.modules[entry.apply.__module__].__doc__


@pytest.mark.parametrize("entry", dict.fromkeys(PASSES), ids=lambda p: p.name)
def test_docstrings_say_what_becomes_of_what_and_the_level(entry):
    text = docstring(entry)
    assert "Matches" in text and "Becomes:" in text and "Why" in text
    assert f"Level {entry.level}" in text, "the docstring names another level than the list"


def test_stages_follow_one_another():
    stages = [entry.stage for entry in PASSES]
    assert stages == sorted(stages, key=["dynamo", "aten", "weights"].index)
    # Lowering is required too: what it leaves has no kernels.
    assert all(entry.stage == "dynamo" or entry.target for entry in PASSES if entry.required)


@functools.cache
def nothing_to_do():
    return aten_of_module(torch.nn.Identity(), torch.zeros(1, 4, 8))


@pytest.mark.parametrize("entry", dict.fromkeys(PASSES), ids=lambda p: p.name)
def test_a_record_has_the_name_of_its_pass(entry):
    graph = nothing_to_do().copy()
    graph.npu = NpuTarget() if entry.target == "npu" else None
    assert entry.apply(graph).name == entry.name
