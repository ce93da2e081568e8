"""Finds how many threads this process has processors for, which processors are on the NUMA node of a device, and
which ones each rank of a group gets.

A container is often given the time of a few processors of a host that shows all of its own: threads for each of
those wait for each other while the system holds them back.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Sequence, Set
from pathlib import Path
from typing import TypeVar

import torch

from .control_group import control_group_limit

log = logging.getLogger(__name__)
_T = TypeVar("_T")

_CHOSEN = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")
_BOUND = ("OMP_PROC_BIND", "OMP_PLACES", "GOMP_CPU_AFFINITY", "KMP_AFFINITY")
_HUAWEI, _ACCELERATOR = "0x19e5", "0x1200"
_MOST_PROCESSORS = 65536
_THREADS_AT_IMPORT = torch.get_num_threads()


def limit_threads(root: Path = Path("/")) -> int:
    """Lower torch's number of threads to what the control group allows, unless somebody chose a number.

    ``OMP_NUM_THREADS``, ``MKL_NUM_THREADS`` and a call of ``torch.set_num_threads`` after this module was imported
    are choices.

    Args:
        root: the folder that ``proc`` and ``sys`` lie in.

    Returns:
        The number of threads from now on.
    """
    threads, fitting = torch.get_num_threads(), _fitting(root)
    chosen = threads != _THREADS_AT_IMPORT or any(map(os.environ.get, _CHOSEN))
    if fitting is None or threads <= fitting or chosen:
        return threads
    log.warning(
        "the control group has time for %d threads instead of %d; OMP_NUM_THREADS chooses otherwise", fitting, threads
    )
    torch.set_num_threads(fitting)
    return fitting


def bind_to_node_of(device: torch.device, root: Path = Path("/")) -> tuple[int, ...]:
    """Keep this process on the processors of the NUMA node that an Ascend device hangs on.

    Whoever restricted the process before is respected: an affinity of the user's or of a control group, a binding of
    OpenMP's threads, ``TORCH_PAGODA_CPU_BINDING=0``. Threads that run already are moved, too.

    Args:
        device: of type ``"npu"``; others are not bound to anything.
        root: the folder that ``proc``, ``sys`` and ``dev`` lie in.

    Returns:
        The processors; none where the process was left as it was. The log says why.
    """
    reason, processors = "", frozenset[int]()
    if device.type != "npu" or not hasattr(os, "sched_setaffinity"):
        return ()
    if os.environ.get("TORCH_PAGODA_CPU_BINDING") == "0":
        reason = "TORCH_PAGODA_CPU_BINDING=0"
    elif bound := next((variable for variable in _BOUND if os.environ.get(variable)), None):
        reason = f"{bound} is set"
    elif os.sched_getaffinity(0) != _processors_in(root / "sys/devices/system/cpu/online"):
        reason = "the process is restricted to some processors already"
    elif (node := node_of(device.index or 0, root)) is None:
        reason = "the system does not say which NUMA node the device hangs on"
    else:
        processors = _processors_in(root / f"sys/devices/system/node/node{node}/cpulist")
        processors &= os.sched_getaffinity(0)
        reason = "" if processors else f"NUMA node {node} has no processors"
    if reason:
        log.info("not bound to a NUMA node: %s", reason)
        return ()
    bind(processors, root)
    log.info("bound to the %d processors of NUMA node %d", len(processors), node)
    if limit_threads(root) > len(processors) and not any(os.environ.get(name) for name in _CHOSEN):
        torch.set_num_threads(len(processors))
    return tuple(sorted(processors))


def bind(processors: Set[int], root: Path = Path("/")) -> None:
    """Keep this process on some processors; threads that run already are moved, too."""
    for task in _names(root / "proc/self/task", r"\d+") or [0]:
        try:
            os.sched_setaffinity(task, processors)
        except OSError as error:  # it has ended, or a sandbox forbids it
            log.info("thread %d is not bound to processors: %s", task, error)


def shares(size: int, root: Path = Path("/")) -> list[set[int]]:
    """Processors for each of the ranks of a group on this host.

    Ranks get whole NUMA nodes, or equal parts of a node, where the numbers of nodes and ranks allow it and no rank
    loses more than a quarter of its cores by it; else equal parts of all. No two ranks get the same processor. All of
    them get all processors that this process may run on where there are fewer than ranks, or where OpenMP's threads
    are bound or ``TORCH_PAGODA_CPU_BINDING=0`` forbids it.

    Args:
        size: number of ranks.
        root: the folder that ``sys`` lies in.
    """
    allowed = os.sched_getaffinity(0)
    if len(allowed) < size or os.environ.get("TORCH_PAGODA_CPU_BINDING") == "0" or any(map(os.environ.get, _BOUND)):
        return [set(allowed) for _ in range(size)]
    nodes = _cores_by_node(allowed, root)
    if sum(map(len, nodes)) < size:
        nodes = [[{processor}] for node in nodes for core in node for processor in sorted(core)]
    equal = _parts([core for node in nodes for core in node], size)
    by_node = equal
    if len(nodes) % size == 0:
        by_node = [[core for node in part for core in node] for part in _parts(nodes, size)]
    elif size % len(nodes) == 0:
        by_node = [part for node in nodes for part in _parts(node, size // len(nodes))]
    chosen = by_node if 4 * min(map(len, by_node)) >= 3 * min(map(len, equal)) else equal
    return [set().union(*cores) for cores in chosen]


def threads_per_rank(size: int, root: Path = Path("/")) -> int:
    """Threads for each rank of a group on this host: the number that somebody chose, else an equal part of this
    process's.

    Args:
        size: number of ranks.
        root: as in :func:`limit_threads`.
    """
    threads = limit_threads(root)
    chosen = threads not in (_THREADS_AT_IMPORT, _fitting(root)) or any(map(os.environ.get, _CHOSEN))
    return threads if chosen else max(1, threads // size)


def node_of(index: int, root: Path = Path("/")) -> int | None:
    """The NUMA node of an Ascend device; None if it cannot be determined.

    Where the devices hang on several nodes, they are taken to be numbered in the order of their PCI addresses, which
    no hardware has confirmed.

    Args:
        index: among the devices that ``ASCEND_RT_VISIBLE_DEVICES`` names, or all.
        root: the folder that ``sys`` and ``dev`` lie in.
    """
    nodes = [
        _number(_read(folder / "numa_node") or "-1")
        for folder in sorted((root / "sys/bus/pci/devices").glob("*"))
        if _read(folder / "vendor") == _HUAWEI and (_read(folder / "class") or "").startswith(_ACCELERATOR)
    ]
    if not nodes or min(nodes) < 0:
        return None
    if len(set(nodes)) == 1:
        return nodes[0]
    visible = os.environ.get("ASCEND_RT_VISIBLE_DEVICES", "")
    if visible and not re.fullmatch(r"\d{1,4}(,\d{1,4})*", visible):
        return None
    numbers: Sequence[int] = [int(part) for part in visible.split(",")] if visible else range(len(nodes))
    if len(_names(root / "dev", r"davinci(\d+)")) != len(nodes) or index >= len(numbers):
        return None
    number = numbers[index]
    return nodes[number] if number < len(nodes) else None


def _fitting(root: Path) -> int | None:
    """Threads that the control group has time for; None where it has no limit."""
    allowed = control_group_limit(lambda path: _read(root / path.lstrip("/")))
    return None if allowed is None else max(1, int(allowed))


def _cores_by_node(allowed: Set[int], root: Path) -> list[list[set[int]]]:
    """The processors that may be used, in cores, by NUMA node; one node where the system names none."""
    system = root / "sys/devices/system"
    numbers = _names(system / "node", r"node(\d+)")
    nodes = [_processors_in(system / f"node/node{number}/cpulist") & allowed for number in numbers]
    nodes.append(frozenset(allowed).difference(*nodes))
    found = []
    for node in filter(None, nodes):
        cores: dict[int, set[int]] = {}
        for processor in sorted(node):
            siblings = _processors_in(system / f"cpu/cpu{processor}/topology/thread_siblings_list") or {processor}
            cores.setdefault(min(siblings), set()).add(processor)
        found.append(list(cores.values()))
    return found


def _parts(things: Sequence[_T], count: int) -> list[Sequence[_T]]:
    """Neighbors in as many parts, whose sizes differ by one at most."""
    return [things[len(things) * i // count : len(things) * (i + 1) // count] for i in range(count)]


def _processors_in(path: Path) -> frozenset[int]:
    """Of a list such as ``0-3,8``; none where it is no such list."""
    found: set[int] = set()
    for part in (_read(path) or "").split(","):
        if not (match := re.fullmatch(r"(\d{1,6})(?:-(\d{1,6}))?", part)):
            return frozenset()
        first, last = int(match[1]), int(match[2] or match[1])
        if last >= _MOST_PROCESSORS:
            return frozenset()
        found.update(range(first, last + 1))
    return frozenset(found)


def _names(folder: Path, pattern: str) -> list[int]:
    """Numbers in the names of a folder's entries; the whole name, or the pattern's group."""
    try:
        names = os.listdir(folder)
    except OSError:
        return []
    matches = (re.fullmatch(pattern, name) for name in names)
    return sorted(int(match[match.lastindex or 0]) for match in matches if match)


def _read(path: Path) -> str | None:
    try:
        with path.open(errors="replace") as file:
            return file.read(4096).strip()
    except OSError:
        return None


def _number(text: str) -> int:
    return int(text) if re.fullmatch(r"-?\d{1,18}", text) else -1
