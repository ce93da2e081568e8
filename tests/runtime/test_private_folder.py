"""The rule for folders that are read: ours or root's, and nobody else may write."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from torch_pagoda.runtime.private_folder import (
    NotPrivate,
    cache_folder,
    check_private_folder,
    locked,
    make_private_folder,
    open_private_file,
)

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="gives files away, which only root may")
STRANGER = 12345


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.fixture(params=[0o000, 0o002, 0o022], ids="umask {:03o}".format)
def umask(request):
    before = os.umask(request.param)
    yield
    os.umask(before)


@pytest.mark.usefixtures("umask")
def test_what_we_make_is_ours_alone(tmp_path):
    folder = tmp_path / "a" / "b" / "c"
    make_private_folder(folder)
    assert [mode(path) for path in (folder, folder.parent, folder.parent.parent)] == [0o700] * 3
    make_private_folder(folder)
    with locked(folder / "lock"):
        assert mode(folder / "lock") == 0o600


@pytest.mark.parametrize("given", [0o777, 0o775, 0o757, 0o1777], ids="{:o}".format)
def test_folders_that_others_can_write_are_refused(tmp_path, given):
    tmp_path.chmod(given)
    for check in (check_private_folder, make_private_folder):
        with pytest.raises(NotPrivate, match=rf"others may write to {tmp_path} .*run: chmod go-w {tmp_path}"):
            check(tmp_path)
    tmp_path.chmod(given & 0o755)
    check_private_folder(tmp_path)


@needs_root
def test_somebody_elses_are_refused(tmp_path):
    file = tmp_path / "file"
    file.touch()
    for path, check in ((tmp_path, check_private_folder), (file, open_private_file)):
        os.chown(path, STRANGER, 0)
        with pytest.raises(NotPrivate, match=r"belongs to user 12345, .*set TORCH_PAGODA_CACHE to a folder"):
            check(path)
        os.chown(path, 0, 0)


@needs_root
def test_what_root_prepared_is_trusted(tmp_path, monkeypatch):
    """As in the image of a container; what user 7 prepared is not."""
    file = tmp_path / "file"
    file.write_text("x")
    monkeypatch.setattr(os, "geteuid", lambda: STRANGER)
    check_private_folder(tmp_path)
    with open_private_file(file) as opened:
        assert opened.read() == b"x"
    os.chown(file, 7, 0)
    with pytest.raises(NotPrivate, match="belongs to user 7"):
        open_private_file(file)


def test_files_that_others_can_write_are_refused(tmp_path):
    file = tmp_path / "file"
    file.touch()
    file.chmod(0o664)
    with pytest.raises(NotPrivate, match=rf"others may write to {file} \(mode 0664\)"):
        open_private_file(file)


def test_links_are_not_followed(tmp_path):
    victim, link = tmp_path / "victim", tmp_path / "link"
    victim.write_text("precious")
    link.symlink_to(victim)
    with pytest.raises(NotPrivate, match="is a link; delete it"):
        open_private_file(link)
    with pytest.raises(NotPrivate, match="is a link; delete it"), locked(link):
        pass
    assert victim.read_text() == "precious"


def test_pipes_and_folders_are_no_files(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", tmp_path):
        with pytest.raises(NotPrivate, match="is not an ordinary file"):
            open_private_file(path)
    (tmp_path / "file").touch()
    with pytest.raises(NotPrivate, match="is not a folder"):
        check_private_folder(tmp_path / "file")


def test_locks_keep_what_is_in_the_file_and_keep_others_out(tmp_path):
    path = tmp_path / "lock"
    path.write_text("not ours to change")
    path.chmod(0o600)
    waited = []

    class Waits(Exception):
        pass

    def wait():
        waited.append(True)
        raise Waits

    with locked(path), pytest.raises(Waits), locked(path, wait):
        pass
    with locked(path, wait):
        assert path.read_text() == "not ours to change"
    assert waited == [True]


def test_one_place_for_the_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("TORCH_PAGODA_CACHE", str(tmp_path))
    assert cache_folder() == tmp_path
    monkeypatch.setenv("TORCH_PAGODA_CACHE", "")
    monkeypatch.setenv("HOME", "/home/somebody")
    assert cache_folder() == Path("/home/somebody/.cache/torch_pagoda")
