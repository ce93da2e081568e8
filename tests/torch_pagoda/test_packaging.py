from __future__ import annotations

import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SETTINGS = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["setuptools"]


def folder_of(package: str) -> Path:
    """The folder that setuptools takes a package from: its longest prefix in package-dir, then the rest."""
    prefix, rest = package, []
    while prefix not in SETTINGS["package-dir"]:
        prefix, _, last = prefix.rpartition(".")
        rest.insert(0, last)
    return Path(SETTINGS["package-dir"][prefix], *rest)


def test_a_wheel_holds_every_package() -> None:
    """The editable install of development finds folders that a wheel would leave out."""
    listed = {folder_of(package) for package in SETTINGS["packages"]}
    roots = set(SETTINGS["package-dir"].values())
    present = {path.parent.relative_to(ROOT) for root in sorted(roots) for path in (ROOT / root).rglob("*.py")}
    assert listed == present


def test_a_wheel_holds_the_list_of_public_names() -> None:
    """``torch_pagoda/__init__.py`` reads it."""
    data = SETTINGS["package-data"]["torch_pagoda"]
    assert {"__init__.pyi", "py.typed"} == set(data) and all(
        (ROOT / "torch_pagoda" / name).is_file() for name in data
    )
