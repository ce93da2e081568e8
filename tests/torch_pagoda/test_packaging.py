from __future__ import annotations

import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from torch_pagoda.npu_tools.offline.wheels import TORCH_NPU

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
SETTINGS = PROJECT["tool"]["setuptools"]


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


def constraints(system: str) -> dict[str, Requirement]:
    """What ``constraints.txt`` says on a system, by package."""
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    asked = [Requirement(line) for line in lines if line and not line.startswith("#")]
    holding = [r for r in asked if r.marker is None or r.marker.evaluate({"sys_platform": system})]
    assert len({r.name for r in holding}) == len(holding)
    return {canonicalize_name(r.name): r for r in holding}


def extra(name: str) -> Iterator[str]:
    """What an extra asks for, with what the extras that it names ask for."""
    for line in PROJECT["project"]["optional-dependencies"][name]:
        asked = Requirement(line)
        if asked.name == PROJECT["project"]["name"]:
            for other in sorted(asked.extras):
                yield from extra(other)
        else:
            yield line


@pytest.mark.parametrize("system", ["linux", "darwin"])
def test_what_we_depend_on_is_constrained_to_one_release_within_its_bounds(system: str) -> None:
    dependencies = [*PROJECT["project"]["dependencies"], *extra("test"), *extra("bench")]
    pinned = constraints(system)
    for dependency in map(Requirement, dependencies):
        if dependency.marker is not None and not dependency.marker.evaluate({"sys_platform": system}):
            continue
        (pin,) = pinned[canonicalize_name(dependency.name)].specifier
        assert pin.operator == "==" and pin.version.partition("+")[0] in dependency.specifier, dependency


def test_torch_has_no_upper_bound_but_for_npus() -> None:
    """The extra for NPUs takes a build for CPUs alone, beside the torch-npu that is compiled for it."""
    (torch,) = (r for r in map(Requirement, PROJECT["project"]["dependencies"]) if r.name == "torch")
    pair = {r.name: r.specifier for r in map(Requirement, PROJECT["project"]["optional-dependencies"]["npu"])}
    assert {bound.operator for bound in torch.specifier} == {">="}
    (cpu,), (npu,) = pair["torch"], pair["torch-npu"]
    release, _, build = cpu.version.partition("+")
    assert build == "cpu" and release in torch.specifier and npu.version == TORCH_NPU[release].version
