"""Wheels with the C++ kernels compiled, for all processors of one architecture that there are builds for.

    python packaging/build_wheel.py [--architecture x86_64|aarch64] [--compiler g++] [--folder dist]

It writes ``torch_pagoda-VERSION-py3-none-manylinux_2_28_ARCHITECTURE.whl``, which runs with any CPython and any
torch: the kernels are plain C functions that ctypes calls. The same sources, compiler and setuptools give the same
bytes. Whatever else installs this project (``pip install .``, with or without ``-e``, an sdist) compiles nothing;
kernels are then built where they run.

Needs this tree installed (``pip install -e .``), pip, binutils, and a compiler for the architecture: on Debian g++,
or from ``apt install g++-aarch64-linux-gnu`` to build for aarch64 elsewhere.
"""

from __future__ import annotations

import argparse
import base64
import hashlib
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path

from torch_pagoda.runtime.ops import native
from torch_pagoda.runtime.ops.kernel_cache import KernelBuildError, digest_file, note_digest
from torch_pagoda.runtime.ops.prebuilt import BUILDS, FOLDER, KernelBuild, library_name

ROOT = Path(__file__).resolve().parents[1]
ARCHITECTURES = sorted({build.machine for build in BUILDS})
POLICY = "manylinux_2_28"
NEWEST = {"GLIBC": (2, 28), "GLIBCXX": (3, 4, 24), "CXXABI": (1, 3, 11), "GCC": (7, 0, 0)}
"""Versions of symbols that PEP 600 systems of that policy have, by auditwheel's table."""
SYSTEM_LIBRARIES = re.compile(r"(lib(c|m|gcc_s|stdc\+\+|pthread|dl|rt)|ld-linux-(x86-64|aarch64))\.so\.\d+")
FROM_TORCH = re.compile(r"(GOMP|omp)_\w+")
"""Symbols without a library: torch's OpenMP runtime has them."""
REPRODUCIBLE = ("-s", "-Wl,--build-id=none")
LONG_AGO = (1980, 1, 1, 0, 0, 0)


def find_compiler(architecture: str, given: str | None = None) -> str:
    """The path of a compiler for an architecture.

    Args:
        architecture: as ``platform.machine()`` says it.
        given: its name or path, for another than GCC's usual one.

    Raises:
        SystemExit: it is not there; the message says what to install.
    """
    usual = f"{architecture}-linux-gnu-g++"
    names = [given] if given else [usual, "g++"] if architecture == platform.machine() else [usual]
    found = next(filter(None, map(shutil.which, names)), None)
    if found is None:
        package = "g++" if "g++" in names else f"g++-{architecture.replace('_', '-')}-linux-gnu"
        remedy = "say another with --compiler" if given else f"install one (on Debian: apt install {package})"
        raise SystemExit(f"no wheel for {architecture}: {' or '.join(names)} is not on PATH; {remedy}")
    target = subprocess.run([found, "-dumpmachine"], capture_output=True, text=True, check=False).stdout.strip()
    if target.partition("-")[0] != architecture:
        raise SystemExit(
            f"no wheel for {architecture}: {found} compiles for {target or 'it does not say what'}; say another with "
            "--compiler"
        )
    return found


def build_libraries(architecture: str, compiler: str, folder: Path) -> list[Path]:
    """Compile the kernels for each build of an architecture into a folder, each with its digest beside it.

    Raises:
        SystemExit: the compiler refuses, or a library needs more than the wheel's tag promises.
    """
    if shutil.which("readelf") is None:
        raise SystemExit("no wheel: readelf is not on PATH; install it (on Debian: apt install binutils)")
    libraries = []
    for build in (build for build in BUILDS if build.machine == architecture):
        library = folder / library_name(build, native.prebuilt_key(build))
        try:
            native.build_library(compiler, library, (*native.prebuilt_flags(build), *REPRODUCIBLE))
        except KernelBuildError as error:
            raise SystemExit(f"no wheel for {architecture}: the build {build.name}: {error}") from error
        if missing := list(unmet_needs(library)):
            raise SystemExit(f"no wheel for {architecture}: {library.name} needs {', '.join(missing)}")
        note_digest(library, native.compiler_version(compiler))
        libraries.append(library)
    return libraries


def unmet_needs(library: Path) -> Iterator[str]:
    """What a library needs that a system of the policy, with torch in the process, need not have."""
    command = ["readelf", "--wide", "--dynamic", "--dyn-syms", str(library)]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    for needed in re.findall(r"\(NEEDED\).*\[(.+)\]", said):
        if not SYSTEM_LIBRARIES.fullmatch(needed):
            yield needed
    for bind, symbol in re.findall(r" (LOCAL|GLOBAL|WEAK) +\w+ +UND (\S+)", said):
        name, _, version = symbol.partition("@")
        family, _, number = version.strip("@").rpartition("_")
        if version and not () < _numbers(number) <= NEWEST.get(family, ()):
            yield symbol
        elif not version and bind != "WEAK" and not FROM_TORCH.fullmatch(name):
            yield name


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", version)))


def build_pure_wheel(folder: Path) -> Path:
    """What pip makes of this tree, without kernels. It sees a copy, for left-overs of earlier builds would get in."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    tree = folder / "tree"
    ignore = shutil.ignore_patterns("__pycache__", "*.so", "*.so.sha256")
    for name in settings["tool"]["setuptools"]["package-dir"].values():
        shutil.copytree(ROOT / name, tree / name, ignore=ignore)
    for name in ("pyproject.toml", settings["project"]["readme"], *settings["project"]["license-files"]):
        shutil.copy(ROOT / name, tree / name)
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(folder), str(tree)]
    subprocess.run(command, check=True)
    (wheel,) = folder.glob("*.whl")
    return wheel


def read_wheel(wheel: Path) -> dict[str, bytes]:
    """The contents of a wheel by path."""
    with zipfile.ZipFile(wheel) as archive:
        return {name: archive.read(name) for name in archive.namelist() if not name.endswith("/")}


def with_libraries(pure: Mapping[str, bytes], libraries: list[Path], architecture: str) -> dict[str, bytes]:
    """The contents of a wheel for one architecture: a pure one's, libraries with their digests, and the right tag."""
    (metadata,) = {name.partition("/")[0] for name in pure if name.endswith(".dist-info/WHEEL")}
    contents = {name: data for name, data in pure.items() if name != f"{metadata}/RECORD"}
    lines = pure[f"{metadata}/WHEEL"].decode().splitlines()
    kept = [line for line in lines if line and not line.startswith(("Tag:", "Root-Is-Purelib:"))]
    kept += ["Root-Is-Purelib: false", f"Tag: py3-none-{POLICY}_{architecture}", ""]
    contents[f"{metadata}/WHEEL"] = "\n".join(kept).encode()
    for library in libraries:
        for file in (library, digest_file(library)):
            contents[f"torch_pagoda/runtime/ops/{FOLDER.name}/{file.name}"] = file.read_bytes()
    contents = {name: contents[name] for name in sorted(contents, key=lambda name: (name.startswith(metadata), name))}
    record = [f"{name},sha256={_base64_digest(data)},{len(data)}" for name, data in contents.items()]
    contents[f"{metadata}/RECORD"] = "\n".join([*record, f"{metadata}/RECORD,,", ""]).encode()
    return contents


def _base64_digest(data: bytes) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()


def write_wheel(wheel: Path, contents: Mapping[str, bytes]) -> None:
    """Write a wheel whose bytes depend on its contents alone."""
    wheel.parent.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(wheel, "w") as archive:
        for name, data in contents.items():
            entry = zipfile.ZipInfo(name, LONG_AGO)
            entry.compress_type = zipfile.ZIP_DEFLATED
            entry.external_attr = (0o100755 if name.endswith(".so") else 0o100644) << 16
            entry.create_system = 3  # Unix, wherever this runs
            archive.writestr(entry, data, compresslevel=9)


def describe(wheel: Path, builds: list[KernelBuild]) -> Iterator[str]:
    """Lines that say what is in a wheel, sizes in bytes and zipped."""
    with zipfile.ZipFile(wheel) as archive:
        entries = archive.infolist()
    libraries = [entry for entry in entries if entry.filename.endswith(".so")]
    yield f"{wheel}: {wheel.stat().st_size:,} bytes, {len(entries)} files"
    for build in builds:
        for entry in (e for e in libraries if Path(e.filename).match(library_name(build, "*"))):
            yield f"  {build.name:<12}{entry.file_size:>9,} bytes, {entry.compress_size:>8,} zipped  {entry.filename}"
    yield f"  libraries together: {sum(entry.compress_size for entry in libraries):,} bytes zipped"


def build_wheel(architecture: str, compiler: str, folder: Path) -> Path:
    """Build the wheel of an architecture and put it into a folder.

    Raises:
        SystemExit: that is impossible; the message says why.
    """
    if not FOLDER.is_relative_to(ROOT):
        raise SystemExit(f"no wheel: torch_pagoda is {FOLDER.parents[2]}, not this tree; run: pip install -e {ROOT}")
    with tempfile.TemporaryDirectory() as name:
        work = Path(name)
        pure = build_pure_wheel(work)
        contents = with_libraries(read_wheel(pure), build_libraries(architecture, compiler, work), architecture)
        wheel = folder / pure.name.replace("py3-none-any", f"py3-none-{POLICY}_{architecture}")
        write_wheel(wheel, contents)
    return wheel


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--architecture", choices=ARCHITECTURES, default=platform.machine())
    parser.add_argument("--compiler", help="name or path of a GCC for that architecture; by default the usual one")
    parser.add_argument("--folder", type=Path, default=ROOT / "dist", help="where the wheel goes")
    arguments = parser.parse_args()
    if arguments.architecture not in ARCHITECTURES:
        parser.error(f"there are no builds for this machine; say --architecture {' or '.join(ARCHITECTURES)}")
    compiler = find_compiler(arguments.architecture, arguments.compiler)
    wheel = build_wheel(arguments.architecture, compiler, arguments.folder)
    builds = [build for build in BUILDS if build.machine == arguments.architecture]
    print(*describe(wheel, builds), sep="\n")


if __name__ == "__main__":
    main()
