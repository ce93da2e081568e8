"""The automaton against a search for each string by itself."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from torch_pagoda.runtime.requests.stop_strings import StopStrings

letters = st.sampled_from("abé\U0001f600")
strings = st.lists(st.text(letters, min_size=1, max_size=5), min_size=1, max_size=6)
pieces = st.lists(st.tuples(st.text(letters, max_size=6), st.booleans()), max_size=6)


def searched(stops: list[str], pieces: list[tuple[str, bool]]) -> tuple[str, str]:
    """The text up to the first stop string that ends in a piece that is looked at, and that string."""
    text = ""
    for piece, look in pieces:
        for character in piece:
            text += character
            ending = [stop for stop in stops if text.endswith(stop)]
            if look and ending:
                return text, max(ending, key=len)
    return text, ""


@settings(max_examples=200, deadline=None)
@given(strings, pieces)
def test_it_finds_what_a_search_for_each_string_finds(stops: list[str], pieces: list[tuple[str, bool]]) -> None:
    automaton, state, text, found = StopStrings(stops), 0, "", ""
    for piece, look in pieces:
        state, count, found = automaton.read(state, piece, look=look)
        text += piece[:count]
        if found:
            break
    assert (text, found) == searched(stops, pieces)
    begun = [size for stop in stops for size in range(len(stop)) if text.endswith(stop[:size])]
    assert automaton.pending(state) == max(begun)


class CountedReads(dict[int, int]):
    """Transitions that count how often they are asked for."""

    reads = 0

    def get(self, key: int, default: int | None = None) -> int | None:  # type: ignore[override]
        self.reads += 1
        return super().get(key, default)


def test_the_cost_of_a_text_depends_on_its_length_alone() -> None:
    text = "ab" * 500 + "aab" * 500
    for stops in (["x"], [f"{number}" for number in range(10_000)], ["a" * size + "x" for size in range(1, 200)]):
        automaton = StopStrings(stops)
        automaton._next = transitions = CountedReads(automaton._next)
        assert automaton.read(0, text)[1:] == (len(text), "")
        assert transitions.reads <= 2 * len(text)
