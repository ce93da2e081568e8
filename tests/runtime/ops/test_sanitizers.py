"""The kernels' own tests once more, on a library built with ASan and UBSan: any finding ends the process."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from operator_files import FILES

from torch_pagoda.runtime.ops import native

FLAGS = (
    *(flag for flag in native.FLAGS if flag != "-O3"),
    "-O1",
    "-fexpensive-optimizations",  # contracts products and sums as -O3 does, so that numbers are those of users
    "-g",
    "-fno-omit-frame-pointer",
    "-fsanitize=address,undefined",
    "-fno-sanitize-recover=all",
)
TESTS = [path for name, path in FILES.items() if name not in ("native", "sanitizers", "operators_in_graphs")]

# Loaded by pytest before any test: the tests' kernels are those of the sanitized library.
PLUGIN = """
import ctypes, os, warnings
from pathlib import Path
import torch
from torch_pagoda.runtime.ops import native
native.promote_openmp(Path(torch.__file__).parent)
_library = ctypes.CDLL(os.environ["PAGODA_SANITIZED"])
native.load_kernels = lambda: _library
native._bound_function.cache_clear()
"""


@pytest.mark.sanitize
@pytest.mark.parametrize("path", TESTS, ids=lambda path: path.stem)
def test_kernels_are_clean(path, sanitized, tmp_path):
    (tmp_path / "sanitized_kernels.py").write_text(PLUGIN)
    environment = {
        **os.environ,
        "LD_PRELOAD": _preloaded(),
        "ASAN_OPTIONS": "detect_leaks=0:halt_on_error=1",
        "UBSAN_OPTIONS": "print_stacktrace=1:halt_on_error=1",
        "PAGODA_SANITIZED": str(sanitized),
        "PYTHONPATH": str(tmp_path),
    }
    # Not captured by file descriptor, for what a dying process has not yet read is lost.
    options = ["-q", "-n", "0", "-p", "sanitized_kernels", "--capture=sys", "-x"]
    command = [sys.executable, "-m", "pytest", *options, str(path)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    # 5: all tests of the file are for another processor.
    assert done.returncode in (0, 5), f"{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    assert "ERROR: AddressSanitizer" not in done.stderr and "runtime error" not in done.stderr


@pytest.mark.sanitize
def test_a_fault_is_found(tmp_path):
    """The build and the options stop at what they are for."""
    source = tmp_path / "fault.cpp"
    source.write_text('extern "C" int f(int* p, int n) { return p[n] + (n << 31); }\n')
    library = tmp_path / "fault.so"
    subprocess.run(["g++", *FLAGS, str(source), "-o", str(library)], check=True)
    call = f"import ctypes; a = (ctypes.c_int * 4)(); ctypes.CDLL({str(library)!r}).f(a, 100)"
    environment = {**os.environ, "LD_PRELOAD": _preloaded(), "ASAN_OPTIONS": "detect_leaks=0"}
    done = subprocess.run([sys.executable, "-c", call], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode != 0 and ("AddressSanitizer" in done.stderr or "runtime error" in done.stderr)


@pytest.fixture(scope="module")
def sanitized(tmp_path_factory: pytest.TempPathFactory) -> Path:
    library = tmp_path_factory.mktemp("sanitized") / "kernels.so"
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("there is no g++")
    native.build_library(compiler, library, FLAGS)
    return library


def _preloaded() -> str:
    """Libraries to be loaded first: the sanitizer's, and that of exceptions, which it looks for at its start."""
    return " ".join(_of_compiler(name) for name in ("libasan.so", "libstdc++.so"))


def _of_compiler(name: str) -> str:
    """Where the compiler has a library."""
    command = ["g++", f"-print-file-name={name}"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
