"""Processors that a control group allows, of both versions, as the engine and the doctor read them."""

from __future__ import annotations

import pytest

from torch_pagoda.npu_tools.doctor.host import processors
from torch_pagoda.npu_tools.doctor.system import System
from torch_pagoda.runtime.control_group import control_group_limit


@pytest.mark.parametrize(
    ("files", "allowed"),
    [
        ({}, None),
        ({"/sys/fs/cgroup/cpu.max": "max 100000"}, None),
        ({"/sys/fs/cgroup/cpu.max": "250000 100000"}, 2.5),
        # A group of its own below one with less.
        (
            {
                "/proc/self/cgroup": "0::/pods/this",
                "/sys/fs/cgroup/pods/this/cpu.max": "800000 100000",
                "/sys/fs/cgroup/pods/cpu.max": "300000 100000",
            },
            3.0,
        ),
        # In a namespace the path is not below what is mounted.
        ({"/proc/self/cgroup": "0::/../../other", "/sys/fs/cgroup/cpu.max": "50000 100000"}, 0.5),
        (
            {
                "/proc/self/cgroup": "9:memory:/m\n4:cpu,cpuacct:/this",
                "/sys/fs/cgroup/cpu/this/cpu.cfs_quota_us": "400000",
                "/sys/fs/cgroup/cpu/this/cpu.cfs_period_us": "100000",
                "/sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1",
                "/sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000",
            },
            4.0,
        ),
        ({"/sys/fs/cgroup/cpu.max": "much 100000"}, None),
        ({"/sys/fs/cgroup/cpu.max": "100000 0"}, None),
        ({"/sys/fs/cgroup/cpu.max": "9" * 5000}, None),
    ],
)
def test_what_the_control_group_allows(files, allowed):
    assert control_group_limit(files.get) == allowed
    assert control_group_limit(lambda path: f"{files[path]}\n" if path in files else None) == allowed


def test_this_system_can_be_read():
    limit = control_group_limit(System().read)
    assert limit is None or limit > 0


def test_the_doctor_says_what_a_group_of_its_own_leaves(tmp_path):
    for name, text in (("proc/self/cgroup", "0::/pod"), ("sys/fs/cgroup/pod/cpu.max", "150000 100000")):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    (finding,) = processors(System(root=tmp_path))
    assert finding.text == "the control group allows 1.5" and finding.remedy
