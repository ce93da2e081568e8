"""CPU kernels for torchair's own operators, which have none.

With them what torchair converted runs on a machine without a device (``run_eagerly``).
"""

from __future__ import annotations

import importlib
from functools import cache
from typing import Any

import torch

_LENGTHS = {
    "npu_fused_infer_attention_score": ("actual_seq_lengths", "actual_seq_lengths_kv"),
    "npu_fused_infer_attention_score_v2": ("actual_seq_qlen", "actual_seq_kvlen"),
}


@cache
def register_air_kernels() -> torch.library.Library:
    """Give attention with tensors of lengths the kernel of its form with lists. Needs torchair."""
    library = torch.library.Library("air", "IMPL")
    for name, lengths in _LENGTHS.items():
        importlib.import_module(f"torchair.ops._{name}")  # defines the operator
        library.impl(name, _kernel(getattr(torch.ops.npu, name), lengths), "CPU", allow_override=True)
    return library


def _kernel(operator: Any, lengths: tuple[str, ...]) -> Any:
    def kernel(*args: Any, **kwargs: Any) -> Any:
        for name in lengths:
            if kwargs.get(name) is not None:
                kwargs[name] = kwargs[name].tolist()
        return operator(*args, **kwargs)

    return kernel
