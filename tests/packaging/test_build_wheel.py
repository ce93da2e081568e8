"""Wheels with kernels: what goes in, what is refused, and that one works where there is no compiler."""

from __future__ import annotations

import base64
import csv
import hashlib
import io
import os
import platform
import shutil
import subprocess
import venv
import zipfile
from pathlib import Path

import build_wheel
import pytest
import torch

from torch_pagoda.runtime.ops import native, prebuilt
from torch_pagoda.runtime.ops.kernel_cache import digest_file, note_digest
from torch_pagoda.runtime.ops.prebuilt import BUILDS, library_name

ROOT = Path(__file__).resolve().parents[2]
PURE = {
    "torch_pagoda/__init__.py": b"",
    "torch_pagoda-1.dist-info/METADATA": b"Metadata-Version: 2.4\nName: torch-pagoda\nVersion: 1\n",
    "torch_pagoda-1.dist-info/WHEEL": b"Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n\n",
    "torch_pagoda-1.dist-info/RECORD": b"",
}
needs_binutils = pytest.mark.skipif(
    shutil.which("cc") is None or shutil.which("readelf") is None, reason="builds and reads shared libraries"
)


@pytest.fixture
def compiled(tmp_path):
    """Compiles C into a shared library."""

    def compile_c(source, *flags):
        (tmp_path / "source.c").write_text(source)
        library = tmp_path / "library.so"
        subprocess.run(["cc", "-shared", "-fPIC", tmp_path / "source.c", "-o", library, *flags], check=True)
        return library

    return compile_c


@needs_binutils
def test_needs_that_every_system_meets(compiled):
    source = "#include <stdlib.h>\nvoid GOMP_barrier(void);\nvoid* f(void) { GOMP_barrier(); return malloc(1); }\n"
    assert list(build_wheel.unmet_needs(compiled(source))) == []


@needs_binutils
@pytest.mark.parametrize(
    "source, flags, need",
    [
        ("unsigned arc4random(void);\nunsigned f(void) { return arc4random(); }\n", [], "arc4random@GLIBC_2.36"),
        ("int pagoda_lost(void);\nint f(void) { return pagoda_lost(); }\n", [], "pagoda_lost"),
        (
            "int omp_get_num_threads(void);\nint f(void) { return omp_get_num_threads(); }\n",
            ["-Wl,--no-as-needed", "-fopenmp"],
            "libgomp.so.1",
        ),
    ],
    ids=["a newer system", "nobody has it", "another OpenMP"],
)
def test_needs_that_some_systems_do_not_meet(compiled, source, flags, need):
    try:
        library = compiled(source, *flags)
    except subprocess.CalledProcessError:
        pytest.skip("this system does not have it either")
    found = list(build_wheel.unmet_needs(library))
    if need.startswith("arc4random@") and found == ["arc4random"]:
        pytest.skip("this system's C library is older")
    assert need in found


def test_a_symbol_without_a_number_is_no_promise(tmp_path, monkeypatch):
    line = "     3: 0000000000000000     0 FUNC    GLOBAL DEFAULT  UND __libc_secret@GLIBC_PRIVATE (2)\n"
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: subprocess.CompletedProcess([], 0, stdout=line))
    assert list(build_wheel.unmet_needs(tmp_path)) == ["__libc_secret@GLIBC_PRIVATE"]


@pytest.mark.parametrize(
    "architecture, package", [("x86_64", r"g\+\+-x86-64-linux-gnu"), ("aarch64", r"g\+\+-aarch64-linux-gnu")]
)
def test_without_a_compiler_it_says_what_to_install(tmp_path, monkeypatch, architecture, package):
    monkeypatch.setenv("PATH", str(tmp_path))
    if architecture == platform.machine():
        package = r"g\+\+"
    with pytest.raises(SystemExit, match=rf"no wheel for {architecture}: .*apt install {package}\)"):
        build_wheel.find_compiler(architecture)


@pytest.mark.skipif(shutil.which("g++") is None, reason="there is no g++")
def test_a_compiler_for_another_machine_is_refused():
    other = next(name for name in build_wheel.ARCHITECTURES if name != platform.machine())
    with pytest.raises(SystemExit, match=rf"no wheel for {other}: \S*g\+\+ compiles for {platform.machine()}"):
        build_wheel.find_compiler(other, "g++")


def test_a_tree_that_is_not_the_installed_one_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(build_wheel, "ROOT", tmp_path)
    with pytest.raises(SystemExit, match=f"not this tree; run: pip install -e {tmp_path}"):
        build_wheel.build_wheel(platform.machine(), "g++", tmp_path)


@pytest.fixture
def without_compiling(monkeypatch):
    """Libraries are files with the flags that they would be made with."""
    monkeypatch.setattr(shutil, "which", lambda name: name)
    monkeypatch.setattr(native, "build_library", lambda _, library, flags: library.write_text(" ".join(flags)))
    monkeypatch.setattr(native, "compiler_version", lambda _: "g++ 1")
    monkeypatch.setattr(build_wheel, "unmet_needs", lambda _: iter(()))


@pytest.mark.parametrize("machine", build_wheel.ARCHITECTURES)
def test_there_is_a_library_for_each_build_of_the_machine(machine, tmp_path, without_compiling):
    libraries = build_wheel.build_libraries(machine, "g++", tmp_path)
    builds = [build for build in BUILDS if build.machine == machine]
    assert len(builds) > 1
    for library, build in zip(libraries, builds, strict=True):
        assert library.name == library_name(build, native.prebuilt_key(build))
        assert library.read_text().split() == [*native.prebuilt_flags(build), *build_wheel.REPRODUCIBLE]
        digest = hashlib.sha256(library.read_bytes()).hexdigest()
        assert digest_file(library).read_text().split()[:2] == [digest, library.name]


def test_a_library_that_needs_more_is_refused(tmp_path, monkeypatch, without_compiling):
    monkeypatch.setattr(build_wheel, "unmet_needs", lambda _: iter(["libgomp.so.1"]))
    with pytest.raises(SystemExit, match=r"no wheel for x86_64: kernels-\S+ needs libgomp\.so\.1"):
        build_wheel.build_libraries("x86_64", "g++", tmp_path)


LIBRARIES = ("kernels-amx-0.so", "kernels-avx2-0.so")


@pytest.fixture
def contents(tmp_path):
    """Of a wheel with two libraries."""
    for name in LIBRARIES:
        (tmp_path / name).write_bytes(b"library")
        note_digest(tmp_path / name, "g++ 1")
    return build_wheel.with_libraries(PURE, [tmp_path / name for name in LIBRARIES], "x86_64")


def test_the_wheel_says_where_it_runs(contents):
    lines = contents["torch_pagoda-1.dist-info/WHEEL"].decode().splitlines()
    assert {"Root-Is-Purelib: false", "Tag: py3-none-manylinux_2_28_x86_64"} <= set(lines)
    assert not {"Root-Is-Purelib: true", "Tag: py3-none-any"} & set(lines)


def test_the_record_names_every_file(contents):
    rows = list(csv.reader(io.StringIO(contents["torch_pagoda-1.dist-info/RECORD"].decode())))
    assert {name for name, *_ in rows} == set(contents)
    assert {f"torch_pagoda/runtime/ops/prebuilt_kernels/{name}.sha256" for name in LIBRARIES} <= set(contents)
    for name, digest, size in rows:
        if not name.endswith("/RECORD"):
            expected = base64.urlsafe_b64encode(hashlib.sha256(contents[name]).digest()).decode().rstrip("=")
            assert (digest, size) == (f"sha256={expected}", str(len(contents[name])))


def test_the_bytes_depend_on_the_contents_alone(contents, tmp_path):
    first, second = tmp_path / "a" / "wheel.whl", tmp_path / "b" / "wheel.whl"
    build_wheel.write_wheel(first, contents)
    os.utime(next(tmp_path.glob("*.so")), (0, 0))
    build_wheel.write_wheel(second, contents)
    assert first.read_bytes() == second.read_bytes()
    assert build_wheel.read_wheel(first) == contents
    with zipfile.ZipFile(first) as archive:
        modes = {entry.filename: entry.external_attr >> 16 & 0o777 for entry in archive.infolist()}
    assert {modes.pop(f"torch_pagoda/runtime/ops/prebuilt_kernels/{name}") for name in LIBRARIES} == {0o755}
    assert set(modes.values()) == {0o644}


QUICKSTART = """
import runpy, sys, warnings
warnings.simplefilter("error", RuntimeWarning)
from torch_pagoda.runtime.ops import native
import torch_pagoda
print("from", torch_pagoda.__file__)
sys.argv = sys.argv[1:]
try:
    runpy.run_path(sys.argv[0], run_name="__main__")
finally:
    native.load_kernels()
    print("kernels", *(line.split()[-1] for line in open("/proc/self/maps") if "kernels-" in line))
"""


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="there is no g++")
def test_a_wheel_works_where_there_is_no_compiler(tmp_path):
    machine = platform.machine()
    if machine not in build_wheel.ARCHITECTURES:
        pytest.skip("there are no builds for this machine")
    compiler = build_wheel.find_compiler(machine)
    wheels = [build_wheel.build_wheel(machine, compiler, tmp_path / name) for name in ("first", "second")]
    assert wheels[0].read_bytes() == wheels[1].read_bytes()
    with zipfile.ZipFile(wheels[0]) as archive:
        libraries = [entry for entry in archive.infolist() if entry.filename.endswith(".so")]
    assert len(libraries) == len([build for build in BUILDS if build.machine == machine])
    assert sum(entry.compress_size for entry in libraries) < 2e6

    venv.create(tmp_path / "venv", with_pip=True)
    python = tmp_path / "venv" / "bin" / "python"
    command = [python, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", wheels[0]]
    subprocess.run(command, check=True)
    (site,) = (tmp_path / "venv" / "lib").glob("python*/site-packages")
    dependencies = Path(torch.__file__).parents[1]  # after its own, where the wheel lies
    (site / "dependencies.pth").write_text(f"{dependencies}\n")
    (tmp_path / "bin").mkdir()
    environment = {
        **{name: value for name, value in os.environ.items() if not name.startswith("PYTHON")},
        **{"PATH": str(tmp_path / "bin"), "TORCH_PAGODA_CACHE": str(tmp_path / "cache"), "HF_HUB_OFFLINE": "1"},
    }
    command = [python, "-c", QUICKSTART, ROOT / "examples" / "quickstart.py"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-2000:]}"
    assert "512/512 tokens equal transformers" in done.stdout and f"from {site}" in done.stdout
    build = prebuilt.choose_build(machine, prebuilt.read_cpuinfo())
    expected = (
        site / "torch_pagoda/runtime/ops/prebuilt_kernels" / f"kernels-{build.name}-{native.prebuilt_key(build)}.so"
    )
    assert set(done.stdout.split("\nkernels ")[1].split()) == {str(expected)}
    assert not list((tmp_path / "cache").rglob("*.so"))


@pytest.mark.slow
def test_other_ways_to_install_compile_nothing(tmp_path, monkeypatch):
    """Pip's own wheel, which ``pip install .`` makes of this tree or of an sdist."""
    (tmp_path / "bin").mkdir()
    for name in ("g++", "cc", "gcc"):
        (tmp_path / "bin" / name).write_text(f"#!/bin/sh\necho {name} >>{tmp_path}/called\nexit 1\n")
        (tmp_path / "bin" / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}")
    wheel = build_wheel.build_pure_wheel(tmp_path)
    contents = build_wheel.read_wheel(wheel)
    assert wheel.name.endswith("-py3-none-any.whl") and not (tmp_path / "called").exists()
    assert not [name for name in contents if "prebuilt_kernels" in name or name.endswith(".so")]
    assert any(name.endswith("csrc/attention.cpp") for name in contents)
