"""OpenMP for the kernels: torch's own runtime, whose threads they share.

The kernels are linked without a runtime: what they need of one is looked up among the libraries that the process has
loaded for all. Torch's is not always of these, though loaded: a wheel that gave it a name of its own
(``libgomp-<hash>.so.1``) keeps it to itself.
"""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

_OTHERS = ("libgomp.so.1", "libiomp5.so", "libomp.so")
"""Runtimes with GNU's entry points that torch may have from elsewhere: the system, conda, MKL, LLVM."""


def promote_openmp(torch_folder: Path) -> None:
    """Make the functions of torch's OpenMP runtime known to all libraries that are loaded from now on.

    Where torch has loaded none, the system's libgomp is loaded.

    Args:
        torch_folder: of the installed package.

    Raises:
        OSError: there is none.
    """
    if not hasattr(os, "RTLD_NOLOAD"):  # Windows, for which there are no kernels
        return
    folders = (torch_folder / "lib", torch_folder.parent / "torch.libs")
    own = [str(path) for folder in folders for path in sorted(folder.glob("libgomp*.so*"))]
    for name in (*own, *_OTHERS):
        try:
            ctypes.CDLL(name, mode=os.RTLD_GLOBAL | os.RTLD_NOLOAD)
        except OSError:
            continue
        return
    ctypes.CDLL(_OTHERS[0], mode=os.RTLD_GLOBAL)
