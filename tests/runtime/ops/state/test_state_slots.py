"""States in slots, of every operator that keeps one: what is read, what is written, and that no cut shows."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from torch_pagoda.runtime.ops.native import load_kernels
from torch_pagoda.runtime.ops.registration import OPERATORS
from torch_pagoda.runtime.ops.state.causal_conv1d import causal_conv1d
from torch_pagoda.runtime.ops.state.linear_recurrence import linear_recurrence
from torch_pagoda.runtime.ops.state.selective_scan import selective_scan

SLOTS = 9


@dataclass(frozen=True)
class Stateful:
    """An operator in its two forms, which a kernel or a reference runs, and arguments for some number of tokens.

    ``by_token`` are the places of the arguments that have a row for each.
    """

    overload: torch._ops.OpOverload
    step: Callable[..., torch.Tensor]
    sequence: Callable[..., torch.Tensor]
    arguments: Callable[[int], list[Any]]
    by_token: tuple[int, ...]
    state: tuple[int, ...]

    def part(self, given: list[Any], begin: int, end: int) -> list[Any]:
        return [x[:, begin:end] if i in self.by_token else x for i, x in enumerate(given)]

    def joined(self, parts: list[list[Any]]) -> list[Any]:
        """The arguments of a step that holds several sequences' tokens."""
        every = zip(*parts, strict=True)
        return [torch.cat(xs, 1) if i in self.by_token else xs[0] for i, xs in enumerate(every)]

    def new_state(self) -> torch.Tensor:
        return torch.full((SLOTS, *self.state), torch.nan)


def convolution(tokens: int) -> list[Any]:
    fixed = torch.Generator().manual_seed(1)
    weight, bias = torch.randn(200, 4, generator=fixed), torch.randn(200, generator=fixed)
    return [torch.randn(1, tokens, 200), weight, bias, "silu"]


def delta(tokens: int, key_heads: int = 2, dim: int = 32, value_dim: int = 72) -> list[Any]:
    query, key = torch.randn(2, 1, tokens, key_heads, dim)
    value, decay = torch.randn(1, tokens, 4, value_dim), -torch.rand(1, tokens, 4)
    return [query, key, value, decay, torch.rand(1, tokens, 4), dim**-0.5, 1e-6]


def delta_by_channel(tokens: int) -> list[Any]:
    given = delta(tokens, 4, 20, 6)  # nothing is a multiple of anything
    given[3] = -torch.rand(1, tokens, 4, 20)
    return given


def plain(tokens: int) -> list[Any]:
    given = delta(tokens, 1, 16, 8)
    given[3:] = [torch.tensor([-0.5, -0.1, -0.01, 0.0]), None, 1.0, None]
    return given


def scan(tokens: int, dim: int = 16) -> list[Any]:
    fixed = torch.Generator().manual_seed(1)
    x, dt = torch.randn(1, tokens, 70), torch.rand(1, tokens, 70)
    return [x, dt, -torch.rand(70, dim, generator=fixed) * 4, *torch.randn(2, 1, tokens, dim), True]


CONVOLUTION = (convolution, (0,), (3, 200))
RECURRENCES = {
    "delta rule": (delta, (0, 1, 2, 3, 4), (4, 72, 32)),
    "delta rule by channel": (delta_by_channel, (0, 1, 2, 3, 4), (4, 6, 20)),
    "lightning": (plain, (0, 1, 2), (4, 8, 16)),
}
SCANS = {
    "scan": (scan, (0, 1, 3, 4), (70, 16)),
    "scan of odd size": (lambda tokens: scan(tokens, 5), (0, 1, 3, 4), (70, 5)),
}
CASES = {
    "convolution": (causal_conv1d, *CONVOLUTION),
    **{name: (linear_recurrence, *case) for name, case in RECURRENCES.items()},
    **{name: (selective_scan, *case) for name, case in SCANS.items()},
}


def by(function: str) -> dict[str, Stateful]:
    own = {name: getattr(OPERATORS[overload], function) for name, (overload, *_) in CASES.items()}
    return {name: Stateful(case[0], own[name], own[name], *case[1:]) for name, case in CASES.items()}


KERNELS, REFERENCES = by("cpu"), by("reference")
BOTH = [
    *(pytest.param(operator, id=f"{name}, kernel") for name, operator in KERNELS.items()),
    *(pytest.param(operator, id=f"{name}, reference") for name, operator in REFERENCES.items()),
]


def ids(*numbers: int) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.int32)


def run(operator: Stateful, given: list[Any], state: torch.Tensor, starts, read, write) -> torch.Tensor:
    return operator.step(*given, state, ids(*starts), ids(*read), ids(*write))


def same(operator: Stateful, found: torch.Tensor, expected: torch.Tensor) -> None:
    """Bit for bit from a kernel; torch multiplies differently shaped matrices in different orders."""
    if operator in KERNELS.values() and load_kernels() is not None:
        assert torch.equal(found, expected)
    else:
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("operator", BOTH)
def test_steps_give_what_one_run_gives(operator):
    """Sequences of different lengths, cut at random, ragged together in steps, each with padding behind."""
    lengths = [1, 5, 24, 11, 0]
    sequences = [operator.arguments(length) for length in lengths]
    expected = [operator.sequence(*given) for given in sequences]
    found: list[list[torch.Tensor]] = [[] for _ in lengths]
    state, slot = operator.new_state(), {}
    done = [0] * len(lengths)
    while done != lengths:
        cuts = [min(random.choice([0, 1, 2, 3, 17]), length - at) for length, at in zip(lengths, done, strict=True)]
        parts = [operator.part(s, at, at + n) for s, at, n in zip(sequences, done, cuts, strict=True)]
        parts.append(operator.arguments(2))  # padding
        starts = [0, *torch.tensor(cuts).cumsum(0).tolist()]
        read = [slot.get(i, -1) for i in range(len(lengths))]
        free = [s for s in range(SLOTS) if s not in slot.values()]
        write = []
        for i, n in enumerate(cuts):
            in_place = n == 0 or random.random() < 0.5
            write.append(slot[i] if in_place and i in slot else free.pop(random.randrange(len(free))))
            if n:
                slot[i] = write[i]
        result = run(operator, operator.joined(parts), state, starts, read, write)
        assert (result[:, starts[-1] :] == 0).all() and result.shape[1] == starts[-1] + 2
        for i, (begin, end) in enumerate(itertools.pairwise(starts)):
            found[i].append(result[:, begin:end])
        done = [at + n for at, n in zip(done, cuts, strict=True)]
    for i in range(len(lengths)):
        same(operator, torch.cat(found[i], 1), expected[i])


@pytest.mark.parametrize("operator", BOTH)
def test_a_slot_that_is_read_stays_and_may_be_shared(operator):
    prefix, first, second = (operator.arguments(n) for n in (6, 3, 4))
    state = operator.new_state()
    run(operator, prefix, state, (0, 6), (-1,), (4,))
    before = state.clone()
    result = run(operator, operator.joined([first, second]), state, (0, 3, 7), (4, 4), (7, -1))
    changed = [s for s in range(SLOTS) if not torch.equal(state[s].nan_to_num(9e9), before[s].nan_to_num(9e9))]
    assert changed == [7] and state[7].isfinite().all()
    for given, found in ((first, result[:, :3]), (second, result[:, 3:])):
        same(operator, found, operator.sequence(*operator.joined([prefix, given]))[:, 6:])


@pytest.mark.parametrize("operator", BOTH)
def test_a_sequence_without_tokens_does_nothing(operator):
    given, state = operator.arguments(3), operator.new_state()
    result = run(operator, given, state, (0, 0, 3, 3), (2, -1, 5), (2, 1, -1))
    assert state[1].isfinite().all() and state[[0, *range(2, SLOTS)]].isnan().all()
    same(operator, result, operator.sequence(*given))
    state = operator.new_state()
    assert (run(operator, given, state, (0, 0), (3,), (3,)) == 0).all() and state.isnan().all()
    assert (run(operator, given, state, (0,), (), ()) == 0).all() and state.isnan().all()
    assert run(operator, operator.part(given, 0, 0), state, (0, 0), (3,), (3,)).numel() == 0


@pytest.mark.parametrize("operator", BOTH)
def test_a_state_without_slots(operator):
    """It has no address, and is no sign of a single sequence."""
    sequences = [operator.arguments(n) for n in (3, 2)]
    given, state = operator.joined([*sequences, operator.arguments(1)]), torch.empty(0, *operator.state)
    result = run(operator, given, state, (0, 3, 5), (-1, -1), (-1, -1))
    assert (result[:, 5:] == 0).all()
    for found, alone in zip((result[:, :3], result[:, 3:5]), sequences, strict=True):
        same(operator, found, operator.sequence(*alone))
    with pytest.raises(ValueError, match=r"state_read\[1\] is 0; give -1, or one of the state's 0 slots"):
        run(operator, given, state, (0, 3, 5), (-1, 0), (-1, -1))
    with pytest.raises(ValueError, match=r"query_start_loc\[2\] is 7; .* not exceed the 6 tokens"):
        run(operator, given, state, (0, 3, 7), (-1, -1), (-1, -1))


@pytest.mark.parametrize("operator", BOTH)
def test_slots_of_a_larger_tensor(operator):
    """A layer's states may lie in memory that holds other things, too."""
    given = operator.arguments(5)
    wide = torch.full((SLOTS, 2, *operator.state), torch.nan)
    strided = torch.full((*operator.state[:-1], SLOTS, operator.state[-1]), torch.nan).movedim(-2, 0)
    for state in (wide[:, 1], strided):
        run(operator, operator.part(given, 0, 2), state, (0, 2), (-1,), (3,))
        result = run(operator, operator.part(given, 2, 5), state, (0, 3), (3,), (3,))
        torch.testing.assert_close(result, operator.sequence(*given)[:, 2:], rtol=1e-4, atol=1e-5)
    assert wide[:, 0].isnan().all()


@pytest.mark.parametrize("operator", KERNELS.values(), ids=KERNELS)
def test_threads_and_company_change_nothing(operator):
    sequences = [operator.arguments(n) for n in (200, 1, 30)]
    before, results = torch.get_num_threads(), []
    try:
        for threads in (1, 3):
            torch.set_num_threads(threads)
            state = operator.new_state()
            result = run(operator, operator.joined(sequences), state, (0, 200, 201, 231), (-1,) * 3, (1, 2, 3))
            results.append((result, state.nan_to_num(9e9)))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(results[0][0], results[1][0]) and torch.equal(results[0][1], results[1][1])
    same(operator, results[0][0][:, 201:], operator.sequence(*sequences[2]))


@pytest.mark.parametrize("operator", BOTH)
def test_what_is_wrong_with_slots_is_refused_before_anything_is_written(operator):
    given, state = operator.arguments(6), operator.new_state()
    for starts, read, write, message in [
        ((0, 3, 6), (-1, 9), (1, 2), r"state_read\[1\] is 9; give -1, or one of the state's 9 slots"),
        ((0, 3, 6), (-2, 0), (1, 2), r"state_read\[0\] is -2"),
        ((0, 3, 6), (-1, -1), (1, 1 << 30), r"state_write\[1\] is 1073741824"),
        ((0, 3, 6), (-1, -1), (-2, 1), r"state_write\[0\] is -2"),
        ((0, 3, 3), (-1, -1), (1, 9), r"state_write\[1\] is 9"),
        ((1, 3, 6), (-1, -1), (1, 2), r"query_start_loc\[0\] is 1; the offsets must start at 0, not fall"),
        ((0, 4, 3), (-1, -1), (1, 2), r"query_start_loc\[2\] is 3"),
        ((0, 3, 7), (-1, -1), (1, 2), r"query_start_loc\[2\] is 7; .* not exceed the 6 tokens"),
        ((0, -1, 6), (-1, -1), (1, 2), r"query_start_loc\[1\] is -1"),
    ]:
        with pytest.raises(ValueError, match=message):
            run(operator, given, state, starts, read, write)
    assert state.isnan().all()
    good = (state, ids(0, 6), ids(-1), ids(1))
    for place, wrong, message in [
        (0, state[..., :-1], r"state has shape .*; the other arguments ask for \[slots, "),
        (0, state[0], "state has shape"),
        (0, state.half(), "state has dtype torch.float16; make it torch.float32"),
        (1, ids(0, 3, 6), r"query_start_loc \(3,\), state_read \(1,\) and state_write \(1,\) must be \[S \+ 1\]"),
        (2, ids(-1, -1), "must be"),
        (3, ids(), "must be"),
        (2, ids(-1).long(), "have dtypes torch.int32, torch.int64 and torch.int32; make them torch.int32"),
    ]:
        where = list(good)
        where[place] = wrong
        with pytest.raises(ValueError, match=message):
            operator.step(*given, *where)
    assert state.isnan().all()


@pytest.mark.parametrize("name", ["convolution", "delta rule by channel", "scan"])
def test_opcheck(name):
    operator = KERNELS[name]
    given = operator.arguments(5)
    state = torch.randn(SLOTS, *operator.state)
    torch.library.opcheck(operator.overload, (*given, state, ids(0, 3, 4), ids(-1, 2), ids(1, 2)))
    packet = operator.overload._schema.name.removeprefix("pagoda::")
    torch.library.opcheck(getattr(torch.ops.pagoda, f"{packet}_seq").default, tuple(given))


def ignore_what_was_read(operator: Stateful) -> Callable[..., torch.Tensor]:
    return lambda *a: operator.step(*a[:-2], torch.full_like(a[-2], -1), a[-1])


def multiply_fresh_memory_by_zero(operator: Stateful) -> Callable[..., torch.Tensor]:
    def step(*a):
        state, fresh = a[-4], (a[-2] < 0).nonzero()[:, 0]
        state[a[-1][fresh].long()] *= 0
        return operator.step(*a[:-2], torch.where(a[-2] < 0, a[-1], a[-2]), a[-1])

    return step


def write_in_place(operator: Stateful) -> Callable[..., torch.Tensor]:
    return lambda *a: operator.step(*a[:-1], torch.where(a[-2] < 0, a[-1], a[-2]))


def compute_padding(operator: Stateful) -> Callable[..., torch.Tensor]:
    def step(*a):
        starts = a[-3].clone()
        starts[-1] = a[0].shape[1]
        return operator.step(*a[:-3], starts, *a[-2:])

    return step


MUTANTS = {
    ignore_what_was_read: test_steps_give_what_one_run_gives,
    multiply_fresh_memory_by_zero: test_steps_give_what_one_run_gives,
    write_in_place: test_a_slot_that_is_read_stays_and_may_be_shared,
    compute_padding: test_steps_give_what_one_run_gives,
}


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda f: f.__name__)
def test_a_mistake_is_seen(mutant):
    for operator in (REFERENCES["convolution"], REFERENCES["lightning"], REFERENCES["scan"]):
        wrong = Stateful(**{**vars(operator), "step": mutant(operator)})
        with pytest.raises(AssertionError):
            MUTANTS[mutant](wrong)
