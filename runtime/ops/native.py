"""The C++ kernels, loaded by ctypes: prebuilt, or built with the machine's g++ on first use and cached."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from ..phases import phase
from ..private_folder import cache_folder
from .kernel_cache import Builder, KernelBuildError, load_library
from .openmp import promote_openmp
from .prebuilt import FOLDER, KERNELS, KernelBuild, chosen_kernels, load_prebuilt, read_cpuinfo

_logger = logging.getLogger(__name__)

_SOURCES = Path(__file__).parent / "csrc"
PORTABLE_FLAGS = (
    "-O3",
    "-fopenmp",
    "-shared",
    "-fPIC",
    "-std=c++17",
    "-ffp-contract=fast",
    "-fno-math-errno",
    "-fno-gnu-unique",  # where several builds are loaded, each uses its own tables
    "-Wno-psabi",
)
"""For any processor; what it may use besides is added."""
FLAGS = (*PORTABLE_FLAGS, "-march=native")

# The kernels' names for dtypes; what is missing here runs on the reference.
FLOAT_CODES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
DTYPE_CODES = {**FLOAT_CODES, torch.bool: 3}


def begin_loading() -> None:
    """Load the library, and build it if need be, on a thread of its own; who calls ``load_kernels`` waits for it.

    Raises:
        ValueError: ``$TORCH_PAGODA_KERNELS`` names no kernels.
    """
    _loading()


@functools.cache
def _loading() -> Future[ctypes.CDLL]:
    chosen = chosen_kernels()
    pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="pagoda-kernels")
    future = pool.submit(_load_or_build, cache_folder() / "kernels", chosen)
    pool.shutdown(wait=False)
    return future


@functools.cache
def load_kernels() -> ctypes.CDLL | None:
    """The library of C++ kernels, built if need be; None, after one warning, where that is impossible.

    It is one that came with a wheel, where that has one for this processor (see ``prebuilt``). Else it lies in
    ``$TORCH_PAGODA_CACHE/kernels`` (``~/.cache/torch_pagoda/kernels``) under a name that hashes sources, flags,
    processor and compiler, see ``kernel_cache``. Processes that need it at once build it once.

    Raises:
        ValueError: ``$TORCH_PAGODA_KERNELS`` names no kernels.
    """
    try:
        with phase("kernels"):
            return _loading().result()
    except (KernelBuildError, OSError) as error:
        warnings.warn(
            f"torch-pagoda runs without its C++ kernels, many times slower: {error}",
            RuntimeWarning,
            stacklevel=2,
        )
        return None


@dataclass(frozen=True, slots=True)
class NotedCall:
    """A call of a kernel that was made.

    Attributes:
        address: of the C function.
        arguments: packed.
        refused: raises what a repetition of the call that is refused means; None: its operator tells, run again.
    """

    address: int
    arguments: bytes
    refused: Callable[[], None] | None = None


class _Notes(threading.local):
    calls: list[NotedCall] | None = None


_notes = _Notes()


@contextmanager
def noting_calls() -> Iterator[list[NotedCall]]:
    """Note down the kernel calls that this thread makes and that are not refused."""
    outer, _notes.calls = _notes.calls, []
    try:
        yield _notes.calls
    finally:
        _notes.calls = outer


def kernel_function(name: str, refused: Callable[[], None] | None = None) -> Callable[[bytes], int] | None:
    """The C function ``name`` (packed argument struct → status); None where there are no kernels.

    Args:
        name: of the function.
        refused: as in :class:`NotedCall`.
    """
    function = _bound_function(name)
    calls = _notes.calls
    return function if calls is None or function is None else functools.partial(_note, function, calls, refused)


@functools.cache
def _bound_function(name: str) -> Callable[[bytes], int] | None:
    library = load_kernels()
    return None if library is None else bind_function(library, name)


def _note(
    function: Callable[[bytes], int], calls: list[NotedCall], refused: Callable[[], None] | None, arguments: bytes
) -> int:
    status = function(arguments)
    if not status:
        address = ctypes.cast(function, ctypes.c_void_p).value or 0  # type: ignore[arg-type]
        calls.append(NotedCall(address, arguments, refused))
    return status


def bind_function(library: ctypes.CDLL, name: str) -> Callable[[bytes], int]:
    """The function ``name`` of a library of kernels, which takes its packed arguments as bytes."""
    function = getattr(library, name)
    function.argtypes = [ctypes.c_char_p]
    function.restype = ctypes.c_int64
    return function


def _load_or_build(folder: Path, chosen: str = "auto") -> ctypes.CDLL:
    """The library that came with a wheel; else from ``folder``, or where that serves for nothing from this user's
    folder for temporary files."""
    promote_openmp(Path(torch.__file__).parent)
    if chosen == "jit":
        return _load_built(folder)
    try:
        return load_prebuilt(FOLDER, platform.machine(), read_cpuinfo(), prebuilt_key)
    except KernelBuildError as error:
        why = f"no prebuilt kernels are usable: {error}"
    if chosen == "prebuilt":
        raise KernelBuildError(f"{KERNELS}={chosen} and {why}")
    _logger.info(why)
    try:
        return _load_built(folder)
    except KernelBuildError as error:
        raise KernelBuildError(f"{error}; {why}") from error


def _load_built(folder: Path) -> ctypes.CDLL:
    """The library that was built on this machine, or is built now."""
    compiler = shutil.which("g++")
    builder = None
    if compiler is not None:
        version = compiler_version(compiler)
        builder = Builder(version, functools.partial(build_library, compiler))
    return load_library([folder, _temporary_folder()], _fingerprint(), builder)


def compiler_version(compiler: str) -> str:
    """What a compiler says about itself."""
    said = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=False).stdout
    return said.partition("\n")[0]


def _temporary_folder() -> Path:
    user = f"-{os.geteuid()}" if hasattr(os, "geteuid") else ""
    return Path(tempfile.gettempdir(), f"torch_pagoda_kernels{user}")


def build_library(compiler: str, library: Path, flags: Sequence[str] = FLAGS) -> None:
    """Compile the kernels into a neighboring folder and rename the result: nobody ever sees half a library.

    Raises:
        KernelBuildError: the compiler refuses; what it printed is logged.
    """
    with tempfile.TemporaryDirectory(prefix=library.stem, dir=library.parent) as folder:
        units = _units()
        objects = [str(Path(folder, f"{i}.o")) for i in range(len(units))]
        with ThreadPoolExecutor(max_workers=min(len(objects), os.cpu_count() or 1)) as pool:
            compile_one = functools.partial(_run_compiler, compiler, flags)
            # The first failure is raised here; the others have finished by then and are not reported.
            list(pool.map(compile_one, [[*unit, "-o", o] for unit, o in zip(units, objects, strict=True)]))
        unfinished = Path(folder, library.name)
        linking = [flag for flag in flags if flag != "-fopenmp"]  # the process has a runtime, see ``openmp``
        _run_compiler(compiler, linking, [*objects, "-o", str(unfinished)])
        unfinished.chmod(0o755)
        os.replace(unfinished, library)
    _logger.info("built %s", library)


def _units() -> list[list[str]]:
    """What the compiler translates at a time, as its arguments: the files in two parts that take it equally long.

    File by file it would parse the same headers once for each, a fifth of its work. Names that clash between files it
    refuses.
    """
    *others, last = sorted(str(path) for path in _SOURCES.glob("*.cpp") if path.stem != "attention")
    included = [argument for path in others for argument in ("-include", path)]
    return [["-c", str(_SOURCES / "attention.cpp")], [*included, "-c", last]]


def _run_compiler(compiler: str, flags: Sequence[str], arguments: Sequence[str]) -> None:
    command = [compiler, *flags, *arguments]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode != 0:
        _logger.warning("%s failed:\n%s", " ".join(command), result.stderr)
        errors = [line for line in result.stderr.splitlines() if "error" in line] or ["no message"]
        raise KernelBuildError(f"{compiler} failed: {errors[0]}")


def prebuilt_flags(build: KernelBuild) -> tuple[str, ...]:
    """Return the compiler flags for the library of a build."""
    return (*PORTABLE_FLAGS, *build.flags)


def prebuilt_key(build: KernelBuild) -> str:
    """A digest of what the library of a build is made of, whatever compiler makes it."""
    return _digest(*prebuilt_flags(build))


def _fingerprint() -> str:
    """A digest of what a library that is built here is made of, and for; whatever compiler builds it."""
    return _digest(*FLAGS, processor())


def _digest(*parts: str) -> str:
    """A digest of the kernels' sources and of what else a library depends on."""
    sources = [path.read_text() for path in sorted(_SOURCES.iterdir()) if path.suffix in (".h", ".cpp")]
    return hashlib.sha256("\0".join((*parts, *sources)).encode()).hexdigest()[:20]


def processor() -> str:
    """What ``-march=native`` depends on: a home directory may be shared by different machines."""
    lines = read_cpuinfo().splitlines()
    if not lines:
        return platform.machine() + platform.processor()
    wanted = ("flags", "Features", "model name", "cpu family", "model", "CPU part", "CPU implementer")
    found = {line.split(":")[0].strip(): line for line in reversed(lines) if ":" in line}
    return platform.machine() + "".join(found.get(name, "") for name in wanted)
