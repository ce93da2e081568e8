"""The time of processors that a control group leaves to a process."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import PurePosixPath


def control_group_limit(read: Callable[[str], str | None]) -> float | None:
    """Processors whose time this process's control group and those above it allow; None where none has a limit.

    Args:
        read: absolute path of a file → what it holds; None where it cannot be read.
    """
    limits = [
        quota / period
        for quota, period in (_quota(folder, read) for folder in _control_groups(read("/proc/self/cgroup")))
        if quota > 0 and period > 0
    ]
    return min(limits, default=None)


def _control_groups(lines: str | None) -> Iterator[PurePosixPath]:
    """Folders of the process's control group, of either version, and of those above it."""
    for line in (lines or "0::/").splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if controllers and "cpu" not in controllers.split(","):
            continue
        top = PurePosixPath("/sys/fs/cgroup", "cpu" if controllers else "")
        parts = [part for part in path.split("/") if part not in ("", ".", "..")]
        for count in range(len(parts), -1, -1):
            yield top.joinpath(*parts[:count])


def _quota(folder: PurePosixPath, read: Callable[[str], str | None]) -> tuple[int, int]:
    """Microseconds of processors' time in a period, and the period's; zeros or -1 where there is no limit."""
    first, _, second = (read(f"{folder}/cpu.max") or "").strip().partition(" ")
    if not second:
        first, second = (read(f"{folder}/cpu.cfs_{name}_us") or "" for name in ("quota", "period"))
    return _number(first), _number(second)


def _number(text: str) -> int:
    return int(text) if re.fullmatch(r"\s*-?\d{1,18}\s*", text) else -1
