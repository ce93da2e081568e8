"""Compares kernels with state with their references, for ``kernel_check``.

A step holds a sequence that begins and is longer than a kernel's tile, one that goes on in place, and one that goes
on from a slot that it must not change; the other slots are full of NaN.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from ..registration import OPERATORS
from .causal_conv1d import causal_conv1d
from .linear_recurrence import linear_recurrence
from .selective_scan import selective_scan

aten = torch.ops.aten

_LENGTHS = (20, 1, 3)
_PADDING = 2
_SLOTS = 6
_READ, _WRITE = (-1, 2, 4), (0, 2, 5)
_TOKENS = sum(_LENGTHS) + _PADDING
# Elements of a value, or channels of a scan, and what each keeps. The first fill more than a kernel's block, and its
# vectors on any processor: such states are worked on where they lie, as models' are. The others end within both.
_STATE_SIZES = ((136, 48), (70, 20))
_TOLERANCE = {torch.float32: 2e-4, torch.bfloat16: 3e-2}

Function = Callable[..., torch.Tensor]
_OPERATORS = {"a convolution": causal_conv1d, "a recurrence": linear_recurrence, "a scan": selective_scan}


def wrong_states() -> str:
    """The mistake of a kernel that keeps state; "" if none is found."""
    for what, overload in _OPERATORS.items():
        if why := wrong_state(what, OPERATORS[overload].cpu, OPERATORS[overload].reference):
            return why
    return ""


def wrong_state(what: str, function: Function, reference: Function) -> str:
    """The mistake of a function that is to do what ``reference`` does; "" if none is found.

    Args:
        what: "a convolution", "a recurrence" or "a scan".
        function: under test.
        reference: of that operator.
    """
    for kind, given, state in _cases(what):
        found, found_state = _run(function, given, state)
        expected, expected_state = _run(reference, given, state)
        error, dtype = max(_error(found, expected), _error(found_state, expected_state)), expected.dtype
        if not error <= _TOLERANCE[dtype]:
            return f"{what}{kind} in {dtype} differs from the reference by {error:.2g} standard deviations"
    try:
        _run(function, given, state, read=(-1, 2, _SLOTS))
    except ValueError:
        return ""
    return f"a slot outside the state of {what} is not refused"


def _run(
    function: Function, given: list[Any], state: torch.Tensor, read: tuple[int, ...] = _READ
) -> tuple[torch.Tensor, torch.Tensor]:
    """The result, and the states behind it."""
    state = state.clone()
    starts = torch.tensor([0, *_LENGTHS]).cumsum(0)
    metadata = (x.to(torch.int32) for x in (starts, torch.tensor(read), torch.tensor(_WRITE)))
    return function(*given, state, *metadata), state


def _error(found: torch.Tensor, expected: torch.Tensor) -> float:
    """The largest difference, in standard deviations of what is expected; NaN must stand where it is expected."""
    if not aten.equal(found.isnan(), expected.isnan()):
        return float("inf")
    found, expected = (x.nan_to_num().float() for x in (found, expected))
    return float((found - expected).abs().max() / expected.std())


def _cases(what: str) -> Iterator[tuple[str, list[Any], torch.Tensor]]:
    """Name, arguments and states."""
    generator = torch.Generator().manual_seed(0)
    half = torch.bfloat16

    def random(*sizes: int) -> torch.Tensor:
        return torch.randn(*sizes, generator=generator)

    def states(*sizes: int) -> torch.Tensor:
        found = torch.full((_SLOTS, *sizes), torch.nan)
        for slot in set(_READ) - {-1}:
            found[slot] = random(*sizes)
        return found

    if what == "a convolution":
        given, state = [random(1, _TOKENS, 150), random(150, 4), random(150)], states(3, 150)
        yield "", [*given, "silu"], state
        yield "", [*(x.to(half) for x in given), "silu"], state.to(half)
    elif what == "a scan":
        for channels, dim in _STATE_SIZES:
            x, dt, B, C = (random(1, _TOKENS, size) for size in (channels, channels, dim, dim))
            yield "", [x, dt.abs(), -random(channels, dim).abs(), B, C, False], states(channels, dim)
    else:
        for value_dim, dim in _STATE_SIZES:
            query, key, value = (random(1, _TOKENS, *sizes) for sizes in ((2, dim), (2, dim), (4, value_dim)))
            beta, decay, by_channel = (aten.sigmoid(random(1, _TOKENS, 4, *sizes)) for sizes in ((), (), (dim,)))
            halves, state = [x.to(half) for x in (query, key, value)], states(4, value_dim, dim)
            yield " by the delta rule", [query, key, value, -decay, beta, 0.2, 1e-6], state
            yield " by the delta rule, decaying by channel", [*halves, -by_channel, beta.to(half), 0.2, 1e-6], state
            yield " without a delta", [query, key, value, -decay[0, 0], None, 0.2, None], state
