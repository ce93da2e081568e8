"""A Python for aarch64 with torch and the packages of this one, run by qemu's user mode: slow, and right.

It is made once, in a folder of the cache. Nothing is installed: Debian's packages for arm64 are unpacked there, and
pip puts wheels beside them. Torch's aarch64 wheel is linked to CUDA, whose libraries ``cuda_stand_ins`` replaces.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import torch
from cuda_stand_ins import write_stand_ins
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from torch_pagoda.runtime.ops import native
from torch_pagoda.runtime.private_folder import cache_folder

COMPILER = "aarch64-linux-gnu-g++"
EMULATOR = "qemu-aarch64"
ROOT = Path(__file__).parents[2]
PATIENCE = 3 * 3600
"""Seconds that an emulated process may take, which now and then hangs."""
LAYOUT = "2"
"""Of the folder that is made here; another one makes it anew."""
PYTHON = f"python{sys.version_info.major}.{sys.version_info.minor}"
DEBIAN = (
    "libc6 libstdc++6 libgcc-s1 libgomp1 libgfortran5 zlib1g libexpat1 libssl3 libffi8 libbz2-1.0 liblzma5 "
    f"libsqlite3-0 libuuid1 libcrypt1 lib{PYTHON}-minimal lib{PYTHON}-stdlib {PYTHON}-minimal {PYTHON}"
).split()
IMPORTED = (
    "transformers",
    "safetensors",
    "numpy",
    "rich",
    "typer",
    "sympy",
    "networkx",
    "pytest",
    "pytest-xdist",
    "hypothesis",
    "psutil",
)
NOT_COPIED = {"torch", "setuptools"}
PLATFORMS = ("manylinux_2_28_aarch64", "manylinux2014_aarch64", "manylinux_2_17_aarch64")
CPUINFO = """processor\t: {0}
Features\t: fp asimd evtstrm aes pmull sha1 sha2 crc32 atomics fphp asimdhp cpuid asimdrdm lrcpc dcpop asimddp
CPU implementer\t: 0x41
CPU architecture: 8
CPU variant\t: 0x1
CPU part\t: 0xd0c
CPU revision\t: 0

"""

# Loaded before anything that calls a kernel. An emulated process hangs now and then where threads start others, so it
# builds none itself.
PLUGIN = """
import ctypes, os
from concurrent.futures import Future
from torch_pagoda.runtime.ops import native
_loaded = Future()
_loaded.set_result(ctypes.CDLL(os.environ["PAGODA_KERNELS"]))
native._loading = lambda: _loaded
"""


class CannotEmulate(RuntimeError):
    """There can be no such Python here; the message says why."""


@dataclass(frozen=True)
class Build:
    """The kernels for some ARM processors.

    Attributes:
        march: what the compiler may use.
        cpu: of qemu's, one that has no more where there is such a one.
    """

    march: str
    cpu: str


BUILDS = {
    "armv8.2": Build("armv8.2-a+fp16+dotprod", "neoverse-n1"),
    "armv8.6": Build("armv8.6-a+bf16+i8mm", "max,sve=off,pauth=off"),
}


class Emulated:
    """An aarch64 Python.

    Args:
        folder: where it lies, whole.
        kernels: an empty folder, where the kernels of a build are compiled when they are first wanted.
    """

    def __init__(self, folder: Path, kernels: Path) -> None:
        self.folder = folder
        self.kernels = kernels

    def run(self, build: Build, arguments: Sequence[str], scratch: Path) -> subprocess.CompletedProcess[str]:
        """Run Python with the kernels of a build; ``scratch`` is an empty folder.

        Raises:
            subprocess.TimeoutExpired: it takes longer than ``PATIENCE``.
        """
        library = self._library(build)
        (scratch / "cross_built_kernels.py").write_text(PLUGIN)
        package = scratch / "torch_pagoda"  # as a wheel lays it out
        package.mkdir()
        parts = [path for path in (ROOT / "torch_pagoda").iterdir() if path.name != "__pycache__"]
        for path in (*parts, *(ROOT / name for name in ("compiler", "passes", "runtime"))):
            (package / path.name).symlink_to(path)
        root = self.folder / "root"
        libraries = [self.folder / "stand_ins", root / "usr/lib/aarch64-linux-gnu", root / "lib/aarch64-linux-gnu"]
        inner = {
            "LD_LIBRARY_PATH": ":".join(map(str, libraries)),
            "PYTHONPATH": f"{scratch}:{self.folder / 'site'}",
            "PYTHONDONTWRITEBYTECODE": "1",
            "PAGODA_KERNELS": str(library),
            "TORCH_PAGODA_CACHE": str(scratch / "cache"),
            "HF_HUB_OFFLINE": "1",
            "OMP_NUM_THREADS": "1",
        }
        given = [word for name, value in inner.items() for word in ("-E", f"{name}={value}")]
        command = [EMULATOR, "-cpu", build.cpu, "-L", str(root), *given, str(root / "usr/bin" / PYTHON), *arguments]
        outer = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST_", "PYTHON"))}
        return subprocess.run(
            command, cwd=scratch, env=outer, capture_output=True, text=True, check=False, timeout=PATIENCE
        )

    def _library(self, build: Build) -> Path:
        library = self.kernels / f"pagoda_{build.march}.so"
        if not library.exists():
            flags = [flag for flag in native.FLAGS if not flag.startswith("-march=")]
            sources = sorted(map(str, (ROOT / "runtime/ops/csrc").glob("*.cpp")))
            _run([COMPILER, *flags, f"-march={build.march}", *sources, "-o", str(library)])
        return library


def set_up(kernels: Path) -> Emulated:
    """The Python of the cache, made now if need be, which takes minutes and 3 GB.

    Args:
        kernels: as for ``Emulated``.

    Raises:
        CannotEmulate: a tool is missing, or something cannot be downloaded.
    """
    for tool, package in ((EMULATOR, "qemu-user"), (COMPILER, "g++-aarch64-linux-gnu"), ("dpkg", "dpkg")):
        if shutil.which(tool) is None:
            raise CannotEmulate(f"there is no {tool} on PATH; install it (for instance: apt install {package})")
    wheels = _wheels()
    key = hashlib.sha256("\0".join([LAYOUT, PYTHON, *wheels, *DEBIAN]).encode()).hexdigest()[:12]
    folder = cache_folder() / f"aarch64-{key}"
    if not folder.exists():
        unfinished = folder.with_name(f"{folder.name}-{os.getpid()}.part")
        shutil.rmtree(unfinished, ignore_errors=True)
        try:
            _make(unfinished, wheels)
            unfinished.rename(folder)
        finally:
            shutil.rmtree(unfinished, ignore_errors=True)
    return Emulated(folder, kernels)


def _wheels() -> list[str]:
    """What pip is to install: torch, and what operators' tests import, in the versions of this Python."""
    wanted, versions = list(IMPORTED), {}
    while wanted:
        name = canonicalize_name(wanted.pop())
        if name in versions or name in NOT_COPIED:
            continue
        found = metadata.distribution(name)
        versions[name] = found.version
        asked = [Requirement(line) for line in found.requires or ()]
        wanted += [r.name for r in asked if r.marker is None or r.marker.evaluate({"extra": ""})]
    copied = [f"{name}=={version}" for name, version in versions.items()]
    return [f"torch=={torch.__version__.partition('+')[0]}", *sorted(copied)]


def _make(folder: Path, wheels: Sequence[str]) -> None:
    root = folder / "root"
    root.mkdir(parents=True)
    _unpack_debian(folder / "apt", root)
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--only-binary=:all:", "--no-cache-dir"]
    pip += [word for platform in PLATFORMS for word in ("--platform", platform)]
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    _run([*pip, "--python-version", version, "--target", str(folder / "site"), *wheels])
    write_stand_ins(folder / "site" / "torch", root, folder / "stand_ins")
    # What torch reads about the processor, which would be the host's.
    identification = root / "sys/devices/system/cpu/cpu0/regs/identification"
    identification.mkdir(parents=True)
    (identification / "midr_el1").write_text("0x00000000410fd0c0\n")
    (root / "proc").mkdir()
    (root / "proc/cpuinfo").write_text("".join(CPUINFO.format(i) for i in range(2)))


def _unpack_debian(apt: Path, root: Path) -> None:
    """Download Debian's packages for arm64 from where this system has its own, with lists of our own."""
    for name in ("lists/partial", "cache/archives/partial", "packages"):
        (apt / name).mkdir(parents=True)
    (apt / "status").touch()
    options = {
        "APT::Architecture": "arm64",
        "APT::Architectures": "arm64",
        "APT::Sandbox::User": "",
        "Dir::State::lists": apt / "lists",
        "Dir::State::status": apt / "status",
        "Dir::Cache": apt / "cache",
    }
    command = ["apt-get", "-qq", *(word for name, value in options.items() for word in ("-o", f"{name}={value}"))]
    _run([*command, "update"])
    _run([*command, "download", *DEBIAN], cwd=apt / "packages")
    for package in sorted((apt / "packages").glob("*.deb")):
        _run(["dpkg", "-x", str(package), str(root)])
    shutil.rmtree(apt)


def _run(command: Sequence[str], cwd: Path | None = None) -> None:
    try:
        done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False)
    except OSError as error:
        raise CannotEmulate(f"{command[0]} cannot be run: {error}") from None
    if done.returncode:
        lines = done.stderr.strip().splitlines() or ["no message"]
        raise CannotEmulate(f"{' '.join(command[:2])} failed: {lines[-1]}")
