"""The table of environment variables in docs/options.md against what the code reads."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("torch_pagoda", "compiler", "passes", "runtime")


def literals(tree: ast.Module) -> dict[str, tuple[str, ...]]:
    """Names that a module gives to strings and to tuples of them."""
    found = {}
    for statement in tree.body:
        if isinstance(statement, ast.Assign) and isinstance(target := statement.targets[0], ast.Name):
            try:
                value = ast.literal_eval(statement.value)
            except ValueError:
                continue
            strings = value if isinstance(value, tuple) else (value,)
            if all(isinstance(string, str) for string in strings):
                found[target.id] = strings
    return found


def names_asked_for(tree: ast.Module) -> Iterator[ast.expr]:
    """What stands for a variable's name wherever the environment is read."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            called = ast.unparse(node.func)
            if called.endswith(("environ.get", "environ.setdefault", "environ.pop", "getenv")):
                yield node.args[0]
        elif isinstance(node, ast.Subscript) and ast.unparse(node.value).endswith("environ"):
            yield node.slice
        elif isinstance(node, ast.Compare) and ast.unparse(node.comparators[0]).endswith("environ"):
            yield node.left


def variables_read(source: str) -> set[str]:
    """Names of the environment variables that a module reads.

    Raises:
        AssertionError: one is read under a name that cannot be told from the module alone.
    """
    tree = ast.parse(source)
    known = literals(tree)
    for loop in (node for node in ast.walk(tree) if isinstance(node, ast.comprehension)):
        if isinstance(loop.target, ast.Name) and isinstance(loop.iter, ast.Name) and loop.iter.id in known:
            known[loop.target.id] = known[loop.iter.id]
    found: set[str] = set()
    for name in names_asked_for(tree):
        if isinstance(name, ast.Constant) and isinstance(name.value, str):
            found.add(name.value)
        else:
            assert isinstance(name, ast.Name) and name.id in known, f"which variable is {ast.unparse(name)}?"
            found.update(known[name.id])
    return found


def documented() -> list[str]:
    section = (ROOT / "docs" / "options.md").read_text(encoding="utf-8").split("## Environment variables")[1]
    first_cells = re.findall(r"^\| (`.+?) \|", section, re.MULTILINE)
    return [name for cell in first_cells for name in re.findall(r"`(\w+)", cell)]


def test_every_variable_that_the_code_reads_is_in_the_table_and_no_other() -> None:
    read: set[str] = set()
    for package in PACKAGES:
        for file in set((ROOT / package).rglob("*.py")):
            read |= variables_read(file.read_text(encoding="utf-8"))
        for file in (file for file in (ROOT / package).rglob("*") if file.suffix in (".cpp", ".h")):
            read |= set(re.findall(r'\bgetenv\("(\w+)"\)', file.read_text(encoding="utf-8")))
    assert {"TORCH_PAGODA_CACHE", "TORCH_PAGODA_DISABLE_PROGRAM_CACHE", "PAGODA_DUMP"} <= read
    assert sorted(documented()) == sorted(read)


@pytest.mark.parametrize(
    "source",
    [
        "os.environ['PAGODA_NEW']",
        "os.environ.get('PAGODA_NEW', '')",
        "os.getenv('PAGODA_NEW')",
        "NEW = 'PAGODA_NEW'\n'x' if NEW in os.environ else 'y'",
        "NEW = ('PAGODA_NEW',)\nany(name in os.environ for name in NEW)",
    ],
)
def test_a_new_variable_is_seen_however_it_is_read(source: str) -> None:
    assert variables_read(source) == {"PAGODA_NEW"}


def test_a_name_that_is_put_together_is_refused() -> None:
    with pytest.raises(AssertionError, match="which variable is"):
        variables_read("os.environ['PAGODA_' + name]")
