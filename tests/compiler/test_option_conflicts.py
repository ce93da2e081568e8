"""The table of options that do not go together: each of its rows names options that there are, and is found."""

from __future__ import annotations

import ast
import re
from dataclasses import replace
from typing import Any

import pytest

from torch_pagoda.compiler.option_conflicts import CONFLICTS, check_conflicts
from torch_pagoda.compiler.options import CompileOptions

ASKS: dict[str, Any] = {
    **dict.fromkeys(("static_decode", "batch_invariant", "pack_weights"), True),
    **{"group_size": 64, "input_bits": 16, "kv_cache_dtype": "int8", "quantization": "int8-weight-only"},
    **{"tensor_parallel_size": 2, "pipeline_parallel_size": 2},
    **{"npu_options": {"ge_config.oo_level": "O1"}, "schedule": {"streams": True}},
    **{f"schedule['{name}']": True for name in ("streams", "prefetch", "super_kernels")},
}
ROWS = [(option, other) for option, others in CONFLICTS.items() for other in others]


def given(options: dict[str, Any], fact: str) -> None:
    """Set what ``name=value`` says, or ``name['entry']=value``."""
    name, entry, value = re.fullmatch(r"(\w+)(?:\['(.+)'\])?=(.+)", fact).groups()  # type: ignore[union-attr]
    plain = ast.literal_eval(value)
    options[name] = {**options.get(name, {}), entry: plain} if entry else plain


@pytest.mark.parametrize(("option", "other"), ROWS)
def test_each_row_is_found(option: str, other: str) -> None:
    shown = option if "=" in option else f"{option}={ASKS[option]!r}"
    options: dict[str, Any] = {}
    for fact in (shown, *other.split(" with ")):
        given(options, fact)
    backend = options.pop("backend", "")
    for name, value in options.items():
        if name != "group_size":  # which goes with no default
            CompileOptions.from_dict({name: value})
    complete = {**vars(CompileOptions()), **options}
    with pytest.raises(ValueError) as refused:
        check_conflicts(complete, backend)
    assert f"{shown} cannot be used with {other}: {CONFLICTS[option][other]}" == str(refused.value)


def test_what_asks_for_nothing_goes_with_everything() -> None:
    nothing = CompileOptions(
        schedule={"streams": False}, static_decode=False, quantization="int8", group_size=0, kv_cache_dtype="auto"
    )
    for target, codegen in (("cpu", "inductor"), ("npu", "ge"), ("npu", "none"), ("npu", "aclgraph")):
        replace(nothing, target=target, codegen=codegen)
    with pytest.raises(ValueError, match="group_size=0 cannot be used with quantization=None"):
        CompileOptions(group_size=0)
    with pytest.raises(ValueError, match="cannot be used with codegen='ge' with static_decode=False"):
        CompileOptions(schedule={"streams": True}, static_decode=0, codegen="ge")  # type: ignore[arg-type]
    check_conflicts({**vars(CompileOptions()), "codegen": "inductor"}, backend="pagoda")
