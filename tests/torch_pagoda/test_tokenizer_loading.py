"""Tokenizers are of the class that ``AutoTokenizer`` chooses, with and without the config's class."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from transformers import AutoTokenizer, PreTrainedConfig

from torch_pagoda.checkpoint import configs
from torch_pagoda.checkpoint.configs import load_tokenizer

EXAMPLE = Path(__file__).resolve().parents[2] / "examples/tiny-pydoc"
CLASSES = (
    "TokenizersBackend",
    "PreTrainedTokenizerFast",
    "LlamaTokenizerFast",
    "Qwen2Tokenizer",
    "GPT2Tokenizer",
    None,
)


def folder_with(folder: Path, model_type: str, **stated: object) -> Path:
    """The example's tokenizer as one that says ``stated`` of itself, beside a config of another model."""
    shutil.copy(EXAMPLE / "tokenizer.json", folder)
    settings = json.loads((EXAMPLE / "tokenizer_config.json").read_text())
    settings.update(stated)
    (folder / "tokenizer_config.json").write_text(json.dumps({k: v for k, v in settings.items() if v is not None}))
    (folder / "config.json").write_text(json.dumps({"model_type": model_type, "architectures": ["X"]}))
    return folder


@pytest.mark.parametrize("name", CLASSES)
@pytest.mark.parametrize("model_type", ["llama", "qwen2", "gpt2", "deepseek_v3", "a type of its own"])
def test_the_class_is_the_one_that_transformers_takes(tmp_path: Path, name: str | None, model_type: str) -> None:
    folder = folder_with(tmp_path, model_type, tokenizer_class=name)
    expected = AutoTokenizer.from_pretrained(folder)
    found = load_tokenizer(folder, trust_remote_code=False, required=True)
    assert type(found) is type(expected)
    text = "def f(x):\n    return  x + 1  # naïve"
    assert found.encode(text) == expected.encode(text) and found.eos_token_id == expected.eos_token_id


def test_only_what_names_its_class_goes_without_the_config_s(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[object] = []
    load = AutoTokenizer.from_pretrained
    monkeypatch.setattr(
        configs.AutoTokenizer, "from_pretrained", lambda *a, **k: given.append(k["config"]) or load(*a, **k)
    )
    load_tokenizer(folder_with(tmp_path, "llama"), trust_remote_code=False, required=True)
    load_tokenizer(folder_with(tmp_path, "llama", tokenizer_class=None), trust_remote_code=False, required=True)
    auto_map = {"AutoTokenizer": ["a.B", None]}
    load_tokenizer(folder_with(tmp_path, "llama", auto_map=auto_map), trust_remote_code=False, required=True)
    assert type(given[0]) is PreTrainedConfig and given[1:] == [None, None]


def test_nothing_is_said_of_a_config_without_its_class(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    """transformers warns of a model type that is not the class's own."""
    load_tokenizer(folder_with(tmp_path, "llama"), trust_remote_code=False, required=True)
    assert "model of type" not in caplog.text + "".join(capfd.readouterr())
