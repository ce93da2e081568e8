"""The build of torch, read off its files."""

from __future__ import annotations

from importlib import util
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from torch_pagoda.npu_tools import torch_build

VERSION = """\
from typing import Optional

__version__ = '2.12.0{local}'
cuda: Optional[str] = {cuda}
git_version = '7661cd9c'
hip: Optional[str] = None
"""


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (VERSION.format(local="+cu130", cuda="'13.0'"), "13.0"),
        (VERSION.format(local="+cpu", cuda=None), None),
        ("cuda = '12.8'\n", "12.8"),
        ("__all__ = ['cuda', 'hip']\nhip = '6.4'\n", None),
        (None, None),
    ],
)
def test_cuda_release(
    text: str | None, expected: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if text is not None:
        (tmp_path / "version.py").write_text(text)
    found = SimpleNamespace(origin=str(tmp_path / "__init__.py"))
    monkeypatch.setattr(torch_build, "util", SimpleNamespace(find_spec=lambda name: found))
    assert torch_build.cuda_release() == expected
    assert bool(torch_build.cuda_conflict("2.12.0")) == (expected is not None)
    monkeypatch.setattr(torch_build, "util", SimpleNamespace(find_spec=lambda name: None))
    assert torch_build.cuda_release() is None


def test_the_installed_torch() -> None:
    assert util.find_spec("torch") is not None
    assert torch_build.cuda_release() == torch.version.cuda


@pytest.mark.parametrize(
    ("output", "expected"),
    [
        (
            "terminate called\n  what():  Duplicated key 'a'\nframe #0\n<omitting python frames>\n",
            "Duplicated key 'a'",
        ),
        ("Traceback\nImportError: libhccl.so: cannot open\n\n", "ImportError: libhccl.so: cannot open"),
        ("\n", ""),
    ],
)
def test_why_it_died(output: str, expected: str) -> None:
    assert torch_build.why_it_died(output) == expected
