"""Attention with tensors of lengths where torchair is not there: the same operators, which read the tensors."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch

import torch_pagoda.runtime.ops.npu  # noqa: F401  registers the operators
from torch_pagoda.compiler.targets.npu.ge.static_graph import LENGTHS, Attention

_LIBRARY = torch.library.Library("pagoda_tests", "FRAGMENT")


@cache
def attention_by_tensors() -> Attention:
    """What ``air_attention`` gives where torchair is."""
    return {target: _form(target, lengths) for target, lengths in LENGTHS.items()}


def _form(target: Any, lengths: tuple[str, ...]) -> Any:
    schema = str(target._schema).partition("::")[2]
    for name in lengths:
        assert f"SymInt[]? {name}=" in schema
        schema = schema.replace(f"SymInt[]? {name}=", f"Tensor? {name}=")
    _LIBRARY.define(schema)
    name = schema.partition("(")[0]

    def with_lists(read: Any) -> Any:
        def kernel(*args: Any, **kwargs: Any) -> Any:
            return target(*args, **{**kwargs, **{name: read(kwargs[name]) for name in lengths if name in kwargs}})

        return kernel

    _LIBRARY.impl(name, with_lists(lambda tensor: tensor.tolist()), "CPU")
    torch.library.register_fake(
        f"pagoda_tests::{name}", with_lists(lambda tensor: list(range(1, len(tensor) + 1))), lib=_LIBRARY
    )
    return getattr(torch.ops.pagoda_tests, name).default
