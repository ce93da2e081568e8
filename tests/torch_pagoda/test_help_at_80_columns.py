"""``--help`` of every command on a terminal of 80 columns."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import typer

from torch_pagoda import cli

Run = Callable[..., tuple[int, str, str]]

WIDTH = 80


def commands(command: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    yield path, command
    for name, inner in getattr(command, "commands", {}).items():
        yield from commands(inner, (*path, name))


EVERY = [
    entry
    for entry in commands(typer.main.get_command(cli.app))
    if "--help" in entry[1].context_settings.get("help_option_names", ["--help"])
]


@pytest.fixture(autouse=True)
def eighty_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(WIDTH))
    monkeypatch.setattr("typer.rich_utils.MAX_WIDTH", None)


@pytest.mark.parametrize(("path", "command"), EVERY, ids=[" ".join(("pagoda", *path)) for path, _ in EVERY])
def test_nothing_is_cut_and_paragraphs_are_filled(run: Run, path: tuple[str, ...], command: Any) -> None:
    status, out, _ = run(*path, "--help")
    assert status == 0
    lines = re.sub(r"\x1b\[[0-9;]*m", "", out).splitlines()
    assert max(map(len, lines)) <= WIDTH
    assert "…" not in out
    words = set(re.findall(r"[\w-]+", out))
    shown = [
        option
        for parameter in command.params
        if not getattr(parameter, "hidden", False)
        for option in (*parameter.opts, *parameter.secondary_opts)
        if option.startswith("-")
    ]
    assert set(shown) <= words
    prose = lines[: next(i for i, line in enumerate(lines) if line.startswith("╭"))]
    for line, following in pairwise(prose):
        if line.strip() and following.strip():
            first = following.split()[0]
            assert len(line.rstrip()) + 1 + len(first) > WIDTH - 2, f"{first!r} has room after {line.strip()!r}"


@pytest.mark.parametrize("name", ["enable-prefix-caching", "async-scheduling"])
def test_what_has_two_names_takes_either_and_not_both(run: Run, checkpoint: Path, name: str) -> None:
    fast = ["--verify", "off", "--codegen", "none", "--max-tokens", "1"]
    enabled, disabled = f"--{name}", f"--no-{name}"
    assert run("generate", checkpoint, "-p", "the", enabled, *fast)[0] == 0
    assert run("generate", checkpoint, "-p", "the", disabled, *fast)[0] == 0
    status, _, err = run("generate", checkpoint, "-p", "the", enabled, disabled, *fast)
    assert status == 2 and enabled in err and disabled in err and err.count("\n") == 1
