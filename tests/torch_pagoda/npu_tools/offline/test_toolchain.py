from __future__ import annotations

import fcntl
import hashlib
import os
import platform
import shutil
import signal
import subprocess
import sys
import threading
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from torch_pagoda import cli
from torch_pagoda.compiler.targets.npu.without_device import is_offline
from torch_pagoda.npu_tools import torch_build
from torch_pagoda.npu_tools.offline import toolchain as module
from torch_pagoda.npu_tools.offline.run import run_python
from torch_pagoda.npu_tools.offline.stand_in import (
    build_stand_ins,
    defined_symbols,
    find_tools,
    missing_symbols,
    needed_libraries,
    undefined_symbols,
)
from torch_pagoda.npu_tools.offline.toolchain import (
    Toolchain,
    ToolchainError,
    environment,
    find_toolchain,
    locate_toolchain,
    set_up_toolchain,
)
from torch_pagoda.npu_tools.offline.wheels import MACHINES, PROTOBUF, TORCH_NPU, TRIED, Requirement

needs_compiler = pytest.mark.skipif(
    not all(shutil.which(tool) for tool in ("cc", "nm", "readelf")), reason="builds shared libraries"
)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache folder; nothing here touches the real one."""
    monkeypatch.setenv("TORCH_PAGODA_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def library(tmp_path: Path) -> Path:
    """A shared object that expects ``aclInit`` of a ``libascendcl.so`` that is nowhere to be found."""
    source, vendor, built = tmp_path / "part.c", tmp_path / "libascendcl.so", tmp_path / "part.so"
    source.write_text("int aclInit(void);\nint answer(void) { return aclInit() + 42; }\n")
    tools = find_tools()
    subprocess.run(
        [tools["cc"], "-shared", f"-Wl,-soname,{vendor.name}", "-o", vendor, "-xc", os.devnull], check=True
    )
    options = ["-shared", "-fPIC", "-Wl,-z,now,--no-as-needed", f"-L{tmp_path}"]
    subprocess.run([tools["cc"], *options, source, "-lascendcl", "-o", built], check=True)
    vendor.unlink()
    return built


@pytest.fixture
def index(tmp_path: Path, library: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Toolchain]:
    """A toolchain whose one wheel lies in a local folder, the only one that pip looks into."""
    folder = tmp_path / "index"
    folder.mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    wheel = folder / "torch_npu-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("torch_npu/__init__.py", "import os\nif 'TORCH_NPU_DIES' in os.environ: os.abort()\n")
        archive.write(library, "torch_npu/part.so")
        info = "torch_npu-1.0.dist-info"
        archive.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: torch-npu\nVersion: 1.0\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")

    def build(sha256: str | None = None) -> Toolchain:
        sha256 = sha256 or hashlib.sha256(wheel.read_bytes()).hexdigest()
        return Toolchain(tmp_path / "cache" / "npu" / "chain", (Requirement("torch-npu", "1.0", sha256),))

    return build


def complete(folder: Path) -> Toolchain:
    """A toolchain that passes for complete."""
    toolchain = Toolchain(folder, ())
    toolchain.libraries.mkdir(parents=True)
    (toolchain.packages / "torch_npu").mkdir(parents=True)
    (toolchain.packages / "torch_npu" / "__init__.py").touch()
    (folder / "toolchain.json").write_text("{}")
    return toolchain


@needs_compiler
def test_symbols_of_a_shared_object(library: Path) -> None:
    assert undefined_symbols(library) == {"aclInit"}
    assert "answer" in defined_symbols(library)
    assert "libascendcl.so" in needed_libraries(library)
    assert missing_symbols([library], []) == ["aclInit"]


@needs_compiler
def test_what_the_system_and_python_define_is_not_missing(tmp_path: Path) -> None:
    source, built = tmp_path / "part.c", tmp_path / "part.so"
    source.write_text("void Py_Initialize(void); double cos(double); void go(double x) { Py_Initialize(); cos(x); }")
    subprocess.run([find_tools()["cc"], "-shared", "-fPIC", "-fno-builtin", source, "-o", built], check=True)
    assert "Py_Initialize" in undefined_symbols(built)
    assert missing_symbols([built], []) == []


@needs_compiler
def test_stand_ins_make_a_library_loadable(library: Path, tmp_path: Path) -> None:
    folder = tmp_path / "stand_ins"
    folder.mkdir()
    assert build_stand_ins([library], [], folder) == (["libascendcl.so"], ["aclInit"])
    assert [path.name for path in folder.iterdir()] == ["libascendcl.so"]
    script = f"import ctypes; raise SystemExit(ctypes.CDLL({str(library)!r}).answer())"
    assert run_python(["-c", script], Toolchain(tmp_path, ())) == 1  # without the stand-ins
    folder.rename(tmp_path / "libraries")
    assert run_python(["-c", script], Toolchain(tmp_path, ())) == 42


@needs_compiler
def test_set_up_once(index: Callable[..., Toolchain]) -> None:
    steps: list[str] = []
    toolchain = set_up_toolchain(steps.append, index())
    assert toolchain.complete and len(steps) == 3
    assert steps[0] == "downloading torch-npu 1.0" and steps[-1] == "importing torch_npu"
    assert toolchain.manifest()["stand_ins"] == ["libascendcl.so"] and toolchain.manifest()["symbols"] == 1
    entries = {path.name for path in toolchain.folder.parent.iterdir()}
    assert entries == {"chain", ".chain.lock"}, "the unfinished folder is gone"
    script = "import ctypes, torch_npu; ctypes.CDLL(torch_npu.__path__[0] + '/part.so')"
    assert run_python(["-c", script], toolchain) == 0

    before = toolchain.folder.stat().st_mtime_ns
    assert set_up_toolchain(steps.append, index()) == toolchain
    assert len(steps) == 3 and toolchain.folder.stat().st_mtime_ns == before

    shutil.rmtree(toolchain.packages)
    assert set_up_toolchain(steps.append, index()).complete and len(steps) == 6, "a damaged one is built anew"


@needs_compiler
def test_a_toolchain_that_cannot_be_imported_is_not_kept(
    index: Callable[..., Toolchain], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCH_NPU_DIES", "1")
    with pytest.raises(ToolchainError, match=r"torch-npu 1\.0 cannot be imported beside torch .*: exit status -6"):
        set_up_toolchain(toolchain=index())
    assert not index().folder.exists()


@needs_compiler
def test_another_checksum_is_refused(index: Callable[..., Toolchain]) -> None:
    with pytest.raises(ToolchainError, match="does not match its pinned checksum; nothing was installed"):
        set_up_toolchain(toolchain=index("0" * 64))
    assert not index().folder.exists()


@needs_compiler
def test_no_package_index(index: Callable[..., Toolchain], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    with pytest.raises(
        ToolchainError, match=r"could not install torch-npu 1\.0: .*A package index must be reachable"
    ):
        set_up_toolchain(toolchain=index())
    assert not index().folder.exists()


def test_no_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    with pytest.raises(ToolchainError, match=r"a C compiler .* and nm and readelf not found on PATH.*apt install"):
        set_up_toolchain(toolchain=Toolchain(tmp_path / "chain", ()))


@needs_compiler
def test_no_pip(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module.metadata, "distributions", lambda name: ())
    with pytest.raises(ToolchainError, match=r"pip is missing .*-m ensurepip"):
        set_up_toolchain(toolchain=Toolchain(tmp_path / "chain", ()))


@needs_compiler
def test_a_cache_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ToolchainError, match="set TORCH_PAGODA_CACHE"):
        set_up_toolchain(toolchain=Toolchain(tmp_path / "file" / "chain", ()))


@needs_compiler
def test_two_at_once_build_one(tmp_path: Path) -> None:
    """The second waits for the first, then finds what that made."""
    waiting = threading.Event()
    steps: list[str] = []

    def told(step: str) -> None:
        steps.append(step)
        waiting.set()

    toolchain = Toolchain(tmp_path / "chain", (PROTOBUF["x86_64"],))
    with (tmp_path / ".chain.lock").open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        second = threading.Thread(target=set_up_toolchain, args=(told, toolchain))
        second.start()
        assert waiting.wait(30)
        complete(toolchain.folder)
    second.join(30)
    assert not second.is_alive() and steps == ["waiting for another process to build the toolchain"]


def test_a_folder_for_every_combination(cache: Path) -> None:
    found = {
        locate_toolchain(torch, python).folder
        for torch in ("2.11.0", "2.12.0", "2.13.0", "2.13.0+cpu", "2.13.0+cu130", "2.14.0")
        for python in ("cp311", "cp312", "cp313", "cp314")
    }
    assert len(found) == 24 and {folder.parent for folder in found} == {cache / "npu"}
    assert locate_toolchain("2.13.0+cpu", "cp312") == locate_toolchain("2.13.0+cpu", "cp312")
    assert locate_toolchain("2.12.0", "cp312").requirements == (
        Requirement("torch-npu", "2.12.0.post3", TORCH_NPU["2.12.0"].sha256[platform.machine()]["cp312"]),
        PROTOBUF[platform.machine()],
    )


@pytest.mark.parametrize("machine", MACHINES)
def test_wheels_are_those_of_the_architecture(machine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "machine", lambda: machine)
    (torch_npu, protobuf), other = locate_toolchain("2.14.0", "cp311").requirements, {*MACHINES} - {machine}
    assert torch_npu == Requirement("torch-npu", "2.14.0", TORCH_NPU["2.14.0"].sha256[machine]["cp311"])
    assert protobuf == PROTOBUF[machine] and protobuf != PROTOBUF[other.pop()]


def test_only_one_combination_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    tried = []
    for machine in MACHINES:
        monkeypatch.setattr(platform, "machine", lambda machine=machine: machine)
        tried += [(torch, machine) for torch in TORCH_NPU if locate_toolchain(torch, "cp312").tried]
    assert tried == [TRIED]


def test_pins_are_checksums() -> None:
    pins = [protobuf.sha256 for protobuf in PROTOBUF.values()]
    pins += [
        pin for wheels in TORCH_NPU.values() for by_python in wheels.sha256.values() for pin in by_python.values()
    ]
    assert len(set(pins)) == len(pins) == 2 + 4 * len(MACHINES) * len(TORCH_NPU) == 34
    assert all(len(bytes.fromhex(pin)) == 32 for pin in pins)


@pytest.mark.parametrize(
    ("torch", "python", "words"),
    [
        (
            "2.10.0",
            "cp311",
            "torch 2.10.0 has no known torch-npu wheel.*install torch 2.11.0, 2.12.0, 2.13.0 or 2.14.0 .*2.13.0 is "
            "the one tested",
        ),
        ("2.15.0.dev1", "cp311", "torch 2.15.0.dev1 has no"),
        ("2.13.0", "cp310", "no wheel for cpython cp310; use CPython 3.11 to 3.14"),
    ],
)
def test_combinations_without_a_wheel(torch: str, python: str, words: str) -> None:
    with pytest.raises(ToolchainError, match=words):
        locate_toolchain(torch, python)


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("machine", "riscv64", "Linux on x86_64 or aarch64 only, but this is linux on riscv64"),
        ("libc_ver", ("glibc", "2.17"), "need glibc 2.28 or newer, but this is glibc 2.17"),
        ("libc_ver", ("", ""), "this is another C library"),
    ],
)
def test_other_machines(name: str, value: object, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, name, lambda: value)
    with pytest.raises(ToolchainError, match=words):
        locate_toolchain()


def test_a_torch_with_cuda_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_build, "cuda_release", lambda: "13.0")
    for ask in (locate_toolchain, find_toolchain, set_up_toolchain):
        with pytest.raises(ToolchainError, match=r"is built for CUDA 13\.0, .*ends the process; .*whl/cpu"):
            ask()
    assert locate_toolchain("2.12.0").requirements, "a release that is named need not be the installed one"


def test_a_missing_toolchain_is_not_built_by_the_way() -> None:
    with pytest.raises(ToolchainError, match=r"is not installed in .*; run: pagoda npu setup"):
        find_toolchain()


def test_environment(tmp_path: Path) -> None:
    base = {"PATH": "/bin", "LD_LIBRARY_PATH": ":/opt/lib", "CUDA_VISIBLE_DEVICES": "0"}
    variables = environment(Toolchain(tmp_path, ()), base)
    assert variables["PATH"] == "/bin" and base["LD_LIBRARY_PATH"] == ":/opt/lib"
    assert variables["LD_LIBRARY_PATH"] == f"{tmp_path}/libraries:/opt/lib", "no empty part: it is the working folder"
    assert variables["PYTHONPATH"] == f"{tmp_path}/packages"
    assert variables["TORCH_DEVICE_BACKEND_AUTOLOAD"] == "0" and variables["CUDA_VISIBLE_DEVICES"] == ""
    assert variables["ASCEND_HOME_PATH"] == f"{tmp_path}/cann/home"


def test_a_python_knows_how_it_was_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    toolchain = Toolchain(tmp_path, ())
    for name, value in environment(toolchain, {}).items():
        monkeypatch.setenv(name, value)
    assert is_offline()
    monkeypatch.delenv("TORCH_PAGODA_NPU_TOOLCHAIN")
    assert not is_offline()


def test_exit_status_is_passed_on(tmp_path: Path) -> None:
    toolchain = Toolchain(tmp_path, ())
    assert run_python(["-c", "raise SystemExit(3)"], toolchain) == 3
    assert run_python(["-c", "import os; os.kill(os.getpid(), 9)"], toolchain) == 128 + signal.SIGKILL


def run(*arguments: str) -> int:
    with pytest.raises(SystemExit) as ended:
        cli.main(arguments)
    return int(ended.value.code or 0)


def test_commands(cache: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert run("npu", "python", "-V") == 2
    assert "run: pagoda npu setup" in capfd.readouterr().err
    toolchain = locate_toolchain()
    complete(toolchain.folder)
    manifest = '{"torch": "2.13.0", "python": "3.11.7", "stand_ins": ["libhccl.so"], "symbols": 7}'
    (toolchain.folder / "toolchain.json").write_text(manifest)
    assert run("npu", "setup") == 0
    out = capfd.readouterr().out
    assert "1 libraries, 7 symbols" in out and "was there already" in out
    assert out.splitlines()[-1] == str(toolchain.folder)
    assert run("npu", "python", "-c", "import sys; print(sys.argv[1:]); sys.exit(5)", "--help", "-m", "x") == 5
    assert capfd.readouterr().out == "['--help', '-m', 'x']\n"


def test_setup_reports_in_one_line(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "riscv64")
    assert run("npu", "setup") == 2
    err = capfd.readouterr().err
    assert err.startswith("pagoda: error: ") and "linux on riscv64" in err and err.count("\n") == 1


def test_torchair_tests_fail_where_they_cannot_run(tmp_path: Path) -> None:
    """They are never skipped: without a compiler pytest says what is missing and fails."""
    command = [sys.executable, "-m", "pytest", "-q", "-m", "torchair", __file__]
    variables = {**os.environ, "PATH": str(tmp_path)}
    variables.pop("TORCH_PAGODA_NPU_TOOLCHAIN", None)
    variables.pop("CC", None)
    result = subprocess.run(command, env=variables, capture_output=True, text=True)
    assert result.returncode == pytest.ExitCode.USAGE_ERROR
    assert "ERROR: a C compiler" in result.stderr and "not found on PATH" in result.stderr


@pytest.mark.parametrize(("cuda", "autoload"), [("'13.0'", "1"), ("None", "1"), ("'13.0'", "0")])
def test_pytest_says_why_a_torch_with_cuda_would_end_it(cuda: str, autoload: str, tmp_path: Path) -> None:
    """Torch imports an installed torch_npu by itself, which here ends the process as the real one does."""
    for package, text in (("torch", "import os\nos.abort()\n"), ("torch_npu", "")):
        (tmp_path / package).mkdir()
        (tmp_path / package / "__init__.py").write_text(text)
    (tmp_path / "torch" / "version.py").write_text(f"cuda: Optional[str] = {cuda}\n")
    variables = {**os.environ, "PYTHONPATH": str(tmp_path), "TORCH_DEVICE_BACKEND_AUTOLOAD": autoload}
    command = [sys.executable, "-m", "pytest", "-q", "-m", "torchair", __file__]
    result = subprocess.run(command, env=variables, capture_output=True, text=True)
    refused = cuda != "None" and autoload == "1"
    assert result.returncode == (pytest.ExitCode.USAGE_ERROR if refused else -signal.SIGABRT)
    assert ("is built for CUDA 13.0, and torch_npu beside it ends the process" in result.stderr) == refused


@pytest.mark.parametrize("part", ["..", ".", "libraries", "packages"])
def test_what_others_can_write_is_not_loaded(part: str) -> None:
    toolchain = complete(locate_toolchain().folder)
    assert find_toolchain().folder == toolchain.folder
    (toolchain.folder / part).resolve().chmod(0o777)
    for find in (find_toolchain, set_up_toolchain):
        with pytest.raises(ToolchainError, match=r"refusing to use .*: others may write to .*chmod go-w"):
            find()


@needs_compiler
def test_the_module_of_pip_is_not_looked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before Python 3.12 setuptools takes that for a run of pip, and Inductor cannot import setuptools after it."""
    looked: list[str] = []

    class Noted:
        @staticmethod
        def find_spec(name: str, path: object = None, target: object = None) -> None:
            looked.append(name)

    monkeypatch.setattr("sys.meta_path", [Noted, *sys.meta_path])
    (tmp_path / "file").touch()
    with pytest.raises(ToolchainError, match="set TORCH_PAGODA_CACHE"):
        set_up_toolchain(toolchain=Toolchain(tmp_path / "file" / "chain", ()))
    assert "pip" not in looked
