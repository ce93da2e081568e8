"""The offline Ascend toolchain: torch-npu, with torchair inside, and stand-ins for CANN, in a cache folder.

An installed torch_npu breaks ``import torch`` on a machine without CANN, so the environment stays unchanged: only a
Python started with the toolchain (see ``offline``) sees the packages.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import metadata, util
from pathlib import Path
from typing import Any

from ...compiler.targets.npu.without_device import OFFLINE_TOOLCHAIN
from ...runtime.private_folder import NotPrivate, cache_folder, check_private_folder, locked, make_private_folder
from ..torch_build import cuda_conflict, why_it_died
from .stand_in import ToolchainError, build_stand_ins, find_tools
from .wheels import MACHINES, PROTOBUF, TORCH_NPU, TRIED, Requirement

__all__ = ["Toolchain", "ToolchainError", "environment", "find_toolchain", "locate_toolchain", "set_up_toolchain"]

_logger = logging.getLogger(__name__)
# Part of every folder's name: raise it when what is built into a folder changes.
_RECIPE = 1
_MANIFEST = "toolchain.json"


@dataclass(frozen=True)
class Toolchain:
    """The toolchain for this Python and this torch; ``complete`` says whether it is installed.

    Attributes:
        folder: its folder in the cache.
        requirements: the wheels in it, torch-npu first.
    """

    folder: Path
    requirements: tuple[Requirement, ...]

    @property
    def packages(self) -> Path:
        """Folder with the Python packages torch_npu and google.protobuf."""
        return self.folder / "packages"

    @property
    def libraries(self) -> Path:
        """Folder with the stand-ins for CANN's shared libraries."""
        return self.folder / "libraries"

    @property
    def cann(self) -> Path:
        """An empty CANN installation; without one, torch_npu prints a warning to stdout."""
        return self.folder / "cann"

    @property
    def complete(self) -> bool:
        return (self.folder / _MANIFEST).is_file() and (self.packages / "torch_npu" / "__init__.py").is_file()

    @property
    def tried(self) -> bool:
        """Whether the tests convert with these wheels; others have a pinned checksum only."""
        release, machine = TRIED
        wheel = TORCH_NPU[release].sha256[machine].values()
        return any(r.name == "torch-npu" and r.sha256 in wheel for r in self.requirements)

    def manifest(self) -> dict[str, Any]:
        """A record of the build: wheels, versions, names of the stand-ins, number of their symbols."""
        content: dict[str, Any] = json.loads((self.folder / _MANIFEST).read_text(encoding="utf-8"))
        return content


def environment(toolchain: Toolchain, base: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Environment variables that start a Python which can import torch_npu and torchair.

    Args:
        toolchain: a complete toolchain.
        base: variables to add to; nothing in it is lost but what would load the wrong thing.
    """
    variables = dict(base)
    variables["LD_LIBRARY_PATH"] = _joined(toolchain.libraries, base.get("LD_LIBRARY_PATH"))
    variables["PYTHONPATH"] = _joined(toolchain.packages, base.get("PYTHONPATH"))
    # Without it `import torch` imports torch_npu, in the middle of its own import.
    variables["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"
    # torch_npu refuses to load where torch sees a GPU.
    variables["CUDA_VISIBLE_DEVICES"] = ""
    variables["ASCEND_HOME_PATH"] = str(toolchain.cann / "home")
    variables["ASCEND_OPP_PATH"] = str(toolchain.cann / "opp")
    variables[OFFLINE_TOOLCHAIN] = str(toolchain.folder)
    return variables


def locate_toolchain(torch_version: str | None = None, python_tag: str | None = None) -> Toolchain:
    """The toolchain for this machine, this Python and the installed torch, installed or not.

    Its folder is in ``$TORCH_PAGODA_CACHE/npu`` (``~/.cache/torch_pagoda/npu``), named after the versions.

    Args:
        torch_version: by default the installed torch's; a local part (+cpu) makes no difference.
        python_tag: by default this Python's, like cp311.

    Raises:
        ToolchainError: there is no matching torch-npu wheel, or the installed torch is a build with CUDA.
    """
    machine = _require_platform()
    if torch_version is None:
        torch_version = metadata.version("torch")
        if conflict := cuda_conflict(torch_version):
            raise ToolchainError(conflict)
    python_tag = python_tag or f"cp{sys.version_info.major}{sys.version_info.minor}"
    release = torch_version.partition("+")[0]
    if release not in TORCH_NPU:
        raise ToolchainError(
            f"torch {torch_version} has no known torch-npu wheel; install torch "
            f"{', '.join(sorted(TORCH_NPU)[:-1])} or {max(TORCH_NPU)} (of these, {TRIED[0]} is the one tested)"
        )
    version, checksums = TORCH_NPU[release].version, TORCH_NPU[release].sha256[machine]
    if python_tag not in checksums or sys.implementation.name != "cpython":
        raise ToolchainError(
            f"torch-npu {version} has no wheel for {sys.implementation.name} {python_tag}; use CPython 3.11 to 3.14"
        )
    wanted = (Requirement("torch-npu", version, checksums[python_tag]), PROTOBUF[machine])
    recipe = "\n".join((str(_RECIPE), torch_version, *map(str, wanted)))
    digest = hashlib.sha256(recipe.encode()).hexdigest()[:10]
    name = f"torch_npu-{version}-torch-{torch_version}-{python_tag}-{digest}"
    return Toolchain(cache_folder() / "npu" / name, wanted)


def find_toolchain() -> Toolchain:
    """The installed toolchain.

    Raises:
        ToolchainError: it is not installed, others could have written to it, or this machine cannot have one.
    """
    toolchain = locate_toolchain()
    if not toolchain.complete:
        raise ToolchainError(
            f"the offline Ascend toolchain is not installed in {toolchain.folder}; run: pagoda npu setup"
        )
    _check_private(toolchain)
    return toolchain


def set_up_toolchain(on_step: Callable[[str], None] = _logger.info, toolchain: Toolchain | None = None) -> Toolchain:
    """Download the wheels, build the stand-ins and put both into the cache folder, unless installed already.

    Wheels are checked against pinned checksums. The folder is built elsewhere and renamed, so it is never incomplete;
    of several concurrent processes, one builds and the others wait. The first call needs a package index (pip's own
    configuration applies), a C compiler and binutils, downloads 44 MB and keeps 160 MB.

    Args:
        on_step: called with a short text before each step, if there is any.
        toolchain: the toolchain to set up; by default ``locate_toolchain()``.

    Raises:
        ToolchainError: something is missing; the message names it and the remedy.
    """
    toolchain = toolchain or locate_toolchain()
    if toolchain.complete:
        _check_private(toolchain)
        return toolchain
    find_tools()  # before the download: it is the cheaper thing to miss
    # Looking for its module would switch off setuptools' distutils in this process, which Inductor needs.
    if not any(metadata.distributions(name="pip")):
        raise ToolchainError(f"pip is missing in {sys.executable}; run: {sys.executable} -m ensurepip")
    try:
        make_private_folder(toolchain.folder.parent)
        lock = toolchain.folder.with_name(f".{toolchain.folder.name}.lock")
        with locked(lock, lambda: on_step("waiting for another process to build the toolchain")):
            if not toolchain.complete:
                _build(toolchain, on_step)
    except NotPrivate as error:
        raise ToolchainError(f"cannot store the offline Ascend toolchain: {error}") from error
    except OSError as error:
        raise ToolchainError(
            f"cannot write the offline Ascend toolchain to {toolchain.folder}: {error}; set TORCH_PAGODA_CACHE to a "
            "writable folder"
        ) from error
    return toolchain


def _check_private(toolchain: Toolchain) -> None:
    """Raise ``ToolchainError`` if another user could have written to the libraries and packages to load."""
    for folder in (toolchain.folder.parent, toolchain.folder, toolchain.libraries, toolchain.packages):
        try:
            check_private_folder(folder)
        except OSError as error:
            raise ToolchainError(f"refusing to use the offline Ascend toolchain: {error}") from error


def _require_platform() -> str:
    """The architecture of this machine, if it has wheels."""
    machine = platform.machine()
    if sys.platform != "linux" or machine not in MACHINES:
        raise ToolchainError(
            f"the offline Ascend toolchain runs on Linux on {' or '.join(MACHINES)} only, but this is {sys.platform} "
            f"on {machine}; use a container or a machine of that kind"
        )
    libc, version = platform.libc_ver()
    if libc != "glibc" or tuple(map(int, version.split(".")[:2])) < (2, 28):
        raise ToolchainError(
            f"torch-npu's wheels need glibc 2.28 or newer, but this is {libc or 'another C library'} {version}; "
            "use a newer distribution"
        )
    return machine


def _build(toolchain: Toolchain, on_step: Callable[[str], None]) -> None:
    torch_folder = util.find_spec("torch")
    assert torch_folder is not None and torch_folder.origin is not None
    torch_libraries = sorted((Path(torch_folder.origin).parent / "lib").glob("*.so*"))
    with tempfile.TemporaryDirectory(prefix=f".{toolchain.folder.name}.", dir=toolchain.folder.parent) as name:
        unfinished = Toolchain(Path(name, "toolchain"), toolchain.requirements)
        unfinished.folder.mkdir(mode=0o700)  # pip does not keep others from writing to what it unpacks
        unfinished.libraries.mkdir(mode=0o700)
        unfinished.packages.mkdir(mode=0o700)
        # The folders that torch_npu looks for in a CANN installation; they may be empty.
        for part in ("home/runtime", "home/compiler", "opp"):
            (unfinished.cann / part).mkdir(parents=True)
        on_step(f"downloading {' and '.join(f'{r.name} {r.version}' for r in toolchain.requirements)}")
        _install(toolchain.requirements, unfinished.packages)
        on_step("building stand-ins for the CANN libraries")
        wheel = sorted((unfinished.packages / "torch_npu").rglob("*.so"))
        names, symbols = build_stand_ins(wheel, torch_libraries, unfinished.libraries)
        on_step("importing torch_npu")
        _check_import(unfinished)
        manifest = {
            "wheels": [str(r) for r in toolchain.requirements],
            "torch": metadata.version("torch"),
            "python": platform.python_version(),
            "stand_ins": names,
            "symbols": len(symbols),
        }
        (unfinished.folder / _MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n", encoding="utf-8")
        if toolchain.folder.exists():  # damaged: a complete one would have been kept
            shutil.rmtree(toolchain.folder)
        os.rename(unfinished.folder, toolchain.folder)


def _check_import(toolchain: Toolchain) -> None:
    """Raise ``ToolchainError`` if a Python with the toolchain cannot import torch_npu."""
    command = [sys.executable, "-c", "import torch_npu"]
    result = subprocess.run(
        command, env=environment(toolchain), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    if result.returncode:
        _logger.debug("import torch_npu: %s", result.stdout)
        raise ToolchainError(
            f"{toolchain.requirements[0].name} {toolchain.requirements[0].version} cannot be imported beside torch "
            f"{metadata.version('torch')}: {why_it_died(result.stdout) or f'exit status {result.returncode}'}"
        )


def _install(requirements: tuple[Requirement, ...], folder: Path) -> None:
    """Unpack the pinned wheels into ``folder``; pip compares the checksums, whatever index it uses."""
    listed = folder.with_name("requirements.txt")
    listed.write_text("".join(f"{r}\n" for r in requirements), encoding="utf-8")
    options = ["--no-input", "--disable-pip-version-check", "--quiet", "--retries", "2", "--timeout", "30"]
    command = [sys.executable, "-m", "pip", "install", *options, "--require-hashes", "--no-deps"]
    command += ["--only-binary", ":all:", "--target", str(folder), "--requirement", str(listed)]
    # Settings with which --target is an error, or a no-op.
    environment = {**os.environ, "PIP_USER": "0", "PIP_REQUIRE_VIRTUALENV": "0"}
    result = subprocess.run(command, capture_output=True, text=True, env=environment)
    listed.unlink()
    if result.returncode == 0:
        return
    text = f"{result.stdout}\n{result.stderr}"
    _logger.debug("pip: %s", text)
    names = " and ".join(f"{r.name} {r.version}" for r in requirements)
    if "HASH" in text:
        raise ToolchainError(
            f"a wheel of {names} from the package index does not match its pinned checksum; nothing was "
            "installed. Use an index that serves PyPI's own files (pip config list shows the current one)"
        )
    errors = [line.removeprefix("ERROR: ") for line in text.splitlines() if line.startswith("ERROR:")]
    reason = errors[-1] if errors else (text.strip().splitlines() or [f"exit status {result.returncode}"])[-1]
    raise ToolchainError(
        f"pip could not install {names}: {reason}. A package index must be reachable once (pip's settings apply, for "
        f"instance PIP_INDEX_URL), or copy the folder {folder.parent.parent.parent} from a machine that has it"
    )


def _joined(folder: Path, others: str | None) -> str:
    """A search path; an empty part would mean the working directory."""
    return os.pathsep.join([str(folder), *filter(None, (others or "").split(os.pathsep))])
