"""Converts rotary positions of GGUF files to transformers' ``rope_parameters``.

Files of llama 3.1 and later store the divisor of each frequency instead of the four numbers it was computed from.
These numbers are recovered, and used only if they reproduce the file's divisors exactly.
"""

from __future__ import annotations

import math
from typing import Any

from .metadata import Metadata

_OF_FLOAT_CHECKPOINT = "pass the float checkpoint"
_LLAMA3 = (1.0, 4.0, 8192)
"""``low_freq_factor``, ``high_freq_factor`` and ``original_max_position_embeddings`` of every llama so far."""


def default_rotary(said: Metadata, theta: float = 10000.0) -> dict[str, Any]:
    """Return the parameters of unscaled positions."""
    return {"rope_type": "default", "rope_theta": said.number("rope.freq_base", theta)}


def scaled_rotary(said: Metadata, factors: list[float] | None, dim: int, theta: float = 10000.0) -> dict[str, Any]:
    """Return the parameters of positions scaled as the file states.

    Args:
        said: the file's metadata.
        factors: divisors of the frequencies; None if the file has none.
        dim: length of a head.
        theta: default base of the frequencies.

    Raises:
        BadGguf: the scaling is unknown, or the factors match no known scaling.
    """
    plain = default_rotary(said, theta)
    kind = said.text("rope.scaling.type", "none")
    if factors is not None:
        if kind not in ("none", "llama3"):
            raise said.bad(f"it has rope_freqs, but also scales positions by {kind!r}", _OF_FLOAT_CHECKPOINT)
        return _llama3(said, plain, factors, dim)
    if kind == "none":
        if said.get("rope.scaling.factor") not in (None, 0.0, 1.0):
            raise said.bad("it has a rope.scaling.factor but no rope.scaling.type", _OF_FLOAT_CHECKPOINT)
        return plain
    if kind not in ("linear", "yarn"):
        raise said.bad(f"rope.scaling.type={kind!r:.50} is not supported", _OF_FLOAT_CHECKPOINT)
    scaled = {**plain, "rope_type": kind, "factor": said.number("rope.scaling.factor")}
    if kind == "yarn":
        scaled["original_max_position_embeddings"] = said.whole("rope.scaling.original_context_length")
        for key in ("beta_fast", "beta_slow"):
            if said.get(f"rope.scaling.yarn_{key}") is not None:
                scaled[key] = said.number(f"rope.scaling.yarn_{key}")
    return scaled


def _llama3(said: Metadata, plain: dict[str, Any], factors: list[float], dim: int) -> dict[str, Any]:
    low, high, original = _LLAMA3
    stated = said.get("rope.scaling.original_context_length")
    if stated is not None:
        original = said.whole("rope.scaling.original_context_length")
    factor = max(factors, default=1.0)
    if not math.isfinite(factor) or factor < 1 or len(factors) != dim // 2:
        raise said.bad(f"its rope_freqs are {len(factors)} up to {factor}; expected {dim // 2} from 1 on")
    if factor == 1:
        return plain
    expected = llama3_factors(plain["rope_theta"], dim, factor, low, high, original)
    if any(abs(found - meant) > 1e-5 * meant for found, meant in zip(factors, expected, strict=True)):
        raise said.bad("its rope_freqs match no known llama 3 model", _OF_FLOAT_CHECKPOINT)
    return {
        **plain,
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": low,
        "high_freq_factor": high,
        "original_max_position_embeddings": original,
    }


def llama3_factors(theta: float, dim: int, factor: float, low: float, high: float, original: int) -> list[float]:
    """Return the divisor of each of ``dim / 2`` frequencies: 1 for short waves, ``factor`` for long ones, and values
    in between for the others."""
    found = []
    for i in range(0, dim, 2):
        length = 2 * math.pi * theta ** (i / dim)
        if length < original / high:
            found.append(1.0)
        elif length > original / low:
            found.append(factor)
        else:
            share = (original / length - low) / (high - low)
            found.append(1 / ((1 - share) / factor + share))
    return found


def longrope(
    said: Metadata,
    short: list[float] | None,
    long: list[float] | None,
    rotated: int,
    context_length: int,
    share: float,
) -> dict[str, Any]:
    """Return entries of phi3's config: factors for short and for long sequences.

    Args:
        said: the file's metadata.
        short, long: factors; None if the file has none.
        rotated: number of rotated dims of a head.
        context_length: longest sequence.
        share: fraction of a head that is rotated.

    Raises:
        BadGguf: one of them is missing, or positions are scaled in another way than phi3's.
    """
    plain = {**default_rotary(said), "partial_rotary_factor": share}
    original = said.whole("rope.scaling.original_context_length", context_length)
    stated = said.get("rope.scaling.attn_factor")
    if said.text("rope.scaling.type", "longrope") not in ("longrope", "none"):
        raise said.bad("only longrope scaling is supported for phi3", _OF_FLOAT_CHECKPOINT)
    if short is None and long is None:
        if stated not in (None, 1.0):
            raise said.bad("it has a rope.scaling.attn_factor but no rope_factors", _OF_FLOAT_CHECKPOINT)
        return {"rope_parameters": plain, "original_max_position_embeddings": original}
    if short is None or long is None or {len(short), len(long)} != {rotated // 2}:
        raise said.bad(f"expected {rotated // 2} rope_factors_short and as many rope_factors_long")
    scale = context_length / original
    expected = math.sqrt(1 + math.log(scale) / math.log(original)) if scale > 1 and original > 1 else 1.0
    if stated is not None and abs(said.number("rope.scaling.attn_factor") - expected) > 1e-4:
        raise said.bad(f"its rope.scaling.attn_factor is {stated}; expected {expected:.6f}", _OF_FLOAT_CHECKPOINT)
    return {
        "rope_parameters": {**plain, "rope_type": "longrope", "short_factor": short, "long_factor": long},
        "original_max_position_embeddings": original,
    }
