"""Turns: what is called in one's own turn, and what only where nobody acts."""

from __future__ import annotations

import threading

from torch_pagoda.runtime.engine.turns import Turns


def test_what_may_come_at_any_moment_is_called_in_ones_own_turn_and_in_nobodys() -> None:
    turns, called = Turns(), []
    turns.take(lambda: turns.take_if_free(lambda: called.append("mine")))
    turns.take_if_free(lambda: called.append("free"))
    assert called == ["mine", "free"]


def test_it_does_not_wait_for_somebody_elses_turn() -> None:
    turns, called = Turns(), []
    begun, go_on = threading.Event(), threading.Event()

    def acts() -> None:
        begun.set()
        go_on.wait()

    other = threading.Thread(target=turns.take, args=(acts,))
    other.start()
    begun.wait()
    turns.take_if_free(lambda: called.append("taken"))
    go_on.set()
    other.join()
    assert called == []
    turns.take_if_free(lambda: called.append("free"))
    assert called == ["free"]
