"""Checks of the installed software: Python, torch, torch_npu, CANN, the driver and the firmware."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator

from ...runtime.cann_toolkit import CANN_VARIABLES, toolkit_folder, toolkit_version, version_in
from ..torch_build import cpu_build, why_it_died
from .compatibility import CANN_OF_TORCH_NPU, DRIVERS_OF_CANN, PYTHONS, SOURCES, release
from .finding import Finding, ok, problem, unknown
from .system import System, plain

__all__ = ["cann", "cann_version", "driver", "environment", "firmware", "imports", "python", "torch_npu"]

_RECOMMENDED = "2.12.0"
"""The torch of the pair that the vendor recommends."""
_OLDEST = (2, 11)
_DRIVER = "/usr/local/Ascend/driver"
_ASK = (
    "import json, torch, torch_npu\n"
    "n = torch.npu.device_count() if torch.npu.is_available() else 0\n"
    "print('DEVICES', json.dumps(n))"
)


def python(system: System) -> Iterator[Finding]:
    """Check that torch_npu has wheels for this Python."""
    found = ".".join(map(str, system.python))
    if system.python[:2] in PYTHONS:
        yield ok("python", found)
    else:
        yield problem("python", found, "use Python 3.11 to 3.14")


def torch_npu(system: System) -> Iterator[Finding]:
    """Check that torch and torch_npu are installed and of the same release."""
    torch, npu = system.version_of("torch"), system.version_of("torch-npu")
    if torch is None:
        yield problem("torch", "not installed", cpu_build(_RECOMMENDED))
        return
    cuda, release_of = system.torch_cuda(), torch.partition("+")[0]
    if _numbers(torch) < _OLDEST:
        yield problem(
            "torch",
            f"{plain(torch, 60)} is older than {'.'.join(map(str, _OLDEST))}, the oldest that torch-pagoda runs with",
            cpu_build(_RECOMMENDED),
        )
    elif cuda is None:
        yield ok("torch", plain(torch, 60))
    else:
        yield problem(
            "torch",
            f"{plain(torch, 60)} is built for CUDA {plain(cuda, 20)}: importing torch_npu beside it ends the process",
            cpu_build(plain(release_of, 20)),
        )
    if npu is None:
        yield problem("torch_npu", "not installed", f"pip install 'torch-npu=={plain(release_of, 20)}.*'")
    elif (compiled_for := npu.partition(".post")[0]) != release_of:
        yield problem(
            "torch_npu",
            f"{plain(npu, 60)} is compiled for torch {plain(compiled_for, 20)}, but torch is {plain(torch, 60)}",
            "install the torch-npu of the same release as torch",
        )
    else:
        yield ok("torch_npu", plain(npu, 60))


def cann_folder(system: System) -> str | None:
    """The folder of CANN: the sourced one, else one of the usual paths."""
    return toolkit_folder(system.environment, lambda folder: system.path(folder).is_dir())


def cann_version(system: System) -> str | None:
    """The version of CANN's toolkit, from its installer's file."""
    return toolkit_version(cann_folder(system), system.read, system.machine)


def cann(system: System) -> Iterator[Finding]:
    """Check that CANN is installed in a version that torch_npu supports."""
    folder, version = cann_folder(system), cann_version(system)
    if folder is None:
        yield problem(
            "CANN", "no toolkit was found", "install CANN's toolkit and ops packages: hiascend.com/cann/download"
        )
        return
    if version is None:
        yield unknown("CANN", f"{plain(folder)} does not state its version", "check that the toolkit is complete")
        return
    yield ok("CANN", f"{version} in {plain(folder)}")
    npu = system.version_of("torch-npu")
    if npu is None:
        return
    asked = CANN_OF_TORCH_NPU.get(npu)
    if asked is None:
        yield unknown("CANN for torch_npu", f"no known vendor table lists torch_npu {plain(npu, 60)}")
    elif version == asked[0] or release(version) == asked[0]:
        yield ok("CANN for torch_npu", f"torch_npu {npu} is released for CANN {asked[0]} ({SOURCES[asked[1]]})")
    else:
        yield problem(
            "CANN for torch_npu",
            f"torch_npu {npu} is released for CANN {asked[0]}, but this is {version} ({SOURCES[asked[1]]})",
            f"install CANN {asked[0]}, or the torch_npu for {version}",
            stops=release(version) != release(asked[0]),
        )


def environment(system: System) -> Iterator[Finding]:
    """Check that CANN's set_env.sh was sourced in the shell that started the process."""
    folder = cann_folder(system)
    named = next((system.environment[name] for name in CANN_VARIABLES if system.environment.get(name)), None)
    script = "set_env.sh" if folder is None else f"{plain(folder)}/set_env.sh"
    if named is None:
        yield problem("environment", f"{' and '.join(CANN_VARIABLES)} are not set", f"source {script}")
    elif folder is None or not system.path(named).is_dir():
        yield problem("environment", f"{plain(named)} does not exist", f"source {script} of the installed CANN")
    elif not any(part.startswith(named) for part in system.environment.get("LD_LIBRARY_PATH", "").split(":") if part):
        # By another name of the folder, perhaps: whether the libraries are found is what the import shows.
        yield unknown("environment", f"LD_LIBRARY_PATH has no folder in {plain(named)}", f"source {script}")
    else:
        yield ok("environment", f"set for {plain(named)}")


def driver(system: System) -> Iterator[Finding]:
    """Check that the driver is installed and compatible with CANN."""
    version = version_in(system.read(f"{_DRIVER}/version.info"))
    if version is None:
        if system.path(_DRIVER).is_dir():
            yield unknown("driver", f"{_DRIVER}/version.info states no version", "see npu-smi info")
        else:
            yield problem(
                "driver",
                f"{_DRIVER} does not exist",
                "install the driver on the host; in a container mount that folder",
            )
        return
    yield ok("driver", version)
    toolkit = cann_version(system)
    if toolkit is None:
        return
    row = DRIVERS_OF_CANN.get(release(toolkit))
    if row is None:
        yield unknown("driver for CANN", f"no known vendor table lists CANN {toolkit}")
    elif release(version) in row[0]:
        yield ok("driver for CANN", f"CANN {toolkit} runs with driver {version} ({SOURCES[row[1]]})")
    elif _numbers(version) > max(map(_numbers, row[0])):
        yield unknown("driver for CANN", f"{version} is newer than the table of CANN {toolkit} ({SOURCES[row[1]]})")
    else:
        yield problem(
            "driver for CANN",
            f"CANN {toolkit} runs with drivers {', '.join(row[0])}, but this is {version} ({SOURCES[row[1]]})",
            f"install driver {row[0][-1]} on the host, or an older CANN",
        )


def firmware(system: System) -> Iterator[Finding]:
    """Report the firmware's version; no known vendor table compares it."""
    version = version_in(system.read("/usr/local/Ascend/firmware/version.info"))
    if version is None:
        yield unknown("firmware", "its version is not readable, as in most containers", "check it on the host")
    else:
        yield ok("firmware", version)


def imports(system: System) -> Iterator[Finding]:
    """Import torch and torch_npu in another Python, and count the devices; only if both are installed."""
    if system.version_of("torch") is None or system.version_of("torch-npu") is None:
        return
    result = system.run([sys.executable, "-c", _ASK])
    if result is None:
        yield unknown("import torch_npu", "Python did not answer in time")
        return
    status, output = result
    count = re.search(r"^DEVICES (\d{1,4})$", output, re.MULTILINE)
    if status or count is None:
        why = plain(why_it_died(output) or f"exit status {status}")
        yield problem("import torch_npu", why, "fix the problems above first; a missing library is CANN's")
    elif count[1] == "0":
        yield problem("import torch_npu", "torch_npu sees no device", "see the lines 'devices' below")
    else:
        yield ok("import torch_npu", f"torch_npu sees {count[1]} device{'s' if count[1] != '1' else ''}")


def _numbers(version: str) -> tuple[int, ...]:
    """The version numbers of ``release``, for comparison; a part that is not a number counts as 0."""
    return tuple(int(part) if part.isdigit() else 0 for part in release(version).split("."))
