"""The device to serve a model on."""

from __future__ import annotations

import torch

from .runtime.memory import free_device_memory


def npu_available() -> bool:
    """True if torch_npu is loaded and reports at least one device.

    torch_npu registers itself with torch by entry point (autoload), so this checks ``torch.npu`` and never imports
    torch_npu: on a machine without CANN the import itself fails.
    """
    npu = getattr(torch, "npu", None)
    return npu is not None and bool(npu.is_available())


def resolve_device(device: str | torch.device) -> torch.device:
    """Resolve ``"cpu"``, ``"npu[:index]"``, or ``"auto"`` (an NPU if torch_npu reports one).

    Raises:
        ValueError: an unknown device, or an unavailable NPU.
    """
    if device == "auto":
        return torch.device("npu" if npu_available() else "cpu")
    name = str(device)
    kind, _, index = name.partition(":")
    if kind not in ("cpu", "npu") or (index and not index.isdigit()):
        raise ValueError(f"device={name!r} is not supported; use 'auto', 'cpu' or 'npu' (Ascend)")
    if kind == "npu" and not npu_available():
        raise ValueError(
            f"device={name!r}: torch_npu reports no NPU on this machine; use device='cpu' or 'auto', with "
            "target='npu' to simulate one on the CPU"
        )
    return torch.device(name)


def free_memory(device: torch.device) -> int | None:
    """Default bytes of ``device`` for the KV cache; None for a CPU, which decides later."""
    return None if device.type == "cpu" else free_device_memory(device)
