"""What the check of the kernels accepts, and the mistakes that it must find."""

from __future__ import annotations

import functools
from dataclasses import replace

import pytest
import torch
from torch.nn import functional as F

from torch_pagoda.runtime.ops import kernel_check
from torch_pagoda.runtime.ops.attention.paged_attention import paged_attention_cpu
from torch_pagoda.runtime.ops.kernel_check import check_kernels, wrong_attention, wrong_experts
from torch_pagoda.runtime.ops.moe.moe import moe_cpu, moe_reference
from torch_pagoda.runtime.ops.reference import paged_attention_reference
from torch_pagoda.runtime.ops.registration import OPERATORS
from torch_pagoda.runtime.ops.state.causal_conv1d import causal_conv1d
from torch_pagoda.runtime.ops.state.linear_recurrence import linear_recurrence
from torch_pagoda.runtime.ops.state.selective_scan import selective_scan
from torch_pagoda.runtime.ops.state.state_check import wrong_state, wrong_states

linear_recurrence_reference = OPERATORS[linear_recurrence].reference
selective_scan_reference = OPERATORS[selective_scan].reference
causal_conv1d_reference = OPERATORS[causal_conv1d].reference

COMPUTING = set(
    "addmm baddbmm bmm cat conv1d einsum exp gelu layer log log1p logsumexp matmul maximum minimum mm mv relu rms "
    "rsqrt scaled searchsorted sigmoid silu softmax softplus square stack tanh where".split()
)
"""Functions of torch, or the first words of their names."""
WEIGHTS, IDS, DOWN_BIAS, LIMIT = 1, 2, 6, 9
KEY_CACHE, VALUE_CACHE, TABLE, LENS, SINKS, SCALE, WINDOW, SOFTCAP = 3, 4, 6, 8, 9, 11, 12, 14


def test_the_kernels_are_right(two_threads):
    assert wrong_attention(paged_attention_cpu) == ""
    assert wrong_experts(moe_cpu) == ""
    assert wrong_states() == ""
    check_kernels.cache_clear()
    check_kernels()


def exchanged(*given, **named):
    raise AssertionError("the check calls a function that a program may exchange")


def test_functions_that_a_program_exchanged_have_no_part_in_the_check(monkeypatch):
    functions = [(F, name) for name, item in vars(F).items() if callable(item) and name[0].islower()]
    functions += [(torch, name) for name in dir(torch._C._VariableFunctions) if name.partition("_")[0] in COMPUTING]
    functions += [(torch.Tensor, name) for name in COMPUTING & vars(torch._C.TensorBase).keys()]
    for place, name in functions:
        monkeypatch.setattr(place, name, exchanged)
    check_kernels.cache_clear()
    check_kernels()


def changed(place, change):
    def attend(*args):
        args = list(args)
        args[place] = change(args[place])
        return paged_attention_reference(*args)

    return attend


def lose_a_key_of_the_second_block(*args):
    """Key 64 of the first sequence, whose decoded token is the 70th, is as if it were not there."""
    args = list(args)
    args[KEY_CACHE] = args[KEY_CACHE].clone()
    block = int(args[TABLE][0, 64 // 32])
    args[KEY_CACHE][block, 0] = 0
    return paged_attention_reference(*args)


def merge_halves_without_weights(*args):
    """The second sequence split over its keys, its halves averaged."""
    right = paged_attention_reference(*args)
    args = list(args)
    halves = []
    for keep in (slice(None, 20), slice(20, None)):
        part = list(args)
        part[TABLE] = args[TABLE].clone()
        rows = args[TABLE][1][keep]
        part[TABLE][1] = rows.repeat(4)[: args[TABLE].shape[1]]
        halves.append(paged_attention_reference(*part))
    right[:, :, 1] = (halves[0][:, :, 1] + halves[1][:, :, 1]) / 2
    return right


def read_any_block(*args):
    args = list(args)
    args[TABLE] = args[TABLE].clamp(0, args[KEY_CACHE].shape[0] - 1)
    return paged_attention_reference(*args)


@pytest.mark.parametrize(
    "mutant",
    [
        changed(SCALE, lambda scale: scale * 1.02),
        changed(SOFTCAP, lambda softcap: 0.0),
        changed(SINKS, lambda sinks: None),
        changed(WINDOW, lambda window: window + 1 if window else 0),
        lose_a_key_of_the_second_block,
        merge_halves_without_weights,
    ],
    ids=["scale", "softcap", "sinks", "window", "lost key", "merge"],
)
def test_wrong_numbers_are_found(mutant):
    assert "differs from the reference" in wrong_attention(mutant)


def with_experts(change):
    def mix(*args):
        args = list(args)
        change(args)
        return moe_reference(*args)

    return mix


def forget_the_single_token(args):
    args[WEIGHTS] = args[WEIGHTS].clone()
    args[WEIGHTS][args[IDS] == 4] = 0


def exchange_two_experts(args):
    args[IDS] = torch.where(args[IDS] == 0, 1, torch.where(args[IDS] == 1, 0, args[IDS]))


def drop_the_down_bias(args):
    args[DOWN_BIAS] = None


def lift_the_limit(args):
    args[LIMIT] = 0.0


@pytest.mark.parametrize(
    "change",
    [forget_the_single_token, exchange_two_experts, drop_the_down_bias, lift_the_limit],
    ids=lambda f: f.__name__,
)
def test_wrong_experts_are_found(change):
    assert "a mixture of experts in torch.float32" in wrong_experts(with_experts(change))


def test_a_wrong_kernel_of_half_precision_is_found():
    def mix(*args):
        right = moe_reference(*args)
        return right * 1.1 if right.dtype is torch.bfloat16 else right

    assert "a mixture of experts in torch.bfloat16" in wrong_experts(mix)


STATEFUL = {
    "a convolution": causal_conv1d_reference,
    "a recurrence": linear_recurrence_reference,
    "a scan": selective_scan_reference,
}


def write_where_it_was_read(reference, *args):
    *given, read, write = args
    return reference(*given, read, torch.where(read >= 0, read, write))


def begin_anew(reference, *args):
    *given, read, write = args
    return reference(*given, torch.full_like(read, -1), write)


def forget_the_first_tokens(reference, *args):
    """Each sequence goes on from zeros behind its 16th token."""
    *given, state, starts, read, write = args
    before = reference(*given, state.clone(), starts, read, torch.full_like(write, -1))
    tail = torch.stack([torch.minimum(starts[:-1] + 16, starts[1:]), starts[1:]]).T.flatten()
    tail = torch.cat([starts.new_zeros(1), tail])
    none = torch.full_like(tail[1:], -1)
    late = none.clone()
    late[1::2] = write
    result = reference(*given, state, tail, none, late)
    before[:, 16:20] = result[:, 16:20]
    return before


def read_any_slot(reference, *args):
    *given, state, starts, read, write = args
    return reference(*given, state, starts, read.clamp(max=len(state) - 1), write)


@pytest.mark.parametrize("what", STATEFUL)
@pytest.mark.parametrize(
    "mutant", [write_where_it_was_read, begin_anew, forget_the_first_tokens], ids=lambda f: f.__name__
)
def test_wrong_states_are_found(what, mutant):
    right = STATEFUL[what]
    assert wrong_state(what, right, right) == ""
    found = wrong_state(what, functools.partial(mutant, right), right)
    assert found.startswith(what) and "in torch.float32 differs from the reference" in found


@pytest.mark.parametrize("what", STATEFUL)
def test_missing_validation_of_slots_is_found(what):
    found = wrong_state(what, functools.partial(read_any_slot, STATEFUL[what]), STATEFUL[what])
    assert found == f"a slot outside the state of {what} is not refused"


def test_wrong_states_are_reported(monkeypatch):
    if kernel_check.load_kernels() is None:
        pytest.skip("there are no kernels")
    wrong = functools.partial(begin_anew, selective_scan_reference)
    monkeypatch.setitem(OPERATORS, selective_scan, replace(OPERATORS[selective_scan], cpu=wrong))
    check_kernels.cache_clear()
    with pytest.raises(RuntimeError, match=r"are wrong on this machine: a scan in torch.float32 differs"):
        check_kernels()
    check_kernels.cache_clear()


def test_missing_validation_is_found():
    assert wrong_attention(read_any_block) == "a block id outside the cache is not refused"


def test_wrong_kernels_are_not_used(monkeypatch):
    if kernel_check.load_kernels() is None:
        pytest.skip("there are no kernels")
    monkeypatch.setattr(kernel_check, "paged_attention_cpu", lose_a_key_of_the_second_block)
    check_kernels.cache_clear()
    with pytest.raises(RuntimeError, match=r"kernels in .* are wrong on this machine: attention in torch.float32"):
        check_kernels()
    check_kernels.cache_clear()
