"""``LLM`` with a head of the checkpoint: read, shared, refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from drafters import always
from mtp_checkpoints import make_head, oracle, save_with_head
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

import torch_pagoda as pagoda
from torch_pagoda.checkpoint.mtp_head import load_mtp_head
from torch_pagoda.compiler import CompileOptions, UnsupportedModel
from torch_pagoda.compiler.build import build_program
from torch_pagoda.compiler.head_program import build_head
from torch_pagoda.draft_program import with_hidden_rows

from tiny_models import build_tiny_model

MTP = {"method": "mtp", "num_speculative_tokens": 3}


def saved(model_type: str, folder: Path, **overrides: Any) -> PreTrainedModel:
    model = build_tiny_model(model_type, **overrides)
    save_with_head(model, make_head(model), folder)
    return model


@pytest.mark.parametrize("model_type", ["deepseek_v3", "glm4_moe", "qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"])
def test_tensors_are_those_of_transformers_head(model_type: str, tmp_path: Path) -> None:
    model = saved(model_type, tmp_path)
    expected, found = make_head(model).state_dict(), load_mtp_head(tmp_path, "auto", False).mtp.state_dict()
    assert expected.keys() == found.keys()
    assert not [name for name, tensor in expected.items() if not torch.equal(tensor, found[name])]


@pytest.mark.parametrize("model_type", ["llama", "glm4_moe"])
def test_a_head_in_a_folder_of_its_own(model_type: str, tmp_path: Path) -> None:
    """Also of a class whose published models have none."""
    model = build_tiny_model(model_type)
    model.save_pretrained(tmp_path / "model")
    save_with_head(model, make_head(model), tmp_path / "head")
    file = tmp_path / "head" / "model.safetensors"
    number = f"layers.{model.config.num_hidden_layers}."
    save_file({name: each for name, each in load_file(file).items() if number in name}, file)
    head = load_mtp_head(tmp_path / "model", "auto", False, tmp_path / "head")
    expected, found = make_head(model).state_dict(), head.mtp.state_dict()
    assert expected.keys() == found.keys()
    assert not [name for name, tensor in expected.items() if not torch.equal(tensor, found[name])]
    with pytest.raises(ValueError, match=r"needs a head in the checkpoint, and model='.*/model' holds no tensors"):
        load_mtp_head(tmp_path / "model", "auto", False, tmp_path / "model")
    with pytest.raises(ValueError, match=r"reads a config.json and safetensors, and model='.*/nowhere' holds none"):
        load_mtp_head(tmp_path / "model", "auto", False, tmp_path / "nowhere")


def test_embeddings_and_output_matrix_are_the_models(tmp_path: Path) -> None:
    model = saved("glm4_moe", tmp_path)
    options = CompileOptions(codegen="none", taps_hidden=True, quantization="int8", pack_weights=True)
    program = build_program(model, options)
    head = load_mtp_head(tmp_path, "auto", False)
    found = build_head(head, program, head.shared, options)
    assert found.report.verdict is not None and found.report.verdict.ok
    own, theirs = ({id(t) for t in p._args if isinstance(t, torch.Tensor)} for p in (found, program))
    assert len(own & theirs) == 2
    with pytest.raises(UnsupportedModel, match="over the model's own embeddings and head"):
        head = load_mtp_head(tmp_path, "auto", False)
        build_head(head, program, {"mtp.shared_head.weight": head.embedding}, CompileOptions(codegen="none"))


def test_a_head_that_knows_what_follows_is_always_right(tmp_path: Path) -> None:
    model, head = oracle()
    save_with_head(model, head, tmp_path)
    with pagoda.LLM(tmp_path, speculative_config=MTP, codegen="none", num_blocks=64, block_size=4) as llm:
        always(llm._core.state.drafting, 3)  # type: ignore[arg-type]
        prompts = [[1, 2, 3], [7, 7, 7, 7, 30], list(range(40))]
        outputs = llm.generate(prompts, pagoda.SamplingParams(temperature=0, max_tokens=25, ignore_eos=True))
        for output, prompt in zip(outputs, prompts, strict=True):
            token, tokens = prompt[-1], output.outputs[0].token_ids
            assert tokens == [token := (token * 5 + 3) % 64 for _ in tokens]
        stats = llm.stats()
        assert stats["spec_decode_num_accepted_tokens"] == stats["spec_decode_num_draft_tokens"] > 0
        assert stats["steps"] == 1 + 24 // 4


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tensor_parallel_size": 2}, "runs in one process, not in 2; use one, or method 'suffix'"),
        ({"pipeline_parallel_size": 2}, "runs in one process, not in 2"),
        ({"target": "npu"}, "does not run on Ascend NPUs yet; use method 'suffix'"),
    ],
    ids=str,
)
def test_what_a_head_cannot_run_on_is_named(options: dict[str, Any], message: str) -> None:
    compiling = CompileOptions(**{"target": "cpu", **options})
    with pytest.raises(ValueError, match=f"speculative_config: method 'mtp' {message}"):
        with_hidden_rows(MTP, "folder", compiling)
    assert with_hidden_rows({"method": "suffix"}, "folder", compiling) is compiling


def test_a_module_has_no_head(checkpoint: Path) -> None:
    with pytest.raises(ValueError, match="'mtp' reads the head from the checkpoint; pass its folder"):
        pagoda.LLM(build_tiny_model("llama"), speculative_config=MTP)


def changed(folder: Path, name: str, tensor: torch.Tensor | None) -> None:
    file = folder / "model.safetensors"
    tensors = load_file(file)
    (key,) = [key for key in tensors if key.endswith(name) and ("mtp." in key or ".2." in key)]
    del tensors[key]
    save_file({**tensors, **({} if tensor is None else {key: tensor})}, file, metadata={"format": "pt"})


def test_broken_heads_are_named(tmp_path: Path) -> None:
    build_tiny_model("glm4_moe").save_pretrained(tmp_path)
    with pytest.raises(
        ValueError, match=r"needs a head in the checkpoint, and model='.*' holds no tensors 'model.la"
    ):
        load_mtp_head(tmp_path, "auto", False)
    for name, tensor, message in [
        ("eh_proj.weight", None, r"cannot use the head of model='.*', a Glm4MoeForCausalLM: it lacks '.*eh_proj"),
        ("eh_proj.weight", torch.zeros(64, 64), "cannot use the head of .*eh_proj"),
        (
            "enorm.weight",
            torch.zeros(64, dtype=torch.int8),
            "does not read quantized heads yet, and '.*enorm.weight'",
        ),
        ("q_proj.weight", torch.zeros(64, 64).to(torch.float8_e4m3fn), "does not read quantized heads"),
    ]:
        saved("glm4_moe", tmp_path)
        changed(tmp_path, name, tensor)
        with pytest.raises(ValueError, match=f"speculative_config: method 'mtp' .*{message}"):
            load_mtp_head(tmp_path, "auto", False)


def test_a_tensor_that_nothing_reads_is_named(tmp_path: Path) -> None:
    saved("glm4_moe", tmp_path)
    file = tmp_path / "model.safetensors"
    save_file({**load_file(file), "model.layers.2.gate_of.weight": torch.ones(3)}, file, metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"it does not know '.*gate_of\.weight'"):
        load_mtp_head(tmp_path, "auto", False)
