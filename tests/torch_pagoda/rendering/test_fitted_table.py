"""A table shows all of its cells, however narrow the terminal is."""

from __future__ import annotations

import io
from collections import Counter

import pytest
from rich import box
from rich.console import Console

from torch_pagoda.rendering.fitted_table import FittedTable, fit
from torch_pagoda.rendering.section import Section
from torch_pagoda.rendering.terminal import section_tables

COLUMNS = ("pass`!", "level#", "matches#", "expected#", "near misses#", "ms#", "")
ROWS = (
    ("recognize_rms_norm", "2", "9", "9 (2/layer + 1)", "0", "15.1", ""),
    ("share_subexpressions (rotations)", "1", "1234", "1234", "17", "159.5", "kept"),
)


def shown(width: int, rows: tuple[tuple[str, ...], ...] = ROWS) -> list[str]:
    stream = io.StringIO()
    console = Console(file=stream, width=width, color_system=None)
    for part in section_tables(Section("Passes", COLUMNS, rows)):
        console.print(part)
    return stream.getvalue().splitlines()


@pytest.mark.parametrize("width", [24, 30, 40, 60, 70, 80, 100])
def test_nothing_is_cut(width: int) -> None:
    lines = shown(width)
    assert max(map(len, lines)) <= width
    found = Counter("".join(lines).replace(" ", ""))
    wanted = Counter("".join(cell for row in ROWS for cell in row).replace(" ", ""))
    assert not wanted - found and "…" not in found


def test_words_stay_whole_where_they_fit() -> None:
    words = " ".join(shown(76)).split()
    assert {
        "recognize_rms_norm",
        "share_subexpressions",
        "(rotations)",
        "(2/layer",
        "159.5",
        "level",
        "misses",
    } <= set(words)


def test_what_fits_is_not_broken() -> None:
    assert any("share_subexpressions (rotations)" in line and "kept" in line for line in shown(120))


@pytest.mark.parametrize(
    ("whole", "words", "room", "expected"),
    [
        ([10, 5], [4, 5], 20, [10, 5]),
        ([10, 5], [4, 5], 12, [7, 5]),
        ([10, 6], [4, 5], 9, [4, 5]),
        ([10, 6], [4, 5], 5, [2, 3]),
        ([3, 3], [3, 3], 1, [1, 1]),
        ([0, 8], [0, 4], 3, [0, 3]),
        ([], [], 3, []),
    ],
)
def test_widths(whole: list[int], words: list[int], room: int, expected: list[int]) -> None:
    assert fit(whole, words, room) == expected


def test_a_table_can_be_printed_at_several_widths() -> None:
    table = FittedTable(box=box.SIMPLE_HEAD)
    table.add_column("a long heading")
    table.add_row("some words in a cell")
    texts = []
    for width in (60, 12, 60):
        stream = io.StringIO()
        Console(file=stream, width=width, color_system=None).print(table)
        texts.append(stream.getvalue())
    assert texts[0] == texts[2] != texts[1]
