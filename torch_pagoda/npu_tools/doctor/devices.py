"""Checks of the devices: presence, permissions, visibility, free memory."""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterator

from .finding import Finding, ok, problem, unknown
from .system import System, plain

__all__ = ["device_files", "health_and_memory", "permissions", "visible"]

_DEVICE = re.compile(r"davinci(\d{1,4})")
_MANAGERS = ("davinci_manager", "devmm_svm", "hisi_hdc")
# | 0     910B3 | OK | ... |  and, in the row below it,  | 0 | 0000:C1:00.0 | 0   0 / 0   3384 / 65536 |
_HEALTH = re.compile(r"^\|\s*(\d{1,4})\s+(?=\S*[A-Za-z])(\S{1,40})\s*\|\s*([A-Za-z]{1,20})\s*\|", re.MULTILINE)
_MEMORY = re.compile(r"(\d{1,9})\s*/\s*(\d{1,9})\s*\|\s*$", re.MULTILINE)
_LEAST_FREE = 0.5
_VISIBLE = "ASCEND_RT_VISIBLE_DEVICES"


def device_numbers(system: System) -> list[int]:
    return sorted(int(found[1]) for name in system.names("/dev") if (found := _DEVICE.fullmatch(name)))


def device_files(system: System) -> Iterator[Finding]:
    """Check for the driver's device files; a container must be given them."""
    numbers, names = device_numbers(system), set(system.names("/dev"))
    inside = " with --device /dev/davinci0" if system.in_container else ""
    if not numbers:
        where = "start the container" + inside if inside else "install the driver; check that lspci shows a device"
        yield problem("devices", "no /dev/davinci* found", where)
        return
    yield ok("devices", ", ".join(f"/dev/davinci{number}" for number in numbers[:16]))
    missing = [name for name in _MANAGERS if name not in names]
    if missing:
        yield problem(
            "device managers",
            f"missing: {', '.join(f'/dev/{name}' for name in missing)}",
            f"start the container with {' '.join(f'--device /dev/{name}' for name in missing)}"
            if inside
            else "reload the driver",
        )


def permissions(system: System) -> Iterator[Finding]:
    """Check that the user may open the devices: as a member of the owner's group, or as everybody."""
    for number in device_numbers(system)[:16]:
        name = f"/dev/davinci{number}"
        try:
            status = os.stat(system.path(name))
        except OSError as error:
            yield unknown("permission", f"{name}: {plain(str(error.strerror))}")
            continue
        mode, is_owner = status.st_mode, status.st_uid == system.user_id
        shares = is_owner and mode & stat.S_IRUSR and mode & stat.S_IWUSR
        shares = shares or (status.st_gid in system.groups and mode & stat.S_IRGRP and mode & stat.S_IWGRP)
        if system.user_id == 0 or shares or (mode & stat.S_IROTH and mode & stat.S_IWOTH):
            yield ok("permission", f"{name} is accessible")
        else:
            group = _group(system, status.st_gid)
            yield problem(
                "permission",
                f"{name} belongs to group {group}, and this user is not a member",
                f"run usermod -aG {group} USER, and log in again",
            )


def visible(system: System) -> Iterator[Finding]:
    """Check that ASCEND_RT_VISIBLE_DEVICES names existing devices."""
    asked = system.environment.get(_VISIBLE)
    if asked is None:
        yield ok("visible devices", f"{_VISIBLE} is not set: all")
        return
    shown = plain(asked, 60)
    parts = [part.strip() for part in asked[:4096].split(",")]
    if not all(re.fullmatch(r"\d{1,4}", part) for part in parts):
        yield problem("visible devices", f"{_VISIBLE}={shown!r} is not a list of numbers", f"export {_VISIBLE}=0")
        return
    numbers = [int(part) for part in parts]
    # Inside of a container the files keep the host's numbers, while the variable counts from 0.
    count = len(device_numbers(system))
    absent = [number for number in numbers if number >= count]
    if absent:
        yield problem(
            "visible devices",
            f"{_VISIBLE}={shown} names {absent[0]}, but the number of devices is {count}",
            f"unset {_VISIBLE}, or name numbers below {count}" if count else "see the line 'devices'",
        )
    else:
        yield ok("visible devices", f"{_VISIBLE}={shown}")


def health_and_memory(system: System) -> Iterator[Finding]:
    """Check with npu-smi that the devices are healthy and mostly free."""
    result = system.run(["npu-smi", "info"])
    if result is None:
        yield unknown("npu-smi", "not found, or it did not answer", "mount /usr/local/bin/npu-smi in a container")
        return
    status, output = result
    healths = list(_HEALTH.finditer(output))
    if status or not healths:
        lines = output.strip().splitlines() or [f"exit status {status}"]
        yield problem("npu-smi", plain(lines[-1]), "see the lines 'driver' and 'devices' above")
        return
    for at, found in enumerate(healths[:16]):
        number, chip, health = found.groups()
        if health == "OK":
            yield ok(f"device {number}", f"{plain(chip, 40)}, healthy")
        else:
            yield problem(
                f"device {number}", f"{plain(chip, 40)}, health {health}", f"npu-smi info -t health -i {number}"
            )
        end = healths[at + 1].start() if at + 1 < len(healths) else len(output)
        # The row of the chip follows that of the device; what holds memory is listed further below.
        rows = output[found.end() : end].splitlines()[1:2]
        memory = _MEMORY.search("\n".join(rows))
        if memory is None or int(memory[2]) == 0:
            yield unknown(f"memory {number}", "npu-smi shows no memory")
            continue
        used, total = int(memory[1]), int(memory[2])
        text = f"{total - used} of {total} MiB free"
        if total - used >= _LEAST_FREE * total:
            yield ok(f"memory {number}", text)
        else:
            yield problem(f"memory {number}", text, "stop the processes that npu-smi info lists", stops=used >= total)


def _group(system: System, number: int) -> str:
    for line in (system.read("/etc/group") or "").splitlines():
        parts = line.split(":")
        if len(parts) >= 3 and parts[2] == str(number) and re.fullmatch(r"[\w.-]{1,32}", parts[0]):
            return parts[0]
    return str(number)
