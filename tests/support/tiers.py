"""The tier of each test. ``tests/tiers.toml`` decides, so that no test is marked by hand.

===========  ========================================================================================================
``quick``    The default run: what takes a fraction of a second, and one whole model of each kind.
``process``  What starts processes or compilers, opens real sockets, or limits seconds of wall time.
``whole``    What compiles or serves whole models, or runs for seconds.
``npu``      The same for what is lowered to an NPU.
``grid``     What ``quick`` leaves out of families with more than ``LARGE`` ids, and the engine's second mode.
===========  ========================================================================================================

A test with one of the markers in ``OWN`` is in that tier alone.
"""

from __future__ import annotations

import re
import tomllib
import zlib
from collections import defaultdict
from collections.abc import Sequence
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import pytest

TIERS = ("quick", "process", "whole", "npu", "grid")
OWN = ("slow", "torchair", "sanitize", "aarch64", "acceptance", "formats", "cuda", "fleet")
"""Tiers whose tests are marked by hand, since they need what a machine may lack, or hours."""

LARGE = 8
TESTS = Path(__file__).parents[1]


def tier_of(name: str) -> str:
    """The tier of the test with the id ``name``, relative to ``tests/``, but for what ``left_to_grid`` adds."""
    file, _, test = name.partition("::")
    return next((tier for tier, tests in _tests_of(file) if tests.fullmatch(test)), "quick")


def tier_of_file(path: Path) -> str | None:
    """The tier of all tests of a file, read off the table and a ``pytestmark``; None if they may be in several."""
    mark = re.search(r"^pytestmark = pytest\.mark\.(\w+)", path.read_text("utf-8"), re.MULTILINE)
    if mark is not None and mark[1] in OWN:
        return mark[1]
    tiers = _tests_of(str(path.relative_to(TESTS)))
    return tiers[0][0] if tiers and tiers[0][1].fullmatch("") else None


def left_to_grid(items: Sequence[pytest.Item]) -> set[pytest.Item]:
    """The items that ``quick`` leaves out of large families: it takes the ones with the first and the last value of
    each axis, and of the others every fourth, by the CRC of its id."""
    families: dict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        families[item.nodeid.partition("[")[0]].append(item)
    left: set[pytest.Item] = set()
    for family in families.values():
        if len(family) > LARGE:
            left |= {item for item in family if zlib.crc32(item.nodeid.encode()) % 4} - _ends_of_axes(family)
    return left


def group_of(name: str) -> str:
    """The group of a test: the architecture that its id names, or else its file. One process runs all of a group, in
    the order of collection, so that a model is traced once and a fixture made once."""
    file, _, ids = name.partition("[")
    architectures = _architectures()
    return next((part for part in re.split(r"[\]\-]", ids) if part in architectures), file.partition("::")[0])


def shard_of(name: str, shards: int) -> int:
    """The shard, from 1 to ``shards``, of a test; those of a group are in one."""
    return zlib.crc32(group_of(name).encode()) % shards + 1


@cache
def _architectures() -> frozenset[str]:
    """The names of architectures that transformers has, without importing it."""
    package = find_spec("transformers")
    assert package is not None and package.origin is not None
    names = [folder.name for folder in (Path(package.origin).parent / "models").iterdir()]
    return frozenset([*names, *(f"{name}_text" for name in names)])


@cache
def _tests_of(file: str) -> list[tuple[str, re.Pattern[str]]]:
    """Each tier that the table gives to tests of ``file``, with an expression for the names of these."""
    found = []
    for tier, files in tomllib.loads((TESTS / "tiers.toml").read_text("utf-8")).items():
        for pattern, tests in files.items():
            if re.fullmatch(_expression(pattern), file):
                names = "|".join(_expression(test) for test in tests)
                found.append((tier, re.compile(rf"({names})(\[.*)?", re.DOTALL)))
    return found


def _expression(pattern: str) -> str:
    return ".*".join(map(re.escape, pattern.split("*")))


def _ends_of_axes(family: Sequence[pytest.Item]) -> set[pytest.Item]:
    first: dict[str, dict[object, pytest.Item]] = defaultdict(dict)
    for item in family:
        for axis, value in item.callspec.params.items():  # type: ignore[attr-defined]
            first[axis].setdefault(value if isinstance(value, (str, int, float)) else id(value), item)
    return {list(of_values.values())[end] for of_values in first.values() for end in (0, -1)}
