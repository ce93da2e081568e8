"""Which build of torch pip takes from an index, under ``constraints.txt``."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def write_index(folder: Path, *versions: str) -> str:
    """Write a package index with an empty wheel of torch for each version; returns its URL."""
    project = folder / "torch"
    project.mkdir(parents=True)
    for version in versions:
        info = f"torch-{version}.dist-info"
        with zipfile.ZipFile(project / f"torch-{version}-py3-none-any.whl", "w") as wheel:
            wheel.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: torch\nVersion: {version}\n")
            wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
            wheel.writestr(f"{info}/RECORD", "")
    links = (f'<a href="{path.name.replace("+", "%2B")}">{path.name}</a>' for path in sorted(project.iterdir()))
    (project / "index.html").write_text(f"<!DOCTYPE html><html><body>{''.join(links)}</body></html>")
    return folder.as_uri()


def resolve(constraints: Path, *options: str) -> str:
    """The version of torch that pip would install; "" where no version fits."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("PIP_")}
    env |= {"PIP_CONFIG_FILE": os.devnull, "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--dry-run", "--ignore-installed", "--report", "-"]
    command += ["torch>=2.11", "-c", str(constraints), *options]
    done = subprocess.run(command, capture_output=True, text=True, env=env)
    if done.returncode:
        assert "ResolutionImpossible" in done.stderr, done.stderr
        return ""
    (installed,) = json.loads(done.stdout)["install"]
    return str(installed["metadata"]["version"])


@pytest.fixture
def torch_pin(tmp_path: Path) -> Path:
    """``constraints.txt``, reduced to torch: the indexes of these tests hold nothing else."""
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    (pin,) = (line for line in lines if line.startswith("torch=="))
    path = tmp_path / "constraints.txt"
    path.write_text(f"{pin}\n")
    return path


def test_torch_installs_from_an_index_without_cpu_builds(tmp_path: Path, torch_pin: Path) -> None:
    plain = write_index(tmp_path / "plain", "2.13.0", "2.14.1")
    assert resolve(torch_pin, "--index-url", plain) == "2.13.0"

    torch_pin.write_text("torch==2.13.0+cpu\n")
    assert resolve(torch_pin, "--index-url", plain) == ""


def test_the_cpu_build_is_preferred_wherever_it_is(tmp_path: Path, torch_pin: Path) -> None:
    plain = write_index(tmp_path / "plain", "2.13.0", "2.14.1")
    cpu = write_index(tmp_path / "cpu", "2.13.0+cpu", "2.14.1+cpu")
    assert resolve(torch_pin, "--index-url", cpu) == "2.13.0+cpu"
    assert resolve(torch_pin, "--index-url", plain, "--extra-index-url", cpu) == "2.13.0+cpu"
    assert resolve(torch_pin, "--index-url", write_index(tmp_path / "both", "2.13.0", "2.13.0+cpu")) == "2.13.0+cpu"
