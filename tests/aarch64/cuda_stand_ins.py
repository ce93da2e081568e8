"""Libraries in place of CUDA's, which torch's aarch64 wheel is linked to: functions that return 0 and are not called.

Only the tests' emulated Python uses them. The loader wants every symbol under the version that torch asks for, from
the library that it names.
"""

from __future__ import annotations

import subprocess
from collections import defaultdict
from pathlib import Path

PREFIX = "aarch64-linux-gnu-"
OTHERS = ("Py", "_Py", "_ITM", "__gmon", "__tls", "_ZTH")
"""Symbols of Python itself, and those that may be missing."""


def write_stand_ins(torch: Path, root: Path, folder: Path) -> None:
    """Write to ``folder`` a library for each of those that the package ``torch`` needs and ``root`` lacks."""
    libraries = sorted([*(torch / "lib").glob("*.so*"), *torch.glob("_C*.so")])
    system = [path for part in ("lib", "usr/lib") for path in (root / part / "aarch64-linux-gnu").glob("*.so*")]
    present = {path.name for path in (*libraries, *system, *root.glob("lib/ld*"))}
    present |= {path.name for path in torch.parent.glob("torch.libs/*")}
    missing: set[str] = set()
    needed: dict[str, tuple[str, list[str]]] = {}  # symbol → version, and what the library that asks for it loads
    defined: set[str] = set()
    library_of: dict[str, str] = {}
    for path in libraries:
        loads = [name for name in _needed(path) if name not in present]
        missing |= set(loads)
        library_of |= _versions(path)
        for kind, name in _symbols(path):
            plain, _, version = name.partition("@")
            if kind == "U":
                needed.setdefault(plain, (version.lstrip("@"), loads))
            elif kind not in "wv":
                defined.add(plain)
    for path in (*system, *torch.parent.glob("torch.libs/*.so*"), *root.glob("lib/ld*")):
        defined |= {name.partition("@")[0] for kind, name in _symbols(path) if kind not in "Uwv"}

    names: dict[str, dict[str, list[str]]] = {library: defaultdict(list) for library in missing}
    for version, library in library_of.items():
        if library in missing:
            names[library][version] = []
    versioned = set(library_of.values())
    for name, (version, loads) in needed.items():
        if name in defined or name.startswith(OTHERS):
            continue
        # A symbol without a version may come from any library that is loaded with the one that asks for it.
        library = library_of.get(version) or min(loads, key=lambda name: (name in versioned, name), default="")
        if library in missing:
            names[library][version if version in library_of else ""].append(name)
    folder.mkdir()
    for library, versions in names.items():
        _write(folder / library, versions)


def _write(path: Path, versions: dict[str, list[str]]) -> None:
    functions = [name for group in versions.values() for name in group]
    source, script = path.with_suffix(".s"), path.with_suffix(".map")
    labels = "".join(f".globl {name}\n.type {name},%function\n{name}:\n" for name in functions)
    source.write_text(f".text\n{labels}mov x0, #0\nret\n")
    command = [f"{PREFIX}gcc", "-shared", "-nostdlib", f"-Wl,-soname,{path.name}", "-o", str(path), str(source)]
    named = {version: group for version, group in versions.items() if version}
    if named:
        lines = [f"{v} {{ global: {' '.join(n + ';' for n in group)} }};\n" for v, group in named.items()]
        script.write_text("".join(lines))
        command.append(f"-Wl,--version-script={script}")
    subprocess.run(command, check=True)


def _output(*command: str) -> list[str]:
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.splitlines()


def _symbols(path: Path) -> list[tuple[str, str]]:
    """(kind, name@version) of each dynamic symbol."""
    lines = (line.split() for line in _output(f"{PREFIX}nm", "-D", str(path)))
    return [(words[-2], words[-1]) for words in lines if len(words) > 1]


def _needed(path: Path) -> list[str]:
    lines = _output(f"{PREFIX}readelf", "-dW", str(path))
    return [line.split("[")[1].rstrip("]") for line in lines if "(NEEDED)" in line]


def _versions(path: Path) -> dict[str, str]:
    """Version → the library that is to have it."""
    found, library = {}, ""
    for line in _output(f"{PREFIX}readelf", "-VW", str(path)):
        if "File:" in line:
            library = line.split("File:")[1].split()[0]
        elif "Name:" in line and "Flags" in line and library:
            found[line.split("Name:")[1].split()[0]] = library
    return found
