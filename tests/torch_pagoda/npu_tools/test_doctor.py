"""``pagoda npu doctor`` on trees of files that stand for machines."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

import pytest

from torch_pagoda.npu_tools import doctor
from torch_pagoda.npu_tools.doctor import OK, PROBLEM, UNKNOWN, Finding, System, checkup, examine, installation
from torch_pagoda.npu_tools.doctor.compatibility import CANN_OF_TORCH_NPU, DRIVERS_OF_CANN, SOURCES
from torch_pagoda.npu_tools.doctor.system import MOST_BYTES, plain

Run = Callable[..., tuple[int, str, str]]

CANN = "/usr/local/Ascend/cann"
SMI = """\
+------------------------------------------------------------------------------------------------+
| npu-smi 25.5.0                   Version: 25.5.0                                               |
+---------------------------+---------------+----------------------------------------------------+
| NPU   Name                | Health        | Power(W)    Temp(C)           Hugepages-Usage(page)|
| Chip                      | Bus-Id        | AICore(%)   Memory-Usage(MB)  HBM-Usage(MB)        |
+===========================+===============+====================================================+
| 0     910B3               | OK            | 93.8        40                0    / 0             |
| 0                         | 0000:C1:00.0  | 0           0    / 0          3384 / 65536         |
+===========================+===============+====================================================+
| 1     910B3               | OK            | 93.8        40                0    / 0             |
| 0                         | 0000:C2:00.0  | 0           0    / 0          3390 / 65536         |
+===========================+===============+====================================================+
| NPU     Chip              | Process id    | Process name             | Process memory(MB)      |
| 0       0                 | 4711          | python                   | 100                     |
"""

# Of torch_npu 2.12.0.post3 beside torch 2.12.0+cu130; what 13 frames say is left out.
ABORT = """\
terminate called after throwing an instance of 'c10::ValueError'
  what():  Duplicated key 'pinned_reserve_segment_size_mb' found in device-specific configuration parser hook
Exception raised from registerDeviceConfigParserHook at /opt/torch/include/c10/core/AllocatorConfig.h:278
frame #13: dlopen + 0x69 (0x7f0244aa3569 in /lib/x86_64-linux-gnu/libc.so.6)
<omitting python frames>
"""


def answers(
    smi: str | None = SMI,
    devices: str = "DEVICES 2\n",
    status: int = 0,
    hccn: Mapping[tuple[int, str], tuple[int, str] | None] = MappingProxyType({}),
) -> Callable[..., object]:
    def run(command: Sequence[str]) -> tuple[int, str] | None:
        if command[0] == "npu-smi":
            return None if smi is None else (0, smi)
        if command[0] == "hccn_tool":
            return hccn.get((int(command[2]), command[3]), (0, "link status: UP\nnet health status: Success\n"))
        return status, devices

    return run


@pytest.fixture
def machine(tmp_path: Path) -> System:
    """A server on which everything fits: torch_npu 2.12, CANN 9.1.0, driver 25.5, two devices."""
    files = {
        f"{CANN}/aarch64-linux/ascend_toolkit_install.info": "package_name=Ascend-cann-toolkit\nversion=9.1.0\n",
        "/usr/local/Ascend/driver/version.info": "Version=25.5.0\nascendhal_version=7.35.23\n",
        "/usr/local/Ascend/firmware/version.info": "Version=7.8.0.5.216\n",
        "/usr/local/Ascend/latest/hccl/version.info": "Version=9.1.0\n",
        "/etc/hccn.conf": "address_0=192.168.100.1\nnetmask_0=255.255.255.0\naddress_1=192.168.100.2\n",
        "/etc/group": "root:x:0:\nHwHiAiUser:x:1000:\n",
        "/proc/meminfo": "MemTotal: 527957864 kB\nMemAvailable: 500000000 kB\n",
        "/sys/fs/cgroup/cpu.max": "max 100000\n",
        "/sys/fs/cgroup/memory.max": "max\n",
    }
    files |= {f"/dev/{name}": "" for name in ("davinci0", "davinci1", "davinci_manager", "devmm_svm", "hisi_hdc")}
    for name, text in files.items():
        path = tmp_path / name[1:]
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    for number in (0, 1):
        (tmp_path / f"dev/davinci{number}").chmod(0o660)
    environment = {"ASCEND_HOME_PATH": CANN, "LD_LIBRARY_PATH": f"{CANN}/lib64:/lib", "HOME": "/root"}
    environment["HCCL_DETERMINISTIC"] = "true"
    versions = {"torch": "2.12.0+cpu", "torch-npu": "2.12.0"}
    return System(
        root=tmp_path,
        environment=environment,
        run=answers(),  # type: ignore[arg-type]
        version_of=versions.get,
        torch_cuda=lambda: None,
        user_id=1001,
        groups=frozenset({os.stat(tmp_path / "dev/davinci0").st_gid}),
        machine="aarch64",
        python=(3, 11, 7),
    )


def of(findings: Sequence[Finding], check: str) -> Finding:
    return next(finding for finding in findings if finding.check == check)


def write(machine: System, name: str, text: str) -> System:
    machine.path(name).parent.mkdir(parents=True, exist_ok=True)
    machine.path(name).write_text(text)
    return machine


def without(machine: System, name: str) -> System:
    machine.path(name).unlink()
    return machine


def setting(machine: System, **variables: str) -> System:
    return replace(machine, environment={**machine.environment, **variables})


def installed(machine: System, **versions: str) -> System:
    return replace(machine, version_of=lambda name: versions.get(name.replace("-", "_")))


def test_a_machine_on_which_all_fits(machine: System) -> None:
    found = examine(machine)
    assert [finding for finding in found if finding.status != OK] == []
    assert of(found, "CANN").text == f"9.1.0 in {CANN}"
    assert "(COMPATIBILITY.md of Ascend/pytorch" in of(found, "CANN for torch_npu").text
    assert of(found, "memory 1").text == "62146 of 65536 MiB free"
    assert of(found, "import torch_npu").text == "torch_npu sees 2 devices"


@pytest.mark.parametrize(
    ("change", "check", "words", "remedy"),
    [
        (lambda m: replace(m, python=(3, 10, 2)), "python", "3.10.2", "use Python 3.11"),
        (lambda m: installed(m), "torch", "not installed", "torch==2.12.0 --index-url"),
        (
            lambda m: installed(m, torch="2.10.0+cpu", torch_npu="2.10.0.post4"),
            *(
                "torch",
                "2.10.0+cpu is older than 2.11, the oldest that torch-pagoda runs with",
                "torch==2.12.0 --index",
            ),
        ),
        (
            lambda m: replace(m, torch_cuda=lambda: "13.0"),
            *(
                "torch",
                "2.12.0+cpu is built for CUDA 13.0: importing torch_npu beside it ends",
                "torch==2.12.0 --index",
            ),
        ),
        (
            lambda m: replace(m, run=answers(devices=ABORT, status=-6)),
            *("import torch_npu", "Duplicated key 'pinned_reserve_segment_size_mb'", "problems above"),
        ),
        (lambda m: installed(m, torch="2.12.0"), "torch_npu", "not installed", "'torch-npu==2.12.0.*'"),
        (
            lambda m: installed(m, torch="2.13.0+cpu", torch_npu="2.12.0"),
            *("torch_npu", "is compiled for torch 2.12.0, but torch is 2.13.0+cpu", "the same release"),
        ),
        (
            lambda m: write(m, f"{CANN}/aarch64-linux/ascend_toolkit_install.info", "version=8.5.0\n"),
            *("CANN for torch_npu", "is released for CANN 9.1.0, but this is 8.5.0", "install CANN 9.1.0"),
        ),
        (
            lambda m: replace(m, environment={}),
            *("environment", "ASCEND_HOME_PATH and", f"source {CANN}/set_env.sh"),
        ),
        (
            lambda m: setting(m, ASCEND_HOME_PATH="/opt/gone"),
            *("environment", "/opt/gone does not exist", f"source {CANN}/set_env.sh"),
        ),
        (
            lambda m: write(m, "/usr/local/Ascend/driver/version.info", "Version=25.0.1\n"),
            *("driver for CANN", "CANN 9.1.0 runs with drivers 25.2, 25.3", "install driver 26.1"),
        ),
        (
            lambda m: without(without(m, "/dev/davinci0"), "/dev/davinci1"),
            *("devices", "no /dev/davinci* found", "install the driver"),
        ),
        (
            lambda m: without(write(m, "/.dockerenv", ""), "/dev/devmm_svm"),
            *("device managers", "/dev/devmm_svm", "start the container with --device /dev/devmm_svm"),
        ),
        (lambda m: replace(m, groups=frozenset({5})), "permission", "this user is not a member", "usermod -aG"),
        (
            lambda m: setting(m, ASCEND_RT_VISIBLE_DEVICES="0,2"),
            *("visible devices", "names 2, but the number of devices is 2", "name numbers below 2"),
        ),
        (lambda m: setting(m, ASCEND_RT_VISIBLE_DEVICES="a"), "visible devices", "not a list of numbers", "export"),
        (
            lambda m: replace(
                m, run=answers(SMI.replace("910B3               | OK     ", "910B3               | Alarm  "))
            ),
            *("device 0", "health Alarm", "npu-smi info -t health -i 0"),
        ),
        (
            lambda m: replace(m, run=answers(SMI.replace("3390 / 65536", "65536 / 65536"))),
            *("memory 1", "0 of 65536 MiB free", "stop the processes"),
        ),
        (
            lambda m: replace(m, run=answers("DrvMngGetConsoleLogLevel failed. ret=4\nnpu-smi: dcmi is not there\n")),
            *("npu-smi", "dcmi is not there", "driver"),
        ),
        (
            lambda m: replace(m, run=answers(devices="Traceback\nImportError: libhccl.so: cannot open", status=1)),
            *("import torch_npu", "ImportError: libhccl.so", "CANN's"),
        ),
        (lambda m: replace(m, run=answers(devices="DEVICES 0\n")), "import torch_npu", "sees no device", "devices"),
        (
            lambda m: setting(m, PYTORCH_NPU_ALLOC_CONF="expandable_segments:True,max_split_size_mb:64"),
            *("allocator", "conflicts with max_split_size_mb", "remove max_split_size_mb"),
        ),
        (lambda m: setting(m, PYTORCH_NPU_ALLOC_CONF="what"), "allocator", "is not a setting", "export"),
    ],
)
def test_what_stops_serving(
    machine: System, change: Callable[[System], System], check: str, words: str, remedy: str
) -> None:
    found = of(examine(change(machine)), check)
    assert found.status == PROBLEM and found.stops
    assert words in found.text and remedy in found.remedy


@pytest.mark.parametrize(
    ("change", "check", "status", "words"),
    [
        (
            lambda m: installed(m, torch="2.13.0", torch_npu="2.13.0"),
            "CANN for torch_npu",
            UNKNOWN,
            "no known vendor table",
        ),
        (
            lambda m: write(m, "/usr/local/Ascend/driver/version.info", "Version=27.0.0\n"),
            *("driver for CANN", UNKNOWN, "newer than the table"),
        ),
        (lambda m: without(m, "/usr/local/Ascend/firmware/version.info"), "firmware", UNKNOWN, "not readable"),
        (lambda m: replace(m, run=lambda command: None), "npu-smi", UNKNOWN, "not found"),
        (
            lambda m: replace(m, run=answers(SMI.replace("3384 / 65536", "   0 / 0    "))),
            *("memory 0", UNKNOWN, "npu-smi shows no memory"),
        ),
        (lambda m: setting(m, LD_LIBRARY_PATH="/lib"), "environment", UNKNOWN, "has no folder in"),
        (lambda m: write(m, "/sys/fs/cgroup/cpu.max", "150000 100000\n"), "processors", PROBLEM, "allows 1.5"),
        (lambda m: write(m, "/sys/fs/cgroup/memory.max", f"{2**31}\n"), "host memory", PROBLEM, "2.0 GiB by the"),
        (
            lambda m: write(m, f"{CANN}/aarch64-linux/ascend_toolkit_install.info", "version=9.1.1\n"),
            *("CANN for torch_npu", PROBLEM, "is released for CANN 9.1.0, but this is 9.1.1"),
        ),
        (
            lambda m: installed(
                write(m, f"{CANN}/aarch64-linux/ascend_toolkit_install.info", "version=9.1.1\n"),
                torch="2.12.0",
                torch_npu="2.12.0.post2",
            ),
            *("CANN for torch_npu", OK, "is released for CANN 9.1 ("),
        ),
        (lambda m: replace(m, user_id=0, groups=frozenset()), "permission", OK, "is accessible"),
    ],
)
def test_what_does_not_stop_serving(
    machine: System, change: Callable[[System], System], check: str, status: str, words: str
) -> None:
    found = of(examine(change(machine)), check)
    assert found.status == status and words in found.text and not found.stops


def test_a_table_that_forgets_a_driver_is_noticed(machine: System, monkeypatch: pytest.MonkeyPatch) -> None:
    old = write(machine, "/usr/local/Ascend/driver/version.info", "Version=25.0.1\n")
    monkeypatch.setitem(DRIVERS_OF_CANN, "9.1", DRIVERS_OF_CANN["9.0"])
    assert of(examine(old), "driver for CANN").status == OK, "the mutant that the case above must catch"


def test_every_row_of_the_tables_has_a_source() -> None:
    rows = [*CANN_OF_TORCH_NPU.values(), *DRIVERS_OF_CANN.values()]
    assert {source for _, source in rows} == set(SOURCES)


def test_hostile_files_are_bounded_and_shown_in_one_plain_line(machine: System) -> None:
    info = f"{CANN}/aarch64-linux/ascend_toolkit_install.info"
    write(machine, info, "version=\x1b[2J9.1.0\n" + "x" * 10 * MOST_BYTES)
    assert len(machine.read(info) or "") == MOST_BYTES
    assert of(examine(machine), "CANN").status == UNKNOWN
    machine.path("/etc/group").unlink()
    os.mkfifo(machine.path("/etc/group"))  # would block who opens it
    assert machine.read("/etc/group") is None
    for name in ("/proc/meminfo", "/sys/fs/cgroup/cpu.max", "/usr/local/Ascend/driver/version.info"):
        machine.path(name).write_bytes(os.urandom(4096))
    loud = setting(machine, PYTORCH_NPU_ALLOC_CONF="a:\x1b[31m\n" * 999, ASCEND_RT_VISIBLE_DEVICES="9" * 10**6)
    for finding in examine(replace(loud, run=answers("\x1b[2J\n" * 9999))):  # type: ignore[arg-type]
        assert all(character.isprintable() for character in finding.text + finding.remedy)
        assert len(finding.text) < 400
    assert plain("a\x00b\u202e\n" + "c" * 900).isprintable()


def test_a_check_that_fails_is_not_known_and_the_others_run(machine: System) -> None:
    def broken(system: System) -> list[Finding]:
        raise OSError("disk\nis gone")

    found = examine(machine, (broken, installation.python))  # type: ignore[arg-type]
    assert [finding.status for finding in found] == [UNKNOWN, OK] and "disk" in found[0].text


def test_the_command(run: Run, monkeypatch: pytest.MonkeyPatch, machine: System) -> None:
    monkeypatch.setattr(doctor, "System", lambda: machine)
    status, out, _ = run("npu", "doctor")
    assert status == 0 and "nothing was found that stops serving" in out and "9.1.0 in" in out
    monkeypatch.setattr(doctor, "System", lambda: replace(machine, python=(3, 9, 1)))
    status, out, _ = run("npu", "doctor", "--json")
    report = json.loads(out)
    assert status == 1 and not report["serves"]
    first = report["findings"][0]
    assert (first["status"], first["remedy"]) == ("problem", "use Python 3.11 to 3.14")


def test_torch_is_not_imported() -> None:
    """It may be what is broken."""
    script = (
        "import sys, torch_pagoda.cli, torch_pagoda.npu_tools.doctor as d\n"
        "d.examine(d.System(run=lambda command: None))\n"
        "raise SystemExit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", script]).returncode == 0
    assert len(checkup.CHECKS) == 19


@pytest.mark.parametrize(
    ("change", "check", "status", "words", "remedy"),
    [
        (lambda m: setting(m, HCCL_OP_EXPANSION_MODE="AIV"), "HCCL expansion", PROBLEM, "hang", "unset HCCL_OP"),
        (lambda m: setting(m, HCCL_OP_EXPANSION_MODE="AI_CPU"), "HCCL expansion", OK, "=AI_CPU", ""),
        (
            lambda m: setting(m, HCCL_BUFFSIZE="0"),
            "HCCL_BUFFSIZE",
            PROBLEM,
            "no number from 1",
            "unset HCCL_BUFFSIZE",
        ),
        (lambda m: setting(m, HCCL_CONNECT_TIMEOUT="9"), "HCCL_CONNECT_TIMEOUT", PROBLEM, "from 120", "unset"),
        (lambda m: setting(m, HCCL_EXEC_TIMEOUT="1e3"), "HCCL_EXEC_TIMEOUT", PROBLEM, "'1e3' is no number", "unset"),
        (lambda m: setting(m, HCCL_EXEC_TIMEOUT="300"), "HCCL_EXEC_TIMEOUT", OK, "300", ""),
        (lambda m: setting(m, HCCL_DETERMINISTIC="false"), "HCCL sums", UNKNOWN, "may change", "=true while"),
        (lambda m: without(m, "/usr/local/Ascend/latest/hccl/version.info"), "HCCL", UNKNOWN, "no version.info", ""),
        (lambda m: without(m, "/etc/hccn.conf"), "device network", UNKNOWN, "cannot be read", "mount /etc/hccn.conf"),
        (
            lambda m: write(m, "/etc/hccn.conf", "address_0=10.0.0.1\n"),
            "device network",
            PROBLEM,
            "of device 1",
            "-i 1",
        ),
        (lambda m: on_links(m, {(1, "-link"): (0, "link status: DOWN\n")}), "link 1", PROBLEM, "DOWN", "-link_stat"),
        (
            lambda m: on_links(m, {(0, "-net_health"): (0, "net health status: Receive timeout\n")}),
            *("link 0", PROBLEM, "its network is Receive timeout", "-netdetect"),
        ),
        (lambda m: on_links(m, {(0, "-link"): None}), "links", UNKNOWN, "hccn_tool was not found", "mount it"),
        (lambda m: on_links(m, {(0, "-link"): (1, "no permission\n")}), "link 0", UNKNOWN, "no permission", ""),
    ],
)
def test_what_several_devices_communicate_by(
    machine: System, change: Callable[[System], System], check: str, status: str, words: str, remedy: str
) -> None:
    found = of(examine(change(machine)), check)
    assert found.status == status and words in found.text and remedy in found.remedy and not found.stops


def on_links(machine: System, hccn: Mapping[tuple[int, str], tuple[int, str] | None]) -> System:
    return replace(machine, run=answers(hccn=hccn))  # type: ignore[arg-type]


def test_one_device_needs_no_links(machine: System) -> None:
    machine.path("/dev/davinci1").unlink()
    assert not [f for f in examine(machine) if f.check.startswith(("HCCL", "link", "device network"))]
