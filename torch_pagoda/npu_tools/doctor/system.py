"""The machine as the checks read it: files below a root, environment, installed packages, commands.

Reads are bounded and text only: nothing read is executed, and control characters do not reach a terminal.
"""

from __future__ import annotations

import os
import platform
import stat
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path

from ..torch_build import cuda_release

__all__ = ["MOST_BYTES", "System", "plain"]

MOST_BYTES = 65536
"""Maximum bytes of a file, or of a command's output."""

_SECONDS = 30


def plain(text: str, most: int = 200) -> str:
    """``text`` on one line, without control characters, at most ``most`` characters."""
    line = "".join(c if c.isprintable() else " " for c in " ".join(text[: 4 * most].split()))
    return line if len(line) <= most else line[: most - 1] + "…"


def _run(command: Sequence[str]) -> tuple[int, str] | None:
    """Exit status and output of a command; None if it is missing or takes too long."""
    with tempfile.TemporaryFile() as output:
        try:
            result = subprocess.run(
                list(command), stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, timeout=_SECONDS
            )
        except (OSError, subprocess.TimeoutExpired):
            return None
        output.seek(0)
        return result.returncode, output.read(MOST_BYTES).decode(errors="replace")


def _installed(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _groups() -> frozenset[int]:
    return frozenset((*os.getgroups(), os.getegid()))


@dataclass(frozen=True)
class System:
    """The machine, or a fake of it in tests.

    Attributes:
        root: folder that absolute paths are looked up in.
        environment: variables of the process.
        run: runs a command; returns its exit status and output, or None if there is no such command.
        version_of: returns the version of an installed distribution, or None.
        torch_cuda: returns the CUDA release that the installed torch is built for, or None.
        user_id: effective user.
        groups: ids of the user's groups.
        machine: as ``platform.machine()``.
        python: version of the running Python.
    """

    root: Path = Path("/")
    environment: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))
    run: Callable[[Sequence[str]], tuple[int, str] | None] = _run
    version_of: Callable[[str], str | None] = _installed
    torch_cuda: Callable[[], str | None] = cuda_release
    user_id: int = field(default_factory=os.geteuid)
    groups: frozenset[int] = field(default_factory=_groups)
    machine: str = field(default_factory=platform.machine)
    python: tuple[int, ...] = sys.version_info[:3]

    @property
    def in_container(self) -> bool:
        """True in a container."""
        return self.path("/.dockerenv").exists() or self.path("/run/.containerenv").exists()

    def path(self, name: str | os.PathLike[str]) -> Path:
        """The path of the absolute path ``name`` below the root."""
        return self.root / Path(name).relative_to("/") if os.path.isabs(name) else self.root / name

    def read(self, name: str | os.PathLike[str]) -> str | None:
        """The text of a regular file, at most ``MOST_BYTES`` of it; None if it cannot be read."""
        try:
            # A pipe in its place would block.
            descriptor = os.open(self.path(name), os.O_RDONLY | os.O_NONBLOCK)
        except (OSError, ValueError):
            return None
        with os.fdopen(descriptor, "rb") as file:
            try:
                if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                    return None
                return file.read(MOST_BYTES).decode(errors="replace")
            except OSError:
                return None

    def names(self, folder: str, most: int = 1000) -> list[str]:
        """Names of the first entries of a folder, sorted; empty if it cannot be listed."""
        found = []
        try:
            with os.scandir(self.path(folder)) as entries:
                for entry in entries:
                    found.append(entry.name)
                    if len(found) == most:
                        break
        except (OSError, ValueError):
            return []
        return sorted(found)
