"""What is said of checkpoints that cannot be loaded: what they are, why not, what to do."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from torch_pagoda.checkpoint.configs import load_config
from torch_pagoda.checkpoint.loading import load_model
from torch_pagoda.checkpoint.source import check_source

CPU = torch.device("cpu")


@pytest.fixture
def copy(checkpoint: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(checkpoint, tmp_path / "copy"))


@pytest.fixture
def said(one_line: Callable[[BaseException], str]) -> Callable[..., str]:
    """Calls a function that has to raise ``ValueError``; yields its message, one line."""

    def call(function: Callable[..., Any], *arguments: Any) -> str:
        with pytest.raises(ValueError) as error:
            function(*arguments)
        return one_line(error.value)

    return call


def change_config(folder: Path, **entries: Any) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | entries))


@pytest.mark.parametrize(
    ("entries", "reason"),
    [
        ({"hidden_size": 65}, "The hidden size (65) is not a multiple of the number of attention heads (4)"),
        ({"hidden_size": "abc"}, "Field 'hidden_size' expected int, got str"),
        (
            {"layer_types": ["full_attention"]},
            "`num_hidden_layers` (2) must be equal to the number of `layer_types` (1)",
        ),
    ],
    ids=str,
)
def test_errors_of_a_config_keep_their_reason(
    entries: dict[str, Any],
    reason: str,
    copy: Path,
    said: Callable[..., str],
    run: Callable[..., tuple[int, str, str]],
) -> None:
    change_config(copy, **entries)
    message = said(load_config, copy, False)
    assert "could not read its config" in message and reason in message
    status, _, err = run("plan", copy, "--memory", "1GiB")
    assert status == 2 and message in err


def test_a_checkpoint_with_code_of_its_own_is_refused_with_the_remedy(copy: Path, said: Callable[..., str]) -> None:
    change_config(copy, model_type="mimo_v2", auto_map={"AutoConfig": "configuration_mimo_v2.MiMoV2Config"})
    message = said(load_config, copy, False)
    assert "contains custom code" in message and "trust_remote_code=True (--trust-remote-code)" in message


def test_a_key_that_is_not_known_is_named_as_one(copy: Path, said: Callable[..., str]) -> None:
    change_config(copy, hidden_act="what")
    assert said(load_model, copy, "auto", False, CPU).endswith("KeyError: 'what'")


def test_weights_of_another_shape_are_named(copy: Path, said: Callable[..., str]) -> None:
    change_config(copy, vocab_size=100)
    message = said(load_model, copy, "auto", False, CPU)
    assert "'lm_head.weight' of shape [256, 64], but its config implies [100, 64], and 1 more" in message


def test_an_adapter_is_named_as_one(tmp_path: Path, said: Callable[..., str]) -> None:
    (tmp_path / "adapter_config.json").write_text('{"base_model_name_or_path": "some/base"}')
    message = said(check_source, tmp_path)
    assert "only an adapter" in message and "'some/base'" in message and "merge_and_unload()" in message
    for content in ("[]", "{", '{"base_model_name_or_path": ["x"]}'):
        (tmp_path / "adapter_config.json").write_text(content)
        assert "only an adapter" in said(check_source, tmp_path)


def test_a_torn_gguf_file_is_named(tmp_path: Path, copy: Path, said: Callable[..., str]) -> None:
    file = tmp_path / "model-q4.gguf"
    file.write_bytes(b"GGUF" + bytes(64))
    (copy / "model.safetensors").unlink()
    shutil.copy(file, copy)
    for source in (file, tmp_path):
        message = said(load_config, source, False)
        assert "model-q4.gguf cannot be read as GGUF" in message and "version 0 of GGUF" in message
    message = said(load_model, copy, "auto", False, CPU)
    assert "has no weights but 'model-q4.gguf'" in message and "gguf_file='model-q4.gguf'" in message
    shutil.copy(file, tmp_path / "other.gguf")
    message = said(check_source, tmp_path)
    assert "2 GGUF files (model-q4.gguf, other.gguf)" in message and "pass one of them" in message


@pytest.mark.parametrize(
    "content",
    [b"no zip file", b"PK\x03\x04 and no more", "an object of its own", [1, 2]],
    ids=["text", "torn", "object", "list"],
)
def test_a_broken_file_of_torch_is_no_reason_to_run_it(content: object, copy: Path, said: Callable[..., str]) -> None:
    tensors = load_file(copy / "model.safetensors")
    (copy / "model.safetensors").unlink()
    if isinstance(content, bytes):
        (copy / "pytorch_model.bin").write_bytes(content)
    else:
        torch.save(
            content if isinstance(content, list) else tensors | {"more": Path("x")}, copy / "pytorch_model.bin"
        )
    message = said(load_model, copy, "auto", False, CPU)
    assert "pytorch_model.bin" in message and "weights_only" not in message


def test_what_torch_saved_long_ago_is_read(copy: Path) -> None:
    tensors = load_file(copy / "model.safetensors")
    (copy / "model.safetensors").unlink()
    torch.save(tensors, copy / "pytorch_model.bin", _use_new_zipfile_serialization=False)
    loaded = load_model(copy, "auto", False, CPU).state_dict()
    assert all(torch.equal(loaded[name], tensors[name]) for name in tensors)
