"""Building, caching and loading the C++ kernels, and life without a compiler."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import torch
from stored_weights import stored_weight

from torch_pagoda.runtime.memory import advise_huge_pages
from torch_pagoda.runtime.ops import attention_reference, gated_activation, native
from torch_pagoda.runtime.ops.attention import attention, paged_attention, rope
from torch_pagoda.runtime.ops.linear import quantized_linear, quantized_weight
from torch_pagoda.runtime.ops.linear.quantized_weight import Quantization
from torch_pagoda.runtime.ops.norm import gated_rms_norm, layer_norm, norm_kernel, rms_norm
from torch_pagoda.runtime.ops.reference import paged_attention_reference

USE = """
import sys, torch, warnings
from torch_pagoda.runtime.ops import attention_reference
q = torch.randn(1, 2, 5, 8)
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    for _ in range(3):
        result = torch.ops.pagoda.attention(q, q, q, None, None, None, 1.0, True, 0, 0, 0.0)
torch.testing.assert_close(result, attention_reference(q, q, q, None, None, None, 1.0, True, 0, 0, 0.0))
print([str(w.message) for w in caught])
"""


def run_python(code: str, **environment: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", code],
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def output(process: subprocess.Popen[str]) -> str:
    out, error = process.communicate(timeout=300)
    assert process.returncode == 0, error
    return out


def test_without_a_compiler_the_reference_runs_and_one_warning_says_so(tmp_path):
    out = output(run_python(USE, PATH=str(tmp_path), TORCH_PAGODA_CACHE=str(tmp_path), TMPDIR=str(tmp_path)))
    assert out.count("without its C++ kernels") == 1
    assert "g++ is not on PATH" in out and "many times slower" in out


def test_a_compiler_that_fails_is_reported(tmp_path):
    compiler = tmp_path / "g++"
    compiler.write_text(
        "#!/bin/sh\n[ \"$1\" = --version ] || { echo 'x.cpp:1: error: no such thing' >&2; exit 1; }\n"
    )
    compiler.chmod(0o755)
    path = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"
    out = output(run_python(USE, PATH=path, TORCH_PAGODA_CACHE=str(tmp_path / "cache"), TMPDIR=str(tmp_path)))
    assert out.count("without its C++ kernels") == 1 and "error: no such thing" in out
    assert not list((tmp_path / "cache").rglob("*.so"))


@pytest.fixture
def counting_compiler(tmp_path, monkeypatch):
    """A g++ that counts what it links and hands out the library that this process has built: no waiting."""
    built = Path(native.load_kernels()._name).resolve()
    folder = tmp_path / "bin"
    folder.mkdir()
    script = f"""#!{sys.executable}
import shutil, sys, time
if "--version" in sys.argv:
    print("g++ 1.0")
elif "-c" not in sys.argv:
    open({str(tmp_path / "builds")!r}, "a").write("build\\n")
    time.sleep(1)
    shutil.copy({str(built)!r}, sys.argv[sys.argv.index("-o") + 1])
"""
    (folder / "g++").write_text(script)
    (folder / "g++").chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("TORCH_PAGODA_CACHE", str(tmp_path / "cache"))
    return lambda: (tmp_path / "builds").read_text().count("build")


def test_two_processes_build_once(counting_compiler, tmp_path):
    processes = [run_python(USE) for _ in range(2)]
    assert [output(process).strip() for process in processes] == ["[]", "[]"]
    assert counting_compiler() == 1
    assert len(list((tmp_path / "cache" / "kernels").glob("*.so"))) == 1


def test_loading_can_begin_before_the_kernels_are_needed(counting_compiler):
    code = """
import threading
from torch_pagoda.runtime.ops import native
native.begin_loading()
native.begin_loading()
assert not native._loading().done(), "it waits for the compiler"
assert sum(t.name.startswith("pagoda-kernels") for t in threading.enumerate()) == 1
assert native.load_kernels().pagoda_attention
"""
    output(run_python(code))
    assert counting_compiler() == 1


def test_a_broken_library_is_built_again(counting_compiler, tmp_path):
    folder = tmp_path / "cache" / "kernels"
    native._load_or_build(folder)
    (library,) = folder.glob("*.so")
    library.write_bytes(b"half a library")
    assert native._load_or_build(folder).pagoda_attention
    assert counting_compiler() == 2 and library.stat().st_size > 1000


def test_without_a_compiler_what_was_built_before_serves(counting_compiler, tmp_path, monkeypatch):
    folder = tmp_path / "cache" / "kernels"
    native._load_or_build(folder)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert native._load_or_build(folder).pagoda_attention
    assert counting_compiler() == 1


def test_an_unwritable_cache_is_no_obstacle(counting_compiler, tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    (tmp_path / "file").write_text("")
    for _ in range(2):
        assert native._load_or_build(tmp_path / "file" / "kernels").pagoda_attention
    assert counting_compiler() == 1
    assert f"cannot store kernels in {tmp_path}/file/kernels" in caplog.text


def test_sources_and_flags_name_the_library(monkeypatch):
    before = native._fingerprint()
    assert native._fingerprint() == before
    monkeypatch.setattr(native, "FLAGS", ("-O1",))
    assert native._fingerprint() != before


def test_kernels_share_the_openmp_runtime_of_torch():
    native.load_kernels()
    maps = Path("/proc/self/maps")
    if not maps.exists():
        pytest.skip("needs /proc")
    loaded = {line.split()[-1] for line in maps.read_text().splitlines() if "libgomp" in line}
    assert len(loaded) == 1


@pytest.mark.skipif(os.uname().machine != "x86_64", reason="names x86 instruction sets")
@pytest.mark.parametrize(
    "architecture",
    [
        ["-march=x86-64-v2"],
        pytest.param(["-march=x86-64-v3"], marks=pytest.mark.slow),
        pytest.param(["-march=native", "-mno-amx-bf16"], marks=pytest.mark.slow),
    ],
    ids=" ".join,
)
def test_kernels_without_newer_instructions(
    architecture, tmp_path, monkeypatch, paged_case, assert_close, assert_rounded_alike
):
    """The portable code compiles and is right on processors with less."""
    flags = [*(flag for flag in native.FLAGS if flag not in ("-march=native", "-O3")), "-O1", *architecture]
    native.build_library("g++", tmp_path / "portable.so", flags)
    native.promote_openmp(Path(torch.__file__).parent)
    library = ctypes.CDLL(str(tmp_path / "portable.so"))
    modules = (attention, paged_attention, norm_kernel, gated_rms_norm, rope, gated_activation)
    modules += (quantized_linear, quantized_weight)
    for module in modules:
        monkeypatch.setattr(module, "kernel_function", lambda name: native.bind_function(library, name))
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        for options in (
            {"dim": 64},
            {"dim": 40},
            {"dim": 7, "value_dim": 18, "window": 20, "sinks": True, "softcap": 3.0},
        ):
            case = paged_case([(3, 90), (70, 70), (1, 700)], dtype=dtype, **options)
            ours, theirs = case.copy(), case.copy()
            assert_close(torch.ops.pagoda.paged_attention(*ours), paged_attention_reference(*theirs))
            assert torch.equal(ours[3], theirs[3])
            case = paged_case([(3, 90), (70, 70)], dtype=dtype, cache_dtype=torch.int8, **options)
            ours, theirs = case.copy(), case.copy()
            assert_close(torch.ops.pagoda.paged_attention(*ours), paged_attention_reference(*theirs))
            assert all(torch.equal(ours[i], theirs[i]) for i in (3, 4, 15, 16))
        query, key = torch.randn(1, 4, 70, 20).to(dtype), torch.randn(1, 2, 70, 20).to(dtype)
        mask = torch.randn(70, 70).masked_fill(torch.rand(70, 70) > 0.5, -torch.inf)
        arguments = (query, key, key, mask, None, torch.rand(4), 0.2, True, 0, 0, 0.0)
        assert_close(torch.ops.pagoda.attention(*arguments), attention_reference(*arguments))

        for scheme in (Quantization(8, 0, 8), Quantization(4, 64, 8), Quantization(4, 128, 16)):
            x, weight = torch.randn(9, 200).to(dtype), torch.randn(70, 200).to(dtype)
            packed = quantized_weight.quantize_weight(weight, scheme)
            whole, _ = quantized_weight.unpack_weight(packed, 70, 200, scheme)
            assert (whole != quantized_weight.round_weight(weight, scheme)[0]).float().mean() < 0.01
            arguments = (packed, weight[:, 0], 70, scheme.bits, scheme.group_size, scheme.input_bits)
            assert_close(
                quantized_linear.quantized_linear_cpu(x, *arguments),
                quantized_linear.quantized_linear_reference(x, *arguments),
            )
        for form in ("e4m3/g128/f32", "e4m3/g16/f32", "e2m1/g16/f32", "int4/g32/f32+z"):
            stored = stored_weight(form, 70, 200).to(torch.float32)
            packed, x = quantized_weight.pack_stored(stored), torch.randn(9, 200).to(dtype)
            arguments = (packed, None, 70, *quantized_weight.scheme_of(stored.form).arguments())
            assert_close(
                quantized_linear.quantized_linear_cpu(x, *arguments),
                quantized_linear.quantized_linear_reference(x, *arguments),
            )
        x, weight = torch.randn(3, 75).to(dtype), torch.randn(75).to(dtype)
        for round_before_scale in (True, False):
            arguments = (x, x.flip(0), weight, 1e-5, 1.0, round_before_scale)
            for ours, theirs in zip(
                rms_norm.add_rms_norm_cpu(*arguments), rms_norm.add_rms_norm_reference(*arguments), strict=True
            ):
                assert_rounded_alike(ours, theirs)
        for form in ((True, "silu", True, 25), (False, "sigmoid", False, 75)):
            for given in (x, x.float()):
                arguments = (given, x.flip(0), weight, 1e-5, 0.0, *form)
                ours = gated_rms_norm.gated_rms_norm_cpu(*arguments)
                assert_rounded_alike(ours, gated_rms_norm.gated_rms_norm_reference(*arguments))
        arguments = (x, weight, weight, 1e-5)
        assert_rounded_alike(layer_norm.layer_norm_cpu(*arguments), layer_norm.layer_norm_reference(*arguments))
        for mode in ("half", "interleaved", "interleaved_to_half"):
            arguments = ([query, key], torch.randn(1, 70, 18), torch.randn(1, 70, 18), mode, 1, True)
            assert all(map(torch.equal, rope.rope_cpu(*arguments), rope.rope_reference(*arguments)))
        for kind in ("silu", "gelu", "gelu_tanh", "relu2", "quick_gelu", "clipped_swiglu"):
            arguments = (x[:, 1:38], x[:, 38:], kind, 1.7, 2.0)
            ours = gated_activation.gated_activation_cpu(*arguments)
            theirs = gated_activation.gated_activation_reference(*arguments)
            assert_rounded_alike(ours, theirs, 0.1)


def test_huge_pages_are_only_advice():
    big = torch.empty(1 << 22)
    assert advise_huge_pages(big) in (True, False)
    assert not advise_huge_pages(torch.empty(4, device="meta"))
    assert not advise_huge_pages(torch.empty(1))
