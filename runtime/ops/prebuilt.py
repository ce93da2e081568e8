"""Kernels built ahead for families of processors, which a wheel brings along, and the choice among them.

``packaging/build_wheel.py`` puts a library ``kernels-BUILD-KEY.so`` into the folder ``prebuilt_kernels`` next to this
file. Its key is a digest of the sources and flags that it is made of; a file next to it holds its own digest, as in
``kernel_cache``. An installation from sources has none and builds its own.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from .kernel_cache import KernelBuildError, load_checked

KERNELS = "TORCH_PAGODA_KERNELS"
"""Environment variable: which kernels are loaded, one of ``CHOICES``; ``auto`` if it is not set."""
CHOICES = ("auto", "jit", "prebuilt")
FOLDER = Path(__file__).parent / "prebuilt_kernels"


@dataclass(frozen=True, slots=True)
class KernelBuild:
    """A family of processors that a library is compiled for.

    Attributes:
        name: in names of files.
        machine: as ``platform.machine()`` says it.
        flags: the compiler's, for the instructions that it may use.
        needs: what ``/proc/cpuinfo`` says of a processor that has these instructions.
    """

    name: str
    machine: str
    flags: tuple[str, ...]
    needs: frozenset[str]


def _x86(name: str, instructions: Mapping[str, str]) -> KernelBuild:
    """A build from GCC's and Linux' names of the same instructions: none is used that is not asked for."""
    return KernelBuild(name, "x86_64", tuple(f"-m{gcc}" for gcc in instructions), frozenset(instructions.values()))


_AVX2 = {
    **{name: name for name in ("avx2", "fma", "f16c", "bmi2", "movbe", "popcnt")},
    **{"bmi": "bmi1", "lzcnt": "abm"},
}
_AVX_VNNI = _AVX2 | {"avxvnni": "avx_vnni"}
_AVX512 = _AVX2 | {name: name for name in ("avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512cd")}
_VNNI = _AVX512 | {"avx512vnni": "avx512_vnni"}
_BF16 = _VNNI | {"avx512vbmi": "avx512vbmi", "avx512bf16": "avx512_bf16"}
_AMX = _BF16 | {"amx-tile": "amx_tile", "amx-int8": "amx_int8", "amx-bf16": "amx_bf16"}
_DOTPROD = frozenset("fp asimd atomics crc32 asimdrdm fphp asimdhp asimddp".split())

BUILDS = (
    _x86("amx", _AMX),  # Sapphire Rapids
    _x86("avx512bf16", _BF16),  # Zen 4, Cooper Lake's successors
    _x86("avx512vnni", _VNNI),  # Cascade Lake, Ice Lake
    _x86("avxvnni", _AVX_VNNI),  # Alder Lake
    _x86("avx2", _AVX2),  # Haswell, Zen
    # Not armv8.6-a: Graviton 3 has these two of its extensions, but not all that it stands for.
    KernelBuild("i8mm", "aarch64", ("-march=armv8.2-a+fp16+dotprod+bf16+i8mm",), _DOTPROD | {"bf16", "i8mm"}),
    KernelBuild("dotprod", "aarch64", ("-march=armv8.2-a+fp16+dotprod",), _DOTPROD),  # Kunpeng 920, Graviton 2
)
"""Of each machine, the one with the most instructions first."""


def chosen_kernels() -> str:
    """Which kernels the environment asks for.

    Raises:
        ValueError: there are none of that name.
    """
    chosen = os.environ.get(KERNELS) or CHOICES[0]
    if chosen not in CHOICES:
        raise ValueError(f"{KERNELS}={chosen} is invalid; set it to one of {', '.join(CHOICES)}, or unset it")
    return chosen


def read_cpuinfo() -> str:
    """What Linux says of the processors; nothing elsewhere."""
    try:
        return Path("/proc/cpuinfo").read_text()
    except OSError:
        return ""


def choose_build(machine: str, cpuinfo: str) -> KernelBuild:
    """The build with the most instructions that a machine's processors have.

    Args:
        machine: as ``platform.machine()`` says it.
        cpuinfo: contents of its ``/proc/cpuinfo``.

    Raises:
        KernelBuildError: there is no build for it; the message says what it lacks.
    """
    builds = [build for build in BUILDS if build.machine == machine]
    has = _abilities(cpuinfo)
    for build in builds:
        if build.needs <= has:
            return build
    lacks = f", lacking {' '.join(sorted(builds[-1].needs - has))}" if builds and has else ""
    raise KernelBuildError(f"there is no build for this processor ({machine or 'unknown'}{lacks})")


def load_prebuilt(folder: Path, machine: str, cpuinfo: str, key_of: Callable[[KernelBuild], str]) -> ctypes.CDLL:
    """Load the library for this machine, if it was made of our sources and is as it was made.

    Args:
        folder: where libraries lie, if there are any.
        machine: as ``platform.machine()`` says it.
        cpuinfo: contents of ``/proc/cpuinfo``.
        key_of: a digest of what the library of a build is made of.

    Raises:
        KernelBuildError: there is no such library; the message says why.
    """
    if not folder.is_dir():
        raise KernelBuildError("this installation contains none")
    build = choose_build(machine, cpuinfo)
    library = folder / library_name(build, key_of(build))
    if not library.exists():
        raise KernelBuildError(f"{library.name} is missing: the builds are from other sources")
    # Whoever may write here may write our Python sources, too: that files are this user's alone is not asked.
    loaded = load_checked(library, lambda path: path.open("rb"))
    if loaded is None:
        raise KernelBuildError(f"could not load {library}; see the log")
    return loaded


def library_name(build: KernelBuild, key: str) -> str:
    """The file of a build's library."""
    return f"kernels-{build.name}-{key}.so"


def _abilities(cpuinfo: str) -> frozenset[str]:
    """What every processor of a machine has: its cores may differ."""
    lines = [line.partition(":") for line in cpuinfo.splitlines()]
    sets = [frozenset(value.split()) for key, _, value in lines if key.strip() in ("flags", "Features")]
    return frozenset.intersection(*sets) if sets else frozenset()
