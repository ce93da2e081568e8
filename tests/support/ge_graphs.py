"""Small graphs of NPU operators, converted by the real torchair."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from torch_pagoda.npu_tools.offline.conversion import convert
from torch_pagoda.npu_tools.offline.ge_graph import GeGraph


def traced(function: Callable[..., Any]) -> fx.GraphModule:
    """The operators that ``function`` calls; its arguments are the placeholders."""
    return fx.GraphModule(torch.nn.Module(), fx.Tracer().trace(function))


def ge_graph_of(function: Callable[..., Any], *inputs: Any, **options: Any) -> GeGraph:
    """What torchair makes of ``function``; options are those of ``convert``."""
    return convert(traced(function), inputs, **options)
