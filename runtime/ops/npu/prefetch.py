"""`npu::` fetch of a weight into the L2 cache: npu_prefetch.

Source: op-plugin, docs `torch_npu-npu_prefetch.md`.
"""

from __future__ import annotations

from .registration import Operator


def npu_prefetch(max_size: int, offset: int) -> None:
    """Fetch a tensor into the L2 cache. There is nothing to compute, and a CPU fetches by itself.

    Args:
        input: any dtype and format; nothing of it is changed.
        dependency: what is made before the fetch begins; where operators are called one by one, None.
        max_size: bytes that are fetched, or all where there are fewer.
        offset: of the first of them.

    Raises:
        ValueError: ``max_size`` is not positive, or ``offset`` is negative.
    """
    if max_size <= 0:
        raise ValueError(f"npu_prefetch: max_size={max_size} is not positive; give the bytes to fetch")
    if offset < 0:
        raise ValueError(f"npu_prefetch: offset={offset} is negative; give 0 for the first byte")


OPERATORS = (Operator("npu_prefetch", npu_prefetch, npu_prefetch, ignores=["input", "dependency"]),)
