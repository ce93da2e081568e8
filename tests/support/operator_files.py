"""The files that test CPU operators, by name, whichever folder they lie in."""

from __future__ import annotations

from pathlib import Path

FOLDER = Path(__file__).resolve().parents[1] / "runtime" / "ops"
FILES = {
    path.stem.removeprefix("test_"): path
    for path in sorted(FOLDER.rglob("test_*.py"))
    if "npu" not in path.relative_to(FOLDER).parts
}
"""Name without ``test_`` → file; operators for an NPU have kernels in torch alone and are left out."""


def operator_files(names: str) -> list[Path]:
    """The files of some names, separated by spaces; ``KeyError`` for one that there is not."""
    return [FILES[name] for name in names.split()]
