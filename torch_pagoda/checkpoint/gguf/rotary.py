"""Rotary positions of GGUF files as transformers' ``rope_parameters``.

Files of llama 3.1 and later hold the factors that each frequency is divided by, not the four numbers that these were
made of. These are found again, and taken where they give the very factors of the file.
"""

from __future__ import annotations

import math
from typing import Any

from .metadata import Metadata

_OF_FLOAT_CHECKPOINT = "pass the float checkpoint"
_LLAMA3 = (1.0, 4.0, 8192)
"""``low_freq_factor``, ``high_freq_factor`` and ``original_max_position_embeddings`` of every llama so far."""


def default_rotary(said: Metadata, theta: float = 10000.0) -> dict[str, Any]:
    """Positions that are not scaled."""
    return {"rope_type": "default", "rope_theta": said.number("rope.freq_base", theta)}


def scaled_rotary(said: Metadata, factors: list[float] | None, dim: int, theta: float = 10000.0) -> dict[str, Any]:
    """Positions scaled as the file says.

    Args:
        said: the file's metadata.
        factors: that the frequencies are divided by; None where the file holds none.
        dim: of a head.
        theta: the base of the frequencies where the file does not say it.

    Raises:
        BadGguf: the scaling is not known, or the factors are of none that is.
    """
    plain = default_rotary(said, theta)
    kind = said.text("rope.scaling.type", "none")
    if factors is not None:
        if kind not in ("none", "llama3"):
            raise said.bad(f"it holds rope_freqs and scales positions by {kind!r}, too", _OF_FLOAT_CHECKPOINT)
        return _llama3(said, plain, factors, dim)
    if kind == "none":
        if said.get("rope.scaling.factor") not in (None, 0.0, 1.0):
            raise said.bad("it has a rope.scaling.factor and no rope.scaling.type", _OF_FLOAT_CHECKPOINT)
        return plain
    if kind not in ("linear", "yarn"):
        raise said.bad(f"it scales positions by {kind!r:.50}, which is not read", _OF_FLOAT_CHECKPOINT)
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
        raise said.bad(f"its rope_freqs are {len(factors)} up to {factor}; {dim // 2} from 1 on are needed")
    if factor == 1:
        return plain
    expected = llama3_factors(plain["rope_theta"], dim, factor, low, high, original)
    if any(abs(found - meant) > 1e-5 * meant for found, meant in zip(factors, expected, strict=True)):
        raise said.bad("its rope_freqs are not those of any llama 3 that is known", _OF_FLOAT_CHECKPOINT)
    return {
        **plain,
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": low,
        "high_freq_factor": high,
        "original_max_position_embeddings": original,
    }


def llama3_factors(theta: float, dim: int, factor: float, low: float, high: float, original: int) -> list[float]:
    """What each of ``dim / 2`` frequencies is divided by: nothing where waves are short, ``factor`` where they are
    long, and between these in between."""
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
    """Entries of phi3's config: factors for short and for long sequences.

    Args:
        said: the file's metadata.
        short, long: factors; None where the file holds none.
        rotated: of a head.
        context_length: longest sequence.
        share: of a head that is rotated.

    Raises:
        BadGguf: one of them is missing, or they are scaled otherwise than phi3 scales them.
    """
    plain = {**default_rotary(said), "partial_rotary_factor": share}
    original = said.whole("rope.scaling.original_context_length", context_length)
    stated = said.get("rope.scaling.attn_factor")
    if said.text("rope.scaling.type", "longrope") not in ("longrope", "none"):
        raise said.bad("it scales positions otherwise than by longrope, which is not read", _OF_FLOAT_CHECKPOINT)
    if short is None and long is None:
        if stated not in (None, 1.0):
            raise said.bad("it has a rope.scaling.attn_factor and no rope_factors", _OF_FLOAT_CHECKPOINT)
        return {"rope_parameters": plain, "original_max_position_embeddings": original}
    if short is None or long is None or {len(short), len(long)} != {rotated // 2}:
        raise said.bad(f"it needs {rotated // 2} rope_factors_short and as many rope_factors_long")
    scale = context_length / original
    expected = math.sqrt(1 + math.log(scale) / math.log(original)) if scale > 1 and original > 1 else 1.0
    if stated is not None and abs(said.number("rope.scaling.attn_factor") - expected) > 1e-4:
        raise said.bad(f"its rope.scaling.attn_factor is {stated}, not {expected:.6f}", _OF_FLOAT_CHECKPOINT)
    return {
        "rope_parameters": {**plain, "rope_type": "longrope", "short_factor": short, "long_factor": long},
        "original_max_position_embeddings": original,
    }
