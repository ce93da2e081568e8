"""Threads and processors on stand-ins of a system's files: control groups of both versions, NUMA nodes, PCI."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import pytest
import torch

from torch_pagoda.runtime import processors
from torch_pagoda.runtime.processors import bind_to_node_of, limit_threads, node_of, shares, threads_per_rank

SETTINGS = (*processors._CHOSEN, *processors._BOUND, "TORCH_PAGODA_CPU_BINDING", "ASCEND_RT_VISIBLE_DEVICES")


@pytest.fixture(autouse=True)
def no_settings(monkeypatch):
    for name in SETTINGS:
        monkeypatch.delenv(name, raising=False)


def write(root: Path, **files: str) -> None:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")


@pytest.fixture
def threads(monkeypatch):
    """Sixteen, as torch begins with on a host of that many; what is set is kept here."""
    count = [16]
    monkeypatch.setattr(processors, "_THREADS_AT_IMPORT", 16)
    monkeypatch.setattr(torch, "get_num_threads", lambda: count[0])
    monkeypatch.setattr(torch, "set_num_threads", lambda number: count.__setitem__(0, number))
    return count


@pytest.mark.parametrize(("quota", "expected"), [("250000", 2), ("50000", 1), ("1550000", 15), ("1600000", 16)])
def test_no_more_threads_than_the_control_group_allows(tmp_path, threads, caplog, quota, expected):
    write(tmp_path, **{"sys/fs/cgroup/cpu.max": f"{quota} 100000"})
    with caplog.at_level(logging.WARNING):
        assert limit_threads(tmp_path) == threads[0] == expected
    assert ("OMP_NUM_THREADS chooses otherwise" in caplog.text) == (expected < 16)


@pytest.mark.parametrize("chosen", ["OMP_NUM_THREADS", "MKL_NUM_THREADS", "torch.set_num_threads"])
def test_a_chosen_number_of_threads_stays(tmp_path, threads, monkeypatch, chosen):
    write(tmp_path, **{"sys/fs/cgroup/cpu.max": "200000 100000"})
    if chosen.startswith("torch"):
        threads[0] = 12
    else:
        monkeypatch.setenv(chosen, "16")
    before = threads[0]
    assert limit_threads(tmp_path) == threads[0] == before


@pytest.fixture
def host(tmp_path, monkeypatch, threads):
    """Two nodes of four processors, two devices on each; nothing of the real process is changed."""
    files = {
        "sys/devices/system/cpu/online": "0-7",
        "sys/devices/system/node/node0/cpulist": "0-1,4-5",
        "sys/devices/system/node/node1/cpulist": "2-3,6-7",
        "proc/self/task/11/stat": "",
        "proc/self/task/12/stat": "",
    }
    for number, node in enumerate((0, 0, 1, 1)):
        folder = f"sys/bus/pci/devices/0000:{number}1:00.0"
        files |= {f"{folder}/vendor": "0x19e5", f"{folder}/class": "0x120000", f"{folder}/numa_node": str(node)}
        files[f"dev/davinci{number}"] = ""
    # A network card of the same vendor, an accelerator of another.
    files |= {
        "sys/bus/pci/devices/0000:91:00.0/vendor": "0x19e5",
        "sys/bus/pci/devices/0000:91:00.0/class": "0x020000",
    }
    files |= {
        "sys/bus/pci/devices/0000:92:00.0/vendor": "0x10de",
        "sys/bus/pci/devices/0000:92:00.0/class": "0x120000",
    }
    write(tmp_path, **files)
    bound: dict[int, set[int]] = {}
    monkeypatch.setattr(os, "sched_getaffinity", lambda task: bound.get(task, set(range(8))))
    monkeypatch.setattr(os, "sched_setaffinity", lambda task, cpus: bound.__setitem__(task, set(cpus)))
    return tmp_path, bound


class Device:
    """Stands for ``torch.device("npu:N")``, a name that torch knows only once torch_npu is loaded."""

    def __init__(self, index: int | None, type: str = "npu") -> None:
        self.index, self.type = index, type


@pytest.mark.parametrize(("index", "processors"), [(None, (0, 1, 4, 5)), (1, (0, 1, 4, 5)), (2, (2, 3, 6, 7))])
def test_a_process_is_bound_to_its_device_s_node(host, threads, index, processors):
    root, bound = host
    assert bind_to_node_of(Device(index), root) == processors
    assert bound == {11: set(processors), 12: set(processors)}
    assert threads == [4]


def test_a_bound_process_has_no_more_threads_than_its_control_group_allows(host, threads):
    root, _ = host
    write(root, **{"sys/fs/cgroup/cpu.max": "200000 100000"})
    assert bind_to_node_of(Device(0), root) and threads == [2]
    assert limit_threads(root) == 2


def test_devices_are_counted_among_the_visible_ones(host, monkeypatch):
    root, _ = host
    monkeypatch.setenv("ASCEND_RT_VISIBLE_DEVICES", "3,0")
    assert [node_of(index, root) for index in (0, 1, 2)] == [1, 0, None]
    monkeypatch.setenv("ASCEND_RT_VISIBLE_DEVICES", "3,x")
    assert node_of(0, root) is None
    monkeypatch.setenv("ASCEND_RT_VISIBLE_DEVICES", "9")
    assert node_of(0, root) is None


def test_a_node_is_not_guessed(host):
    """Numbers are not known where PCI devices and device files are not as many, unless all hang on one node."""
    root, _ = host
    (root / "dev/davinci3").unlink()
    assert node_of(0, root) is None
    for folder in (root / "sys/bus/pci/devices").glob("*"):
        (folder / "numa_node").write_text("1\n")
    assert node_of(0, root) == 1
    (root / "sys/bus/pci/devices/0000:21:00.0/numa_node").write_text("-1\n")
    assert node_of(0, root) is None


@pytest.mark.parametrize(
    ("setting", "reason"),
    [
        ("TORCH_PAGODA_CPU_BINDING=0", "TORCH_PAGODA_CPU_BINDING=0"),
        ("OMP_PROC_BIND=close", "OMP_PROC_BIND is set"),
        ("affinity", "restricted to some processors already"),
        ("no node", "does not say which NUMA node"),
        ("no processors", "NUMA node 0 has no processors"),
        ("a hostile list", "NUMA node 0 has no processors"),
    ],
)
def test_what_was_chosen_is_respected(host, monkeypatch, caplog, setting, reason):
    root, bound = host
    name, equals, value = setting.partition("=")
    if equals:
        monkeypatch.setenv(name, value)
    elif setting == "affinity":
        monkeypatch.setattr(os, "sched_getaffinity", lambda task: {0, 1})
    elif setting == "no node":
        (root / "sys/bus/pci/devices/0000:01:00.0/numa_node").unlink()
    else:
        text = "" if setting == "no processors" else "0-999999"
        (root / "sys/devices/system/node/node0/cpulist").write_text(text)
    with caplog.at_level(logging.INFO, processors.__name__):
        assert bind_to_node_of(Device(0), root) == ()
    assert bound == {} and reason in caplog.text


def test_other_devices_bind_nothing(host):
    root, bound = host
    assert bind_to_node_of(torch.device("cpu"), root) == () and bound == {}


def test_a_thread_that_has_ended_does_not_stop_the_others(host, monkeypatch):
    root, bound = host

    def set_affinity(task: int, cpus: set[int]) -> None:
        if task == 11:
            raise ProcessLookupError(3, "No such process")
        bound[task] = set(cpus)

    monkeypatch.setattr(os, "sched_setaffinity", set_affinity)
    assert bind_to_node_of(Device(0), root) and list(bound) == [12]


def test_this_system_can_be_read():
    assert node_of(0) is None or node_of(0) >= 0


@pytest.fixture
def topology(tmp_path, monkeypatch):
    """Makes a host of nodes and cores of two threads, and restricts this process to some of its processors."""

    def make(nodes: int, cores: int, threads: int = 1, allowed: set[int] | None = None) -> Path:
        count = nodes * cores
        for node in range(nodes):
            own = [node * cores + core + count * thread for thread in range(threads) for core in range(cores)]
            write(tmp_path, **{f"sys/devices/system/node/node{node}/cpulist": ",".join(map(str, own))})
        for processor in range(count * threads):
            siblings = ",".join(str(processor % count + count * thread) for thread in range(threads))
            path = f"sys/devices/system/cpu/cpu{processor}/topology/thread_siblings_list"
            write(tmp_path, **{path: siblings})
        monkeypatch.setattr(os, "sched_getaffinity", lambda task: allowed or set(range(count * threads)))
        return tmp_path

    return make


@pytest.mark.parametrize(
    ("host", "size", "expected"),
    [
        ((2, 4), 2, [{0, 1, 2, 3}, {4, 5, 6, 7}]),  # a node each
        ((4, 2), 2, [{0, 1, 2, 3}, {4, 5, 6, 7}]),  # two nodes each
        ((2, 4), 4, [{0, 1}, {2, 3}, {4, 5}, {6, 7}]),  # half a node each
        ((2, 2, 2), 2, [{0, 1, 4, 5}, {2, 3, 6, 7}]),  # a core's two threads go to one rank
        ((2, 2, 2), 4, [{0, 4}, {1, 5}, {2, 6}, {3, 7}]),
        ((1, 2, 2), 4, [{0}, {2}, {1}, {3}]),  # more ranks than cores
        ((1, 7), 3, [{0, 1}, {2, 3}, {4, 5, 6}]),
        ((3, 2), 2, [{0, 1, 2}, {3, 4, 5}]),  # the numbers do not allow whole nodes
        ((2, 4, 1, {0, 1, 2, 3, 4, 5, 6}), 2, [{0, 1, 2, 3}, {4, 5, 6}]),  # whole nodes, though one is smaller
        ((2, 4, 1, {0, 1, 2, 3, 4}), 2, [{0, 1}, {2, 3, 4}]),  # as nodes, one rank would have one of five
        ((2, 4, 1, {1, 2}), 2, [{1}, {2}]),  # what the user allows is respected
        ((2, 4, 1, {1, 2}), 3, [{1, 2}] * 3),  # fewer processors than ranks
        ((1, 4), 1, [{0, 1, 2, 3}]),
    ],
)
def test_ranks_get_processors_of_their_own(topology, host, size, expected):
    assert shares(size, topology(*host)) == expected


def test_a_system_that_says_nothing_is_one_node(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda task: {3, 5, 8, 9})
    assert shares(2, tmp_path) == [{3, 5}, {8, 9}]
    write(tmp_path, **{"sys/devices/system/node/node0/cpulist": "0-999999"})
    assert shares(2, tmp_path) == [{3, 5}, {8, 9}]


@pytest.mark.parametrize("setting", ["TORCH_PAGODA_CPU_BINDING=0", "OMP_PLACES=cores"])
def test_bound_threads_are_left_where_they_are(topology, monkeypatch, setting):
    monkeypatch.setenv(*setting.split("="))
    assert shares(2, topology(2, 2)) == [{0, 1, 2, 3}] * 2


@pytest.mark.parametrize(
    ("size", "quota", "expected"), [(2, None, 8), (3, None, 5), (32, None, 1), (2, 6, 3), (2, 1, 1)]
)
def test_threads_of_all_ranks_are_those_of_one_process(tmp_path, threads, size, quota, expected):
    if quota is not None:
        write(tmp_path, **{"sys/fs/cgroup/cpu.max": f"{quota}00000 100000"})
    assert threads_per_rank(size, tmp_path) == expected
    assert threads_per_rank(size, tmp_path) == expected  # also once the process has fewer


def test_a_chosen_number_of_threads_is_that_of_each_rank(tmp_path, threads, monkeypatch):
    threads[0] = 12
    assert threads_per_rank(2, tmp_path) == 12
    threads[0] = 16
    monkeypatch.setenv("OMP_NUM_THREADS", "16")
    assert threads_per_rank(2, tmp_path) == 16


def test_the_ranks_of_this_system():
    found = shares(2)
    assert found[0] | found[1] <= os.sched_getaffinity(0)
    assert found[0].isdisjoint(found[1]) or len(os.sched_getaffinity(0)) == 1
