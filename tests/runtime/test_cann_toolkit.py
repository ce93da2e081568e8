"""The version of the CANN toolkit that graphs are lowered for."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from torch_pagoda.compiler.options import CompileOptions, installed_cann
from torch_pagoda.runtime.cann_toolkit import toolkit_folder, toolkit_version
from torch_pagoda.runtime.npu_target import NEWEST_CANN, OLDEST_CANN, NpuTarget


class Npu:
    """A torch.npu with a device."""

    @staticmethod
    def is_available() -> bool:
        return True


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("ASCEND_HOME_PATH", str(tmp_path))
    return tmp_path


def test_the_toolkit_that_was_sourced_says_its_version(home: Path) -> None:
    (home / "version.info").write_text("Version=9.0.0\n")
    assert installed_cann() == "9.0.0" and NpuTarget(cann=installed_cann()).cann_release == (9, 0)
    assert CompileOptions(target="npu").npu_target().cann == "9.0.0"
    assert CompileOptions(target="npu", cann="8.5").npu_target().cann_release == (8, 5), "what is given wins"


def test_without_a_version_a_device_gets_the_limits_that_every_release_keeps(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert toolkit_version(str(home)) is None and installed_cann() == NEWEST_CANN
    monkeypatch.setattr(torch, "npu", Npu, raising=False)
    assert installed_cann() == OLDEST_CANN


def test_releases_are_compared_as_numbers() -> None:
    assert NpuTarget(cann="10.0").cann_release > NpuTarget(cann="9.1.0").cann_release
    with pytest.raises(ValueError, match=r"cann='nine' is not a version of CANN; give its release, such as '9\.1'"):
        NpuTarget(cann="nine")
    assert toolkit_folder({"ASCEND_HOME_PATH": "not/absolute"}, lambda folder: folder.endswith("latest")) is not None
