"""Checks of the host: allocator settings, and a container's processors and memory."""

from __future__ import annotations

import re
from collections.abc import Iterator

from ...runtime.control_group import control_group_limit
from .finding import Finding, ok, problem, unknown
from .system import System, plain

__all__ = ["allocator", "container", "memory", "processors"]

_ALLOCATOR = "PYTORCH_NPU_ALLOC_CONF"
_OPTIONS = frozenset(
    {
        *("max_split_size_mb", "garbage_collection_threshold", "expandable_segments", "base_addr_aligned_kb"),
        *("page_size", "segment_size_mb"),
    }
)
"""From Ascend's documentation of PYTORCH_NPU_ALLOC_CONF (gitcode.com/Ascend/pytorch, v2.7.1-26.0.0)."""

_GIB = 2**30
_LEAST_MEMORY = 8 * _GIB


def allocator(system: System) -> Iterator[Finding]:
    """Check that the settings of torch_npu's allocator are valid and compatible."""
    text = system.environment.get(_ALLOCATOR)
    if not text:
        yield ok("allocator", f"{_ALLOCATOR} is not set")
        return
    settings: dict[str, str] = {}
    for part in text[:4096].split(","):
        name, colon, value = part.strip().partition(":")
        if not colon or not value:
            yield problem("allocator", f"{plain(part, 60)!r} is not a setting", f"export {_ALLOCATOR}=name:value,...")
            return
        settings[name] = value
    for name in sorted(settings.keys() - _OPTIONS):
        yield unknown("allocator", f"{_ALLOCATOR}: {plain(name, 40)} is not in the vendor's documentation")
    grows = settings.get("expandable_segments", "False").lower() == "true"
    against = [name for name in ("max_split_size_mb", "garbage_collection_threshold") if name in settings]
    if grows and against:
        yield problem(
            "allocator",
            f"expandable_segments:True conflicts with {against[0]}",
            f"remove {against[0]} from {_ALLOCATOR}, or set expandable_segments:False",
        )
    else:
        yield ok("allocator", f"{_ALLOCATOR}={plain(text, 100)}")


def container(system: System) -> Iterator[Finding]:
    """Whether this is a container."""
    yield ok("container", "yes" if system.in_container else "none detected")


def processors(system: System) -> Iterator[Finding]:
    """Check that the control group allows at least two processors: one for the engine's loop."""
    allowed = control_group_limit(system.read)
    if allowed is None:
        yield ok("processors", "the control group sets no limit")
        return
    text = f"the control group allows {allowed:.1f}"
    if allowed < 2:
        yield problem("processors", text, "give the container at least 2: --cpus 2", stops=False)
    else:
        yield ok("processors", text)


def memory(system: System) -> Iterator[Finding]:
    """Check the host memory for reading weights, and that shared memory is not a container's default of 64 MiB."""
    found = re.search(r"^MemAvailable:\s*(\d{1,15}) kB", system.read("/proc/meminfo") or "", re.MULTILINE)
    limit = _number(system.read("/sys/fs/cgroup/memory.max"))
    if limit is None:
        limit = _number(system.read("/sys/fs/cgroup/memory/memory.limit_in_bytes"))
    sizes = [size for size in (1024 * int(found[1]) if found else None, limit) if size is not None]
    if not sizes:
        yield unknown("host memory", "neither /proc/meminfo nor the control group gives it")
        return
    text = f"{min(sizes) / _GIB:.1f} GiB" + (" by the control group" if limit == min(sizes) else " available")
    if min(sizes) < _LEAST_MEMORY:
        yield problem(
            "host memory", text, "weights are read through it; allow the size of the largest file", stops=False
        )
    else:
        yield ok("host memory", text)


def _number(text: str | None) -> int | None:
    return int(text) if text is not None and re.fullmatch(r"\s*\d{1,20}\s*", text) else None
