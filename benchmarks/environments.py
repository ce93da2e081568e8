"""Virtual environments with pinned packages, made once; none of them ever gets a torch for CUDA."""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path


class CommandFailed(RuntimeError):
    """A command of a set-up ended with an error; says which, its last words, and where the others are."""


def python_of(
    folder: Path,
    requirements: Sequence[str],
    unwanted: Sequence[str] = (),
    variables: Mapping[str, str] | None = None,
) -> Path:
    """The Python of an environment; made where it is not there yet, or was made of other requirements.

    Two processes may ask for the same one: the second waits for the first.

    Args:
        folder: of the environment. Beside it lies ``NAME-install.log``.
        requirements: what pip installs. They name torch where its newest version would not be the CPU's.
        unwanted: what comes along and gets in the way.
        variables: of the environment in which pip builds.

    Raises:
        CommandFailed: pip cannot install them, or torch comes as a build for CUDA.
    """
    marker = folder / "installed.txt"
    wanted = "\n".join(requirements)
    python = folder / "bin" / "python"
    folder.parent.mkdir(parents=True, exist_ok=True)
    with folder.with_name(f"{folder.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if marker.exists() and marker.read_text() == wanted:
            return python
        shutil.rmtree(folder, ignore_errors=True)
        print(f"installing {', '.join(requirements)} in {folder}", flush=True)
        log = folder.with_name(f"{folder.name}-install.log")
        run([sys.executable, "-m", "venv", folder], log)
        # A wheel that was built otherwise may lie in pip's cache.
        caching = ["--no-cache-dir"] if variables else []
        run([python, "-m", "pip", "install", *caching, *requirements], log, variables)
        if unwanted:
            run([python, "-m", "pip", "uninstall", "-y", *unwanted], log)
        refuse_cuda(python, log)
        marker.write_text(wanted)
    return python


def refuse_cuda(python: Path, log: Path) -> None:
    """Raise :class:`CommandFailed` if a Python's torch is a build for CUDA; having none is fine."""
    code = """
import importlib.util, sys
if importlib.util.find_spec("torch"):
    import torch
    if torch.version.cuda:
        sys.exit(f"torch {torch.__version__} is a build for CUDA; pin torch to a version whose CPU build pip finds")
"""
    run([python, "-c", code], log)


def run(command: Sequence[str | Path], log: Path, variables: Mapping[str, str] | None = None) -> None:
    """Run a command, its output in a file.

    Raises:
        CommandFailed: with what it said last.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("w") as output:
        done = subprocess.run(
            command, stdout=output, stderr=subprocess.STDOUT, env={**os.environ, **(variables or {})}
        )
    if done.returncode:
        raise CommandFailed(f"{Path(command[0]).name} failed: {last_line(log)} (see {log})")


def last_line(log: Path) -> str:
    """The last line with something in it, at most 200 characters."""
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines()]
    return next((line for line in reversed(lines) if line), "without a word")[:200]
