"""The list of passes: what each entry and its docstring promise."""

from __future__ import annotations

import sys

import pytest

from torch_pagoda.passes import PASSES


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


def test_names_are_those_of_the_records():
    for entry in PASSES:
        assert entry.name == sys.modules[entry.apply.__module__].NAME
