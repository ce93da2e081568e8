"""Reads how the installed torch was built, without an import: with the wrong build torch_npu ends the process."""

from __future__ import annotations

import re
from importlib import util
from pathlib import Path

__all__ = ["cpu_build", "cuda_conflict", "cuda_release", "why_it_died"]

_CUDA = re.compile(r"""^cuda\b[^=\n]*=\s*['"]([\w.]{1,20})['"]""", re.MULTILINE)
_MOST_BYTES = 65536


def cuda_release() -> str | None:
    """The CUDA release that torch is built for, like "13.0"; None for a build without CUDA, or without torch.

    The version in torch's metadata does not tell: builds on PyPI have no "+cu130" there.
    """
    found = util.find_spec("torch")
    if found is None or found.origin is None:
        return None
    try:
        with Path(found.origin).with_name("version.py").open(encoding="utf-8", errors="replace") as file:
            cuda = _CUDA.search(file.read(_MOST_BYTES))
    except OSError:
        return None
    return cuda[1] if cuda else None


def cpu_build(release: str) -> str:
    """The command that installs the build for CPUs of a torch release, the one that torch_npu is compiled against."""
    return f"pip install --force-reinstall torch=={release} --index-url https://download.pytorch.org/whl/cpu"


def cuda_conflict(release: str) -> str:
    """Why torch_npu cannot be imported beside the installed torch, with the remedy; "" where its build allows it.

    Args:
        release: of the installed torch, as its metadata has it.
    """
    cuda = cuda_release()
    if cuda is None:
        return ""
    return (
        f"torch {release} is built for CUDA {cuda}, and torch_npu beside it ends the process; "
        f"install the build for CPUs: {cpu_build(release.partition('+')[0])}"
    )


def why_it_died(output: str) -> str:
    """The line of a dead process's output that says why: of an uncaught C++ exception, else its last line; or ""."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    said = [line.removeprefix("what():").strip() for line in lines if line.startswith("what():")]
    return next(iter(said or lines[-1:]), "")
