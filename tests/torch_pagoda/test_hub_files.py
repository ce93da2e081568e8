"""What tells the checkpoint of a hub id from others, whatever was downloaded of it so far."""

from __future__ import annotations

import shutil
from pathlib import Path

import huggingface_hub.constants
import pytest

from torch_pagoda.checkpoint import loading, stored_tensors
from torch_pagoda.checkpoint.loading import checkpoint_files

from tiny_models import build_tiny_model

COMMITS = {"acme/tiny": "a" * 40, "mirror/tiny": "b" * 40}


def snapshot(hub: Path, name: str) -> Path:
    return hub / f"models--{name.replace('/', '--')}" / "snapshots" / COMMITS[name]


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("saved")
    build_tiny_model("llama", num_hidden_layers=1).save_pretrained(folder)
    return folder


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """The cache of a hub that is out of reach."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    for name, commit in COMMITS.items():
        snapshot(tmp_path / "hub", name).mkdir(parents=True)
        refs = snapshot(tmp_path / "hub", name).parents[1] / "refs"
        refs.mkdir()
        (refs / "main").write_text(commit)
    return tmp_path / "hub"


@pytest.fixture
def remote(hub, saved, tmp_path, monkeypatch):
    """The hub itself: folders of which a file is downloaded when it is asked for."""

    def cached_file(name, file, **_):
        source, target = tmp_path / "remote" / name / file, snapshot(hub, name) / file
        if not source.is_file():
            return None
        shutil.copy(source, target)
        return str(target)

    for name in COMMITS:
        shutil.copytree(saved, tmp_path / "remote" / name)
    for module in (loading, stored_tensors):
        monkeypatch.setattr(module, "cached_file", cached_file)
    return tmp_path / "remote"


def contents(name):
    files = checkpoint_files(name, "float32")
    assert files is not None
    return files.contents()


def test_what_is_still_to_be_downloaded_counts(remote):
    (remote / "mirror/tiny/generation_config.json").write_text('{"eos_token_id": [0, 42], "temperature": 0.5}')
    ours, theirs = contents("acme/tiny"), contents("mirror/tiny")
    assert ours["tensors"] == theirs["tensors"]
    assert "42" in theirs["texts"].pop("generation_config.json")
    assert "42" not in ours["texts"].pop("generation_config.json")
    assert ours["texts"].pop("config.json") == theirs["texts"].pop("config.json")
    assert ours["texts"] == {"hub id": "acme/tiny", "commit": COMMITS["acme/tiny"]} != theirs["texts"]


def test_the_second_start_finds_what_the_first_one_wrote(remote, hub):
    first = contents("acme/tiny")
    (snapshot(hub, "acme/tiny") / "tokenizer.json").write_text("{}")
    assert contents("acme/tiny") == first


@pytest.mark.parametrize("missing", [(), ("generation_config.json",)], ids=["complete", "without defaults"])
def test_offline(hub, saved, missing):
    folder = snapshot(hub, "acme/tiny")
    shutil.copytree(saved, folder, dirs_exist_ok=True)
    for name in missing:
        (folder / name).unlink()
    texts = contents("acme/tiny")["texts"]
    assert texts.keys() == {"hub id", "commit", "config.json", "generation_config.json"} - set(missing)
    (folder / "config.json").unlink()
    assert checkpoint_files("acme/tiny", "float32") is None
