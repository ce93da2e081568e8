"""GGUF files are found by path, folder and name, with their tokenizer, and say how positions are scaled."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from gguf_files import Gguf, Stored, all_of, as_llama_cpp, file_of
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

import torch_pagoda as pagoda
from torch_pagoda.checkpoint.configs import load_config, load_tokenizer
from torch_pagoda.checkpoint.gguf import checkpoint
from torch_pagoda.checkpoint.gguf.checkpoint import open_gguf
from torch_pagoda.checkpoint.gguf.rotary import llama3_factors
from torch_pagoda.checkpoint.loading import load_model
from torch_pagoda.checkpoint.source import check_source

from tiny_models import build_tiny_model

TEXT = "the cat sat on the mat"
WIDE = {"hidden_size": 256, "intermediate_size": 256, "head_dim": 64}
Run = Callable[..., tuple[int, str, str]]


@pytest.fixture(scope="module")
def bytes_of_text() -> PreTrainedTokenizerFast:
    """A byte-level BPE of 300 ids with merges of its own."""
    model = Tokenizer(models.BPE())
    model.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    model.decoder = decoders.ByteLevel()
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=["</s>"], initial_alphabet=letters, show_progress=False
    )
    model.train_from_iterator([TEXT, "a list of names is returned"] * 8, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=model, eos_token="</s>")


def with_tokens(file: Gguf, tokenizer: PreTrainedTokenizerFast) -> Gguf:
    """A file that holds the tokenizer, as llama.cpp writes it."""
    vocabulary = sorted(tokenizer.get_vocab().items(), key=lambda entry: entry[1])
    merges = json.loads(tokenizer.backend_tokenizer.to_str())["model"]["merges"]
    del file.metadata["tokenizer.ggml.bos_token_id"]
    file.metadata |= {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": [token for token, _ in vocabulary],
        "tokenizer.ggml.token_type": [3] + [1] * (len(vocabulary) - 1),
        "tokenizer.ggml.merges": [" ".join(merge) for merge in merges],
        "tokenizer.ggml.eos_token_id": 0,
        "tokenizer.chat_template": "{% for message in messages %}{{ message['content'] }}{% endfor %}",
    }
    return file


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, bytes_of_text: PreTrainedTokenizerFast) -> Path:
    """A folder with one file, of a model of two layers and its tokenizer."""
    path = tmp_path_factory.mktemp("gguf")
    file = file_of(build_tiny_model("llama", vocab_size=320, **WIDE), as_llama_cpp("Q4_0"))
    with_tokens(file, bytes_of_text).write(path / "model.gguf")
    return path


def test_each_way_to_name_a_file(folder: Path, tmp_path: Path, one_line: Callable[[BaseException], str]) -> None:
    path = folder / "model.gguf"
    assert check_source(path) == check_source(folder) == check_source(f"{folder}:model.gguf") == str(path)
    assert check_source(folder, argument="tokenizer") == str(path)
    for source, words in (
        (f"{folder}:other.gguf", "no such GGUF file"),
        (f"{folder}:../{folder.name}/model.gguf", "not the name of a file"),
        (tmp_path / "nothing.gguf", "does not exist"),
    ):
        with pytest.raises(ValueError) as error:
            check_source(source)
        assert words in one_line(error.value)
    with pytest.raises(ValueError, match=r"gguf_file='x\.gguf': there is no such GGUF file"):
        pagoda.LLM(folder, gguf_file="x.gguf")
    with pytest.raises(ValueError, match=r"gguf_file='x\.gguf' names a file"):
        pagoda.LLM(build_tiny_model("llama"), gguf_file="x.gguf")


def test_the_tokenizer_in_the_file(folder: Path, bytes_of_text: PreTrainedTokenizerFast) -> None:
    pytest.importorskip("transformers.integrations.gguf", reason="older releases read no file without a bos_token_id")
    found = load_tokenizer(folder / "model.gguf", False, required=True)
    assert found is not None
    assert found(TEXT)["input_ids"] == bytes_of_text(TEXT)["input_ids"]
    assert found.eos_token == "</s>" and found.apply_chat_template([{"content": "x"}], tokenize=False) == "x"


def test_the_tokenizer_beside_the_file(
    folder: Path, tmp_path: Path, tokenizer: PreTrainedTokenizerFast, caplog: pytest.LogCaptureFixture
) -> None:
    file = shutil.copy(folder / "model.gguf", tmp_path)
    tokenizer.save_pretrained(tmp_path)
    found = load_tokenizer(file, False, required=False)
    assert found is not None and found(TEXT)["input_ids"] == tokenizer(TEXT)["input_ids"]
    bare = tmp_path / "bare"
    bare.mkdir()
    written = file_of(build_tiny_model("llama"), all_of("Q8_0"))
    del written.metadata["tokenizer.ggml.tokens"]
    assert load_tokenizer(written.write(bare / "model.gguf"), False, required=False) is None
    assert "no tokenizer from" in caplog.text and "holds no tokens" in caplog.text


def test_a_model_in_parts(tmp_path: Path, one_line: Callable[[BaseException], str]) -> None:
    whole = file_of(build_tiny_model("llama"), all_of("Q8_0"))
    expected = dict(open_gguf(whole.write(tmp_path / "whole.gguf")).tensors(torch.float32))
    count = 3
    paths = [tmp_path / f"part-0000{i + 1}-of-00003.gguf" for i in range(count)]
    for i, path in enumerate(paths):
        said = {"split.no": i, "split.count": count, "split.tensors.count": len(whole.tensors)}
        part = Gguf(said | (whole.metadata if not i else {}), whole.tensors[i::count])
        part.write(path)
    found = dict(open_gguf(paths[0]).tensors(torch.float32))
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[key].clone(), expected[key]) for key in found)
    (tmp_path / "whole.gguf").unlink()
    assert check_source(tmp_path) == str(paths[0])
    for path, words in ((paths[1], "pass the first part, part-00001-of-00003.gguf"),):
        with pytest.raises(ValueError) as error:
            open_gguf(path)
        assert words in one_line(error.value)
    paths[2].unlink()
    checkpoint._opened.cache_clear()
    with pytest.raises(ValueError, match=r"part-00003-of-00003\.gguf is missing"):
        open_gguf(paths[0])


def test_plan_names_types_and_bytes(run: Run, folder: Path) -> None:
    status, out, err = run("plan", folder / "model.gguf", "--memory", "64MiB", "--json")
    assert status == 0, err
    formats = {(one["layer"], one["form"]): one for one in json.loads(out)["formats"]}
    layer = formats[0, "Q4_0"]
    # q, k, v and o: 256 + 128 + 128 + 256 rows of 256; three of the MLP.
    numbers = 256 * (256 + 128 + 128 + 256) + 3 * 256 * 256
    assert layer["served"] == "as stored" and layer["weights"] == 7
    assert layer["stored_bytes"] == numbers // 32 * 18
    assert layer["served_bytes"] == numbers // 2 + numbers // 32 * 4
    outside = [one for one in json.loads(out)["formats"] if one["layer"] is None and one["form"] == "Q6_K"]
    assert {one["served"] for one in outside} == {"as int8", "unpacked"}
    assert all(one["stored_bytes"] == 320 * 210 for one in outside)


@pytest.mark.slow
def test_commands_take_a_file(run: Run, folder: Path, tmp_path: Path) -> None:
    status, out, err = run("inspect", folder / "model.gguf", "--dtype", "float32")
    assert status == 0 and "Q4_0" in out and "as stored" in out, err
    common = ("--prompt", TEXT, "--max-tokens", "4", "--block-size", "4", "--num-blocks", "64")
    status, out, err = run("generate", f"{folder}:model.gguf", *common)
    assert status == 0 and out, err
    (tmp_path / "text.txt").write_text(TEXT)
    status, _, err = run("quantize", folder / "model.gguf", tmp_path / "out", "--text", tmp_path / "text.txt")
    assert status == 2 and "is quantized (GGUF" in err


def test_rounding_what_is_rounded_is_refused(folder: Path) -> None:
    with pytest.raises(ValueError, match="is already quantized"):
        pagoda.LLM(folder, quantization="int8")


def rope_freqs(file: Gguf, factors: list[float]) -> Gguf:
    data = torch.tensor(factors).numpy().tobytes()
    file.tensors.append(Stored("rope_freqs.weight", (len(factors),), "F32", data))
    return file


def test_factors_of_llama_3_are_those_that_transformers_computes(
    tmp_path: Path, one_line: Callable[[BaseException], str]
) -> None:
    """The frequencies of transformers' model are the plain ones divided by the factors in the file."""
    said = {"rope.freq_base": 500000.0, "context_length": 131072}
    model = build_tiny_model("llama", head_dim=32)
    factors = llama3_factors(500000.0, 32, 8.0, 1.0, 4.0, 8192)
    assert factors[0] == 1 and factors[-1] == 8 and any(1 < factor < 8 for factor in factors)
    path = rope_freqs(file_of(model, all_of("F32"), **said), factors).write(tmp_path / "model.gguf")
    loaded = load_model(path, "float32", False, torch.device("cpu"), load_config(path, False)[1])
    assert loaded.config.rope_parameters["rope_type"] == "llama3"
    plain = 1 / 500000.0 ** (torch.arange(0, 32, 2) / 32)
    assert torch.allclose(loaded.model.rotary_emb.inv_freq, plain / torch.tensor(factors), rtol=1e-5)
    spoilt = rope_freqs(file_of(model, all_of("F32"), **said), [1.0] * 8 + [3.0] + [8.0] * 7)
    with pytest.raises(ValueError) as error:
        load_config(spoilt.write(tmp_path / "model.gguf"), False)
    assert "match no known llama 3 model" in one_line(error.value)


@pytest.mark.parametrize(
    ("model_type", "name"),
    [
        ("gemma", "rope_freqs"),
        ("gemma3_text", "rope_freqs"),
        ("phi3", "rope_freqs"),
        ("qwen2", "rope_factors_long"),
        ("llama", "rope_factors_short"),
        ("llama", "rope_freqs_2"),
    ],
)
def test_rotary_factors_that_the_model_does_not_read(
    model_type: str, name: str, tmp_path: Path, one_line: Callable[[BaseException], str]
) -> None:
    file = file_of(build_tiny_model(model_type, tie_word_embeddings="gemma" in model_type), all_of("F32"))
    open_gguf(file.write(tmp_path / "without.gguf"))
    data = torch.full((8,), 8.0).numpy().tobytes()
    file.tensors.append(Stored(f"{name}.weight", (8,), "F32", data))
    with pytest.raises(ValueError) as error:
        open_gguf(file.write(tmp_path / "model.gguf"))
    assert f"'{name}.weight' does not belong to a {model_type}" in one_line(error.value)
