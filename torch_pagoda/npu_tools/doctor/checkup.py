"""Runs the checks in the order of the report."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from . import devices, hccl, host, installation
from .finding import Finding, unknown
from .system import System, plain

__all__ = ["CHECKS", "Check", "examine"]

Check = Callable[[System], Iterator[Finding]]

CHECKS: tuple[Check, ...] = (
    installation.python,
    installation.torch_npu,
    installation.cann,
    installation.environment,
    installation.driver,
    installation.firmware,
    devices.device_files,
    devices.permissions,
    devices.visible,
    devices.health_and_memory,
    installation.imports,
    hccl.version,
    hccl.settings,
    hccl.network,
    hccl.links,
    host.allocator,
    host.container,
    host.processors,
    host.memory,
)


def examine(system: System, checks: Iterable[Check] = CHECKS) -> list[Finding]:
    """Run all checks. A check that raises is reported as unknown, and the others still run."""
    found: list[Finding] = []
    for check in checks:
        try:
            found += check(system)
        except Exception as error:  # whatever the machine holds, the report is whole
            found.append(unknown(check.__name__.replace("_", " "), f"the check failed: {plain(repr(error))}"))
    return found
