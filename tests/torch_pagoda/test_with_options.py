"""Commands that get their options from option classes."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import pytest
import typer
from typer.testing import CliRunner

from torch_pagoda.cli.with_options import with_options
from torch_pagoda.runtime.option import option


@dataclass(frozen=True)
class Own:
    """Options of the command alone."""

    words: list[str] | None = option(None, "Words.", flags=("--words", "-w"))
    file: Path | None = option(None, "A file.", metavar="FILE")
    both: str = option("own", "Of both.")
    not_offered: int = option(3, "Nowhere.")
    debug: bool = option(False, "Show the traceback.")


@dataclass(frozen=True)
class Engine:
    """Options that other commands have, too."""

    both: str = option("engine", "Of the engine.")
    size: int | str = option(0, "A size.")
    count: int = option(64, "A count.")
    share: float | None = option(None, "A share.")
    fast: bool = option(True, "Be slow.")
    ahead: bool | None = option(None, "Look ahead.")
    table: Mapping[str, Any] = option({}, "A table.")
    hosts: tuple[str, ...] = option((), "Hosts.")
    plain: int = 7


PANELS = (("", "words file both"), ("Engine", "size count share fast ahead table hosts"), ("", "debug"))
DEFAULTS = {
    **{"size": "0", "count": 64, "share": None, "fast": True, "ahead": None},
    **{"table": None, "hosts": ()},
}


@pytest.fixture
def called(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Runs the command with arguments; gives what it was called with, and what was printed."""
    monkeypatch.setenv("COLUMNS", "100")

    def run(*arguments: str) -> tuple[list[Any], str]:
        app, found = typer.Typer(add_completion=False), []

        @app.command()
        @with_options(Own, PANELS, (Engine,))
        def command(name: Annotated[str, typer.Argument(metavar="NAME")], own: Own, engine: dict[str, Any]) -> None:
            """Do it."""
            found.extend([name, own, engine])

        result = CliRunner().invoke(app, arguments)
        return found, re.sub(r"\x1b\[[0-9;]*m", "", result.output)

    return run


def test_defaults_are_those_of_the_classes(called: Any) -> None:
    assert called("x")[0] == ["x", Own(), DEFAULTS]
    assert Engine().table == {} and Engine().table is not Engine().table


@pytest.mark.parametrize(
    ("arguments", "name", "value"),
    [
        (["--size", "4GiB"], "size", "4GiB"),
        (["--count", "3"], "count", 3),
        (["--share", ".5"], "share", 0.5),
        (["--fast"], "fast", True),
        (["--no-fast"], "fast", False),
        (["--ahead"], "ahead", True),
        (["--no-ahead"], "ahead", False),
        (["--table", '{"a": 1}'], "table", {"a": 1}),
        (["--hosts", "a", "--hosts", "b"], "hosts", ("a", "b")),
    ],
)
def test_values_are_what_the_classes_take(called: Any, arguments: list[str], name: str, value: Any) -> None:
    (_, own, engine), _ = called("x", *arguments)
    assert own == Own() and engine == {**DEFAULTS, name: value}
    assert type(engine[name]) is type(value)


def test_the_commands_own_class_comes_first(called: Any) -> None:
    (_, own, engine), _ = called("x", "-w", "a", "-w", "b", "--file", "f", "--both", "c")
    assert own == Own(["a", "b"], Path("f"), "c") and engine == DEFAULTS


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--fast", "--no-fast"], "--fast and --no-fast are mutually exclusive"),
        (["--table", "[1]"], "--table is not a JSON object"),
        (["--table", "{"], "--table is not JSON"),
        (["--count", "many"], "--count"),
        (["--not-offered", "1"], "--not-offered"),
        (["--plain", "1"], "--plain"),
    ],
)
def test_mistakes_are_told(called: Any, arguments: list[str], words: str) -> None:
    found, printed = called("x", *arguments)
    assert not found and words in printed


def test_help_has_panels_in_order_and_the_flag_that_changes_something(called: Any) -> None:
    _, printed = called("--help")
    rows = [line for line in printed.splitlines() if "--" in line or "─ " in line]
    shown = [re.search(r"(--[\w-]+)|─ (\w+) ─", row) for row in rows]
    assert [found[1] or found[2] for found in shown if found] == [
        *("Arguments", "Options", "--words", "--file", "--both", "--debug", "--help"),
        *("Engine", "--size", "--count", "--share", "--no-fast", "--ahead", "--table", "--hosts"),
    ]
    text = " ".join(printed.split())
    for part in (
        "Do it.",
        "-w",
        "FILE A file.",
        "Of both. [default: own]",
        "A count. [default: 64]",
        "JSON A table.",
    ):
        assert part in text, part
