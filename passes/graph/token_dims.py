"""Dims of a tensor that count the tokens of a flat step."""

from __future__ import annotations

from typing import Any

import torch

from .fx_nodes import shape
from .traced import TracedGraph


def token_dims(traced: TracedGraph, node: Any) -> list[int]:
    """The dims of ``node`` whose size depends on the number of tokens."""
    return [i for i, size in enumerate(shape(node)) if reads_tokens(traced, size)]


def reads_tokens(traced: TracedGraph, size: Any) -> bool:
    """True for a size that varies with the number of tokens."""
    return isinstance(size, torch.SymInt) and traced.token_symbol in size.node.expr.free_symbols
