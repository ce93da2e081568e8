"""Conversion of graphs by torchair on a machine without an Ascend device.

Torchair queries the device and CANN for the SoC and for the operators that CANN has, and starts the graph engine. The
answers here are those of a machine with the given SoC whose CANN has every operator.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

OFFLINE_TOOLCHAIN = "TORCH_PAGODA_NPU_TOOLCHAIN"
"""Environment variable of a process that was started with the offline Ascend toolchain: the toolchain's folder."""

# Family by the prefix of its SoCs' names → torch_npu's SocVersion of one of its members (NpuVariables.h).
# The longer of two prefixes that fit is the family.
SOC_FAMILIES = {
    "Ascend910_93": 250,  # Atlas A3
    "Ascend910_95": 260,  # the older name of Ascend950
    "Ascend910B": 223,  # Atlas A2
    "Ascend950": 260,
    "Ascend310P": 200,
    "Ascend310B": 240,
}


def is_offline() -> bool:
    """True if this process was started with the toolchain, so that it can import torch_npu and torchair."""
    return OFFLINE_TOOLCHAIN in os.environ


def soc_version(soc: str) -> int:
    """The number by which torch_npu knows a SoC's family.

    Raises:
        ValueError: the name belongs to no family that is known.
    """
    for prefix in sorted(SOC_FAMILIES, key=len, reverse=True):
        if soc.startswith(prefix):
            return SOC_FAMILIES[prefix]
    raise ValueError(f"soc={soc!r} is unknown; use a name that begins with {', '.join(sorted(SOC_FAMILIES))}")


@contextmanager
def without_device(soc: str) -> Iterator[None]:
    """Answer torchair's questions for a machine with ``soc`` for the duration of a block.

    Nothing is answered otherwise than on such a machine except that CANN has every operator of the Ascend IR.
    """
    number = soc_version(soc)
    import torch_npu
    import torch_npu.op_plugin.meta._meta_registrations as metas
    import torchair  # noqa: F401  the names below are its submodules
    from torchair._ge_concrete_graph import compat_ir, fx2ge_converter
    from torchair.core import _backend, _torchair

    def nothing(*args: Any, **kwargs: Any) -> None: ...

    patches: list[tuple[Any, str, Any]] = [
        (_backend, "_cached_device_id", 0),
        (_backend, "initialize_graph_engine", nothing),
        (fx2ge_converter, "initialize_graph_engine", nothing),
        (compat_ir, "is_cann_compat", lambda *args, **kwargs: ""),
        (torch_npu.npu, "get_device_name", lambda *args: soc),
        (metas, "get_soc_version", lambda: number),
        (_torchair, "get_registered_ir_def", lambda name: ("SUCCESS", [], [], [])),
    ]
    with ExitStack() as stack:
        for target, name, replacement in patches:
            stack.callback(setattr, target, name, getattr(target, name))
            setattr(target, name, replacement)
        yield
