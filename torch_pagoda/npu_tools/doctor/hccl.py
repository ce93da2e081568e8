"""Checks of HCCL, by which several devices communicate: settings, addresses and links."""

from __future__ import annotations

import re
from collections.abc import Iterator

from .devices import device_numbers
from .finding import Finding, ok, problem, unknown
from .system import System, plain

__all__ = ["links", "network", "settings", "version"]

_FEW = 16
"""Devices of a host that are looked at."""
_CONFIG = "/etc/hccn.conf"
_ADDRESS = re.compile(r"^address_(\d{1,4})=(\S{1,64})\s*$", re.MULTILINE)
_LINK = re.compile(r"link status:\s*(\w{1,20})", re.IGNORECASE)
_HEALTH = re.compile(r"net health status:\s*(\w[\w ]{0,40})", re.IGNORECASE)
_VERSIONS = ("latest/hccl/version.info", "latest/hcomm/version.info", "cann/share/info/hccl/version.info")
_VERSION = re.compile(r"^Version=(\S{1,40})", re.MULTILINE)
_EXPANSION, _DETERMINISTIC = "HCCL_OP_EXPANSION_MODE", "HCCL_DETERMINISTIC"
_NUMBERS = {
    "HCCL_BUFFSIZE": (1, "MiB of the buffer of each communicator; 200 by default"),
    "HCCL_CONNECT_TIMEOUT": (120, "seconds that devices wait for each other at the start; 120 to 7200"),
    "HCCL_EXEC_TIMEOUT": (0, "seconds that a collective waits for other devices; 0 waits for ever"),
}
"""Variable → its least value, and its meaning (HCCL user guide of CANN 9.0.0, "Environment Variables")."""


def version(system: System) -> Iterator[Finding]:
    """The version of HCCL that CANN brings."""
    if len(device_numbers(system)) < 2:
        return
    for name in _VERSIONS:
        text = system.read(f"/usr/local/Ascend/{name}")
        if text is not None and (found := _VERSION.search(text)):
            yield ok("HCCL", plain(found[1]))
            return
    yield unknown("HCCL", "no version.info of HCCL below /usr/local/Ascend")


def settings(system: System) -> Iterator[Finding]:
    """Check the variables that several devices depend on."""
    if len(device_numbers(system)) < 2:
        return
    environment = system.environment
    mode = environment.get(_EXPANSION, "")
    if "AIV" in mode.upper():
        yield problem(
            "HCCL expansion",
            f"{_EXPANSION}={plain(mode, 40)}: collectives on vector cores are reported to hang with captured graphs",
            f"unset {_EXPANSION}",
            stops=False,
        )
    else:
        yield ok("HCCL expansion", f"{_EXPANSION}={plain(mode, 40)}" if mode else f"{_EXPANSION} is not set")
    for name, (least, meaning) in _NUMBERS.items():
        given = environment.get(name)
        if given is None:
            yield ok(name, f"not set ({meaning})")
        elif not re.fullmatch(r"\d{1,10}", given.strip()) or int(given) < least:
            yield problem(
                name, f"{plain(given, 40)!r} is no number from {least}", f"unset {name} ({meaning})", stops=False
            )
        else:
            yield ok(name, given.strip())
    exact = environment.get(_DETERMINISTIC, "")
    if exact.lower() in ("true", "strict"):
        yield ok("HCCL sums", f"{_DETERMINISTIC}={exact}")
    else:
        yield unknown(
            "HCCL sums",
            "the order of sums over devices may change from run to run",
            f"export {_DETERMINISTIC}=true while pagoda compares several devices with the model",
        )


def network(system: System) -> Iterator[Finding]:
    """Check that each device has an address for devices of other hosts."""
    numbers = device_numbers(system)[:_FEW]
    if len(numbers) < 2:
        return
    text = system.read(_CONFIG)
    if text is None:
        yield unknown(
            "device network", f"{_CONFIG} cannot be read", f"mount {_CONFIG} into a container; several hosts need it"
        )
        return
    known = {int(number) for number, _ in _ADDRESS.findall(text)}
    missing = [number for number in numbers if number not in known]
    if missing:
        shown = ", ".join(map(str, missing))
        remedy = f"hccn_tool -i {missing[0]} -ip -s address ADDRESS netmask MASK, for several hosts"
        yield problem("device network", f"{_CONFIG} has no address of device {shown}", remedy, stops=False)
    else:
        yield ok("device network", f"{_CONFIG} has an address of each device")


def links(system: System) -> Iterator[Finding]:
    """Check with hccn_tool that the network links of several devices are up and healthy."""
    numbers = device_numbers(system)[:_FEW]
    if len(numbers) < 2:
        return
    for number in numbers:
        name = f"link {number}"
        result = system.run(["hccn_tool", "-i", str(number), "-link", "-g"])
        if result is None:
            yield unknown(
                "links", "hccn_tool was not found, or does not answer", "mount it, it comes with the driver"
            )
            return
        found = _LINK.search(result[1])
        if result[0] or found is None:
            yield unknown(name, plain(result[1]) or f"hccn_tool ended with status {result[0]}")
            continue
        health = system.run(["hccn_tool", "-i", str(number), "-net_health", "-g"])
        state = None if health is None else _HEALTH.search(health[1])
        if found[1].upper() != "UP":
            remedy = f"check cable and switch; hccn_tool -i {number} -link_stat -g"
            yield problem(name, f"the link is {plain(found[1], 20)}, which several hosts need", remedy, stops=False)
        elif state is not None and not state[1].strip().lower().startswith(("success", "init")):
            remedy = f"hccn_tool -i {number} -netdetect -g shows the address that is probed"
            yield problem(name, f"up, but its network is {plain(state[1], 40)}", remedy, stops=False)
        else:
            yield ok(name, "up")
