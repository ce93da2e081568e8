"""Builds stand-ins for the CANN libraries that torch_npu is linked with, for machines without CANN.

The shared objects of the torch-npu wheel are bound at load time (``BIND_NOW``): every symbol of CANN must exist,
though nothing that runs without a device calls it. The stand-ins define each symbol as a function that does nothing
and returns 0.
"""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import subprocess
from collections.abc import Iterable, Sequence
from pathlib import Path

# Libraries with a version in their name (libc.so.6, libstdc++.so.6) are the system's; CANN's and torch's have none.
_SYSTEM_LIBRARY = re.compile(r"\.so\.\d+$|^ld-linux")
_SYMBOL = re.compile(r"[A-Za-z_.$][\w.$]*")
_NEEDED = re.compile(r"\(NEEDED\).*\[(.+)\]")


class ToolchainError(RuntimeError):
    """The offline toolchain is not available; the message says why and gives the remedy."""


def find_tools() -> dict[str, str]:
    """Paths of the build tools: ``cc`` (or $CC), ``nm`` and ``readelf``.

    Raises:
        ToolchainError: one of them is not on PATH.
    """
    compilers = [os.environ["CC"]] if os.environ.get("CC") else ["cc", "gcc", "clang"]
    found = {
        "cc": next((path for name in compilers if (path := shutil.which(name))), None),
        "nm": shutil.which("nm"),
        "readelf": shutil.which("readelf"),
    }
    missing = [{"cc": f"a C compiler ({', '.join(compilers)})"}.get(name, name) for name in found if not found[name]]
    if missing:
        raise ToolchainError(
            f"{' and '.join(missing)} not found on PATH, but needed to build stand-ins for the CANN libraries; "
            "install gcc and binutils (for instance: apt install gcc binutils)"
        )
    return {name: path for name, path in found.items() if path}


def undefined_symbols(library: Path, nm: str = "nm") -> set[str]:
    """Undefined symbols of ``library``.

    Excludes weak symbols, which may stay undefined, and versioned ones (``malloc@GLIBC_2.2.5``), which are the
    system's.
    """
    return {s for kind, s in _symbols(library, nm, "--undefined-only") if kind == "U" and "@" not in s}


def defined_symbols(library: Path, nm: str = "nm") -> set[str]:
    """Exported symbols of ``library``, without their versions."""
    return {symbol.partition("@")[0] for _, symbol in _symbols(library, nm, "--defined-only")}


def needed_libraries(library: Path, readelf: str = "readelf") -> set[str]:
    """Names of the shared libraries that ``library`` needs."""
    return set(_NEEDED.findall(_output([readelf, "-d", "-W", str(library)])))


def missing_symbols(libraries: Sequence[Path], providers: Iterable[Path], nm: str = "nm") -> list[str]:
    """Sorted symbols that ``libraries`` need and neither they, ``providers``, the system nor Python define."""
    missing = set().union(*(undefined_symbols(library, nm) for library in libraries))
    for library in (*libraries, *providers):
        missing -= defined_symbols(library, nm)
    system: list[ctypes.CDLL] = [ctypes.pythonapi]
    for name in ("libc.so.6", "libm.so.6", "libdl.so.2", "libpthread.so.0", "librt.so.1", "libstdc++.so.6"):
        try:
            system.append(ctypes.CDLL(name))
        except OSError:  # merged into libc, or not there
            continue
    return sorted(symbol for symbol in missing if not any(hasattr(library, symbol) for library in system))


def build_stand_ins(
    libraries: Sequence[Path], providers: Sequence[Path], folder: Path
) -> tuple[list[str], list[str]]:
    """Build, in ``folder``, a stand-in for each missing library that ``libraries`` need.

    Args:
        libraries: all shared objects of the wheel.
        providers: shared objects loaded earlier, torch's.
        folder: existing folder for the stand-ins.

    Returns:
        names of the stand-ins, and of the symbols that each defines.

    Raises:
        ToolchainError: a tool is missing or fails.
    """
    tools = find_tools()
    present = {path.name for path in (*libraries, *providers)}
    needed = set().union(*(needed_libraries(library, tools["readelf"]) for library in libraries))
    names = sorted(n for n in needed - present if not _SYSTEM_LIBRARY.search(n))
    symbols = missing_symbols(libraries, providers, tools["nm"])
    strange = [s for s in symbols if not _SYMBOL.fullmatch(s)]
    if strange:
        raise ToolchainError(
            f"symbol {strange[0]!r} of {libraries[0].parent} cannot be written in C; please report this"
        )
    source, compiled = folder / "stand_in.c", folder / "stand_in.o"
    source.write_text("".join(map(_definition, range(len(symbols)), symbols)), encoding="ascii")
    _output([tools["cc"], "-O1", "-fPIC", "-c", str(source), "-o", str(compiled)])
    for name in names:
        # The loader looks a symbol up only in the libraries that the one in need of it names, so all get all of them.
        _output([tools["cc"], "-shared", f"-Wl,-soname,{name}", str(compiled), "-o", str(folder / name)])
    source.unlink()
    compiled.unlink()
    return names, symbols


def _definition(index: int, symbol: str) -> str:
    declaration = f"long stand_in_{index}(void)"
    return f'{declaration} __asm__("{symbol}");\n{declaration} {{ return 0; }}\n'


def _symbols(library: Path, nm: str, which: str) -> list[tuple[str, str]]:
    """(kind, name) of the dynamic symbols of ``library``; nm prints ``[address] kind name``."""
    rows = (line.split() for line in _output([nm, "-D", which, str(library)]).splitlines())
    return [(row[-2], row[-1]) for row in rows if len(row) >= 2]


def _output(command: list[str]) -> str:
    result = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "LC_ALL": "C"})
    if result.returncode:
        reason = (result.stderr.strip() or f"exit status {result.returncode}").splitlines()[0]
        raise ToolchainError(f"{Path(command[0]).name} failed on {command[-1]}: {reason}")
    return result.stdout
