"""The option ``speculative_config``, by vLLM's keys; importable without torch."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..shown import shown

LENGTHS = (0, 1, 3, 7)
"""Drafts of a request in one step: few sizes, so that recorded steps and captured graphs repeat."""

METHODS = ("suffix", "ngram", "draft_model", "mtp")
_KEYS: dict[str, tuple[str, ...]] = {
    "mtp": ("model",),
    "draft_model": ("model",),
    "ngram": ("prompt_lookup_max", "prompt_lookup_min"),
    "suffix": (
        *("suffix_decoding_max_tree_depth", "suffix_decoding_max_spec_factor", "suffix_decoding_min_token_prob"),
        "suffix_decoding_max_cached_bytes",
    ),
}
"""Method → its keys, besides ``method`` and ``num_speculative_tokens``."""


@dataclass(frozen=True)
class SpeculativeConfig:
    """Settings of a drafter: one that looks its drafts up in earlier tokens, a model, or a head of the model.

    Attributes:
        method: ``"suffix"``, ``"ngram"``, ``"draft_model"`` or ``"mtp"``.
        num_speculative_tokens: most drafts of a request in one step; text that a grammar forces is not counted.
        model: checkpoint folder or hub id of the draft model; or of the head, where it is not in the model's own.
        least_match: tokens at the end of a sequence that must occur earlier.
        longest_match: tokens that are compared.
        spec_factor: drafts per matching token; None: as many as may be.
        least_probability: of a draft, by how often it followed the match.
        shared_bytes: memory for the outputs that later requests look up; 0: each request looks up its own tokens.
    """

    method: str
    num_speculative_tokens: int = LENGTHS[-1]
    model: str = ""
    least_match: int = 3
    longest_match: int = 24
    spec_factor: float | None = 1.0
    least_probability: float = 0.1
    shared_bytes: int = 64 << 20


def planned_drafts(given: Mapping[str, Any] | None) -> int:
    """Return the drafts of each request for which a program plans sizes of steps; 0 without the option."""
    if given is None:
        return 0
    most = read_speculative_config(given).num_speculative_tokens
    return next((length for length in LENGTHS if length >= most), LENGTHS[-1])


def drafts_with_head(given: Mapping[str, Any] | None) -> bool:
    """Return True if ``speculative_config`` asks for a head of the model.

    Raises:
        ValueError: see ``read_speculative_config``.
    """
    return given is not None and read_speculative_config(given).method == "mtp"


def read_speculative_config(given: Mapping[str, Any]) -> SpeculativeConfig:
    """Return the settings that ``speculative_config`` stands for.

    Raises:
        ValueError: a method or key is unknown, or a value is out of range; the message names it.
    """
    if not isinstance(given, Mapping):
        raise ValueError(f'speculative_config={shown(given)} is not a dictionary; use {{"method": "suffix"}}')
    method = given.get("method")
    remedy = "use 'suffix', 'ngram', 'draft_model' or 'mtp'"
    if not isinstance(method, str) or method not in METHODS:
        raise ValueError(f"speculative_config: method {shown(method)} is not known; {remedy}")
    known = ("method", "num_speculative_tokens", *_KEYS[method])
    for key in given:
        if key not in known:
            raise ValueError(f"speculative_config: key {shown(key)} is not one of {method!r}; use {', '.join(known)}")
    most = _whole(given, "num_speculative_tokens", LENGTHS[-1])
    if method in ("mtp", "draft_model"):
        model = given.get("model")
        if method == "mtp" and model is None:
            return SpeculativeConfig(method, most)
        if not isinstance(model, str | os.PathLike) or not os.fspath(model):
            kind = "head" if method == "mtp" else "draft model"
            raise ValueError(
                f"speculative_config: model={shown(model)} names no {kind}; use a checkpoint folder or hub id"
            )
        return SpeculativeConfig(method, most, os.fspath(model))
    if method == "ngram":
        least, longest = given.get("prompt_lookup_min"), given.get("prompt_lookup_max")
        # vLLM's defaults: 5 for both; of one alone, the other is the same.
        least = _whole(given, "prompt_lookup_min", 5 if longest is None else longest)
        longest = _whole(given, "prompt_lookup_max", least)
        if least > longest:
            raise ValueError(
                f"speculative_config: prompt_lookup_min={least} is above prompt_lookup_max={longest}; lower it"
            )
        return SpeculativeConfig(method, most, "", least, longest, None, 0.0, 0)
    default = SpeculativeConfig("suffix")
    longest = _whole(given, "suffix_decoding_max_tree_depth", default.longest_match)
    return SpeculativeConfig(
        method,
        most,
        "",
        min(default.least_match, longest),
        longest,
        _number(given, "suffix_decoding_max_spec_factor", default.spec_factor or 1.0),
        _number(given, "suffix_decoding_min_token_prob", default.least_probability, most=1.0),
        _whole(given, "suffix_decoding_max_cached_bytes", default.shared_bytes, least=0),
    )


def _whole(given: Mapping[str, Any], key: str, default: int, *, least: int = 1) -> int:
    value = given.get(key, default)
    if type(value) is not int or value < least:
        raise ValueError(f"speculative_config: {key}={shown(value)} is not a whole number from {least}; use one")
    return value


def _number(given: Mapping[str, Any], key: str, default: float, *, most: float | None = None) -> float:
    value = given.get(key, default)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= (most or float("inf")):
        limit = "from 0" if most is None else f"from 0 to {most:g}"
        raise ValueError(f"speculative_config: {key}={shown(value)} is not a number {limit}; use one")
    return float(value)
