"""Kernel calls are noted by the thread that makes them, and made again in order until one is refused."""

from __future__ import annotations

import ctypes
import struct
import threading

import pytest
import torch

from torch_pagoda.runtime.ops.gated_activation import activation_cpu
from torch_pagoda.runtime.ops.native import NotedCall, kernel_function, load_kernels, noting_calls
from torch_pagoda.runtime.ops.replay import Replay

pytestmark = pytest.mark.skipif(load_kernels() is None, reason="no C++ kernels")


def test_calls_are_made_again_on_what_lies_there_now():
    x = torch.randn(4, 64)
    with noting_calls() as calls:
        once = activation_cpu(x, "silu")
        twice = activation_cpu(once, "relu")
    assert len(calls) == 2
    x.copy_(torch.randn(4, 64))
    assert Replay(calls).run()
    assert torch.equal(once, activation_cpu(x, "silu"))
    assert torch.equal(twice, once.relu())


def test_nothing_is_noted_outside():
    with noting_calls() as outer:
        with noting_calls() as inner:
            activation_cpu(torch.ones(4), "silu")
        activation_cpu(torch.ones(4), "relu")
    activation_cpu(torch.ones(4), "relu")
    assert (len(outer), len(inner)) == (1, 1)


def test_other_threads_are_not_noted():
    with noting_calls() as calls:
        thread = threading.Thread(target=activation_cpu, args=(torch.ones(4), "silu"))
        thread.start()
        thread.join()
    assert not calls


REFUSED = struct.pack("=11q", 0, 0, 0, 0, 0, 1, 32, 16, 32, 7, 1)
"""Arguments of pagoda_blocked_linear: panels of 7 outputs, which it does not know."""


def test_refused_calls_are_not_noted():
    with noting_calls() as calls:
        kernel = kernel_function("pagoda_blocked_linear")
        assert kernel is not None
        assert kernel(REFUSED) == 1
    assert not calls


def test_a_replay_ends_where_a_call_is_refused():
    x, y = torch.randn(64), torch.randn(64)
    with noting_calls() as calls:
        before, after = activation_cpu(x, "silu"), activation_cpu(y, "silu")
    kernel = kernel_function("pagoda_blocked_linear")
    refused = NotedCall(ctypes.cast(kernel, ctypes.c_void_p).value or 0, REFUSED)
    before.zero_()
    after.zero_()
    assert not Replay([calls[0], refused, calls[1]]).run()
    assert torch.equal(before, activation_cpu(x, "silu"))
    assert not after.any()
