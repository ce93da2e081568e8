"""Operators of an NPU that do not support a model's dtype, and their replacements."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Protocol

import torch

from ....runtime.npu_target import Product

_FORMULA = "aten"


class _Route(Protocol):
    @property
    def operator(self) -> str: ...
    @property
    def chosen(self) -> tuple[str, ...]: ...
    @property
    def refused(self) -> tuple[tuple[str, str], ...]: ...


def dtype_advice(routes: Iterable[_Route], dtype: torch.dtype, product: Product) -> str:
    """The operators that were refused for the dtype that a model computes in, what is taken instead, and the dtype
    that has them, in one line; "" where there are none.

    Args:
        routes: of the lowering passes.
        dtype: of the model's parameters.
        product: family of the chip.
    """
    better = torch.float16 if product is Product.INFERENCE else torch.bfloat16
    if dtype is better:
        return ""
    refused: dict[tuple[str, str], dict[str, None]] = {}
    # What is asked for instead, where it is said, has to be the better one: it cures no other refusal.
    about = re.compile(rf"\b(is|are|of) {re.escape(str(dtype))}\b[^;:]*([;:].*\b{_name(better)}\b.*)?$")
    for route in routes:
        names = [name.partition(" ")[0] for name, reason in route.refused if about.search(reason)]
        names = [_short(name) for name in names if name not in route.chosen]
        if names:
            key = _short(route.operator), _stands_in(route.chosen)
            refused.setdefault(key, {}).update(dict.fromkeys(names))
    if not refused:
        return ""
    said = [f"{operator} is {chosen}, not {_listed(list(names))}" for (operator, chosen), names in refused.items()]
    remedy = f"dtype={_name(better)!r} would allow them"
    return f"{_name(dtype)} prevents the use of operators: {'; '.join(said)}. {remedy}"


def _stands_in(chosen: tuple[str, ...]) -> str:
    """What a route chose, in words."""
    fused = [_short(name) for name in chosen if name.startswith("npu.")]
    spelled_out = any(name == _FORMULA or name.startswith("aten.") for name in chosen)
    return _listed([*fused, *(["its reference implementation"] if spelled_out else [])]) or "left as it is"


def _listed(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}" if names else ""


def _short(name: str) -> str:
    return name.removeprefix("npu.").removeprefix("pagoda.").removeprefix("aten.")


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
