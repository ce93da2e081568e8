"""The table of a quantized checkpoint's formats, for ``pagoda plan`` and ``pagoda inspect``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..checkpoint.format_bytes import FormatBytes
    from ..rendering.fitted_table import FittedTable

_MIB = 2**20


def format_table(formats: Sequence[FormatBytes]) -> FittedTable:
    """One row per format of a run of equal layers; sizes are per layer."""
    from ..rendering.fitted_table import FittedTable  # imports torch

    table = FittedTable(box=None, padding=(0, 2, 0, 0))
    for name in ("layers", "format", "served"):
        table.add_column(name)
    for name in ("weights", "read MiB", "served MiB"):
        table.add_column(name, justify="right")
    for layers, of_layer in _runs(formats):
        for i, one in enumerate(of_layer):
            sizes = (f"{size / _MIB:.2f}" for size in (one.stored_bytes, one.served_bytes))
            table.add_row("" if i else layers, one.form, one.served, str(one.weights), *sizes)
    if len(formats) > 1:
        total = (sum(one.stored_bytes for one in formats), sum(one.served_bytes for one in formats))
        weights = sum(one.weights for one in formats)
        table.add_row("all", "", "", str(weights), *(f"{size / _MIB:.2f}" for size in total))
    return table


def _runs(formats: Sequence[FormatBytes]) -> list[tuple[str, list[FormatBytes]]]:
    """Consecutive equal layers: their indices, and the contents of one."""
    by_layer: dict[int | None, list[FormatBytes]] = {}
    for one in formats:
        by_layer.setdefault(one.layer, []).append(one)
    runs: list[tuple[int | None, int | None, list[FormatBytes]]] = []
    for layer, held in by_layer.items():
        if runs and layer is not None and runs[-1][1] is not None and _sizes(runs[-1][2]) == _sizes(held):
            runs[-1] = (runs[-1][0], layer, runs[-1][2])
        else:
            runs.append((layer, layer, held))
    return [(_span(first, last), held) for first, last, held in runs]


def _span(first: int | None, last: int | None) -> str:
    if first is None:
        return "outside"
    return str(first) if first == last else f"{first}-{last}"


def _sizes(held: Sequence[FormatBytes]) -> list[tuple[str, str, int, int, int]]:
    return [(one.form, one.served, one.weights, one.stored_bytes, one.served_bytes) for one in held]
