"""Compatible versions of torch, torch_npu, Python, CANN and the driver, with sources.

Versions without a source are missing here, and are reported as unknown.
"""

from __future__ import annotations

__all__ = ["CANN_OF_TORCH_NPU", "DRIVERS_OF_CANN", "PYTHONS", "SOURCES", "release"]

SOURCES = {
    "npu": "COMPATIBILITY.md of Ascend/pytorch at 9e73e708",
    "fork": "COMPATIBILITY.md of TorchNPU at gitcode.com (wzyly/pytorch, master: releases 26.0.0 to 26.1.1)",
    "base": "no table lists the build, and COMPATIBILITY.md of Ascend/pytorch at 9e73e708 its release",
    "wheel": "the description of torch-npu 2.14.0 on PyPI: CANN 9.1.0",
    "cann": "CANN 9.1.1 release notes, compatibility with the Ascend HDK (hiascend.com, CANNCommunityEdition 910)",
    "cann85": "CANN 8.5.0 release notes (hiascend.com, canncommercial 850, releasenote_0000)",
}

# torch_npu → (CANN that it is released for, key of the source); "9.1" stands for every 9.1.x.
CANN_OF_TORCH_NPU: dict[str, tuple[str, str]] = {
    "2.10.0.post4": ("9.1.0", "npu"),
    "2.11.0": ("9.1.0", "npu"),
    "2.11.0.post2": ("9.1", "fork"),
    "2.11.0.post3": ("9.1", "base"),
    "2.12.0": ("9.1.0", "npu"),
    "2.12.0.post2": ("9.1", "fork"),
    "2.12.0.post3": ("9.1", "base"),
    "2.14.0": ("9.1.0", "wheel"),
}

# CANN → (releases of the driver, the Ascend HDK, that it runs with, key of the source).
DRIVERS_OF_CANN: dict[str, tuple[tuple[str, ...], str]] = {
    "8.5": (("25.0", "25.2", "25.3", "25.5"), "cann85"),
    "9.0": (("25.0", "25.2", "25.3", "25.5", "25.7", "26.0", "26.1"), "cann"),
    "9.1": (("25.2", "25.3", "25.5", "25.7", "26.0", "26.1"), "cann"),
}

PYTHONS = ((3, 11), (3, 12), (3, 13), (3, 14))
"""The versions of TorchNPU's recommended 3.10 to 3.14 that torch-pagoda supports."""


def release(version: str) -> str:
    """Major and minor version: "9.1.0" and "9.1.RC1" are "9.1"."""
    return ".".join(version.split(".")[:2])
