"""The list of passes: what each entry and its docstring promise."""

from __future__ import annotations

import functools
import sys

import pytest
import torch
from aten_graphs import aten_of_module

from torch_pagoda.compiler.options import CompileOptions, selected_passes
from torch_pagoda.compiler.pass_runs import run_passes
from torch_pagoda.compiler.user_passes import register_pass, unregister_pass, with_user_passes
from torch_pagoda.passes import PASSES, PassRecord
from torch_pagoda.runtime.npu_target import NpuTarget


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
    # So is what makes a rank's part.
    assert all(entry.stage == "dynamo" or entry.target or entry.option for entry in PASSES if entry.required)


def test_entries_of_one_name_are_told_apart_in_reports():
    assert len({(entry.name, entry.place) for entry in PASSES}) == len(PASSES)
    for entry in PASSES:
        assert bool(entry.place) == ([p.name for p in PASSES].count(entry.name) > 1)
    (record, *others) = run_passes(nothing_to_do().copy(), [p for p in PASSES if p.place])
    assert record.title == f"share_subexpressions ({record.place})"
    assert len({record.title, *(other.title for other in others)}) == 5
    skipping = CompileOptions(target="npu", passes={"skip": ["share_subexpressions", "fold_constants"]})
    assert not [p for p in selected_passes(skipping) if p.place], "one name still takes all"


def test_a_pass_of_the_users_stands_before_the_first_of_several_entries():
    register_pass("mine", lambda graph: PassRecord("mine"), before="share_subexpressions")
    try:
        names = [p.name for p in with_user_passes([p for p in PASSES if p.stage == "aten"])]
    finally:
        unregister_pass("mine")
    assert names.count("mine") == 1
    assert names.index("mine") == names.index("share_subexpressions") - 1


@functools.cache
def nothing_to_do():
    return aten_of_module(torch.nn.Identity(), torch.zeros(1, 4, 8))


@pytest.mark.parametrize("entry", dict.fromkeys(PASSES), ids=lambda p: p.name)
def test_a_record_has_the_name_of_its_pass(entry):
    graph = nothing_to_do().copy()
    graph.npu = NpuTarget() if entry.target == "npu" else None
    assert entry.apply(graph).name == entry.name
