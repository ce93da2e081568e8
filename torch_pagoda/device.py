"""The device that a model is served on."""

from __future__ import annotations

import torch

_SHARE_OF_NPU = 0.9
"""Of an NPU's free memory, what the KV cache takes by default; the rest is for a step's own tensors."""


def npu_available() -> bool:
    """True if torch_npu is loaded and reports at least one device.

    torch_npu registers itself with torch by entry point (autoload), so it is asked through ``torch.npu`` and
    never imported here: on a machine without CANN the import itself fails.
    """
    npu = getattr(torch, "npu", None)
    return npu is not None and bool(npu.is_available())


def resolve_device(device: str | torch.device) -> torch.device:
    """The device meant by ``"cpu"``, ``"npu[:index]"``, or ``"auto"`` (an NPU if torch_npu reports one).

    Raises:
        ValueError: an unknown device, or an NPU that is not there.
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
    """Bytes of ``device`` that a KV cache may take by default; None for a CPU, where that is decided later."""
    if device.type == "cpu":
        return None
    free, _ = torch.npu.mem_get_info(device)  # type: ignore[attr-defined]
    return int(_SHARE_OF_NPU * free)
