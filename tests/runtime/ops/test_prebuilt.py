"""Kernels that a wheel brings along: which of them is chosen, when none is loaded, and that each computes right."""

from __future__ import annotations

import ctypes
import functools
import itertools
import logging
import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from operator_files import operator_files
from stored_weights import stored_weight

from torch_pagoda.runtime.ops import native, openmp, prebuilt
from torch_pagoda.runtime.ops.kernel_cache import KernelBuildError, digest_file, note_digest
from torch_pagoda.runtime.ops.linear import quantized_linear
from torch_pagoda.runtime.ops.linear.quantized_weight import pack_stored, scheme_of
from torch_pagoda.runtime.ops.prebuilt import BUILDS, KERNELS, KernelBuild, choose_build, library_name, load_prebuilt

HERE = Path(__file__).parent
NEEDS = frozenset({"avx2"})
TOY = KernelBuild("toy", "x86_64", (), NEEDS)
ABLE = "flags\t\t: fpu avx2\n"
needs_cc = pytest.mark.skipif(shutil.which("cc") is None, reason="builds a shared library")


def cpuinfo(processor: str) -> str:
    """What Linux said on a real one."""
    return (HERE / "cpuinfo" / f"{processor}.txt").read_text()


@pytest.mark.parametrize(
    "processor, machine, name",
    [
        ("haswell", "x86_64", "avx2"),
        ("zen3", "x86_64", "avx2"),
        ("zen4", "x86_64", "avx512bf16"),
        ("ice_lake", "x86_64", "avx512vnni"),
        ("sapphire_rapids", "x86_64", "amx"),
        ("sapphire_rapids_without_amx", "x86_64", "avx512bf16"),  # as a hypervisor may show it
        ("kunpeng_920", "aarch64", "dotprod"),
        ("kunpeng_0xd02", "aarch64", "i8mm"),
        ("graviton_3", "aarch64", "i8mm"),
    ],
)
def test_the_best_build_that_a_processor_can_run(processor, machine, name):
    assert choose_build(machine, cpuinfo(processor)).name == name


def test_a_processor_that_multiplies_bytes_without_avx512():
    assert choose_build("x86_64", cpuinfo("zen3").replace(" avx2 ", " avx2 avx_vnni ")).name == "avxvnni"


@pytest.mark.parametrize(
    "processor, machine, lacks",
    [
        ("ivy_bridge", "x86_64", "lacking abm avx2 bmi1 bmi2 fma movbe"),
        ("cortex_a53", "aarch64", "lacking asimddp asimdhp asimdrdm atomics fphp"),
        ("zen4", "aarch64", "lacking asimd"),
        ("zen4", "riscv64", "riscv64"),
        (None, "x86_64", "x86_64"),
    ],
)
def test_processors_without_a_build(processor, machine, lacks):
    with pytest.raises(KernelBuildError, match=f"no build for this processor.*{lacks}"):
        choose_build(machine, cpuinfo(processor) if processor else "")


def test_what_one_core_lacks_is_not_used():
    mixed = cpuinfo("graviton_3") + cpuinfo("kunpeng_920")
    assert choose_build("aarch64", mixed).name == "dotprod"


def test_builds_ask_for_more_and_more():
    """So that the first that can run is the best; and each has flags of its own. Processors with AVX-512 have bytes
    multiplied in it rather than in AVX-VNNI."""
    for better, build in itertools.pairwise(BUILDS):
        needs = build.needs - {"avx_vnni"}
        assert better.machine != build.machine or better.needs > needs
    assert len({build.flags for build in BUILDS}) == len({build.name for build in BUILDS}) == len(BUILDS)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder with a library ``toy`` made of sources of digest ``ours``, which this machine is said to need."""
    monkeypatch.setattr(prebuilt, "BUILDS", (TOY,))
    source = tmp_path / "toy.c"
    source.write_text("int answer(void) { return 42; }\n")
    folder = tmp_path / "prebuilt_kernels"
    folder.mkdir()
    library = folder / library_name(TOY, "ours")
    subprocess.run(["cc", "-shared", "-fPIC", source, "-o", library], check=True)
    note_digest(library, "cc")
    return folder


def load(folder, key="ours", able=ABLE):
    return load_prebuilt(folder, "x86_64", able, lambda build: key)


@needs_cc
def test_a_library_of_our_sources_is_loaded(folder, caplog):
    for path in folder.iterdir():
        path.chmod(0o664)  # as pip leaves it where a group shares its files: no reason to distrust it
    assert load(folder).answer() == 42
    assert not caplog.text


@needs_cc
def test_a_library_of_other_sources_is_not(folder):
    with pytest.raises(KernelBuildError, match=r"kernels-toy-theirs\.so is missing: .*other sources"):
        load(folder, "theirs")


@needs_cc
def test_a_library_for_a_better_processor_is_not(folder):
    with pytest.raises(KernelBuildError, match="lacking avx2"):
        load(folder, able="flags : fpu\n")


def test_an_installation_without_libraries(tmp_path):
    with pytest.raises(KernelBuildError, match="this installation contains none"):
        load(tmp_path / "missing")


def cut(library):
    library.write_bytes(library.read_bytes()[:4096])


def flip(library):
    content = bytearray(library.read_bytes())
    content[len(content) // 2] ^= 4
    library.write_bytes(content)


def lose_digest(library):
    digest_file(library).unlink()


def garble(library):
    """Its digest fits, and it is not a library."""
    library.write_bytes(b"no library")
    note_digest(library, "nobody")


@needs_cc
@pytest.mark.parametrize("damage", [cut, flip, lose_digest, garble], ids=lambda f: f.__name__)
def test_a_damaged_library_is_not_loaded_and_that_is_said(folder, caplog, damage):
    damage(folder / library_name(TOY, "ours"))
    with pytest.raises(KernelBuildError, match="could not load"):
        load(folder)
    assert "not using" in caplog.text and "kernels-toy-ours.so" in caplog.text


def test_the_key_names_sources_and_flags(tmp_path, monkeypatch):
    before = {build: native.prebuilt_key(build) for build in BUILDS}
    assert len(set(before.values())) == len(BUILDS)
    sources = shutil.copytree(native._SOURCES, tmp_path / "csrc")
    monkeypatch.setattr(native, "_SOURCES", sources)
    assert {build: native.prebuilt_key(build) for build in BUILDS} == before
    with (sources / "softmax.h").open("a") as header:
        header.write("// another\n")
    assert not set(before.values()) & {native.prebuilt_key(build) for build in BUILDS}
    monkeypatch.undo()
    monkeypatch.setattr(native, "PORTABLE_FLAGS", ("-O1",))
    assert not set(before.values()) & {native.prebuilt_key(build) for build in BUILDS}


class TestChoice:
    """What ``TORCH_PAGODA_KERNELS`` chooses, where loading and building only say what they would do."""

    @pytest.fixture(autouse=True)
    def sources(self, monkeypatch):
        self.prebuilt = self.built = None
        monkeypatch.setattr(native, "load_prebuilt", lambda *_: self._found(self.prebuilt, "they are gone"))
        monkeypatch.setattr(native, "_load_built", lambda _: self._found(self.built, "there is no g++"))

    def _found(self, library, why):
        if library is None:
            raise KernelBuildError(why)
        return library

    @pytest.mark.parametrize(
        "chosen, prebuilt, built, loaded",
        [
            ("auto", "prebuilt", "built", "prebuilt"),
            ("auto", None, "built", "built"),
            ("jit", "prebuilt", "built", "built"),
            ("prebuilt", "prebuilt", "built", "prebuilt"),
        ],
    )
    def test_loaded(self, tmp_path, chosen, prebuilt, built, loaded):
        self.prebuilt, self.built = prebuilt, built
        assert native._load_or_build(tmp_path, chosen) == loaded

    @pytest.mark.parametrize(
        "chosen, prebuilt, built, why",
        [
            ("auto", None, None, r"there is no g\+\+; no prebuilt kernels are usable: they are gone"),
            ("jit", "prebuilt", None, r"there is no g\+\+$"),
            (
                "prebuilt",
                None,
                "built",
                "TORCH_PAGODA_KERNELS=prebuilt and no prebuilt kernels are usable: they are gone",
            ),
        ],
    )
    def test_reasons(self, tmp_path, chosen, prebuilt, built, why):
        self.prebuilt, self.built = prebuilt, built
        with pytest.raises(KernelBuildError, match=why):
            native._load_or_build(tmp_path, chosen)

    def test_the_log_says_why_kernels_are_built(self, tmp_path, caplog):
        self.built = "built"
        with caplog.at_level(logging.INFO, native.__name__):
            native._load_or_build(tmp_path)
        assert "no prebuilt kernels are usable: they are gone" in caplog.text


@pytest.mark.parametrize("value, chosen", [(None, "auto"), ("", "auto"), ("jit", "jit"), ("prebuilt", "prebuilt")])
def test_the_environment_chooses(monkeypatch, value, chosen):
    monkeypatch.delenv(KERNELS, raising=False)
    if value is not None:
        monkeypatch.setenv(KERNELS, value)
    assert prebuilt.chosen_kernels() == chosen


def test_a_wrong_choice_is_refused_by_name(monkeypatch):
    monkeypatch.setenv(KERNELS, "JIT")
    native._loading.cache_clear()
    with pytest.raises(ValueError, match="TORCH_PAGODA_KERNELS=JIT is invalid; set it to one of auto, jit, preb"):
        native.begin_loading()


@pytest.fixture(scope="module")
def build():
    """The build for this machine."""
    try:
        return choose_build(platform.machine(), prebuilt.read_cpuinfo())
    except KernelBuildError as error:
        pytest.skip(str(error))


@pytest.fixture
def installed(build, tmp_path):
    """A folder with the library for this machine; it is the one that was built here, which takes no waiting."""
    if native.load_kernels() is None:
        pytest.skip("there are no C++ kernels")
    folder = tmp_path / "prebuilt_kernels"
    folder.mkdir()
    library = folder / library_name(build, native.prebuilt_key(build))
    shutil.copy(Path(native.load_kernels()._name).resolve(), library)
    note_digest(library, "g++")
    return folder


USE = """
import sys, warnings
from pathlib import Path
from torch_pagoda.runtime.ops import native
native.FOLDER = Path(sys.argv[1])
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    library = native.load_kernels()
print([str(w.message) for w in caught], library and Path(library._name).resolve().name)
"""


def run(folder, tmp_path, **environment):
    """What a process that has no compiler loads."""
    settings = {**os.environ, "PATH": str(tmp_path), "TMPDIR": str(tmp_path), "TORCH_PAGODA_CACHE": str(tmp_path)}
    command = [sys.executable, "-c", USE, str(folder)]
    done = subprocess.run(command, env={**settings, **environment}, capture_output=True, text=True, check=True)
    return done.stdout, done.stderr


def test_without_a_compiler_the_prebuilt_library_serves_silently(build, installed, tmp_path):
    out, error = run(installed, tmp_path)
    assert out.startswith("[]") and out.split()[-1] == library_name(build, native.prebuilt_key(build))
    assert not error and not list(tmp_path.glob("kernels*"))


def test_without_a_compiler_a_damaged_library_leaves_the_reference(installed, tmp_path):
    flip(*installed.glob("*.so"))
    out, error = run(installed, tmp_path)
    assert out.endswith("None\n") and "g++ is not on PATH" in out and "no prebuilt kernels are usable" in out
    assert "it is damaged" in error


HASHED = """
import ctypes, importlib.util, sys
from pathlib import Path
spec = importlib.util.spec_from_file_location("openmp", sys.argv[1])
openmp = importlib.util.module_from_spec(spec)
spec.loader.exec_module(openmp)
torch, kernels = Path(sys.argv[2]), sys.argv[3]
ctypes.CDLL(str(next((torch / "lib").iterdir())))  # as a dependency of torch's libraries, for these alone
try:
    ctypes.CDLL(kernels)
except OSError as error:
    assert "GOMP_" in str(error) or "omp_" in str(error), error
else:
    sys.exit("loads whatever the runtime is called")
openmp.promote_openmp(torch)
assert ctypes.CDLL(kernels).pagoda_attention
print({line.split()[-1].rpartition("/")[2] for line in open("/proc/self/maps") if "gomp" in line})
"""


def test_a_renamed_openmp_runtime_is_found(tmp_path):
    """As torch's CUDA wheels have it: another file, another soname, not in the global namespace."""
    library = native.load_kernels()
    loaded = {line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if "libgomp" in line}
    if library is None or not loaded:
        pytest.skip("needs kernels and a libgomp")
    (tmp_path / "torch" / "lib").mkdir(parents=True)
    runtime = Path(loaded.pop()).read_bytes()
    (tmp_path / "torch" / "lib" / "libgomp-1.so").write_bytes(runtime.replace(b"libgomp.so.1\0", b"libgomp-1.so\0"))
    command = [
        sys.executable,
        "-c",
        HASHED,
        openmp.__file__,
        str(tmp_path / "torch"),
        os.path.realpath(library._name),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "{'libgomp-1.so'}"


# Loaded by pytest before any test: the tests' kernels are those of one build.
PLUGIN = """
import ctypes, os
from torch_pagoda.runtime.ops import native
native.load_kernels()
_library = ctypes.CDLL(os.environ["PAGODA_PREBUILT"])
native.load_kernels = lambda: _library
native._bound_function.cache_clear()
"""
OPERATORS = (
    "attention_kernel float8_linear gated_activation gated_rms_norm int8_rows layer_norm moe packed_linear "
    "paged_attention_int8 paged_attention_kernel quantized_linear quantized_moe rms_norm rope shared_steps "
    "stored_weight weight_panels"
)
OPERATOR_TESTS = operator_files(OPERATORS)


@pytest.mark.slow
@pytest.mark.parametrize("build", [b for b in BUILDS if b.machine == platform.machine()], ids=lambda b: b.name)
def test_operators_on_every_build_that_this_machine_can_run(build, tmp_path):
    """Also on a lesser one than the best: what the machine has besides is not taken for granted."""
    if not build.needs <= prebuilt._abilities(prebuilt.read_cpuinfo()):
        pytest.skip(f"this processor cannot run {build.name}")
    library = tmp_path / library_name(build, "test")
    native.build_library("g++", library, native.prebuilt_flags(build))
    (tmp_path / "prebuilt_plugin.py").write_text(PLUGIN)
    environment = {**os.environ, "PAGODA_PREBUILT": str(library), "PYTHONPATH": str(tmp_path)}
    command = [sys.executable, "-m", "pytest", "-q", "-n", "0", "-p", "prebuilt_plugin", *map(str, OPERATOR_TESTS)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{done.stdout[-3000:]}\n{done.stderr[-3000:]}"


@pytest.mark.slow
@pytest.mark.skipif(platform.machine() != "x86_64", reason="names x86 instruction sets")
def test_rounded_products_are_the_same_on_every_build(tmp_path, monkeypatch):
    """Bit for bit, with the largest sums among them: words, bytes and tiles add the same integers."""
    able = prebuilt._abilities(prebuilt.read_cpuinfo())
    builds = [build for build in BUILDS if build.machine == "x86_64" and build.needs <= able]
    if len(builds) < 2:
        pytest.skip("this processor can run one build at most")
    libraries = []
    for build in builds:
        native.build_library("g++", tmp_path / f"{build.name}.so", native.prebuilt_flags(build))
        libraries.append(ctypes.CDLL(str(tmp_path / f"{build.name}.so")))
    found: dict[str, list[torch.Tensor]] = {}
    for build, library in zip(builds, libraries, strict=True):
        bound = functools.partial(native.bind_function, library)
        monkeypatch.setattr(quantized_linear, "kernel_function", bound)
        found[build.name] = results = []
        for text in (
            *("int4/g128/bf16", "int4/g128/f16+z", "int8/g256/f16+z", "int8/row/f32", "int8/g512/f16+z"),
            *("int4/g32/f16+z", "int8/g16/f32", "e2m1/g32/f32", "e2m1/g64/f32", "affine4/g32/f32", "int8/row/f32/x8"),
        ):
            weight = stored_weight(text, 70, 1088)
            weight.codes[:2] = torch.tensor([[255], [0]], dtype=torch.uint8)
            packed, scheme = pack_stored(weight), scheme_of(weight.form, None)
            for rows in (1, 2, 3, 5, 7, 33):
                for x in (
                    torch.randn(rows, 1088, generator=torch.Generator().manual_seed(rows)),
                    torch.ones(rows, 1088),
                ):
                    results.append(quantized_linear.quantized_linear_cpu(x, packed, None, 70, *scheme.arguments()))
    first, *others = found.values()
    for other in others:
        assert all(map(torch.equal, other, first))


@pytest.mark.slow
@pytest.mark.skipif(platform.machine() != "x86_64", reason="AMX is Intel's")
def test_quantized_products_on_emulated_tiles(tmp_path):
    """Plain C++ stands in for AMX on processors without it."""
    amx, vectors = (next(build for build in BUILDS if build.name == name) for name in ("amx", "avx512bf16"))
    if not vectors.needs <= prebuilt._abilities(prebuilt.read_cpuinfo()):
        pytest.skip("this processor lacks what an AMX build uses besides")
    library, tiles = tmp_path / "emulated.so", HERE.parents[1] / "support" / "emulated_tiles.h"
    native.build_library("g++", library, (*native.prebuilt_flags(amx), "-include", str(tiles)))
    (tmp_path / "prebuilt_plugin.py").write_text(PLUGIN)
    environment = {**os.environ, "PAGODA_PREBUILT": str(library), "PYTHONPATH": str(tmp_path)}
    tests = map(str, operator_files("shared_steps float8_linear quantized_linear"))
    command = [sys.executable, "-m", "pytest", "-q", "-n", "0", "-p", "prebuilt_plugin", *tests]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
