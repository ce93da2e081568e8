"""Words and numbers shared by tables of a terminal and of a page: joined entries, bytes, milliseconds."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Hashable, Iterable, Mapping
from itertools import groupby
from typing import TypeVar

Entry = TypeVar("Entry", bound=Hashable)

_NUMBER = re.compile(r"(?<=\.)\d+(?=\.|$)")


def alike(path: str) -> str:
    """``model.layers.7.mlp`` → ``model.layers.*.mlp``: the same for all layers."""
    return _NUMBER.sub("*", path)


def counted(entries: Iterable[Entry]) -> list[tuple[Entry, int]]:
    """Distinct entries in order of first appearance, with their counts."""
    return list(Counter(entries).items())


def in_runs(numbers: Iterable[int]) -> str:
    """``0-3, 5``."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ", ".join(f"{first}-{last}" if last > first else str(first) for first, last in runs)


def times(name: str, count: int) -> str:
    """``aten.linear ×2``; the name alone for one."""
    return name if count == 1 else f"{name} ×{count}"


def operator_list(operators: Iterable[str]) -> str:
    """``pagoda.rms_norm · aten.linear ×2``: in order, adjacent repetitions joined."""
    return " · ".join(times(name, len(list(same))) for name, same in groupby(operators))


def counted_names(counts: Mapping[str, int]) -> str:
    """``RmsNorm · MatMul ×4``."""
    return " · ".join(times(name, count) for name, count in counts.items())


def quantity(count: float, unit: str) -> str:
    """A number of things with a decimal prefix: ``1.6 TB/s``."""
    for prefix in ("", "k", "M", "G", "T", "P"):
        if count < 1000 or prefix == "P":
            return f"{count:.3g} {prefix}{unit}"
        count /= 1000
    raise AssertionError


def duration(seconds: float) -> str:
    """A time in a suitable unit, three digits."""
    for unit in ("s", "ms", "µs"):
        if seconds >= 1:
            return f"{seconds:.3g} {unit}"
        seconds *= 1000
    return f"{seconds:.3g} ns"


def size(count: float) -> str:
    """Bytes in KiB, MiB, ...: three digits."""
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if count < 1000 or unit == "TiB":
            return f"{count:.3g} {unit}"
        count /= 1024
    raise AssertionError


def milliseconds(seconds: float) -> str:
    """A time in ms, precise enough to distinguish fast passes."""
    return f"{1000 * seconds:.1f}" if seconds < 0.1 else f"{1000 * seconds:.0f}"
