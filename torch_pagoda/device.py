"""The device to serve a model on."""

from __future__ import annotations

import torch

_SHARE_OF_NPU = 0.9
"""Default share of an NPU's free memory for the KV cache; the rest is for the tensors of steps."""


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
    if device.type == "cpu":
        return None
    free, _ = torch.npu.mem_get_info(device)  # type: ignore[attr-defined]
    return int(_SHARE_OF_NPU * free)
