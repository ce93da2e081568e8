"""The garbage collector: kept off while many objects are made, and left as it was found."""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Iterator

import pytest

from torch_pagoda.runtime.garbage_collection import collection_paused


@pytest.fixture(autouse=True)
def collector() -> Iterator[None]:
    """The collector on, with nothing frozen, before and after."""
    gc.enable()
    gc.unfreeze()
    yield
    gc.unfreeze()
    gc.enable()


def is_old(item: object) -> bool:
    return any(other is item for other in gc.get_objects(generation=2))


def test_objects_made_inside_are_old_afterwards():
    collections: list[str] = []
    gc.callbacks.append(lambda phase, info: collections.append(phase))
    try:
        with collection_paused():
            made = [[i] for i in range(100_000)]
            inside = list(collections)
    finally:
        gc.callbacks.pop()
    assert not inside and gc.isenabled() and gc.get_freeze_count() == 0
    assert is_old(made[-1]) and is_old(made)


def test_on_again_after_an_error_and_as_a_decorator():
    @collection_paused()
    def fail():
        assert not gc.isenabled()
        raise KeyError("x")

    for _ in range(2):
        with pytest.raises(KeyError):
            fail()
        assert gc.isenabled()


def test_whoever_switched_it_off_finds_it_off():
    gc.disable()
    with collection_paused():
        pass
    assert not gc.isenabled()
    gc.enable()
    with collection_paused():
        with collection_paused():
            pass
        assert not gc.isenabled()
    assert gc.isenabled()


def test_frozen_objects_stay_frozen():
    gc.freeze()
    try:
        frozen = gc.get_freeze_count()
        with collection_paused():
            pass
        # Some go for want of references, in other threads.
        assert frozen > 1000 and gc.get_freeze_count() > 0.9 * frozen
    finally:
        gc.unfreeze()


def test_the_last_of_two_threads_switches_it_on():
    entered, leave = threading.Event(), threading.Event()

    @collection_paused()
    def wait() -> None:
        entered.set()
        assert leave.wait(30)

    other = threading.Thread(target=wait)
    with collection_paused():
        other.start()
        assert entered.wait(30)
    assert not gc.isenabled()
    leave.set()
    other.join()
    assert gc.isenabled()


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_forked_process_collects():
    with collection_paused():
        child = os.fork()
        if not child:
            os._exit(0 if gc.isenabled() else 1)
        assert not gc.isenabled()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
