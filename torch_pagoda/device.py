"""Which device a model is served on."""

from __future__ import annotations

import logging

import torch

from .compiler.options import TARGETS

logger = logging.getLogger(__name__)


def npu_available() -> bool:
    """Whether torch_npu is loaded and reports at least one device.

    torch_npu registers itself with torch by entry point (autoload), so it is asked through ``torch.npu`` and
    never imported here: on a machine without CANN the import itself fails.
    """
    npu = getattr(torch, "npu", None)
    return npu is not None and bool(npu.is_available())


def resolve_device(device: str | torch.device) -> torch.device:
    """The device meant by ``"cpu"``, ``"npu[:index]"``, or ``"auto"`` (an NPU if torch_npu reports one).

    While the compiler has no npu target, ``"auto"`` stays on the CPU and says so.

    Raises:
        ValueError: an unknown device, or an NPU that is not there.
    """
    if device == "auto":
        if not npu_available():
            return torch.device("cpu")
        if "npu" in TARGETS:
            return torch.device("npu")
        logger.warning("this machine has an NPU, but the npu target is not built yet; running on the CPU")
        return torch.device("cpu")
    name = str(device)
    kind, _, index = name.partition(":")
    if kind not in ("cpu", "npu") or (index and not index.isdigit()):
        raise ValueError(f"device={name!r} is not supported; use 'auto', 'cpu' or 'npu' (Ascend)")
    if kind == "npu" and "npu" not in TARGETS:
        raise ValueError(f"device={name!r}: the npu target is not built yet; use device='cpu'")
    if kind == "npu" and not npu_available():
        raise ValueError(f"device={name!r}: torch_npu reports no NPU on this machine; use device='cpu' or 'auto'")
    return torch.device(name)
