"""Built libraries on disk: which one is loaded, which is built again, and that a damaged or planted one never is."""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest

from torch_pagoda.runtime.ops import kernel_cache, native
from torch_pagoda.runtime.ops.kernel_cache import Builder, KernelBuildError, load_library

pytestmark = pytest.mark.skipif(shutil.which("cc") is None, reason="builds a shared library")
STRANGER = 12345


@pytest.fixture(scope="module")
def libraries(tmp_path_factory):
    """The contents of shared libraries of some pages whose function ``answer`` returns 1, 2 and 3."""
    folder, found = tmp_path_factory.mktemp("libraries"), {}
    for number in (1, 2, 3):
        source = folder / "answer.c"
        source.write_text(f"char table[65536] = {{1}};\nint answer(void) {{ return {number}; }}\n")
        subprocess.run(["cc", "-shared", "-fPIC", source, "-o", folder / "answer.so"], check=True)
        found[number] = (folder / "answer.so").read_bytes()
    return found


@pytest.fixture
def compiler(libraries):
    """A compiler by version that makes a library of a number and counts what it made."""

    def made(version="g++ 1", number=1):
        def build(library):
            builds.append(library)
            unfinished = library.with_suffix(".part")
            unfinished.write_bytes(libraries[number])
            os.replace(unfinished, library)

        return Builder(version, build)

    builds = made.builds = []
    return made


@pytest.fixture
def cache():
    """A folder for libraries that other users may enter, not yet there."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        yield Path(folder) / "kernels"


@pytest.fixture
def read_only(cache):
    """Makes the cache one that is read only: it belongs to root, and we are somebody else, or it just is."""

    def forbid():
        cache.chmod(0o555)
        if os.geteuid() == 0:
            os.seteuid(STRANGER)

    yield forbid
    os.seteuid(os.getuid())


def test_built_once_then_loaded(cache, compiler):
    assert load_library([cache], "key", compiler()).answer() == 1
    (library,) = cache.glob("*.so")
    assert load_library([cache], "key", compiler()).answer() == 1
    assert compiler.builds == [library]
    assert cache.stat().st_mode & 0o777 == 0o700


def test_digest_and_compiler_stand_beside_it(cache, compiler):
    load_library([cache], "key", compiler("g++ (Debian) 1.2"))
    (noted,) = cache.glob("*.sha256")
    assert "built by g++ (Debian) 1.2" in noted.read_text()
    checked = subprocess.run(["sha256sum", "-c", noted.name], cwd=cache, capture_output=True, text=True)
    assert checked.returncode == 0, checked.stderr


@pytest.mark.parametrize("key", ["other sources", "another processor"])
def test_other_keys_are_built_anew(cache, compiler, key):
    load_library([cache], "key", compiler())
    assert load_library([cache], key, compiler(number=2)).answer() == 2
    with pytest.raises(KernelBuildError, match=r"g\+\+ is not on PATH"):
        load_library([cache], "third", None)


def test_other_compilers_build_their_own(cache, compiler):
    for _ in range(2):
        assert load_library([cache], "key", compiler("g++ 1", 1)).answer() == 1
        assert load_library([cache], "key", compiler("g++ 2", 2)).answer() == 2
    assert len(compiler.builds) == 2


def test_without_a_compiler_a_matching_library_serves(cache, compiler):
    load_library([cache], "key", compiler())
    assert load_library([cache], "key", None).answer() == 1


def test_a_compiler_that_fails_is_not_missed_where_a_library_matches(cache, compiler):
    def fail(library):
        raise KernelBuildError("cc1plus is missing")

    with pytest.raises(KernelBuildError, match="cc1plus"):
        load_library([cache], "key", Builder("g++ 3", fail))
    load_library([cache], "key", compiler())
    assert load_library([cache], "key", Builder("g++ 3", fail)).answer() == 1


@pytest.mark.parametrize("version", ["g++ 1", "g++ 2"])
def test_a_read_only_cache_is_read(cache, compiler, read_only, version):
    load_library([cache], "key", compiler("g++ 1"))
    cache.chmod(0o755)  # as `chmod -R a+rX` does while an image is made
    for lock in cache.glob("*.lock"):
        lock.unlink()
    before = sorted(cache.iterdir())
    read_only()
    assert load_library([cache], "key", compiler(version, number=2)).answer() == 1
    assert len(compiler.builds) == 1 and sorted(cache.iterdir()) == before


def replace(library, content):
    """Another file: the one that was loaded stays as it is, for it is mapped."""
    library.unlink()
    library.write_bytes(content)


def cut(library):
    content = library.read_bytes()
    replace(library, content[: len(content) // 2])


def cut_at_a_page(library):
    replace(library, library.read_bytes()[:4096])


def flip(library):
    content = bytearray(library.read_bytes())
    content[len(content) // 2] ^= 4
    replace(library, content)


def longer(library):
    replace(library, library.read_bytes() + b"\0")


def empty(library):
    replace(library, b"")


def without_digest(library):
    library.with_name(f"{library.name}.sha256").unlink()


def with_an_empty_digest(library):
    library.with_name(f"{library.name}.sha256").write_text("")


DAMAGES = (cut, cut_at_a_page, flip, longer, empty, without_digest, with_an_empty_digest)


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda f: f.__name__)
def test_damaged_libraries_are_built_again(cache, compiler, caplog, damage):
    load_library([cache], "key", compiler())
    damage(*cache.glob("*.so"))
    assert load_library([cache], "key", compiler(number=2)).answer() == 2
    assert "not using " in caplog.text
    caplog.clear()
    assert load_library([cache], "key", None).answer() == 2
    assert not caplog.text


@pytest.mark.parametrize("damage", [cut_at_a_page, flip], ids=lambda f: f.__name__)
def test_damaged_libraries_of_a_read_only_cache_are_built_for_one_process(cache, compiler, read_only, damage):
    load_library([cache], "key", compiler())
    damage(*cache.glob("*.so"))
    cache.chmod(0o755)
    read_only()
    before = sorted(cache.iterdir())
    assert load_library([cache], "key", compiler(number=2)).answer() == 2
    assert sorted(cache.iterdir()) == before and not compiler.builds[-1].parent.exists()


def test_a_second_folder_is_used_again_and_again(cache, compiler, caplog, tmp_path):
    """Such as that for temporary files: what is built there does not pile up."""
    (tmp_path / "file").touch()
    folders = [tmp_path / "file" / "kernels", cache]
    for _ in range(3):
        assert load_library(folders, "key", compiler()).answer() == 1
    assert len(compiler.builds) == 1
    assert "cannot store kernels in" in caplog.text


def test_nothing_is_left_where_no_folder_serves(compiler, tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    (tmp_path / "file").touch()
    assert load_library([tmp_path / "file" / "kernels"], "key", compiler()).answer() == 1
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def plant(cache, content):
    """What somebody who may write to the folder can do: a library with its digest, under the right name."""
    target = cache / f"kernels-key-{Builder('g++ 1', print).key}.so"
    target.write_bytes(content)
    digest = hashlib.sha256(target.read_bytes()).hexdigest()
    target.with_name(f"{target.name}.sha256").write_text(f"{digest}  {target.name}\n")
    return target


def test_planted_libraries_in_a_folder_that_others_can_write(cache, compiler, libraries, caplog):
    cache.mkdir()
    plant(cache, libraries[3])
    assert load_library([cache], "key", compiler()).answer() == 3  # it is one: 3 is loaded where it is trusted
    cache.chmod(0o777)
    assert load_library([cache], "key", compiler()).answer() == 1
    assert "others may write to" in caplog.text and "chmod go-w" in caplog.text


@pytest.mark.skipif(os.geteuid() != 0, reason="gives files away, which only root may")
@pytest.mark.parametrize("whose", ["folder", "library", "digest"])
def test_planted_libraries_of_somebody_else(cache, compiler, libraries, caplog, whose):
    cache.mkdir(mode=0o755)
    target = plant(cache, libraries[3])
    given = {"folder": cache, "library": target, "digest": target.with_name(f"{target.name}.sha256")}[whose]
    os.chown(given, STRANGER, 0)
    assert load_library([cache], "key", compiler()).answer() == 1
    assert f"{given} belongs to user 12345" in caplog.text


def test_planted_locks_cost_their_victims_nothing(cache, compiler, tmp_path, caplog):
    victim = tmp_path / "victim"
    victim.write_text("precious")
    cache.mkdir()
    builder = compiler()
    (cache / f"kernels-key-{builder.key}.lock").symlink_to(victim)
    assert load_library([cache], "key", builder).answer() == 1
    assert victim.read_text() == "precious"
    assert ".lock is a link; delete it" in caplog.text


def test_what_was_checked_is_what_is_loaded(cache, compiler, libraries, monkeypatch):
    """Though somebody renames folders in between."""
    load_library([cache], "key", compiler())
    (library,) = cache.glob("*.so")
    load = ctypes.CDLL

    def swap(name):
        replace(library, libraries[3])
        return load(name)

    monkeypatch.setattr(ctypes, "CDLL", swap)
    assert load_library([cache], "key", None).answer() == 1


def test_what_killed_builds_left_is_deleted(cache, compiler):
    cache.mkdir()
    builder = compiler()
    left = cache / f"kernels-key-{builder.key}abc"
    left.mkdir()
    (left / "0.o").touch()
    load_library([cache], "key", builder)
    assert not left.exists()


def test_the_folder_for_temporary_files_is_of_this_user(monkeypatch, tmp_path):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    assert native._temporary_folder() == tmp_path / f"torch_pagoda_kernels-{os.geteuid()}"


def test_the_log_says_whose_kernels_are_used(cache, compiler, caplog):
    with caplog.at_level(logging.INFO, kernel_cache.__name__):
        load_library([cache], "key", compiler("g++ 1"))
        load_library([cache], "key", None)
    assert f"using kernels of another compiler: {cache}" in caplog.text
