"""The grid of calibrated weights: recorded in the model's config, used when they are quantized.

``calibrate`` writes ``config.pagoda_grid = {"bits": 4, "group_size": 64}``, which transformers stores and loads like
any unknown attribute. Groups of another size have other scales, so they would undo the calibration.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ...runtime.ops.linear.quantized_weight import LARGEST_INPUTS, PANEL
from ..options import CompileOptions

GRID_KEY = "pagoda_grid"
"""Of config.json. Not ``quantization_config``: the checkpoint's numbers are ordinary floats."""

_BITS = 4


def record_grid(config: Any, group_size: int) -> None:
    """Say in a model's config that its weights lie on a 4-bit grid with groups of this size."""
    setattr(config, GRID_KEY, {"bits": _BITS, "group_size": group_size})


def on_recorded_grid(options: CompileOptions, config: Any) -> CompileOptions:
    """The options with the group size that a model's config records, where weights are to be rounded.

    Args:
        options: of the compilation; returned as they are without ``quantization`` or without a record.
        config: the model's, of whatever type; None has no record.

    Raises:
        ValueError: the record is none that ``record_grid`` writes, or the options ask for other bits or groups.
    """
    record = getattr(config, GRID_KEY, None)
    if record is None or options.quantization is None:
        return options
    size = _group_size(record)
    off_grid = f"but the weights lie on a {_BITS}-bit grid with group_size={size} ({GRID_KEY} in config.json)"
    stale = "if they were trained since, remove the entry"
    scheme = options.weight_quantization
    assert scheme is not None
    if scheme.bits != _BITS:
        raise ValueError(
            f"quantization={options.quantization!r} quantizes to {scheme.bits} bits, {off_grid}; use 'int4' or "
            f"'int4-weight-only', or the original checkpoint; {stale}"
        )
    if options.group_size not in (None, size):
        raise ValueError(
            f"group_size={options.group_size} was given, {off_grid}; omit group_size, or run pagoda quantize "
            f"with --group-size {options.group_size}; {stale}"
        )
    return replace(options, group_size=size)


def _group_size(record: object) -> int:
    """The group size of a record that came from a file."""
    wrong = f"{GRID_KEY}={repr(record)[:200]} in the model's config is invalid"
    remedy = "; write the checkpoint again with pagoda quantize, or remove the entry"
    if not isinstance(record, dict) or set(record) != {"bits", "group_size"}:
        raise ValueError(f"{wrong}: it must have exactly bits and group_size{remedy}")
    bits, size = record["bits"], record["group_size"]
    if type(bits) is not int or bits != _BITS:
        raise ValueError(f"{wrong}: bits must be {_BITS}{remedy}")
    if type(size) is not int or not 0 <= size <= LARGEST_INPUTS or size % PANEL:
        raise ValueError(f"{wrong}: group_size must be a multiple of {PANEL} up to {LARGEST_INPUTS}, or 0{remedy}")
    return size
